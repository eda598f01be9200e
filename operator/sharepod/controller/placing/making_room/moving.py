"""Moving: restarts a tenant, the mover, on other GPUs to free a place for a waiting request. The mover's new place is
reserved.

A move is carried out as a preemption with one victim (`preemptions`). This module chooses the mover and handles its new
place.

Guarantees:
- The new place is reserved from before the mover's eviction until the mover is placed again. No other request gets it.
- At most one tenant moves per waiting request. Moves do not cascade: nothing is evicted or moved for the mover. A
  request that could not evict any tenant causes no second move within `after` seconds.
- The new place is released if the eviction fails, if the mover is deleted, or once the mover has had no row for
  `_AWAY_S`.
- At most `per_minute` tenants are moved a minute.
- While the Pod of a moving SharePod ends, its status contains the new place. So the next leader reserves that place
  before it decides. The new place for a claim is only in memory. After a crash of the operator, the claim's next Pod
  waits like any other.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass

import structlog

from sharepod.api.sharepod import KeptPlace
from sharepod.api.units import Bytes, GpuUuid, TenantId
from sharepod.controller import metrics
from sharepod.controller.state.cluster_state import ClusterState
from sharepod.placement.preemption.moves import Find, move_plans, place_holds
from sharepod.placement.preemption.victims import PreemptionPlan
from sharepod.placement.state.cluster_view import HeadReservation
from sharepod.placement.state.types import Assignment, PlacementRequest
from sharepod.rate_limit import RateLimiter

from .movers_seen import MoversSeen
from .victims_seen import VictimsSeen

_YIELD_S = 0.01
"""Seconds of planning after which other tasks get a turn."""
_AWAY_S = 120.0
"""Seconds for which the new place stays reserved after the mover's row was removed. Its next Pod is normally created
within seconds; a quota or a controller's back-off may delay it."""
_LONGEST_S = 900.0
"""Seconds after which the new place is released in any case: more than a mover's longest grace period."""

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class MoveLimits:
    """Limits of moving. `per_minute`: largest number of tenants moved per minute; 0: none. `after`: seconds that a
    tenant must have run before it is moved."""

    per_minute: float
    after: float


NO_MOVES = MoveLimits(0.0, 0.0)
"""Limits that allow no moves."""


@dataclass(slots=True)
class OngoingMove:
    """Move of one tenant, from the decision until the tenant is placed again. Times are monotonic seconds."""

    mover: PlacementRequest
    waits: PlacementRequest | None
    """Request for which the tenant moves. None for a move that a former leader began: the status does not contain the
    request."""
    node: str
    """Node that the tenant leaves."""
    to: Assignment
    began: float
    others: frozenset[str] = frozenset()
    """uids of the claims that Pods of the mover's controller used when the move began. The claim of the mover's next
    Pod is none of these."""
    away_since: float | None = None
    """Time since which the tenant has no row; None while it has one."""


