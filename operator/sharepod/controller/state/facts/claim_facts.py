"""Facts of ResourceClaims and of the Pods that use them, read from objects of the API server.

Guarantees:
- These functions do not raise for any object with a uid and a name.
- Of a claim of another class, only identity and owner are kept.
- Reading takes time in proportion to the size of the object, up to a bound.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

from sharepod.api.bounds import MAX_ITEMS, MAX_NAME, clipped
from sharepod.api.claims import scheduled_claims
from sharepod.api.claims.claims import ClaimRequest, is_ours, lower, of_line
from sharepod.api.claims.scheduled_claims import ScheduledShare
from sharepod.api.claims.share_claims import is_share_claim
from sharepod.api.default_groups import default_group
from sharepod.api.dialects import is_dialect
from sharepod.api.objects import CLAIM_DRIVER, GPUS_ANNOTATION, LINE_CLAIM
from sharepod.api.pods import plain_pods
from sharepod.api.resource_line import MEMORY, MILLI, NOTHING, Carried, carried
from sharepod.api.sharepod import SpecError
from sharepod.controller.state.reading.fitting import METADATA, POD
from sharepod.placement.state.needs import parse_needs
from sharepod.placement.state.types import PodNeeds

from .object_facts import (
    Json,
    ObjectFacts,
    controller_of,
    grace_s,
    mapping,
    maps,
    resources_of,
    started,
    whole_number,
    without_line,
)
from .pod_facts import DEFAULT_SCHEDULER, NEVER_PREEMPTS, pinned_node

MADE_FOR = "resource.kubernetes.io/pod-claim-name"
"""Annotation of a claim from a template. Its value is the name that the Pod's spec gives to the claim."""

MAX_CLAIMS = 16
"""Largest number of claims of one Pod that are placed together. A Pod with more claims waits, and an Event reports
it."""

_TERMINAL = ("Succeeded", "Failed")

OF_ANOTHER_SHAPE = SpecError(
    "spec.devices.requests",
    f"sets capacity, and so does the resource line of its Pod: template {LINE_CLAIM} differed when the claim was "
    "created; delete the claim, and it is created again with the size of the line",
)
"""Error of a claim that was created for a Pod's resource line, but not from SharePod's template, which has no sizes."""


