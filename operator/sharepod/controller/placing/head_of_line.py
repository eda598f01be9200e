"""Head of the line: for whom GPUs are reserved before a place is found, and for how long.

Guarantees:
- At most one tenant has a head-of-line reservation: the first in queue order that has waited long enough, for lack of
  room, and could be served.
- Among those of one priority, the oldest that has waited `fair_wait` comes before all that have not, whatever their
  standing.
- It keeps its reservation until it is placed, can no longer be served, one of higher priority has waited as long, or
  the reservation has lasted its time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import structlog

from sharepod.api.units import TenantId
from sharepod.controller.state.memos import TenantMemos
from sharepod.placement.engine import head_key
from sharepod.placement.head_reservation import find_head_reservation, is_attainable
from sharepod.placement.state.cluster import Cluster, HeadReservation
from sharepod.placement.state.types import Outlook, PlacementRequest

from .waiting import WaitingTenant

_CHECK_PERIOD_S = 1.0
"""Least seconds between two looks for the head of the line: it costs a decision for each SharePod that waits long."""

log = structlog.get_logger(__name__)


class HeadOfLine:
    """Chooser of the head-of-line reservation.

    Args:
        cluster: Takes the reservation.
        memos: Say why a tenant was refused.
        request_of: Returns what a tenant asks for; None if it waits no longer.
        clock: Monotonic seconds.
        after: Seconds of waiting after which GPUs are reserved.
        lasts: Seconds after which a reservation ends; its owner then waits as if it came now.
        fair_wait: Seconds of waiting from which the standing of its namespace does not count.
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
        fair_wait: float,
        later: Callable[[float], None],
        wake: Callable[[], None],
    ) -> None:
        self._cluster = cluster
        self._memos = memos
        self._request_of = request_of
        self._clock = clock
        self._after = after
        self._lasts = lasts
        self._fair_wait = fair_wait
        self._later = later
        self._wake = wake
        self._kept_since = (TenantId(""), 0.0)
        """Owner of the reservation, and since when it has one."""
        self._next_check = 0.0

    def look(self, places: Mapping[str, WaitingTenant]) -> None:
        """Reserve GPUs for the first in the line that has waited long enough.

        `places`: the tenants that wait for a place.
        """
        now, cluster = self._clock(), self._cluster
        may_reserve_at = min((waiting.since for waiting in places.values()), default=now) + self._after
        if now < max(may_reserve_at, self._next_check):
            if places:
                self._later(max(may_reserve_at, self._next_check))
            return
        self._next_check = now + _CHECK_PERIOD_S
        self._end_keeping(now, places)
        waits = [waiting for waiting in list(places.values()) if self._waits_for_room(waiting)]
        requests = ((self._request_of(waiting), waiting) for waiting in waits)
        asked = [(request, waiting) for request, waiting in requests if request is not None and not request.beside]
        asked.sort(key=lambda item: head_key(item[0], overdue=now - item[1].since >= self._fair_wait))
        if asked:
            self._later(max(min(waiting.since for _, waiting in asked) + self._after, self._next_check))
        reservation = self._choose(asked, now)
        if reservation == cluster.head_reservation:
            return
        cluster.reserve_for_head(reservation)
        owner = places.get(reservation.tenant) if reservation is not None else None
        if owner is not None:
            owner.refused_at_version, owner.explained_at = None, float("-inf")
        self._wake()

    def _end_keeping(self, now: float, places: Mapping[str, WaitingTenant]) -> None:
        """End the head-of-line reservation once it has lasted its time; its owner waits from now on."""
        reservation = self._cluster.head_reservation
        if reservation is None:
            self._kept_since = (TenantId(""), now)
        elif self._kept_since[0] != reservation.tenant:
            self._kept_since = (reservation.tenant, now)
        elif now - self._kept_since[1] >= self._lasts:
            log.info("keeps GPUs for the head of the line no longer", tenant=reservation.tenant)
            if (owner := places.get(reservation.tenant)) is not None:
                owner.since = now
            self._cluster.reserve_for_head(None)
            self._wake()

    def _choose(self, asked: list[tuple[PlacementRequest, WaitingTenant]], now: float) -> HeadReservation | None:
        """Choose the head-of-line reservation: for the first in the queue that has waited long and could be served.

        The present one stays with its owner, unless a SharePod of higher priority has waited as long.
        """
        cluster, reservation = self._cluster, self._cluster.head_reservation
        of_owner = (request for request, _ in asked if reservation is not None and request.tenant == reservation.tenant)
        owner = next(of_owner, None)
        if reservation is not None and (owner is None or not is_attainable(cluster, owner, reservation)):
            reservation = None
        for request, waiting in asked:
            if reservation is not None and owner is not None and request.priority <= owner.priority:
                return replace(reservation, priority=owner.priority)
            if now - waiting.since < self._after:
                continue
            if (found := find_head_reservation(cluster, request)) is not None:
                return found
        return reservation

    def _waits_for_room(self, waiting: WaitingTenant) -> bool:
        """True if it was refused for lack of room, not because it can never fit."""
        refusal = self._memos.of(waiting.tenant).refusal
        return refusal is not None and refusal.outlook is Outlook.WAITING
