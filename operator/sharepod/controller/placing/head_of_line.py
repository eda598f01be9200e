"""Head of the line: for whom GPUs are reserved before a place is found, and for how long.

Guarantees:
- At most one tenant has a head-of-line reservation: the first in queue order that has waited long enough, for lack of
  room, and could be served.
- Among those of one priority, the oldest that has waited `fair_wait` comes before all that have not, whatever their
  standing.
- GPUs are reserved on the node whose tenants are expected to end first, by the run times of their kind. The reservation
  stays there: a reservation that moves drains nothing.
- A tenant keeps its reservation until it is placed, can no longer be served, one of higher priority has waited as long,
  or the reservations have lasted their time. After a pause of that length it may have the next one.
- GPU time that stands idle on reserved GPUs, and that another waiting tenant could use, comes to `idle_ratio` of the
  GPU time in the long run: the next reservation begins once the last ones are paid off (`IdleDebt`), after
  `LONGEST_PAUSE_S` at the latest.
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
"""Least seconds between two looks for the head of the line: it costs a decision for each SharePod that waits long."""
_TRIES = 8
"""Different requests that GPUs to keep are looked for at one look: half are the first in the queue, the others those
for which none were looked for the longest time. A look for one costs a millisecond on 800 GPUs."""
_COUNTED = 1000
"""Most waiting tenants that are asked whether they could use reserved GPUs: a millisecond or two."""

log = structlog.get_logger(__name__)


class HeadOfLine:
    """Chooser of the head-of-line reservation.

    Args:
        cluster: Takes the reservation.
        memos: Say why a tenant was refused.
        request_of: Returns what a tenant asks for; None if it waits no longer.
        clock: Monotonic seconds.
        after: Seconds of waiting after which GPUs are reserved.
        lasts: Seconds after which a tenant's reservations end.
        idle_ratio: Most of the GPU time that may stand idle on reserved GPUs in the long run; 1: all.
        fair_wait: Seconds of waiting from which the standing of its namespace does not count.
        left: Returns the seconds until a tenant is expected to end.
        later: Called with the time, monotonic seconds, at which to look again.
        wake: Called when the queue is to be gone through again.
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
        """Reserved GPUs whose time is idle and could be used by another that waits, as of the last look."""
        self._fair_wait = fair_wait
        self._left = left
        self._later = later
        self._wake = wake
        self._kept_since = (TenantId(""), 0.0)
        """Owner of the reservation, and since when it has one."""
        self._next_check = 0.0

    async def look(self, places: Mapping[str, WaitingTenant], arrived: asyncio.Event) -> None:
        """Reserve GPUs for the first in the line that has waited long enough. Others have turns meanwhile.

        `places`: the tenants that wait for a place. `arrived`: set while others have come to be placed.
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
            self._next_check = max(self._next_check, may_reserve_at)  # who comes later has waited less
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
        """Return how many reserved GPUs' time is idle, as far as other waiting tenants would fit there."""
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
        """End the head-of-line reservation once it has lasted its time. Its owner keeps its place in the line, but
        others have a turn before the next one for it."""
        reservation = self._cluster.head_reservation
        if reservation is None:
            self._kept_since = (TenantId(""), now)
            return
        if self._kept_since[0] != reservation.tenant:
            self._kept_since = (reservation.tenant, now)
        if now - self._kept_since[1] < self._lasts:
            return
        log.info("keeps GPUs for the head of the line no longer", tenant=reservation.tenant)
        owner = places.get(reservation.tenant)
        if owner is not None:
            owner.not_kept_before = now + self._lasts
        self._cluster.reserve_for_head(None)
        self._wake()

    def _choose(self, places: Mapping[str, WaitingTenant], waited: _Firsts, now: float) -> HeadReservation | None:
        """Choose the head-of-line reservation: for the first in the queue that has waited long and could be served.

        The present one stays with its owner, unless a SharePod of higher priority has waited as long. `waited`: those
        that have waited long for room.
        """
        cluster = self._cluster
        kept = cluster.head_reservation
        owning = places.get(kept.tenant) if kept is not None else None
        owner = self._request_of(owning) if owning is not None and self._waits_for_room(owning) else None
        if kept is not None and (owner is None or not is_attainable(cluster, owner, kept)):
            kept = owner = None
        for waiting in waited.whose_turn(above=owner.priority if owner is not None else None):
            if places.get(waiting.tenant) is not waiting:
                continue  # it has left meanwhile
            request = self._request_of(waiting)
            found = find_head_reservation(cluster, request, self._left) if request is not None else None
            if request is not None and found is not None:
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
        """True if it was refused for lack of room, not because it can never fit, and is no claim beside others."""
        if waiting.key is None or (waiting.worked_out is not None and waiting.worked_out.request.beside):
            return False
        refusal = self._memos.of(waiting.tenant).refusal
        return refusal is not None and refusal.outlook is Outlook.WAITING


def _priority(waiting: WaitingTenant) -> int:
    return -waiting.key[0] if waiting.key is not None else 0


class _Firsts:
    """Those that have waited long: of those that ask the same the first alone."""

    def __init__(self) -> None:
        self._first_of: dict[str, tuple[QueueKey, WaitingTenant]] = {}

    def add(self, waiting: WaitingTenant, rank: QueueKey) -> None:
        """Add one. `rank`: where it stands in the head of the line."""
        asks = waiting.worked_out.asks if waiting.worked_out is not None else waiting.tenant
        known = self._first_of.get(asks)
        if known is None or rank < known[0]:
            self._first_of[asks] = rank, waiting

    def whose_turn(self, *, above: int | None) -> Iterator[WaitingTenant]:
        """Yield those that GPUs are looked for now: the first in the queue, then those that they were not looked for
        the longest time. `above`: those of a higher priority alone."""
        these = [each for each in self._first_of.values() if above is None or _priority(each[1]) > above]
        first = heapq.nsmallest(_TRIES // 2, these, key=_rank_of)
        taken = {waiting.tenant for _, waiting in first}
        yield from (waiting for _, waiting in first)
        others = (each for each in these if each[1].tenant not in taken)
        rest = heapq.nsmallest(_TRIES - len(first), others, key=lambda each: (each[1].kept_nowhere_at, each[0]))
        yield from (waiting for _, waiting in rest)


def _rank_of(ranked: tuple[QueueKey, WaitingTenant]) -> QueueKey:
    return ranked[0]
