"""Placement requests: what is asked of placement for each tenant that waits.

Guarantees:
- A tenant whose Pod no longer waits for a share, or is gone, asks for nothing.
- A request is worked out from the cluster state as it is now: what was asked before counts no more.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import replace

from sharepod.api.gpunode import ClaimReference, Latency, Mode
from sharepod.api.units import Milli, TenantId
from sharepod.budgets.standing import Standing
from sharepod.controller.state.cluster_state import ClusterState
from sharepod.controller.state.facts.claim_facts import ClaimFacts
from sharepod.controller.state.facts.pod_facts import PodFacts
from sharepod.controller.state.facts.sharepod_facts import SharePodFacts
from sharepod.controller.state.memos import TenantMemos
from sharepod.placement.engine import queue_key
from sharepod.placement.state.types import Outlook, PlacementRequest, Refusal

from .claim_requests import claim_request
from .waiting import WaitingTenant, WorkedOut, asks

_THEN_LOOKED = "Whether a GPU is free for it is looked at then, or once a cluster admin has given it a larger budget."


def budget_wait(standing: Standing) -> Refusal | None:
    """Return why new SharePods of a namespace wait for its budget; None if they do not."""
    if standing.waits_until is None:
        return None
    headline = (
        "the GPU budget of the namespace is spent, and new SharePods wait until it counts again at "
        f"{standing.waits_until}"
    )
    return Refusal(outlook=Outlook.SPENT, headline=headline, advice=_THEN_LOOKED)


def borrower_advice(standing: Standing) -> str:
    """Return until when a namespace that borrows comes after those within their budgets; empty if it does not."""
    if standing.lowered_to is None or standing.refill_at is None:
        return ""
    return (
        "The GPU budget of the namespace is spent: others within theirs come first until it counts again at "
        f"{standing.refill_at}."
    )


class PlacementRequests:
    """Maker of placement requests.

    Args:
        state: The cluster state.
        memos: Say which nodes a tenant is kept away from.
        clock: Monotonic seconds.
        standing_of: Returns the standing of a namespace.
    """

    def __init__(
        self,
        state: ClusterState,
        memos: TenantMemos,
        clock: Callable[[], float],
        standing_of: Callable[[str], Standing],
    ) -> None:
        self._state = state
        self._memos = memos
        self._clock = clock
        self._standing_of = standing_of

    def of(self, tenant: str) -> PlacementRequest | None:
        """Return the request of a tenant, as its namespace's standing makes it; None if it asks for nothing any
        more."""
        request = self._own(tenant)
        return self.ranked(request) if request is not None else None

    def worked_out(self, waiting: WaitingTenant) -> WorkedOut | None:
        """Return the request of one in the queue as `of` does, with what it asks. That of a SharePod that is kept away
        from no node is worked out again only where something that it is made of has changed. One that asks for
        something else by now is tried whatever has changed of the cluster."""
        parts = self._parts(waiting.tenant)
        known = waiting.worked_out
        if parts and known is not None and known.parts and all(map(operator.is_, parts, known.parts)):
            return known
        request = self.of(waiting.tenant)
        now = WorkedOut(parts, request, asks(request), queue_key(request)) if request is not None else None
        if known is not None and now is not None and now.asks != known.asks:
            waiting.refused_at_version = None  # it was something else that was refused
        waiting.worked_out = now
        return now

    def _parts(self, tenant: str) -> tuple[object, ...]:
        """Return what the request of a SharePod is made of; nothing where that is no matter of a few objects."""
        sharepod, pod = self._state.asking(tenant), self._state.pod_of(tenant)
        if sharepod is None or pod is None or self._memos.of(tenant).avoid:
            return ()
        return sharepod, pod, self._state.claim_of_pod(pod), self._standing_of(sharepod.namespace)

    def ranked(self, request: PlacementRequest) -> PlacementRequest:
        """Return a request with its effective priority and its standing."""
        standing = self._standing_of(request.namespace)
        priority = standing.effective_priority(request.priority)
        if (priority, standing.step) == (request.priority, request.standing):
            return request
        return replace(request, priority=priority, standing=standing.step)

    def best_effort(self, request: PlacementRequest) -> PlacementRequest | None:
        """Return the request with which a tenant of a namespace out of budget may run meanwhile: the same at request 0.

        None for a namespace that does not borrow, and where a request of 0 is no share.
        """
        gpu = request.gpu
        shareable = gpu.mode is Mode.SHARED and gpu.latency is not Latency.INTERACTIVE and gpu.memory is not None
        if not (shareable and gpu.request_milli) or request.beside:
            return None
        if self._standing_of(request.namespace).lowered_to is None:
            return None
        return replace(request, gpu=replace(gpu, request_milli=Milli(0)))

    def _own(self, tenant: str) -> PlacementRequest | None:
        claim = self._state.seen_claims.claims.get(tenant)
        if claim is not None:
            return self._of_claim(claim)
        sharepod, pod = self._state.asking(tenant), self._state.pod_of(tenant)
        if sharepod is None or sharepod.gpu is None or pod is None or pod.deleting or not pod.waits_for_share:
            return None
        if pod.claim is not None and self._state.claim_of_pod(pod) is None:
            return None  # it asks again with the next claim
        return self.of_sharepod(sharepod, pod)

    def _of_claim(self, claim: ClaimFacts) -> PlacementRequest | None:
        """Return the request of a claim and those beside it; None if it asks for nothing any more."""
        if claim.request is None or claim.deleting:
            return None
        return claim_request(self._state, claim, self._avoided(claim.uid))

    def of_sharepod(self, sharepod: SharePodFacts, pod: PodFacts) -> PlacementRequest:
        """Return the placement request of a valid SharePod, for its Pod, which waits for a share."""
        assert sharepod.gpu is not None
        claim = self._state.claim_of_pod(pod)
        return PlacementRequest(
            tenant=TenantId(sharepod.uid),
            namespace=sharepod.namespace,
            name=sharepod.name,
            gpu=sharepod.gpu,
            pod=pod.asks or sharepod.needs,
            pod_uid=pod.uid,
            owner=sharepod.owner,
            default_group=sharepod.group,
            priority=pod.priority,
            may_preempt=pod.may_preempt,
            created=sharepod.created,
            claim=ClaimReference(name=claim.name, uid=claim.uid) if claim is not None else None,
            avoid=self._avoided(sharepod.uid),
        )

    def _avoided(self, tenant: str) -> dict[str, str]:
        """Return the nodes that a tenant is kept away from, each with the reason."""
        memo, now = self._memos.of(tenant), self._clock()
        memo.avoid = {node: (why, until) for node, (why, until) in memo.avoid.items() if until > now}
        return {node: why for node, (why, _) in memo.avoid.items()}
