"""Claims as watched: ResourceClaims, the Pods that use them, and which Pod uses which claim.

Guarantees:
- Watch events and lists may arrive in any order. The newest version of each object is kept.
- Every Pod that names a claim counts as its user, whatever the claim's owner reference. Owner references prove nothing:
  anyone can write them, and kube-scheduler checks them only for claims from templates.
- For each change, `on_changed` is called with the uid of each affected claim.
- A claim never belongs to a Pod of another namespace, whatever owner reference it has.
- A claim that was created for a Pod's resource line gets its size from that line, once the Pod is known. No other Pod
  counts as its user.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from itertools import chain
from typing import Any

from sharepod.api.claims.scheduled_claims import ScheduledShare
from sharepod.api.claims.self_test_claim import has_name_of_self_test

from .facts.claim_facts import (
    MAX_CLAIMS,
    ClaimFacts,
    ClaimPodFacts,
    claim_facts,
    claim_pod_facts,
    size_by_line,
    unreadable_claim,
)
from .store import Latest, Store

Json = Mapping[str, Any]


class ClaimsSeen:
    """Store of all claims, and of all Pods that use claims. `on_changed`: called with the uid of each claim that a
    change affects.
    """

    def __init__(self, on_changed: Callable[[str], None]) -> None:
        self.claims: Store[ClaimFacts] = Store()
        self.pods: Store[ClaimPodFacts] = Store()
        self._on_changed = on_changed
        self._users: dict[tuple[str, str], set[str]] = {}
        """uids of the Pods that name a claim, by (namespace, name of the claim)."""
        self._made: dict[str, dict[str, set[str]]] = {}
        """uids of the claims that were created for a Pod: by the Pod's uid, then by the Pod's own name for the
        claim."""
        self._deleted: Latest[None] = Latest()
        self._unused: set[str] = set()
        self._sorted: dict[str, tuple[ClaimPodFacts, ...]] = {}
        """The Pods that use a claim, sorted, by the claim's uid. An entry is dropped when one of these Pods changes."""
        self.turns: dict[str, int] = {}
        """By a claim's uid: index in `users` of the first Pod whose turn it is (`claim_requests.next_turn`). Without an
        entry: 0."""
        self._lacking: dict[str, set[str]] = {}
        """By namespace: uids of Pods whose claim for their resource line is missing, or is another claim than
        SharePod's template makes."""
        self._bound_lines: dict[str, set[str]] = {}
        """By name of a node: uids of the Pods with a resource line that are bound to it."""
        self.on_claim_lacking: Callable[[str], None] = lambda _namespace: None
        """Called with the namespace of a Pod that waits until the claim for its resource line is created."""
        self.on_share_claim: Callable[[str], None] = lambda _pod: None
        """Called with the uid of a SharePod's Pod whose claim has changed."""
        self.on_self_test: Callable[[str], None] = lambda _claim: None
        """Called with the uid of a changed claim that has the name of a self-test claim."""

    # Claims

    def booked(self, uid: str) -> None:
        """Record that a place was decided for a claim. From now on the claim counts as unused, until a Pod on a node is
        seen to use it."""
        self._unused.add(uid)

    def unused(self, uid: str) -> bool:
        """Return True if a place was decided (`booked`), and since then no Pod on a node was seen to use the claim, or
        was named in `status.reservedFor`.
        """
        return uid in self._unused

    def forgotten(self, uid: str) -> None:
        """Record that neither a row nor a user of a claim is left."""
        self._unused.discard(uid)

    def forget_unused(self) -> None:
        """Count no claim as unused any more. Called when events may have been missed: a list does not show which Pods
        have used a claim before.
        """
        self._unused.clear()

    def put_claim(self, raw: Json, *, sure: bool = False, news: bool = True) -> None:
        """Record a claim. `sure`: True if a GET has just returned it, so it exists. `news`: False if the caller has
        written it itself and needs no notification.
        """
        metadata = raw["metadata"]
        uid, version = str(metadata["uid"]), int(metadata.get("resourceVersion") or 0)
        if not self.claims.knows(uid, version, sure=sure):
            self._take(self._sized(claim_facts(raw, self.claims.get(uid))), sure=sure, news=news)

    def _sized(self, item: ClaimFacts) -> ClaimFacts:
        """Return a claim with the size of its Pod's resource line, if the claim takes its size from there. Any other
        claim is returned unchanged.
        """
        request, error = size_by_line(item, self.pods.get(item.made_for or ""))
        same = request is item.request and error is item.error
        return item if same else replace(item, request=request, error=error)

    def put_unreadable_claim(self, metadata: Json, why: str) -> None:
        """Record a claim of which only the metadata is readable. Facts of an earlier version stay."""
        if self.claims.get(str(metadata["uid"])) is None:
            self._take(unreadable_claim(metadata, why))

    def _take(self, item: ClaimFacts, *, sure: bool = False, news: bool = True) -> None:
        taken, before, replaced = self.claims.put(item, sure=sure)
        if replaced is not None:
            self._claim_gone(replaced)
        if not taken:
            return
        self._sorted.pop(item.uid, None)
        if before is not None and (before.made_for, before.entry) != (item.made_for, item.entry):
            self._no_longer_made(before)
        waiting = {pod.uid for pod in self.users(item) if pod.node is None} if item.consumers else set()
        if not waiting.issuperset(item.consumers):
            self._unused.discard(item.uid)
        if item.made_for is not None:
            self._made.setdefault(item.made_for, {}).setdefault(item.entry, set()).add(item.uid)
            if (pod := self.pods.get(item.made_for)) is not None and pod.claim_of_line == item.name:
                self._note_lacking(pod)
        if news:
            self._tell(item)
        if before is None or (before.deleting, before.request is None) != (item.deleting, item.request is None):
            self._report_siblings(item)

    def drop_claim(self, uid: str, version: float = math.inf, *, deleted: bool = False) -> None:
        """Remove a deleted claim. `version`: resourceVersion of the deletion, if known. `deleted`: True if a watch has
        shown the deletion."""
        if deleted:
            self._deleted[uid] = None
        item = self.claims.drop(uid, version)
        if item is not None:
            self._claim_gone(item)
            self._note_lost(item)
        elif deleted:
            self._on_changed(uid)

    def saw_deleted(self, uid: str) -> bool:
        """Return True if a watch has shown the deletion of this claim."""
        return uid in self._deleted

    def invalidate_claims(self) -> None:
        """Mark all cached claims stale, so that the next list overwrites them whatever its versions. Forget which
        claims were deleted.
        """
        self._deleted.clear()
        self.claims.invalidate()

    def _note_lost(self, item: ClaimFacts) -> None:
        """If the Pod of a deleted claim has a resource line and still waits for that claim, call `on_claim_lacking`."""
        pod = self.pods.get(item.made_for or "")
        if pod is not None and pod.waits and pod.claim_of_line == item.name:
            self._note_lacking(pod)
            self.on_claim_lacking(item.namespace)

    def without_claim(self) -> Iterator[ClaimPodFacts]:
        """Yield the waiting Pods whose claim for their resource line is named in their status, but is not in the
        store."""
        for pod in self.pods:
            name = pod.claim_of_line if pod.waits else None
            if name is not None and self.claims.named(name, pod.namespace) is None:
                yield pod

    def _no_longer_made(self, item: ClaimFacts) -> None:
        """Forget which Pod a claim was made for."""
        if item.made_for is not None:
            made = self._made.get(item.made_for, {})
            mine = made.get(item.entry, set())
            mine.discard(item.uid)
            if not mine:
                made.pop(item.entry, None)
            if not made:
                self._made.pop(item.made_for, None)

    def _claim_gone(self, item: ClaimFacts) -> None:
        self._no_longer_made(item)
        self._sorted.pop(item.uid, None)
        self.turns.pop(item.uid, None)
        self._tell(item)
        self._report_siblings(item)

    def _tell(self, item: ClaimFacts) -> None:
        """Report a changed or deleted claim: as a tenant, to the SharePod whose Pod uses it, or to the self-test."""
        if item.ours or item.scheduled:
            self._on_changed(item.uid)
        elif item.of_sharepod and item.made_for is not None:
            self.on_share_claim(item.made_for)
        elif has_name_of_self_test(item.name):
            self.on_self_test(item.uid)

    def _report_siblings(self, item: ClaimFacts) -> None:
        """Call `on_changed` for all claims of each Pod that uses this claim, because a Pod is placed only if all its
        claims are.
        """
        siblings: set[str] = set()
        for pod in self.users(item):
            if 1 < len(pod.entries) <= MAX_CLAIMS:
                siblings.update(claim.uid for claim in self.of_pod(pod))
        for uid in siblings:
            self._on_changed(uid)

    def share_claim(self, name: str, namespace: str, pod: str) -> ClaimFacts | None:
        """Return the claim of that name, if the operator created it for the SharePod's Pod with uid `pod`. None
        otherwise.
        """
        item = self.claims.named(name, namespace)
        return item if item is not None and item.of_sharepod and item.made_for == pod else None

    # Pods

    def put_pod(self, raw: Json) -> ClaimPodFacts | None:
        """Record a Pod that uses claims. Return its facts in their newest known version."""
        item = claim_pod_facts(raw)
        taken, before, replaced = self.pods.put(item)
        if replaced is not None:
            self._pod_gone(replaced)
        if not taken:
            return self.pods.get(item.uid)
        if before is not None and before.entries != item.entries:
            self._resort(before)
            self._forget_names(before)
        for _, name in item.entries:
            if name is not None:
                self._users.setdefault((item.namespace, name), set()).add(item.uid)
        self._resize(item)
        self._note_lacking(item)
        if item.node is not None and item.line is not None:
            self._bound_lines.setdefault(item.node, set()).add(item.uid)
        self._resort(item)
        if item.node is not None:
            self._unused.difference_update(claim.uid for claim in self._followed(item))
        if before is None or before.content() != item.content():
            self._tell_claims_of(item)
        return item

    def drop_pod(self, uid: str, version: float = math.inf) -> None:
        """Remove a Pod that was deleted or has ended."""
        item = self.pods.drop(uid, version)
        if item is not None:
            self._pod_gone(item)

    def _pod_gone(self, item: ClaimPodFacts) -> None:
        concerned = list(self._followed(item))
        self._unused.difference_update(claim.uid for claim in concerned if item.uid in claim.consumers)
        self._resort(item)
        self._forget_names(item)
        self._no_longer_lacking(item)
        self._bound_lines.get(item.node or "", set()).discard(item.uid)
        for claim in concerned:
            self._on_changed(claim.uid)

    def invalidate_pods(self) -> None:
        """Mark all cached Pods stale, so that the next list overwrites them whatever its versions."""
        self.pods.invalidate()

    def _resize(self, pod: ClaimPodFacts) -> None:
        """Update the sizes of the claims of a Pod that take their size from its resource line."""
        for uid in chain.from_iterable(self._made.get(pod.uid, {}).values()):
            claim = self.claims.get(uid)
            if claim is not None and claim.ours:
                self.claims.amend(self._sized(claim))

    def _note_lacking(self, pod: ClaimPodFacts) -> None:
        if pod.lacks_claim or (pod.waits and self._has_another(pod)):
            self._lacking.setdefault(pod.namespace, set()).add(pod.uid)
            self.on_claim_lacking(pod.namespace)
        else:
            self._no_longer_lacking(pod)

    def _has_another(self, pod: ClaimPodFacts) -> bool:
        """Return True if the claim that was created for a Pod's resource line has sizes of its own, so it was not
        created from SharePod's template.
        """
        claim = self.claims.named(pod.claim_of_line or "", pod.namespace)
        return claim is not None and claim.made_for == pod.uid and claim.readable and not claim.by_line

    def _no_longer_lacking(self, pod: ClaimPodFacts) -> None:
        some = self._lacking.get(pod.namespace, set())
        some.discard(pod.uid)
        if not some:
            self._lacking.pop(pod.namespace, None)

    def lacking(self) -> tuple[str, ...]:
        """Return the namespaces with Pods that wait until the claim for their resource line is created."""
        return tuple(self._lacking)

    def lacking_in(self, namespace: str) -> Iterator[ClaimPodFacts]:
        """Yield the Pods of a namespace that wait until the claim for their resource line is created."""
        known = (self.pods.get(uid) for uid in self._lacking.get(namespace, ()))
        yield from (pod for pod in known if pod is not None)

    def bound_lines(self, node: str) -> Iterator[ClaimPodFacts]:
        """Yield the Pods with a resource line that are bound to a node."""
        known = (self.pods.get(uid) for uid in self._bound_lines.get(node, ()))
        yield from (pod for pod in known if pod is not None)

    def _resort(self, pod: ClaimPodFacts) -> None:
        """Drop the cached order of the users of each claim that a Pod uses."""
        for claim in self._followed(pod):
            self._sorted.pop(claim.uid, None)

    def _forget_names(self, item: ClaimPodFacts) -> None:
        for _, name in item.entries:
            key = (item.namespace, name or "")
            users = self._users.get(key, set())
            users.discard(item.uid)
            if not users:
                self._users.pop(key, None)

    def _tell_claims_of(self, pod: ClaimPodFacts) -> None:
        for claim in self._followed(pod):
            self._on_changed(claim.uid)

    # Relation between claims and Pods

    def users(self, claim: ClaimFacts) -> tuple[ClaimPodFacts, ...]:
        """Return the Pods that use a claim: waiting Pods first, by priority, then by age."""
        known = self._sorted.get(claim.uid)
        if known is None or self.claims.get(claim.uid) is not claim:
            uids = set() if claim.by_line else set(self._users.get((claim.namespace, claim.name), ()))
            if claim.made_for is not None and self._uses_template(claim):
                uids.add(claim.made_for)
            found = [pod for uid in uids if (pod := self.pods.get(uid)) is not None]
            known = tuple(sorted(found, key=lambda pod: (not pod.waits, -pod.priority, pod.created, pod.name)))
            if self.claims.get(claim.uid) is claim:
                self._sorted[claim.uid] = known
        return known

    def _uses_template(self, claim: ClaimFacts) -> bool:
        """Return True if the Pod for which a claim was created uses it: the Pod's entry names this claim, or no claim
        yet."""
        owner = self.pods.get(claim.made_for or "")
        if owner is None or owner.namespace != claim.namespace:
            return False
        return any(entry == claim.entry and name in (None, claim.name) for entry, name in owner.entries)

    def of_pod(self, pod: ClaimPodFacts) -> Iterator[ClaimFacts]:
        """Yield the known claims of SharePod's class that a Pod uses, each once, in the order of the Pod's spec."""
        yield from (claim for claim in self._followed(pod) if claim.ours)

    def _followed(self, pod: ClaimPodFacts) -> Iterator[ClaimFacts]:
        """Yield the known claims of a Pod that have or may get a row, each once, in the order of the Pod's spec: claims
        of SharePod's class, and claims to which kube-scheduler allocates SharePod's GPUs."""
        known = (self._named(pod, *entry) for entry in pod.entries)
        followed = [claim for claim in known if claim is not None and (claim.ours or claim.scheduled)]
        yield from {claim.uid: claim for claim in followed}.values()

    def scheduled_on(self, node: str) -> bool:
        """Return True if kube-scheduler has allocated a GPU of this node to a known claim."""
        return any(
            claim.allocation is not None
            and isinstance(claim.allocation.scheduled, ScheduledShare)
            and claim.allocation.scheduled.node == node
            for claim in self.claims
        )

    def crowded(self, pod: ClaimPodFacts) -> str | None:
        """Return the name of a container that uses two claims of SharePod's class. None if there is none."""
        for name, entries in pod.containers:
            known = (self._named(pod, *entry) for entry in pod.entries if entry[0] in entries)
            if len({claim.uid for claim in known if claim is not None and claim.ours}) > 1:
                return name
        return None

    def complete(self, pod: ClaimPodFacts) -> bool:
        """Return True if every claim of a Pod is known, including claims of other classes."""
        return all(self._named(pod, *entry) is not None for entry in pod.entries)

    def needs_others(self, pod: ClaimPodFacts) -> bool:
        """Return True if a Pod also uses a claim of another class."""
        known = (self._named(pod, *entry) for entry in pod.entries)
        return any(claim is not None and not claim.ours for claim in known)

    def _named(self, pod: ClaimPodFacts, entry: str, name: str | None) -> ClaimFacts | None:
        """Return one claim of a Pod; None if it is not known. A claim from a template is found by its owner while the
        Pod's status does not name it yet.
        """
        if name is not None:
            return self.claims.named(name, pod.namespace)
        made = (self.claims.get(uid) for uid in self._made.get(pod.uid, {}).get(entry, ()))
        return next((claim for claim in made if claim is not None and claim.namespace == pod.namespace), None)

    def tell_namespace(self, namespace: str) -> None:
        """Call `on_changed` for every claim of a namespace."""
        for claim in self.claims:
            if (claim.ours or claim.scheduled) and claim.namespace == namespace:
                self._on_changed(claim.uid)
