"""Preemptions: chooses victims, that is, tenants of lower priority whose capacity a waiting request needs, and reserves
GPUs for that request.

Guarantees:
- A request preempts only if it was refused for lack of free capacity, and its Pod's preemptionPolicy allows preemption.
  Its victims have a lower effective priority.
- Victims are first lowered to request 0. If this is not enough, a movable tenant is moved (`moving`). Only if no move
  helps, tenants are evicted.
- The GPUs are reserved for the request before the first eviction. They stay reserved until the request is placed, or no
  victim is left.
- The next leader needs no memory of this process: Pods show which tenants end, and the ledger shows which tenants were
  lowered.
- A preemption is given up, and other victims are searched, if a PodDisruptionBudget protects a victim or a victim's
  priority has risen.
- Tenants with a grace period of at most an hour are preempted first. Each request has at most one set of slower victims
  at a time: while any of the set has more than an hour left, no further slow tenant is evicted for the request.
- Victims are searched for every waiting request in turn, however many requests before it find no victims.
- At most `per_minute` Pods are evicted, or shares lowered, per minute.
"""

from __future__ import annotations

import asyncio
import heapq
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import structlog

from sharepod.api.units import Milli, TenantId
from sharepod.controller import metrics
from sharepod.controller.placing import slices
from sharepod.controller.placing.waiting import WaitingTenant
from sharepod.controller.placing.waiting_queue import WaitingQueue
from sharepod.controller.state.cluster_state import ClusterState
from sharepod.placement.engine import queue_key
from sharepod.placement.preemption.planner import plans, still_holds
from sharepod.placement.preemption.several_claims import holds_for_several, plans_for_several
from sharepod.placement.preemption.victims import PreemptionPlan, Victims
from sharepod.placement.state.cluster import Cluster
from sharepod.placement.state.cluster_view import HeadReservation
from sharepod.placement.state.types import Assignment, PlacementRequest
from sharepod.rate_limit import RateLimiter

from .moving import Moving
from .victims_seen import VictimsSeen

_PERIOD_S = 1.0
"""Shortest time in seconds between two searches, as each reads all tenants."""
_AGAIN_S = 10.0
"""Seconds after which a search is repeated even if no capacity has changed, as budgets may have changed priorities."""
TRIES = 4
"""Number of requests per search. Half of them are the first in the queue, the others the requests with the oldest
search. A plan takes up to a few tenths of a second on 10,000 GPUs."""
_YIELD_S = 0.01
"""Seconds of planning after which other tasks get a turn."""
_UNTOUCHED_S = 120.0
"""Seconds after which a preemption is given up if the API server has not accepted the eviction of a victim."""

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class OngoingPreemption:
    """Preemption in progress: victims are ending, and GPUs are reserved. `began`: monotonic seconds."""

    request: PlacementRequest
    plan: PreemptionPlan
    began: float