@dataclass(frozen=True, slots=True)
class Allocation:
    """Allocation in the status of a claim. `node`: the node that it names; None if it names none or several. `devices`:
    (request, pool, device) of each result. `ours`: True if every result is a device of SharePod's driver."""

    node: str | None
    devices: tuple[tuple[str, str, str], ...]
    ours: bool
    scheduled: ScheduledShare | SpecError | None = None
    """Share that kube-scheduler has allocated on GPUs of pool `scheduler`, or the error if the allocation is no valid
    share. None if it contains no device of that pool."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimFacts(ObjectFacts):
    """Facts of a ResourceClaim.

    A claim of SharePod's class has either `request` or `error`. Exception: a claim that takes its size from a resource
    line has neither until the line is known.
    """

    ours: bool
    by_line: bool = False
    """True for a claim that takes its size from its Pod's resource line (`size_by_line`)."""
    created: str = ""
    deleting: bool = False
    made_for: str | None = None
    """uid of the Pod for which the claim was created from a template. None for a claim that a user created."""
    entry: str = ""
    """Name that the spec of this Pod gives to the claim."""
    request: ClaimRequest | None = None
    error: SpecError | None = None
    allocation: Allocation | None = None
    consumers: tuple[str, ...] = ()
    """uids of the Pods in `status.reservedFor`."""
    finalizers: tuple[str, ...] = ()
    asks: Json = field(default_factory=dict, repr=False)
    """The part of the claim from which `request` was read, for comparison with the next version."""
    scheduled: bool = False
    """True for a claim that kube-scheduler allocates: it has the class of pool `scheduler`, or has or had devices of
    that pool. Its `error` names the parts of its request that the pool does not support."""
    hold: tuple[str, ...] = ()
    """uids of the operator's own entries in `status.reservedFor`, which keep the allocation
    (`scheduled_claim_steps`)."""
    reserved_for: tuple[Json, ...] = ()
    """Entries of `status.reservedFor`. Kept only for a claim with `scheduled`."""
    of_sharepod: bool = False
    """True for a claim through which the operator attaches the GPUs of a SharePod's Pod (`made_for`). Its share is the
    SharePod's."""
    readable: bool = True
    """False if only the metadata is known, so that request and status are unknown."""
    shown: tuple[Json, ...] = ()
    """Entries of `status.devices` of SharePod's driver."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimPodFacts(ObjectFacts):
    """Facts of a Pod that uses ResourceClaims."""

    entries: tuple[tuple[str, str | None], ...]
    """The Pod's claims: (name in the Pod's spec, name of the ResourceClaim). The latter is None before the claim is
    created. A claim that the Pod's status marks as not needed is left out."""
    node: str | None
    """Node to which the Pod is bound. None before."""
    phase: str
    deleting: bool
    gated: bool
    """True if it has a scheduling gate."""
    unschedulable: str
    """kube-scheduler's reason not to bind it; empty if it was not refused."""
    priority: int
    created: str
    owner: str | None
    """uid of the Pod's controller, such as a ReplicaSet."""
    group: str | None
    """Default group of the Pod's tenants, from its controller, such as `Job/UID` of an indexed Job (`default_groups`).
    It applies if the claim names no group."""
    asks: PodNeeds | None
    """Requirements of the Pod on its node. None if that cannot be read."""
    containers: tuple[tuple[str, frozenset[str]], ...] = ()
    """(name of the container, claims by their names in the Pod's spec) of each container that uses more than one claim.
    Empty for a Pod with more than `MAX_CLAIMS` claims, which is not placed."""
    unlisted: frozenset[str] = frozenset()
    """Names of its ResourceClaims that no container lists. Empty for a Pod with more than `MAX_CLAIMS` claims."""
    line: ClaimRequest | SpecError | None = None
    """Request of its resource line, or the error of an invalid line. None for a Pod whose line has no claim."""
    carried: Carried = NOTHING
    """Amounts of its resource line, which cannot change while the Pod exists. Annotations do not affect them."""
    gpus: str | None = None
    """Value of the annotation in which the operator shows the GPUs of the Pod's share. None without it."""
    annotated: bool = False
    """True if it has annotations."""
    scheduler: str = DEFAULT_SCHEDULER
    """Name of the scheduler that must bind the Pod."""
    may_preempt: bool = True
    """True unless its preemptionPolicy is Never."""
    started: str = ""
    """Time at which the kubelet accepted the Pod, RFC 3339. Empty before."""
    grace_s: int = 30
    """Grace period in the Pod's spec, in seconds."""
    ends_by: str = ""
    """Time at which its grace period ends, RFC 3339. Empty while the Pod is not being deleted."""

    @property
    def ended(self) -> bool:
        """True if the Pod's phase is terminal."""
        return self.phase in _TERMINAL

    @property
    def waits(self) -> bool:
        """True while kube-scheduler may bind the Pod: it has no node and no gate, and is not ending."""
        return self.node is None and not (self.deleting or self.ended or self.gated)

    @property
    def runs(self) -> bool:
        """True if the Pod is bound and may have processes."""
        return self.node is not None and not self.ended

    def content(self) -> tuple[object, ...]:
        """Return the facts whose change matters to the Pod's claims, for comparison."""
        return (
            self.entries,
            self.node,
            self.phase,
            self.deleting,
            self.gated,
            self.unschedulable,
            self.priority,
            self.asks,
            self.gpus,
            str(self.line) if isinstance(self.line, SpecError) else self.line,
        )

    @property
    def claim_of_line(self) -> str | None:
        """Name of the claim that was created for the Pod's resource line. None while there is none."""
        return next((name for entry, name in self.entries if self.line is not None and entry == LINE_CLAIM), None)

    @property
    def lacks_claim(self) -> bool:
        """True if the Pod waits until the claim for its resource line is created."""
        return self.line is not None and self.waits and (LINE_CLAIM, None) in self.entries


