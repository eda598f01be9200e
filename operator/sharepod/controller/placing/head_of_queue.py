"""Head of queue: for which tenant GPUs are reserved before a place is found, and for how long.

Guarantees:
- At most one tenant has a head-of-queue reservation: the first in queue order that lacks only room, has waited long
  enough, and could be served.
- Within one priority, the oldest tenant that has waited `fair_wait` precedes all that have not, whatever their
  standing.
- GPUs are reserved on the node whose tenants are expected to end first, by the run times of their kind. The reservation
  stays on that node: a moving reservation would drain none.
- A tenant keeps its reservation until it is placed, can no longer be served, or a tenant of higher priority has waited
  as long. It also ends once the reservations have lasted `lasts`. After a pause of that length it may get the next one.
- In the long run, idle time of reserved GPUs that another waiting tenant could use stays within `idle_ratio` of the GPU
  time. The next reservation begins once the earlier ones are paid off (`IdleDebt`), after `LONGEST_PAUSE_S` at the
  latest.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

import structlog

from sharepod.api.units import WHOLE_GPU, TenantId
from sharepod.controller.state.memos import TenantMemos
from sharepod.placement.engine import QueueKey, head_key
from sharepod.placement.head_reservation import SecondsLeft, find_head_reservation, is_attainable
from sharepod.placement.state.cluster import Cluster
from sharepod.placement.state.cluster_view import HeadReservation
from sharepod.placement.state.types import Outlook, PlacementRequest

from . import slices
from .idle_debt import IdleDebt
from .waiting import WaitingTenant

_CHECK_PERIOD_S = 1.0
"""Least seconds between two checks of the head of queue: a check costs a decision for each long-waiting SharePod."""
_TRIES = 8
"""Different requests per check for which GPUs to reserve are searched. Half are the first in the queue, the others
those searched for longest ago. A search costs a millisecond on 800 GPUs."""
_COUNTED = 1000
"""Most waiting tenants that are checked for use of reserved GPUs: one or two milliseconds."""

log = structlog.get_logger(__name__)


class HeadOfQueue:
    """Chooser of the head-of-queue reservation.

    Args:
        cluster: Takes the reservation.
        memos: Hold the reason of each tenant's refusal.
        request_of: Returns a tenant's request; None if it waits no longer.
        clock: Monotonic seconds.
        after: Seconds of waiting after which GPUs are reserved.
        lasts: Seconds after which a tenant's reservations end.
        idle_ratio: Most of the GPU time that may be idle on reserved GPUs in the long run; 1: all.
        fair_wait: Seconds of waiting from which the standing of its namespace does not count.
        left: Returns the seconds until a tenant is expected to end.
        later: Called with the time of the next check, in monotonic seconds.
        wake: Called when the queue must be processed again.
    """

    def __init__(
        self,
        cluster: Cluster,
        memos: TenantMemos,
        *,
        request_of: Callable[[WaitingTenant], PlacementRequest | None],
        clock: Callable[[], float],
        after: float,
        lasts: float,
        idle_ratio: float,
        fair_wait: float,
        left: SecondsLeft,
        later: Callable[[float], None],
        wake: Callable[[], None],
    ) -> None:
        self._cluster = cluster
        self._memos = memos
        self._request_of = request_of
        self._clock = clock
        self._after = after
        self._lasts = lasts
        self._debt = IdleDebt(idle_ratio, clock())
        self._idle = 0.0
        """Reserved GPUs, as of the last check, whose time is idle although another waiting tenant could use it."""
        self._fair_wait = fair_wait
        self._left = left
        self._later = later
        self._wake = wake
        self._kept_since = (TenantId(""), 0.0)
        """Owner of the reservation, and start of its reservations."""
        self._next_check = 0.0

    async def look(self, places: Mapping[str, WaitingTenant], arrived: asyncio.Event) -> None:
        """Reserve GPUs for the first tenant in the queue that has waited long enough. Yields to other tasks in between.

        `places`: the tenants that wait for a place. `arrived`: set while newly arrived tenants wait to be placed.
        """
        now = self._clock()
        self._debt.count(now, self._idle)
        await self._look(places, now, arrived)
        self._idle = self._idle_gpus(places)

    async def _look(self, places: Mapping[str, WaitingTenant], now: float, arrived: asyncio.Event) -> None:
        cluster = self._cluster
        if not places:
            return
        if now >= self._next_check:
            may_reserve_at = min(waiting.since for waiting in places.values()) + self._after
            self._next_check = max(self._next_check, may_reserve_at)  # later arrivals have waited less
        if now < self._next_check:
            self._later(self._next_check)
            return
        self._next_check = now + _CHECK_PERIOD_S
        self._debt.gpus = sum(len(node.gpus) for node in cluster.nodes())
        self._end_keeping(now, places)
        if cluster.head_reservation is None and (wait_s := self._debt.paid_in_s()) > 0:
            self._later(now + max(wait_s, _CHECK_PERIOD_S))
            return
        first_at, waited = float("inf"), _Firsts()
        async for waiting in slices.in_slices(places.values(), arrived):
            if self._waits_for_room(waiting):
                first_at = min(first_at, waiting.since + self._after)
                if now >= self._may_be_kept_at(waiting):
                    waited.add(waiting, self._rank(waiting, now))
        if first_at < float("inf"):
            self._later(max(first_at, self._next_check))
        reservation = self._choose(places, waited, now)
        if reservation == cluster.head_reservation:
            return
        cluster.reserve_for_head(reservation)
        owner = places.get(reservation.tenant) if reservation is not None else None
        if owner is not None:
            owner.refused_at_version, owner.explained_at = None, float("-inf")
        self._wake()

    def _idle_gpus(self, places: Mapping[str, WaitingTenant]) -> float:
        """Return how much of the reserved GPUs' time is idle although other waiting tenants would fit there."""
        reservation = self._cluster.head_reservation
        node = self._cluster.node(reservation.node) if reservation is not None else None
        if reservation is None or node is None:
            return 0.0
        free = [node.gpus_by_uuid[uuid].free_milli for uuid in reservation.gpus if uuid in node.gpus_by_uuid]
        idle, asked = sum(free), 0
        for waiting in itertools.islice(places.values(), _COUNTED):
            known = waiting.worked_out
            if asked >= idle or known is None or waiting.tenant == reservation.tenant:
                continue
            gpu = known.request.gpu
            if sum(milli >= gpu.request_milli for milli in free) >= gpu.count:
                asked += gpu.count * gpu.request_milli
        return min(idle, asked) / WHOLE_GPU

    def _end_keeping(self, now: float, places: Mapping[str, WaitingTenant]) -> None:
        """End the head-of-queue reservation once it has lasted its time. Its owner keeps its place in the queue, but
        other tenants come before its next one."""
        reservation = self._cluster.head_reservation
        if reservation is None:
            self._kept_since = (TenantId(""), now)
            return
        if self._kept_since[0] != reservation.tenant:
            self._kept_since = (reservation.tenant, now)
        if now - self._kept_since[1] < self._lasts:
            return
        log.info("ended the head-of-queue reservation", tenant=reservation.tenant)
        owner = places.get(reservation.tenant)
        if owner is not None:
            owner.not_kept_before = now + self._lasts
        self._cluster.reserve_for_head(None)
        self._wake()

    def _choose(self, places: Mapping[str, WaitingTenant], waited: _Firsts, now: float) -> HeadReservation | None:
        """Choose the head-of-queue reservation: for the first tenant in the queue that has waited long and could be
        served.

        The present reservation stays with its owner, unless a SharePod of higher priority has waited as long. `waited`:
        tenants that have waited long for room.
        """
        cluster = self._cluster
        kept = cluster.head_reservation
        owning = places.get(kept.tenant) if kept is not None else None
        owner = self._request_of(owning) if owning is not None and self._waits_for_room(owning) else None
        if kept is not None and (owner is None or not is_attainable(cluster, owner, kept)):
            kept = owner = None
        for waiting in waited.whose_turn(above=owner.priority if owner is not None else None):
            if places.get(waiting.tenant) is not waiting:
                continue  # the tenant has left since
            request = self._request_of(waiting)
            found = find_head_reservation(cluster, request, self._left) if request is not None else None
            if found is not None:
                return found
            waiting.kept_nowhere_at = now
        if kept is None or owner is None:
            return None
        return replace(kept, priority=owner.priority)

    def _rank(self, waiting: WaitingTenant, now: float) -> QueueKey:
        assert waiting.key is not None
        return head_key(waiting.key, overdue=now - waiting.since >= self._fair_wait)

    def _may_be_kept_at(self, waiting: WaitingTenant) -> float:
        return max(waiting.since + self._after, waiting.not_kept_before)

    def _waits_for_room(self, waiting: WaitingTenant) -> bool:
        """True if it was refused for lack of room, can fit at some time, and is no claim of a Pod with several."""
        if waiting.key is None or (waiting.worked_out is not None and waiting.worked_out.request.siblings):
            return False
        refusal = self._memos.of(waiting.tenant).refusal
        return refusal is not None and refusal.outlook is Outlook.WAITING


