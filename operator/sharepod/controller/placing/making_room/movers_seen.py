"""Movers: tenants that may be restarted on other GPUs to free a place for a waiting request. This module finds the
movers for a request, and the request for each mover's new place.

Guarantees:
- A tenant is moved only in two cases: its owner has set `movable: true`, or it is best effort and would otherwise be
  evicted.
- The grace period of its Pod is at most `_LONGEST_GRACE_S`. During that time its new place is reserved and unused, and
  its old place is not free yet.
- It will run again, by its restartPolicy or by the controller of its Pod.
- It has run for at least `after` seconds. Its Pod is not ending. No PodDisruptionBudget has recently refused its
  eviction.
- A Pod with several claims is not moved.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from dataclasses import replace

from sharepod.api.sharepod import RestartPolicy
from sharepod.api.units import Milli, TenantId
from sharepod.budgets.standing import Standing
from sharepod.controller.placing.claim_requests import request_elsewhere
from sharepod.controller.placing.requests import PlacementRequests
from sharepod.controller.state.cluster_state import ClusterState
from sharepod.controller.state.facts.claim_facts import ClaimFacts
from sharepod.placement.preemption.moves import Movable
from sharepod.placement.state.types import PlacementRequest, Reservation

from .victims_seen import VictimsSeen

_LONGEST_GRACE_S = 600
"""Longest grace period of a moved Pod, in seconds. Checkpoints of large models take minutes, but both the old and the
new place are reserved during that time."""
_SLICE = 20
"""Number of nodes that are read before other tasks get a turn: a few milliseconds of work with 30 tenants each."""


def most_above(movable: bool | None, restart_policy: RestartPolicy, request_milli: int) -> int | None:
    """Return by how much a request's priority must exceed a SharePod's, so that the SharePod may be moved for the
    request. 0: equal priority is enough. None: the SharePod may not be moved."""
    if restart_policy is RestartPolicy.NEVER or movable is False:
        return None
    if movable:
        return 0
    return 1 if request_milli == 0 and restart_policy is RestartPolicy.ALWAYS else None


class MoversSeen:
    """Finder of the tenants that may be moved.

    Args:
        state: The cluster state.
        seen: Facts of each tenant as a victim of preemption.
        requests: Builder of placement requests.
        after: Seconds that a tenant must have run before it is moved.
        wall: Time of day, seconds since the epoch.
        standing: Returns the standing of a namespace.
    """

    def __init__(
        self,
        state: ClusterState,
        seen: VictimsSeen,
        requests: PlacementRequests,
        *,
        after: float,
        wall: Callable[[], float],
        standing: Callable[[str], Standing],
    ) -> None:
        self._state = state
        self._seen = seen
        self._requests = requests
        self._after = after
        self._wall = wall
        self._standing = standing

    def any_marked(self) -> bool:
        """Return True if the owner of any tenant allows moves. If not, no move can help a request of the same
        priority."""
        return any(self._is_marked(tenant) for node in self._state.cluster.nodes() for tenant in node.rows)

    def _is_marked(self, tenant: TenantId) -> bool:
        claim, sharepod = self._state.seen_claims.claims.get(tenant), self._state.asking(tenant)
        if claim is not None:
            return claim.request is not None and bool(claim.request.gpu.movable)
        return sharepod is not None and sharepod.gpu is not None and bool(sharepod.gpu.movable)

    async def look(self, request: PlacementRequest, evicted: Collection[TenantId]) -> dict[TenantId, Movable]:
        """Return the tenants that may be moved for a request. Yields to other tasks.

        Args:
            request: The waiting request.
            evicted: Tenants that would otherwise be evicted for it.
        """
        found: dict[TenantId, Movable] = {}
        for number, node in enumerate(list(self._state.cluster.nodes())):
            if number % _SLICE == _SLICE - 1:
                await asyncio.sleep(0)
            for tenant, row in node.rows.items():
                movable = self.of(tenant, row.wanted, request, evicted)
                if movable is not None:
                    found[tenant] = movable
        return found

    def own(self, request: PlacementRequest) -> dict[TenantId, Movable]:
        """Return the tenants of a request's namespace that could be moved for the request if their owners set `movable:
        true`.
        """
        found: dict[TenantId, Movable] = {}
        for node in self._state.cluster.nodes():
            for tenant, row in node.rows.items():
                if row.wanted.namespace != request.namespace or row.wanted.releasing or not self._returns(tenant):
                    continue
                fact, asked = self._seen.fact(tenant, row.wanted), self.asks(tenant, row.wanted)
                if fact is None or fact.leaving or asked is None or fact.priority > request.priority:
                    continue
                found[tenant] = Movable(request=asked, started=fact.started, lost_seconds=fact.lost_seconds)
        return found

    def of(
        self, tenant: TenantId, row: Reservation, request: PlacementRequest, evicted: Collection[TenantId]
    ) -> Movable | None:
        """Return a tenant's facts as a mover for a request. None if it may not be moved for it. `evicted`: see
        `look`."""
        most = self._most_above(tenant, row)
        if most is None or row.releasing or (most > 0 and tenant not in evicted):
            return None
        if not self._seen.goes_within(tenant, _LONGEST_GRACE_S):
            return None
        fact = self._seen.fact(tenant, row)
        if fact is None or fact.leaving or fact.protected or fact.priority > request.priority - most:
            return None
        asked = self.asks(tenant, row)
        if asked is None or self._wall() - fact.started < self._after:
            return None
        return Movable(request=asked, started=fact.started, lost_seconds=fact.lost_seconds)

    def asks(self, tenant: TenantId, row: Reservation) -> PlacementRequest | None:
        """Return the request with which a running tenant would be placed again. None if it cannot be derived."""
        claim = self._state.seen_claims.claims.get(tenant)
        if claim is not None:
            return self._of_claim(claim)
        sharepod, pod = self._state.asking(tenant), self._state.pod_of(tenant)
        if sharepod is None or sharepod.gpu is None or pod is None:
            return None
        request = self._requests.ranked(self._requests.of_sharepod(sharepod, pod))
        borrows = self._standing(sharepod.namespace).lowered_to is not None
        if row.request_milli == 0 and borrows:  # its namespace's budget is spent: it will have request 0 again
            return replace(request, gpu=replace(request.gpu, request_milli=Milli(0)))
        return request

    def _of_claim(self, claim: ClaimFacts) -> PlacementRequest | None:
        request = request_elsewhere(self._state, claim)
        return self._requests.ranked(request) if request is not None else None

    def _most_above(self, tenant: TenantId, row: Reservation) -> int | None:
        """Return by how much a request's priority must exceed a tenant's, so that the tenant may be moved for the
        request. 0: equal priority is enough. None: the tenant may not be moved.
        """
        claim = self._state.seen_claims.claims.get(tenant)
        if claim is not None:
            return 0 if claim.request is not None and claim.request.gpu.movable else None
        sharepod = self._state.asking(tenant)
        if sharepod is None or sharepod.gpu is None or not self._returns(tenant):
            return None
        return most_above(sharepod.gpu.movable, sharepod.restart_policy, row.request_milli)

    def _returns(self, tenant: TenantId) -> bool:
        """Return True if another run follows the eviction of a tenant's Pod. Always True for a claim, as `asks` decides
        there.
        """
        sharepod = self._state.asking(tenant)
        if sharepod is None:
            return self._state.seen_claims.claims.get(tenant) is not None
        return not (sharepod.ended or sharepod.deleting or sharepod.restart_policy is RestartPolicy.NEVER)