def claim_facts(raw: Json, before: ClaimFacts | None = None) -> ClaimFacts:
    """Return the facts of a claim. `before`: facts of an earlier version, whose parsed request is reused if the request
    has not changed.
    """
    try:
        return _claim_facts(raw, before)
    except Exception as found:  # invalid content must affect this claim only
        error = SpecError("spec", f"cannot be read: {type(found).__name__}: {found}")
        return replace(unreadable_claim(mapping(raw.get("metadata")), ""), ours=is_ours(raw), error=error)


def unreadable_claim(metadata: Json, why: str) -> ClaimFacts:
    """Return the facts of a claim of which only the metadata is known. `why`: cause as the end of a sentence that
    begins "the object".
    """
    known = METADATA(metadata) or {}
    return ClaimFacts(
        uid=str(metadata["uid"]),
        name=str(metadata["name"]),
        namespace=str(metadata.get("namespace") or ""),
        version=whole_number(metadata.get("resourceVersion")),
        ours=False,
        deleting=bool(known.get("deletionTimestamp")),
        error=SpecError("spec", f"cannot be read: the object {why}"),
        readable=False,
    )


def _claim_facts(raw: Json, before: ClaimFacts | None) -> ClaimFacts:
    metadata, spec, status = (mapping(raw.get(name)) for name in ("metadata", "spec", "status"))
    common: dict[str, Any] = {
        "uid": str(metadata["uid"]),
        "name": str(metadata["name"]),
        "namespace": str(metadata.get("namespace") or ""),
        "version": whole_number(metadata.get("resourceVersion")),
        "made_for": controller_of(metadata, "Pod"),
        "entry": str(mapping(metadata.get("annotations")).get(MADE_FOR) or "")[:MAX_NAME],
    }
    held: dict[str, Any] = {
        "deleting": bool(metadata.get("deletionTimestamp")),
        "allocation": _allocation(status.get("allocation")),
        "consumers": tuple(
            str(item.get("uid") or "")[:MAX_NAME] for item in maps(status.get("reservedFor"), MAX_ITEMS)
        ),
        "finalizers": tuple(str(item) for item in islice(metadata.get("finalizers") or (), MAX_ITEMS)),
    }
    if is_share_claim(raw):
        return ClaimFacts(**common, **held, ours=False, of_sharepod=True)
    if not is_ours(raw):
        # a claim whose class was changed may still have a row for the devices it had before
        was = before is not None and before.scheduled
        return (
            _scheduled_facts(raw, common, held) if was or _is_scheduled(raw, held) else ClaimFacts(**common, ours=False)
        )
    written = {name: value for name, value in mapping(metadata.get("annotations")).items() if is_dialect(name)}
    by_line = of_line(raw)
    asks: Json = {"metadata": {"annotations": written}, "spec": spec}
    request: ClaimRequest | None = None
    error: SpecError | None = None
    if before is not None and before.ours and before.asks == asks:
        request, error, asks = before.request, before.error, before.asks
    elif by_line:
        pass  # the Pod's resource line gives the size
    else:
        try:
            request = lower(asks)
        except SpecError as found:
            error, asks = found, {}
    return ClaimFacts(
        **common,
        **held,
        ours=True,
        by_line=by_line,
        created=str(metadata.get("creationTimestamp") or ""),
        request=request,
        error=error,
        asks=asks,
        shown=tuple(item for item in maps(status.get("devices"), MAX_ITEMS) if item.get("driver") == CLAIM_DRIVER),
    )


def _is_scheduled(raw: Json, held: Mapping[str, Any]) -> bool:
    allocation = held["allocation"]
    return scheduled_claims.is_scheduled(raw) or (allocation is not None and allocation.scheduled is not None)


