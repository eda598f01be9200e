"""Placement loop: the only part that decides shares. It tries the requests in the queue, pass by pass.

Guarantees:
- Decisions are made one at a time, in the order of effective priority, standing of the namespace, turns of namespaces,
  and age (`namespace_turns.py`). Each decision counts all earlier ones, also those not yet written.
- A request that arrives during a pass is tried in that pass. It waits for at most one request of each other namespace.
- Requests of equal content are tried as one. Retries of refused requests take at most a quarter of a processor, however
  many there are. So a new request waits for at most one slice of retries.
- Nothing is decided before every kind was listed, nor while this process does not lead.
- A decision is passed to the ledger writer at once. The loop never waits for the write.
- A refused SharePod is retried only when a node has gained capacity that this SharePod could use.
- The reasons of refusals are computed after the decisions of the pass, so they delay no placement.
- A waiting SharePod keeps capacity from others only by a head-of-queue reservation: GPUs of one node, reserved for the
  first tenant in the queue once it has waited `head_reservation_after`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import structlog

from sharepod.budgets.standing import WITHOUT_BUDGET, Standing
from sharepod.controller import metrics
from sharepod.controller.state.cluster_state import ClusterState
from sharepod.controller.state.memos import TenantMemos
from sharepod.placement.engine import Engine
from sharepod.placement.holders import find_holder
from sharepod.placement.state.types import (
    Assignment,
    NewHolder,
    PlacementError,
    PlacementRequest,
    label_key,
)

from . import slices
from .alarm import Alarm
from .explanations import Explanations
from .head_of_queue import HeadOfQueue
from .making_room.movers_seen import MoversSeen
from .making_room.moving import NO_MOVES, MoveLimits, Moving
from .making_room.preemptions import Preemptions
from .making_room.victims_seen import VictimsSeen
from .requests import PlacementRequests, budget_wait
from .resizes import Resizes
from .stays import Stays
from .unexplained import Unexplained
from .waiting import Asked, WaitingTenant, asked_of
from .waiting_queue import WaitingQueue

_PASSES = 4
"""Number of consecutive passes after which a pass no longer begins again when capacity becomes free, but continues to
the end of the queue."""
_EXPLAINED_AT_ONCE = 100
"""Number of refusals that are explained again at once after a node was deleted, without the usual pause: about 50 ms of
work."""


log = structlog.get_logger(__name__)


class PlacementLoop:
    """Loop that decides for waiting SharePods, plain Pods and claims.

    Args:
        state: The cluster state. The loop stores reservations in its `cluster`.
        memos: The tenants' memos: nodes to avoid, times before which not to try, and refusals.
        may_act: Returns True while this process leads and has listed every kind.
        on_decided: Called with (tenant, node) of each new or changed reservation, which must then be written.
        on_answered: Called with each tenant whose answer has changed.
        on_holder_wanted: Called with a request that has no place, and the node and number of plugin holders that would
            make one.
        clock: Monotonic seconds.
        head_reservation_after: Seconds after which GPUs are reserved for the head of the queue.
        head_reservation_for: Longest duration of that reservation, in seconds.
        head_idle_ratio: Largest part of the GPU time that may be idle on GPUs reserved for the head of the queue, in
            the long run.
        preemptions_per_minute: Largest number of victims of preemption per minute. 0 means no preemption.
        moves: Limits of moving tenants to other GPUs.
        wall: Time of day, seconds since the epoch.
        fair_wait: Seconds of waiting after which the standing of a tenant's namespace no longer counts for that
            reservation.
        standing: Returns the standing of a namespace: its place in the queue by use and budget.
    """

    def __init__(
        self,
        state: ClusterState,
        memos: TenantMemos,
        *,
        may_act: Callable[[], bool],
        on_decided: Callable[[str, str], None],
        on_answered: Callable[[str], None],
        clock: Callable[[], float],
        head_reservation_after: float,
        head_reservation_for: float = float("inf"),
        head_idle_ratio: float = 1.0,
        on_holder_wanted: Callable[[PlacementRequest, NewHolder], None] = lambda _request, _place: None,
        preemptions_per_minute: float = 0.0,
        moves: MoveLimits = NO_MOVES,
        wall: Callable[[], float] = time.time,
        fair_wait: float = float("inf"),
        standing: Callable[[str], Standing] = lambda _namespace: WITHOUT_BUDGET,
    ) -> None:
        self._state = state
        self.engine = Engine(state.cluster)
        self.requests = PlacementRequests(state, memos, clock, standing)
        self._memos = memos
        self._may_act = may_act
        self._on_decided = on_decided
        self._on_answered = on_answered
        self._clock = clock
        self._on_holder_wanted = on_holder_wanted
        self._resizes = Resizes(
            state, memos, on_decided=on_decided, on_answered=on_answered, on_room=self.room_changed, clock=clock
        )
        self._queue = WaitingQueue(self.requests, self.leave, clock)
        self._unexplained = Unexplained(lambda: self._queue.groups)
        self._alarm = Alarm(clock)
        self._cycles = 0
        self.rests = slices.RESTS
        """Pause after a slice of retries or explanations, as a multiple of the slice's duration."""
        self._renewal = slices.Renewal(self.engine.packing, self._alarm.rung)
        self.victims_seen = VictimsSeen(state, clock, wall, standing)
        self._stays = Stays(clock, self.victims_seen.ran_for)
        state.cluster.on_released(self._stays.ended)
        self._head = HeadOfQueue(
            state.cluster,
            memos,
            request_of=self._queue.request_of,
            clock=clock,
            after=head_reservation_after,
            lasts=head_reservation_for,
            idle_ratio=head_idle_ratio,
            fair_wait=fair_wait,
            left=self._stays.left,
            later=self._alarm.ring_at,
            wake=self._alarm.ring,
        )
        self._standing = standing
        movers = MoversSeen(state, self.victims_seen, self.requests, after=moves.after, wall=wall, standing=standing)
        self._explanations = Explanations(
            self.engine,
            memos,
            request_of=self._queue.request_of,
            own_movable=movers.own,
            standing=standing,
            may_act=may_act,
            on_answered=on_answered,
            clock=clock,
            later=self._alarm.ring_at,
            kick=self._alarm.rung,
            arrived=self._queue.arrived,
            rests=lambda: self.rests,
        )
        self.preemptions = Preemptions(
            state,
            self.victims_seen,
            Moving(
                state,
                self.victims_seen,
                movers,
                self.engine.find,
                limits=moves,
                clock=clock,
                later=self._alarm.ring_at,
            ),
            request_of=self._queue.request_of,
            per_minute=preemptions_per_minute,
            clock=clock,
            on_lowered=on_decided,
            later=self._alarm.ring_at,
            wake=self._alarm.ring,
        )

    def want_place(self, tenant: str) -> None:
        """Enqueue a tenant for a place. If it already waits with another request, it is tried again with the new
        one."""
        if self._queue.join(tenant):
            self._alarm.ring()

    def want_resize(self, tenant: str, wish: int) -> None:
        """Enqueue a placed tenant for another share. `wish`: number that changes with the requested share."""
        if self._resizes.want(tenant, wish):
            self._alarm.ring()

    def leave(self, tenant: str) -> None:
        """Remove a tenant from the queue, and end its head-of-queue reservation."""
        self._queue.leave(tenant)
        self._resizes.leave(tenant)
        self.preemptions.end(tenant, "left")
        reservation = self._state.cluster.head_reservation
        if reservation is not None and reservation.tenant == tenant:
            self._state.cluster.reserve_for_head(None)
            self.room_changed()

    def room_changed(self) -> None:
        """Wake the loop if any tenant waits, because capacity may have become free."""
        if self._queue.places or self._resizes:
            self._alarm.ring()

    def order_changed(self) -> None:
        """Try every waiting tenant again, because standings and so the order of the queue have changed."""
        for waiting in self._queue.places.values():
            waiting.refused_at_version = waiting.key = None
        self.room_changed()

    def node_left(self) -> None:
        """Compute the reasons of refusals again after a node was deleted, because their texts count that node."""
        self._explanations.forget()
        refused = [waiting for waiting in self._queue.places.values() if waiting.refused_at_version is not None]
        for number, waiting in enumerate(refused):
            if number < _EXPLAINED_AT_ONCE:
                waiting.explained_at = float("-inf")
            self._unexplained.add_anew(waiting)
        if refused:
            self._alarm.ring()

    def retry(self, tenant: str) -> None:
        """Try a tenant again, even if nothing has changed since its refusal."""
        waiting = self._queue.places.get(tenant)
        if waiting is not None:
            waiting.refused_at_version = None
            self._alarm.ring()

    def take_over(self) -> None:
        """Reserve the new places of the moves that a former leader has begun. The caller must call this before any
        decision.
        """
        moving = self.preemptions.moving
        moving.take_over()
        if moving:
            self._alarm.ring()  # a pass must release these places in time, even if no request waits

    def waiting(self) -> tuple[str, ...]:
        """Return the tenants that wait for a place."""
        return tuple(self._queue.places)

    def longest_wait_s(self) -> float:
        """Return the seconds that the oldest waiting tenant has waited. 0 if none waits."""
        return self._queue.longest_wait_s()

    def clear(self) -> None:
        """Drop all queued requests, reservations for them, and preemptions: this process no longer leads."""
        self._queue.clear()
        self._resizes.clear()
        self._state.cluster.reserve_for_head(None)
        self.preemptions.clear()

    async def run(self) -> None:
        """Run passes until cancelled: each time the alarm rings."""
        while True:
            await self._alarm.rung.wait()
            self._alarm.rung.clear()
            await asyncio.sleep(0)  # SharePods that arrive together are decided in one pass, in queue order
            for attempt in range(_PASSES):
                if not self._may_act() or await self._pass(whole=attempt == _PASSES - 1):
                    break
            metrics.WAITING.set(len(self._queue.places))

    async def _pass(self, *, whole: bool) -> bool:
        """Try the requests in the queue once. `whole`: continue to the end of the queue even if capacity becomes free.

        Return True at the end of the queue, or if this process may no longer decide. Return False if capacity became
        free while other tasks ran: the caller must begin again, so that the head of the queue is tried first.
        """
        cluster = self._state.cluster
        self._cycles += 1
        self.preemptions.moving.take_over()
        began, version = time.monotonic(), cluster.room_version
        cycle = slices.Cycle(self._cycles, began, {})
        # 1. Resize: change shares in place. Shares with request 0 come later, after the waiting requests.
        await self._resizes.decide(of_request_0=False, arrivals=lambda: self._queue.arrivals)
        cycle.end_of("resize")
        # 2. Sort the requests to try: highest priority first; then namespaces with the least use of their entitlement;
        # then turns of namespaces, each with its oldest request first.
        turns = await self._queue.start_pass(cluster)
        queued = len(turns)
        cycle.end_of("sort")
        # 3. Place: decide for each request that free capacity could serve.
        refused: set[Asked] = set()
        began = time.monotonic()
        while (tried := turns.take()) is not None:
            if slices.is_over(began):
                if tried.refused_at_version is None or turns.has_untried:
                    await slices.let_others_go_on(self._queue.arrived)
                else:
                    await slices.rest(began, self._queue.arrived, self.rests, arrived=self._queue.arrived)
                began = time.monotonic()
                if cluster.room_version != version and not whole:
                    return False
                self._queue.queue_arrivals(turns)
            if self.engine.packing.due and not self.engine.packing.ready:
                await self._renewal.go_on()
            if not self._may_act():
                self._queue.passed_over(tried)
                return True
            request = self._asked_now(tried)
            if request is not None and not self._is_placed(tried, request, refused):
                self._queue.refused(tried, cluster, turns)
                self._unexplained.add(tried)
            else:
                self._queue.passed_over(tried)
        await slices.turns_of_others(began, self._queue.arrived)
        await self._resizes.decide(of_request_0=True, arrivals=lambda: self._queue.arrivals)
        cycle.end_of("place")
        # 4. Renew the shadow prices, if the demand has changed.
        await self._renewal.go_on()
        cycle.end_of("renew")
        # 5. Reserve GPUs for the head of the queue, if it has waited long enough; preempt tenants for it.
        await self._head.look(self._queue.places, self._queue.arrived)
        # other tasks run now, so that decisions are written before refusals are explained
        await slices.let_others_go_on(self._queue.arrived)
        cycle.end_of("head")
        await self.preemptions.look(self._queue)
        cycle.end_of("preempt")
        # 6. Explain the refusals that have no explanation yet, or an old one.
        await self._explanations.work_out(self._unexplained, self._queue.places)
        cycle.end_of("explain")
        # 7. Set the alarm for requests that are retried at a set time.
        if (again := self._queue.retry_at()) < float("inf"):
            self._alarm.ring_at(again)
        log.debug("placement pass", cycle=cycle.number, queued=queued, phases_ms=cycle.phases_ms)
        return True

    def _asked_now(self, waiting: WaitingTenant) -> PlacementRequest | None:
        """Return the tenant's present request. None if the tenant no longer waits, or must not be tried now."""
        if not self._queue.has(waiting) or (request := self._queue.request_of(waiting)) is None:
            return None
        waiting.key = waiting.worked_out.key if waiting.worked_out is not None else None
        until = self._memos.of(waiting.tenant).not_before
        if self._clock() < until:
            self._alarm.ring_at(until)
            return None
        if (wait := budget_wait(self._standing(request.namespace))) is not None:
            self._explanations.store(waiting, wait)
            return None
        return request

    def _could_be_served(self, waiting: WaitingTenant, request: PlacementRequest, refused: set[Asked]) -> bool:
        """Return True if changes since the refusal of a request could give it a place, or it was not refused.
        `refused`: contents of the requests that this pass has refused.
        """
        cluster = self._state.cluster
        if waiting.refused_at_version is None or self._clock() >= waiting.retry_at:
            return True
        asked = asked_of(cluster, waiting, request)
        if asked in refused:
            return False
        key = label_key(request.namespace, request.gpu.labels.affinity)
        if key is not None and cluster.regrouped_since(key, waiting.refused_at_version):
            return True
        excludes = any(one.gpu.labels.exclusion is not None for one in (request, *request.siblings))
        if excludes and cluster.excludes_fewer_since(request.namespace, waiting.refused_at_version):
            return True
        grown = cluster.grown_since(waiting.refused_at_version)
        asks = (request, self.requests.best_effort(request))
        if any(self.engine.serves(one, grown) for one in asks if one is not None):
            return True
        if find_holder(cluster, request) is not None:
            return True
        if asked is not None:
            refused.add(asked)
        return False

    def _is_placed(self, waiting: WaitingTenant, request: PlacementRequest, refused: set[Asked]) -> bool:
        """Try one request. Return True if it has a place, and False if it is refused."""
        return self._could_be_served(waiting, request, refused) and self._place(waiting, request, refused)

    def _place(self, waiting: WaitingTenant, request: PlacementRequest, refused: set[Asked]) -> bool:
        """Decide on one request. Return False if it is refused. `refused`: contents of the requests that this pass has
        refused; a refused content is added.
        """
        cluster = self._state.cluster
        if not waiting.arrival_counted:
            waiting.arrival_counted = True
            self.engine.packing.arrived(request)
        memo = self._memos.of(waiting.tenant)
        is_head = cluster.head_reservation is not None and cluster.head_reservation.tenant == request.tenant
        asked = asked_of(cluster, waiting, request)
        answer: Assignment | None = None
        if asked is None or asked not in refused:
            with metrics.DECISION_SECONDS.time():
                answer = self.engine.find(request)
        holder = find_holder(cluster, request) if answer is None else None
        if answer is None and holder is None and (lesser := self.requests.best_effort(request)) is not None:
            answer = self.engine.find(lesser)
            request = lesser if answer is not None else request
        if answer is None:
            if holder is not None:
                self._on_holder_wanted(request, holder)
            metrics.DECISIONS.labels("refused").inc()
            if asked is not None:
                refused.add(asked)
            waiting.retry_at = min((until for _, until in memo.avoid.values()), default=float("inf"))
            return False
        version = cluster.room_version
        try:
            self.engine.reserve(request, answer)
        except PlacementError as error:
            log.error(
                "cannot reserve the decided share",
                tenant=waiting.tenant,
                sharepod=f"{request.namespace}/{request.name}",
                error=str(error),
            )
            waiting.refused_at_version = waiting.explained_version = cluster.room_version
            return True  # this is a fault in the decision: more free capacity would not help
        metrics.DECISIONS.labels("placed").inc()
        together = (request, *request.siblings)
        for one in together:
            self._stays.began(one.tenant)
        for one in together if request.claim is not None and request.pod_uid is None else ():
            self._state.seen_claims.booked(one.tenant)
        memo.refusal = None
        for other in request.siblings:
            self._memos.of(other.tenant).refusal = None
        self._queue.leave(waiting.tenant)
        preempted = self.preemptions.placed(request, answer)
        if is_head:
            cluster.reserve_for_head(None)
        grouped = request.gpu.labels.affinity is not None  # other tenants with this affinity label may fit now
        if is_head or preempted or grouped or cluster.excluding_fewer_at > version:
            self.room_changed()
        self._on_decided(waiting.tenant, answer.node)
        return True
