"""Head-of-queue reservation: chooses the waiting tenant for which GPUs are reserved, which GPUs, and for how long.

Guarantees:
- At most one tenant has a head-of-queue reservation. It is the first tenant in queue order that meets three conditions:
    it was refused only for lack of free capacity, it has waited for `after`, and some node could hold it.
- Within one priority, tenants that have waited `fair_wait` precede all others, the oldest first. The standing of their
  namespaces no longer counts.
- GPUs are reserved on the node whose tenants are expected to end first, as estimated from past run times. The
  reservation stays on that node: if it changed nodes, no node would become free.
- A tenant's reservation ends in four cases: the tenant is placed; no node can hold it any more; a tenant of higher
  priority has waited for `after`; or the tenant has had reservations for `lasts`. In the last case the tenant may get
  its next reservation after a pause of `lasts`.
- In the long run, at most `idle_ratio` of all GPU time is idle on reserved GPUs while another waiting tenant could use
  it. After a reservation, the next one begins only once the idle time so far is within the ratio (`IdleDebt`), or after
  `LONGEST_PAUSE_S`.
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
"""Shortest time in seconds between two checks: a check costs a decision for each tenant that has waited long."""
_TRIES = 8
"""Number of different requests for which GPUs are searched in one check. Half of them are the first in the queue, the
others the requests with the oldest search. A search takes a millisecond on 800 GPUs."""
_COUNTED = 1000
"""Number of waiting tenants for which it is tested whether they could use the reserved GPUs: one or two
milliseconds."""

log = structlog.get_logger(__name__)


class HeadOfQueue:
    """Chooser of the head-of-queue reservation.

    Args:
        cluster: The cluster model, which stores the reservation.
        memos: The tenants' memos, with the reason of each refusal.
        request_of: Returns a tenant's request; None if it no longer waits.
        clock: Monotonic seconds.
        after: Seconds of waiting after which GPUs are reserved.
        lasts: Seconds that one tenant's reservations may last in sum; also the pause until its next reservation.
        idle_ratio: Largest part of the GPU time that may be idle on reserved GPUs in the long run. 1 means no bound.
        fair_wait: Seconds of waiting after which the standing of the tenant's namespace no longer counts.
        left: Returns the seconds after which a running tenant is expected to end.
        later: Called with the time of the next check, in monotonic seconds.
        wake: Called when the queue must be tried again.
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
        """Number of GPUs, at the last check, that were reserved and idle although another waiting tenant could use
        them."""
        self._fair_wait = fair_wait
        self._left = left
        self._later = later
        self._wake = wake
        self._kept_since = (TenantId(""), 0.0)
        """(tenant with the reservation, time at which it was first seen with one, without a gap since)."""
        self._next_check = 0.0

    async def look(self, places: Mapping[str, WaitingTenant], arrived: asyncio.Event) -> None:
        """Check whether GPUs must be reserved, for which tenant, and which GPUs. Yields to other tasks.

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
            self._next_check = max(self._next_check, may_reserve_at)  # later arrivals wait for `after` even later
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
        """Return the free time of the reserved GPUs, as a number of GPUs, as far as other waiting tenants could use
        it."""
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
        """End the head-of-queue reservation once its tenant has had reservations for `lasts`. The tenant stays in the
        queue, and gets its next reservation at the earliest after another `lasts`.
        """
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
        """Return the head-of-queue reservation that should exist now; None if there should be none.

        The tenant with the present reservation keeps it, unless a tenant of higher priority has waited as long.
        `waited`: tenants that have waited for free capacity for at least `after`.
        """
        cluster = self._cluster
        kept = cluster.head_reservation
        owning = places.get(kept.tenant) if kept is not None else None
        owner = self._request_of(owning) if owning is not None and self._waits_for_room(owning) else None
        if kept is not None and (owner is None or not is_attainable(cluster, owner, kept)):
            kept = owner = None
        for waiting in waited.whose_turn(above=owner.priority if owner is not None else None):
            if places.get(waiting.tenant) is not waiting:
                continue  # the tenant has left the queue, or joined it again, since it was counted
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
        """Return True if a tenant was refused for lack of free capacity, and can fit some day. False for claims of a
        Pod with several claims: they get no reservation.
        """
        if waiting.key is None or (waiting.worked_out is not None and waiting.worked_out.request.siblings):
            return False
        refusal = self._memos.of(waiting.tenant).refusal
        return refusal is not None and refusal.outlook is Outlook.WAITING


def _priority(waiting: WaitingTenant) -> int:
    return -waiting.key[0] if waiting.key is not None else 0


class _Firsts:
    """Tenants that have waited long, of which only the first in the queue is kept for each content of a request."""

    def __init__(self) -> None:
        self._first_of: dict[str, tuple[QueueKey, WaitingTenant]] = {}

    def add(self, waiting: WaitingTenant, rank: QueueKey) -> None:
        """Add a tenant. `rank`: its sort key in the head-of-queue order."""
        asks = waiting.worked_out.asks if waiting.worked_out is not None else waiting.tenant
        known = self._first_of.get(asks)
        if known is None or rank < known[0]:
            self._first_of[asks] = rank, waiting

    def whose_turn(self, *, above: int | None) -> Iterator[WaitingTenant]:
        """Yield at most `_TRIES` tenants for which to search GPUs in this check: first the front of the queue, then the
        tenants with the oldest search. `above`: yield only tenants of a higher priority than this; None: all.
        """
        these = [each for each in self._first_of.values() if above is None or _priority(each[1]) > above]
        first = heapq.nsmallest(_TRIES // 2, these, key=_rank_of)
        taken = {waiting.tenant for _, waiting in first}
        yield from (waiting for _, waiting in first)
        others = (each for each in these if each[1].tenant not in taken)
        rest = heapq.nsmallest(_TRIES - len(first), others, key=lambda each: (each[1].kept_nowhere_at, each[0]))
        yield from (waiting for _, waiting in rest)


def _rank_of(ranked: tuple[QueueKey, WaitingTenant]) -> QueueKey:
    return ranked[0]