class Moving:
    """The moves in progress, and the choice of new moves.

    Args:
        state: The cluster state. The new places are reserved in its `cluster`.
        seen: Facts of each tenant as a victim of preemption.
        movers: Finder of the tenants that may be moved.
        find: Returns the place that the placement engine would give to a request now; None without one.
        limits: Rate of moves, and the time that a mover must have run.
        clock: Monotonic seconds.
        later: Called with the time, monotonic seconds, of the next check.
    """

    def __init__(
        self,
        state: ClusterState,
        seen: VictimsSeen,
        movers: MoversSeen,
        find: Find,
        *,
        limits: MoveLimits,
        clock: Callable[[], float],
        later: Callable[[float], None],
    ) -> None:
        self._state = state
        self._seen = seen
        self._movers = movers
        self._find = find
        self._clock = clock
        self._later = later
        self._after = limits.after
        per_minute = limits.per_minute
        self.enabled = per_minute > 0
        """True if the settings allow moves."""
        self._limiter = RateLimiter(clock(), per_s=max(per_minute, 0.01) / 60, burst=max(1.0, per_minute / 4))
        self._running: dict[TenantId, OngoingMove] = {}
        self._had: dict[TenantId, float] = {}
        """Time of the last decision to move a tenant, by the waiting tenant for which it was made."""
        self._taken_over = False
        """True once the moves of a former leader were taken over."""
        self.on_moved: Callable[[OngoingMove, str], None] = lambda _move, _node: None
        """Called when a mover is placed again, with the move and the mover's new node."""

    def __bool__(self) -> bool:
        """Return True if any move is in progress."""
        return bool(self._running)

    def kept_place(self, tenant: TenantId) -> KeptPlace | None:
        """Return the place that is reserved for a moving tenant, as in `status.movesTo`. None if the tenant does not
        move.
        """
        move = self._running.get(tenant)
        if move is None:
            return None
        return KeptPlace(node=move.to.node, gpus=tuple(move.to.gpus), priority=move.mover.priority)

    def take_over(self) -> None:
        """Reserve the new places of SharePods that a former leader was moving, as their status shows. The caller must
        call this before any decision. Only the first call after `clear` has an effect.
        """
        if self._taken_over:
            return
        self._taken_over = True
        for sharepod in self._state.sharepods:
            place, pod, tenant = sharepod.status.moves_to, self._state.pod_of(sharepod.uid), TenantId(sharepod.uid)
            if place is None or sharepod.gpu is None or sharepod.ended or sharepod.deleting or tenant in self._running:
                continue
            if pod is not None and not (pod.deleting or pod.ended or pod.waits_for_share):
                continue
            mover = PlacementRequest(
                tenant=tenant,
                namespace=sharepod.namespace,
                name=sharepod.name,
                gpu=sharepod.gpu,
                pod_uid=pod.uid if pod is not None else None,
                priority=place.priority,
            )
            gpus = tuple(map(GpuUuid, place.gpus))
            to = Assignment(node=place.node, gpus=gpus, memory=Bytes(0))
            self._keep(OngoingMove(mover, None, sharepod.status.node or "", to, self._clock()))
            log.info("continuing a move", tenant=tenant, to=place.node)

    def helps_equals(self) -> bool:
        """Return True if any tenant may be moved for a request of equal priority."""
        return self.enabled and self._movers.any_marked()

    async def plan(self, request: PlacementRequest, evicted: Collection[TenantId]) -> PreemptionPlan | None:
        """Return the move that frees a place for a request, as a preemption plan with one victim. None if no move
        helps, or the limits allow none now. Yields to other tasks.

        Args:
            request: The waiting request.
            evicted: Tenants that would otherwise be evicted for the request.
        """
        now = self._clock()
        if not self.enabled:
            return None
        if (wait := self._limiter.wait_s(now)) > 0:
            self._later(now + wait)
            return None
        if not evicted and request.tenant in self._had and now - self._had[request.tenant] < self._after:
            self._later(self._had[request.tenant] + self._after)
            return None
        movable = await self._movers.look(request, evicted)
        movable = {one: what for one, what in movable.items() if one not in self._running}
        began = time.monotonic()
        for found in move_plans(self._state.cluster, request, movable, self._find):
            if found is not None:
                return found.preemption
            if time.monotonic() - began > _YIELD_S:
                await asyncio.sleep(0)
                began = time.monotonic()
        return None

    def may_begin(self, request: PlacementRequest, plan: PreemptionPlan) -> PlacementRequest | None:
        """Return the mover's request if a plan is still valid after other tasks have run. None if it is not."""
        mover = self._mover(request, plan)
        if mover is None or not place_holds(self._state.cluster, request, mover, plan):
            return None
        return mover

    def may_go_on(self, request: PlacementRequest, plan: PreemptionPlan) -> bool:
        """Return True if the mover of a plan may still be moved, or is ending. Its owner may have set `movable: false`
        while the API server accepted no evictions.
        """
        tenant = plan.evict[0]
        row = next((row for node, row in self._state.cluster.reservations_of(tenant) if node == plan.node), None)
        if row is None or self._seen.leaves(tenant):
            return True
        return self._movers.of(tenant, row, request, plan.evict) is not None

    def begin(self, request: PlacementRequest, mover: PlacementRequest, plan: PreemptionPlan) -> None:
        """Reserve the mover's new place. The caller evicts the mover after that."""
        now = self._clock()
        assert plan.move_to is not None
        with_claim = mover.claim is not None and mover.pod_uid is None
        others = self._claims_of(mover.owner) if with_claim else frozenset()
        self._keep(OngoingMove(mover, request, plan.node, plan.move_to, now, others))
        self._had[request.tenant] = now
        self._limiter.charge(1)
        metrics.MOVES.labels("begun").inc()
        log.info("moves", tenant=mover.tenant, node=plan.node, to=plan.move_to.node, waits=request.tenant)

    def _keep(self, move: OngoingMove) -> None:
        mover, to = move.mover, move.to
        self._running[mover.tenant] = move
        open_to = mover.namespace if mover.claim is not None and mover.pod_uid is None else None
        gpus = frozenset(to.gpus)
        self._state.cluster.keep(HeadReservation(mover.tenant, to.node, gpus, mover.priority, open_to=open_to))

    def stopped(self, tenant: TenantId) -> None:
        """End a move whose request no longer needs the old place, unless the mover's Pod is ending: release the new
        place."""
        if tenant in self._running and not self._seen.leaves(tenant):
            if (waits := self._running[tenant].waits) is not None:
                self._had.pop(waits.tenant, None)
            self._end(tenant, "stopped")

    def placed(self, request: PlacementRequest, to: Assignment) -> None:
        """End the move of a tenant that is placed again. The tenant is a SharePod, or the claim of the next Pod of the
        mover's controller.
        """
        move = self._running.get(request.tenant) or self._of_next_pod(request, to)
        if move is not None:
            kept = move.to.node == to.node and set(move.to.gpus) == set(to.gpus)
            self._end(move.mover.tenant, "moved" if kept else "elsewhere")
            move.mover = request  # the claim of the next Pod is a tenant of its own
            self.on_moved(move, to.node)

    def review(self) -> None:
        """End the moves whose mover has not been placed again in time, or will not run again: release the new
        places."""
        now = self._clock()
        self._had = {tenant: at for tenant, at in self._had.items() if now - at < self._after}
        for tenant, move in list(self._running.items()):
            if self._state.cluster.reservations_of(tenant):
                move.away_since = None
            elif move.away_since is None:
                move.away_since = now
            away = now - move.away_since if move.away_since is not None else 0.0
            if self._is_gone(move.mover) or away > _AWAY_S or now - move.began > _LONGEST_S:
                self._end(tenant, "lost")

    def clear(self) -> None:
        """Drop all moves and their reservations: this process no longer leads."""
        for tenant in list(self._running):
            self._state.cluster.give_up(tenant)
        self._running.clear()
        self._had.clear()
        self._taken_over = False

    def _mover(self, request: PlacementRequest, plan: PreemptionPlan) -> PlacementRequest | None:
        tenant = plan.evict[0]
        row = next((row for node, row in self._state.cluster.reservations_of(tenant) if node == plan.node), None)
        movable = (
            self._movers.of(tenant, row, request, plan.evict)
            if row is not None and tenant not in self._running
            else None
        )
        return movable.request if movable is not None else None

    def _of_next_pod(self, request: PlacementRequest, to: Assignment) -> OngoingMove | None:
        """Return the move whose mover's controller has created the Pod of this request. None if there is none.

        If several moves match, a move whose reserved place is `to` is preferred.
        """
        if request.owner is None or request.claim is None or request.pod_uid is not None:
            return None
        moves = [move for move in self._running.values() if move.mover.owner == request.owner]
        there = [move for move in moves if move.to.node == to.node and set(move.to.gpus) <= set(to.gpus)]
        found = [*there, *(move for move in moves if request.tenant not in move.others)]
        return found[0] if found else None

    def _claims_of(self, owner: str | None) -> frozenset[str]:
        """Return the uids of the claims that Pods of a controller use."""
        seen = self._state.seen_claims
        return frozenset(one.uid for one in seen.claims if any(pod.owner == owner for pod in seen.users(one)))

    def _is_gone(self, mover: PlacementRequest) -> bool:
        """Return True if a moving SharePod will not run again. Always False for a claim: its next Pod has another
        claim.
        """
        if mover.claim is not None and mover.pod_uid is None:
            return False
        sharepod = self._state.asking(mover.tenant)
        return sharepod is None or sharepod.ended or sharepod.deleting

    def _end(self, tenant: TenantId, outcome: str) -> None:
        self._running.pop(tenant)
        self._state.cluster.give_up(tenant)
        metrics.MOVES.labels(outcome).inc()
