"""Placement requests: computes what each waiting tenant requests from placement.

Guarantees:
- A tenant has no request if its Pod is deleted or no longer waits for a share.
- A request is computed from the present cluster state, independently of earlier requests.
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

_THEN_LOOKED = "Free GPUs are checked then, or once a cluster admin has given it a larger budget."


def budget_wait(standing: Standing) -> Refusal | None:
    """Return the refusal for new SharePods of a namespace that must wait for its budget. None if they need not wait."""
    if standing.waits_until is None:
        return None
    headline = f"the GPU budget of the namespace is spent, and new SharePods wait until {standing.waits_until}"
    return Refusal(outlook=Outlook.SPENT, headline=headline, advice=_THEN_LOOKED)


def borrower_advice(standing: Standing) -> str:
    """Return advice for a namespace whose budget is spent and that borrows: when its budget is refilled. Empty if the
    namespace does not borrow.
    """
    if standing.lowered_to is None or standing.refill_at is None:
        return ""
    return (
        "The GPU budget of the namespace is spent: namespaces within their budgets come first until the refill at "
        f"{standing.refill_at}."
    )


class PlacementRequests:
    """Builder of placement requests.

    Args:
        state: The cluster state.
        memos: The tenants' memos, with the nodes that a tenant must avoid.
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
        """Return the request of a tenant, adjusted by its namespace's standing. None if the tenant no longer requests
        anything.
        """
        request = self._own(tenant)
        return self.ranked(request) if request is not None else None

    def worked_out(self, waiting: WaitingTenant) -> WorkedOut | None:
        """Return a waiting tenant's request (see `of`), its content, its queue key, and the objects from which all were
        computed.

        For a SharePod, the last result is returned while these objects are the same and no nodes must be avoided. If
        the content has changed, the tenant is marked as not refused, so that it is tried in any case.
        """
        parts = self._parts(waiting.tenant)
        known = waiting.worked_out
        if parts and known is not None and known.parts and all(map(operator.is_, parts, known.parts)):
            return known
        request = self.of(waiting.tenant)
        now = WorkedOut(parts, request, asks(request), queue_key(request)) if request is not None else None
        if known is not None and now is not None and now.asks != known.asks:
            waiting.refused_at_version = None  # the refusal was for another request
        waiting.worked_out = now
        return now

    def _parts(self, tenant: str) -> tuple[object, ...]:
        """Return the objects that determine a SharePod's request. Empty if the request also depends on other facts, so
        that it must be computed each time.
        """
        sharepod, pod = self._state.asking(tenant), self._state.pod_of(tenant)
        if sharepod is None or pod is None or self._memos.of(tenant).avoid:
            return ()
        return sharepod, pod, self._state.claim_of_pod(pod), self._standing_of(sharepod.namespace)

    def ranked(self, request: PlacementRequest) -> PlacementRequest:
        """Return a request with the effective priority and the standing that its namespace gives it now."""
        standing = self._standing_of(request.namespace)
        priority = standing.effective_priority(request.priority)
        if (priority, standing.step) == (request.priority, request.standing):
            return request
        return replace(request, priority=priority, standing=standing.step)

    def best_effort(self, request: PlacementRequest) -> PlacementRequest | None:
        """Return a copy with request 0, as which a tenant may run on lent time while its namespace's budget is spent.

        None if the namespace does not borrow, or if the share cannot have request 0.
        """
        gpu = request.gpu
        shareable = gpu.mode is Mode.SHARED and gpu.latency is not Latency.INTERACTIVE and gpu.memory is not None
        if not (shareable and gpu.request_milli) or request.siblings:
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
            return None  # its claim was deleted: its next Pod, with another claim, requests a share again
        return self.of_sharepod(sharepod, pod)

    def _of_claim(self, claim: ClaimFacts) -> PlacementRequest | None:
        """Return the request of a claim, with its Pod's other claims. None if the claim no longer requests anything."""
        if claim.request is None or claim.deleting:
            return None
        return claim_request(self._state, claim, self._avoided(claim.uid))

    def of_sharepod(self, sharepod: SharePodFacts, pod: PodFacts) -> PlacementRequest:
        """Return the placement request of a valid SharePod. `pod`: its Pod, which waits for a share."""
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
        """Return the nodes that a tenant must avoid, each with the reason."""
        memo, now = self._memos.of(tenant), self._clock()
        memo.avoid = {node: (why, until) for node, (why, until) in memo.avoid.items() if until > now}
        return {node: why for node, (why, _) in memo.avoid.items()}