def whose_turn(asked: list[tuple[PlacementRequest, WaitingTenant]]) -> list[tuple[PlacementRequest, WaitingTenant]]:
    """Return the requests of `asked` for which victims are searched now, `TRIES` at most: first the front of the queue,
    then the requests with the oldest search.
    """
    first = heapq.nsmallest(TRIES // 2, asked, key=lambda item: queue_key(item[0]))
    taken = {item[0].tenant for item in first}
    others = (item for item in asked if item[0].tenant not in taken)
    return first + heapq.nsmallest(
        TRIES - len(first), others, key=lambda item: (_last_turn(item[1]), queue_key(item[0]))
    )


def _holds(cluster: Cluster, request: PlacementRequest, plan: PreemptionPlan, victims: Victims) -> bool:
    """Return True if a plan still frees enough capacity for the request."""
    holds = holds_for_several if request.siblings else still_holds
    return holds(cluster, request, plan, victims)


def _last_turn(waiting: WaitingTenant) -> float:
    return waiting.room_looked_for[1] if waiting.room_looked_for is not None else waiting.since


class Preemptions:
    """Preemptions in progress, and the choice of new ones.

    Args:
        state: The cluster state. The GPUs are reserved in its `cluster`.
        seen: Facts of each tenant as a victim.
        moving: Moves in progress, and the choice of new moves.
        request_of: Returns a tenant's request; None if it no longer waits.
        per_minute: Largest number of Pods evicted, or shares lowered, per minute. 0: no preemption; moves remain
            possible.
        clock: Monotonic seconds.
        on_lowered: Called with (tenant, node) of each lowered share, which must then be written.
        later: Called with the time, monotonic seconds, of the next search.
        wake: Called to request another pass through the queue.
    """

    def __init__(
        self,
        state: ClusterState,
        seen: VictimsSeen,
        moving: Moving,
        *,
        request_of: Callable[[WaitingTenant], PlacementRequest | None],
        per_minute: float,
        clock: Callable[[], float],
        on_lowered: Callable[[str, str], None],
        later: Callable[[float], None],
        wake: Callable[[], None],
    ) -> None:
        self._state = state
        self._seen = seen
        self.moving = moving
        self._request_of = request_of
        self._clock = clock
        self._on_lowered = on_lowered
        self._later = later
        self._wake = wake
        self._enabled = per_minute > 0
        self._limiter = RateLimiter(clock(), per_s=max(per_minute, 0.001) / 60, burst=max(1.0, per_minute / 4))
        self._running: dict[str, OngoingPreemption] = {}
        self._slow: dict[str, frozenset[str]] = {}
        """For each preempting tenant: uids of its victims' Pods with a grace period of more than an hour."""
        self._next_look = 0.0
        self.on_begun: Callable[[OngoingPreemption], None] = lambda _preemption: None
        """Called with each new preemption. The called function must evict its victims and write Events about it."""

    def of(self, tenant: str) -> OngoingPreemption | None:
        """Return the preemption for a waiting tenant; None if there is none."""
        return self._running.get(tenant)

    def end(self, tenant: str, outcome: str) -> None:
        """End the preemption for a tenant: the tenant was placed, no longer waits, or the plan is given up. `outcome`:
        label of the metric.
        """
        preemption = self._running.pop(tenant, None)
        if preemption is not None:
            metrics.PREEMPTIONS.labels(outcome).inc()
            self._state.cluster.give_up(TenantId(tenant))
            if preemption.plan.move_to is not None:
                self.moving.stopped(preemption.plan.evict[0])

    def placed(self, request: PlacementRequest, to: Assignment) -> bool:
        """End the preemption for a tenant that was just placed, and also the move of that tenant. Return True if there
        was a preemption.
        """
        preempted = request.tenant in self._running
        self.end(request.tenant, "placed")
        self.moving.placed(request, to)
        return preempted

    def refused(self, tenant: str, pod: str) -> None:
        """Give up a preemption because a PodDisruptionBudget protects a victim's Pod, `pod`. Other victims are searched
        at once.
        """
        self._seen.refused(pod)
        self.end(tenant, "refused")
        self._next_look = 0.0
        self._wake()

    def clear(self) -> None:
        """Drop all preemptions and moves: this process no longer leads."""
        for tenant in list(self._running):
            self._state.cluster.give_up(TenantId(tenant))
        self._running.clear()
        self._slow.clear()
        self.moving.clear()

    async def look(self, queue: WaitingQueue) -> None:
        """Give up invalid preemptions, then begin new ones for waiting requests in `queue`. Yields to other tasks."""
        now, places = self._clock(), queue.places
        if not (self._enabled or self.moving.enabled or self.moving) or not (places or self._running or self.moving):
            return  # a move may be in progress even if the settings allow none: a former leader had other settings
        if now < self._next_look:
            self._later(self._next_look)
            return
        self._next_look = now + _PERIOD_S
        self.moving.review()
        asked = await self._asked(queue, now)
        if not asked and not self._running:
            if self.moving:
                self._later(self._next_look)
            looked = (waiting.room_looked_for for waiting in places.values())
            again = min((at + _AGAIN_S for _, at in filter(None, looked)), default=None)
            if again is not None:
                self._later(max(again, now + _PERIOD_S))
            return
        victims = await self._seen.look()
        self._slow = {tenant: pods for tenant, pods in self._slow.items() if tenant in places}
        given_up = self._review(places, victims)
        for request, waiting in asked:
            if self._limiter.wait_s(now) > 0:
                self._later(now + self._limiter.wait_s(now))
                break
            plan = await self._plan_quickly(request, victims)
            if plan is None or plan.evict or (plan.lower and not self._enabled):
                plan = plan if self._enabled else None
                plan = await self.moving.plan(request, plan.evict if plan is not None else ()) or plan
            if plan is None or not self._begin(request, waiting, plan, victims, places):
                waiting.room_looked_for = (self._state.cluster.room_version, self._clock())
        if self._running or self.moving or given_up:
            self._later(self._next_look)
        elif asked:
            self._later(now + _AGAIN_S)

    async def _asked(self, queue: WaitingQueue, now: float) -> list[tuple[PlacementRequest, WaitingTenant]]:
        """Return the requests for which victims are searched now: requests that may preempt, and without a recent
        search in vain.
        """

        def is_due(waiting: WaitingTenant) -> bool:
            was_refused = waiting.refused_at_version is not None and waiting.tenant not in self._running
            return was_refused and not self._looked(waiting, now)

        async for waiting in slices.in_slices(queue.places.values(), queue.arrived):
            if is_due(waiting):
                break
        else:
            return []
        least = await self._seen.lowest() + (0 if self.moving.helps_equals() else 1)
        with_holder = {tenant for node in self._state.cluster.nodes() for tenant in node.holders.values()}
        asked: list[tuple[PlacementRequest, WaitingTenant]] = []
        async for waiting in slices.in_slices(queue.of_priority(least), queue.arrived):
            request = self._request_of(waiting) if queue.has(waiting) and is_due(waiting) else None
            if request is None or not request.may_preempt or request.tenant in with_holder or request.priority < least:
                continue
            asked.append((request, waiting))
        return whose_turn(asked)

    def _looked(self, waiting: WaitingTenant, now: float) -> bool:
        if waiting.room_looked_for is None:
            return False
        version, at = waiting.room_looked_for
        return now < at + (_AGAIN_S if version == self._state.cluster.room_version else _PERIOD_S)

    async def _plan_quickly(self, request: PlacementRequest, victims: Victims) -> PreemptionPlan | None:
        """Return the plan for a request, if possible without slow victims. None if no plan helps, or if the only plan
        has slow victims while the slow victims of an earlier plan for this request are still ending.
        """
        plan = await self._plan(request, victims)
        if plan is None or not victims.are_slow(plan.evict):
            return plan
        quick = await self._plan(request, victims.without_slow())
        if quick is not None and not quick.refused_lately:
            return quick
        return None if any(map(self._seen.goes_slowly, self._slow.get(request.tenant, ()))) else plan

    async def _plan(self, request: PlacementRequest, victims: Victims) -> PreemptionPlan | None:
        """Return the best plan for a request. None if no plan helps. Yields to other tasks."""
        best: PreemptionPlan | None = None
        began = time.monotonic()
        look = plans_for_several if request.siblings else plans
        for best in look(self._state.cluster, request, victims):  # noqa: B007 the last is the best
            if time.monotonic() - began > _YIELD_S:
                await asyncio.sleep(0)
                began = time.monotonic()
        return best

    def _begin(
        self,
        request: PlacementRequest,
        waiting: WaitingTenant,
        plan: PreemptionPlan,
        victims: Victims,
        places: Mapping[str, WaitingTenant],
    ) -> bool:
        """Begin a preemption: reserve the GPUs, lower shares, and pass the plan to `on_begun`, which evicts. Return
        False if the plan is no longer valid or may not begin.
        """
        cluster = self._state.cluster
        if places.get(waiting.tenant) is not waiting or not _holds(cluster, request, plan, victims):
            return False
        if plan.refused_lately:
            metrics.PREEMPTIONS.labels("protected").inc()
            return False
        if not (plan.lower or plan.evict or plan.leaving):
            return False  # nothing to preempt: the request waits until tenants of equal or higher priority end
        if plan.move_to is not None:
            mover = self.moving.may_begin(request, plan)
            if mover is None:
                return False
            self.moving.begin(request, mover, plan)
        # 1. Reserve the GPUs. 2. Lower shares at once. 3. Evict and notify the other victims.
        open_to = request.namespace if request.siblings else None  # each claim of the Pod is a tenant of its own
        cluster.keep(HeadReservation(request.tenant, plan.node, plan.gpus, request.priority, open_to=open_to))
        for tenant in plan.lower:
            row = next((row for node, row in cluster.reservations_of(tenant) if node == plan.node), None)
            if row is not None:
                cluster.change_share(replace(row, request_milli=Milli(0)))
                self._on_lowered(tenant, plan.node)
        preemption = OngoingPreemption(request, plan, self._clock())
        self._running[waiting.tenant] = preemption
        self._slow[waiting.tenant] = self._slow.get(waiting.tenant, frozenset()) | self._seen.slow_pods(plan.evict)
        if plan.move_to is None:  # moves have their own limit
            self._limiter.charge(len(plan.lower) + len(plan.evict))
        metrics.PREEMPTIONS.labels("begun").inc()
        log.info(
            "makes room",
            tenant=request.tenant,
            node=plan.node,
            lower=list(plan.lower),
            evict=list(plan.evict),
            leaving=list(plan.leaving),
            move=plan.move_to is not None,
        )
        self.on_begun(preemption)
        return True

    def _review(self, places: Mapping[str, WaitingTenant], victims: Victims) -> bool:
        """Give up invalid preemptions. Return True if any was given up."""
        now, before = self._clock(), len(self._running)
        for tenant, item in list(self._running.items()):
            waiting = places.get(tenant)
            request = self._request_of(waiting) if waiting is not None else None
            stays = [one for one in item.plan.evict if one in victims.units]
            if request is None:
                self.end(tenant, "left")
            elif now - item.began > _UNTOUCHED_S and stays:
                self.end(tenant, "stuck")
            elif item.plan.move_to is not None and not self.moving.may_go_on(request, item.plan):
                self.end(tenant, "withdrawn")
            elif not _holds(self._state.cluster, request, item.plan, victims):
                self.end(tenant, "overtaken")
        return len(self._running) < before