def _scheduled_facts(raw: Json, common: Mapping[str, Any], held: Mapping[str, Any]) -> ClaimFacts:
    """Return the facts of a claim that kube-scheduler allocates."""
    entries = tuple(maps(mapping(raw.get("status")).get("reservedFor"), MAX_ITEMS))
    hold = tuple(str(item.get("uid") or "")[:MAX_NAME] for item in entries if scheduled_claims.is_hold(item))
    return ClaimFacts(
        **common,
        **{**held, "consumers": tuple(uid for uid in held["consumers"] if uid not in hold)},
        ours=False,
        scheduled=True,
        hold=hold,
        reserved_for=entries,
        error=scheduled_claims.fault(raw),
    )


def size_by_line(claim: ClaimFacts, pod: ClaimPodFacts | None) -> tuple[ClaimRequest | None, SpecError | None]:
    """Return (size of a claim, error if it has none). `pod`: the Pod for which the claim was created, if known.

    A claim with a size of its own keeps it, unless it was created for the Pod's resource line. A claim without sizes
    gets one only if the Pod's status names it for the line. Users can write neither that status nor the claim's owner.
    """
    if not claim.by_line:
        return (None, OF_ANOTHER_SHAPE) if _is_for_line(claim, pod) else (claim.request, claim.error)
    if claim.made_for is None:
        return None, _not_of("no Pod")
    if pod is None or pod.namespace != claim.namespace:
        return None, None
    if pod.line is None or LINE_CLAIM not in (entry for entry, _ in pod.entries):
        return None, _not_of(f"Pod {pod.name}, which has no resource line")
    if pod.claim_of_line is None:
        return None, None
    if pod.claim_of_line != claim.name:
        return None, _not_of(f"Pod {pod.name}, whose line uses the claim {pod.claim_of_line}")
    return (None, pod.line) if isinstance(pod.line, SpecError) else (pod.line, None)


def _is_for_line(claim: ClaimFacts, pod: ClaimPodFacts | None) -> bool:
    """Return True if a claim was created for the resource line of `pod`."""
    if pod is None or pod.line is None or pod.namespace != claim.namespace:
        return False
    return claim.ours and claim.entry == LINE_CLAIM and pod.claim_of_line in (None, claim.name)


def _not_of(owner: str) -> SpecError:
    text = f"belongs to {owner}, and has no capacity; delete it, or set capacity in a claim of your own"
    return SpecError("metadata.ownerReferences", text)


def _allocation(value: object) -> Allocation | None:
    if not isinstance(value, Mapping):
        return None
    results = list(maps(mapping(value.get("devices")).get("results"), MAX_ITEMS))
    devices = tuple(tuple(str(item.get(key) or "") for key in ("request", "pool", "device")) for item in results)
    return Allocation(
        node=pinned_node(mapping(value.get("nodeSelector"))),
        devices=tuple((request, pool, device) for request, pool, device in devices),
        ours=bool(results) and all(item.get("driver") == CLAIM_DRIVER for item in results),
        scheduled=scheduled_claims.share(results),
    )


def uses_claims(pod: Json) -> bool:
    """Return whether a Pod uses ResourceClaims."""
    return bool(mapping(pod.get("spec")).get("resourceClaims"))


