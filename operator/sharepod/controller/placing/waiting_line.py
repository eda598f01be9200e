"""Line of those that wait for a place, in the order in which they are tried.

Guarantees:
- Those that come while others are tried are known: they can be lined up among them.
- Who asks for nothing any more leaves the line when looked at.
- Where many come at once, other tasks get turns while their places in the order are worked out.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator

from sharepod.placement.engine import QueueKey, queue_key
from sharepod.placement.state.types import PlacementRequest

from . import slices
from .namespace_turns import NamespaceTurns
from .requests import PlacementRequests
from .waiting import WaitingTenant


class WaitingLine:
    """Line of those that wait.

    Args:
        requests: Says what each asks for.
        on_idle: Called with each tenant that asks for nothing any more, which is to leave.
        clock: Monotonic seconds.
    """

    def __init__(self, requests: PlacementRequests, on_idle: Callable[[str], None], clock: Callable[[], float]) -> None:
        self._requests = requests
        self._on_idle = on_idle
        self._clock = clock
        self.places: dict[str, WaitingTenant] = {}
        """All of them, by tenant."""
        self._came: list[WaitingTenant] = []
        """Those that have come since the turns were worked out."""

    def join(self, tenant: str) -> bool:
        """Take a tenant in; return False if it waits already, and asks for what it was refused."""
        waiting = self.places.get(tenant)
        if waiting is None:
            self.places[tenant] = waiting = WaitingTenant(tenant, self._clock())
            self._came.append(waiting)
            return True
        if waiting.refused_at_version is None:
            return False
        self.request_of(waiting)
        return waiting.refused_at_version is None

    def leave(self, tenant: str) -> None:
        """Take a tenant out."""
        self.places.pop(tenant, None)

    def clear(self) -> None:
        """Take all out."""
        self.places.clear()
        self._came.clear()

    def has(self, waiting: WaitingTenant) -> bool:
        """Return whether this one waits still."""
        return self.places.get(waiting.tenant) is waiting

    def request_of(self, waiting: WaitingTenant) -> PlacementRequest | None:
        """Return its request; have it leave and return None if it asks for nothing any more."""
        worked_out = self._requests.worked_out(waiting)
        if worked_out is None:
            self._on_idle(waiting.tenant)
            return None
        return worked_out.request

    async def line_up(self, version: int) -> NamespaceTurns:
        """Return the turns of those to try at this version of the room; those refused at it already are left out."""
        self._came.clear()
        began, turns, now = time.monotonic(), NamespaceTurns(), self._clock()
        due = [
            waiting
            for waiting in self.places.values()
            if waiting.refused_at_version != version or now >= waiting.retry_at
        ]
        for waiting in due:
            if waiting.key is None and slices.is_over(began):
                await slices.let_others_go_on()
                began = time.monotonic()
            self._know_key(waiting)
        turns.add_all(self._keyed(due + self._take_those_that_came()))
        return turns

    def line_up_those_that_came(self, turns: NamespaceTurns) -> None:
        """Add those that have come meanwhile to the turns."""
        turns.add_all(self._keyed(self._take_those_that_came()))

    def _take_those_that_came(self) -> list[WaitingTenant]:
        came, self._came = self._came, []
        return came

    def _keyed(self, waiting: Iterable[WaitingTenant]) -> Iterator[tuple[QueueKey, WaitingTenant]]:
        """Yield those that wait still, with their keys."""
        for each in waiting:
            if self.has(each) and (key := self._know_key(each)) is not None:
                yield key, each

    def _know_key(self, waiting: WaitingTenant) -> QueueKey | None:
        """Return its key; None if it asks for nothing any more."""
        if waiting.key is None and (request := self.request_of(waiting)) is not None:
            waiting.key = queue_key(request)
        return waiting.key