def _priority(waiting: WaitingTenant) -> int:
    return -waiting.key[0] if waiting.key is not None else 0


class _Firsts:
    """Tenants that have waited long: only the first of those with equal requests."""

    def __init__(self) -> None:
        self._first_of: dict[str, tuple[QueueKey, WaitingTenant]] = {}

    def add(self, waiting: WaitingTenant, rank: QueueKey) -> None:
        """Add a tenant. `rank`: its place in the head-of-queue order."""
        asks = waiting.worked_out.asks if waiting.worked_out is not None else waiting.tenant
        known = self._first_of.get(asks)
        if known is None or rank < known[0]:
            self._first_of[asks] = rank, waiting

    def whose_turn(self, *, above: int | None) -> Iterator[WaitingTenant]:
        """Yield the tenants to search GPUs for now: the first in the queue, then those searched for longest ago.
        `above`: only tenants of a higher priority."""
        these = [each for each in self._first_of.values() if above is None or _priority(each[1]) > above]
        first = heapq.nsmallest(_TRIES // 2, these, key=_rank_of)
        taken = {waiting.tenant for _, waiting in first}
        yield from (waiting for _, waiting in first)
        others = (each for each in these if each[1].tenant not in taken)
        rest = heapq.nsmallest(_TRIES - len(first), others, key=lambda each: (each[1].kept_nowhere_at, each[0]))
        yield from (waiting for _, waiting in rest)


def _rank_of(ranked: tuple[QueueKey, WaitingTenant]) -> QueueKey:
    return ranked[0]