def claim_pod_facts(raw: Json) -> ClaimPodFacts:
    """Return the facts of a Pod that uses claims. Unreadable fields count as absent."""
    spec, status = mapping(raw.get("spec")), mapping(raw.get("status"))
    fitted = POD(raw) or {}
    metadata, fitted_spec, fitted_status = (mapping(fitted.get(name)) for name in ("metadata", "spec", "status"))
    made = {
        str(item.get("name")): item.get("resourceClaimName")
        for item in maps(status.get("resourceClaimStatuses"), MAX_ITEMS)
    }
    conditions = {item.get("type"): item for item in fitted_status.get("conditions") or ()}
    scheduled = conditions.get("PodScheduled") or {}
    entries = tuple(_entries(spec, made))
    lists = list(_lists(spec)) if len(entries) <= MAX_CLAIMS else None
    line = _line(raw, spec)
    return ClaimPodFacts(
        uid=str(metadata["uid"]),
        name=str(metadata["name"]),
        namespace=str(metadata.get("namespace") or ""),
        version=whole_number(metadata.get("resourceVersion")),
        entries=entries,
        node=str(fitted_spec.get("nodeName") or "") or None,
        phase=str(fitted_status.get("phase") or "Pending"),
        deleting=bool(metadata.get("deletionTimestamp")),
        gated=bool(fitted_spec.get("schedulingGates")),
        unschedulable=clipped(str(scheduled.get("message") or "")) if scheduled.get("status") == "False" else "",
        priority=whole_number(fitted_spec.get("priority")),
        created=str(metadata.get("creationTimestamp") or ""),
        owner=controller_of(metadata, None),
        group=default_group(mapping(raw.get("metadata"))),
        asks=_needs(spec),
        containers=tuple(one for one in lists or () if len(one[1]) > 1),
        unlisted=_unlisted(entries, lists) if lists is not None else frozenset(),
        line=line,
        carried=_carried(line, spec),
        gpus=mapping(metadata.get("annotations")).get(GPUS_ANNOTATION),
        annotated=bool(metadata.get("annotations")),
        scheduler=clipped(str(fitted_spec.get("schedulerName") or DEFAULT_SCHEDULER)),
        may_preempt=fitted_spec.get("preemptionPolicy") != NEVER_PREEMPTS,
        started=started(metadata, fitted_status),
        grace_s=grace_s(fitted_spec),
        ends_by=str(metadata.get("deletionTimestamp") or ""),
    )


def _line(raw: Json, spec: Json) -> ClaimRequest | SpecError | None:
    from_template = any(
        item.get("name") == LINE_CLAIM and item.get("resourceClaimTemplateName") == LINE_CLAIM
        for item in maps(spec.get("resourceClaims"), MAX_ITEMS)
    )
    if not from_template:
        return None
    try:
        return plain_pods.lower(raw)
    except SpecError as error:
        return error


def _carried(line: ClaimRequest | SpecError | None, spec: Json) -> Carried:
    if line is None:
        return NOTHING
    if isinstance(line, ClaimRequest):
        return carried(line.gpu, most_milli=line.most_milli)
    taken = resources_of(spec).extended
    return Carried(taken.get(MILLI, 0), taken.get(MEMORY, 0))


def _entries(spec: Json, made: Mapping[str, Any]) -> list[tuple[str, str | None]]:
    found: list[tuple[str, str | None]] = []
    for item in maps(spec.get("resourceClaims"), MAX_ITEMS):
        entry, name = str(item.get("name") or "")[:MAX_NAME], item.get("resourceClaimName")
        if isinstance(name, str):
            found.append((entry, name[:MAX_NAME]))
        elif entry not in made:
            found.append((entry, None))
        elif isinstance(made[entry], str):
            found.append((entry, made[entry][:MAX_NAME]))
    return found


def _lists(spec: Json) -> Iterator[tuple[str, frozenset[str]]]:
    """Yield (name of the container, its claims by their names in the Pod's spec) of each container that uses claims."""
    for kind in ("containers", "initContainers"):
        for container in maps(spec.get(kind)):
            used = maps(mapping(container.get("resources")).get("claims"), MAX_ITEMS)
            names = {name for item in used if isinstance(name := item.get("name"), str)}
            if names:
                yield str(container.get("name") or "")[:MAX_NAME], frozenset(name[:MAX_NAME] for name in names)


def _unlisted(entries: tuple[tuple[str, str | None], ...], lists: list[tuple[str, frozenset[str]]]) -> frozenset[str]:
    """Return the names of the ResourceClaims that no container lists. A claim may have several names in the Pod's
    spec."""
    listed: frozenset[str] = frozenset().union(*(names for _, names in lists))
    used = {name for entry, name in entries if entry in listed}
    return frozenset(name for _, name in entries if name is not None and name not in used)


def _needs(spec: Json) -> PodNeeds | None:
    """Return what a Pod requires of its node, without its resource line, which the ledger counts. None if that cannot
    be read."""
    try:
        needs = parse_needs(spec)
    except Exception:  # kube-scheduler makes its own checks
        return None
    return replace(needs, resources=without_line(needs.resources))
