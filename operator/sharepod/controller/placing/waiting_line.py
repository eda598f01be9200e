"""Line of those that wait for a place, in the order in which they are tried.

Guarantees:
- Those that come while others are tried are known: they can be lined up among them.
- Who asks for nothing any more leaves the line when looked at.
- Where many come at once, or wait, other tasks get turns while their places in the order are worked out.
- Those that ask the same are lined up as one, unless GPUs are kept for one of them or holders make places.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator

from sharepod.placement.engine import QueueKey
from sharepod.placement.state.cluster import Cluster
from sharepod.placement.state.types import PlacementRequest

from . import slices
from .namespace_turns import NamespaceTurns
from .requests import PlacementRequests
from .waiting import WaitingTenant, who_asks_matters

_AT_ONCE = 256
"""Those that wait that are lined up between two looks at the time: some 100 us of work."""


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
        self.arrived = asyncio.Event()
        """Set while there are any of these."""
        self.arrivals = 0
        """Number of all that have ever come."""

    def join(self, tenant: str) -> bool:
        """Take a tenant in; return False if it waits already, and asks for what it was refused."""
        waiting = self.places.get(tenant)
        if waiting is None:
            self.places[tenant] = waiting = WaitingTenant(tenant, self._clock())
            self._came.append(waiting)
            self.arrivals += 1
            self.arrived.set()
            return True
        was_refused = waiting.refused_at_version is not None
        if waiting.worked_out is not None:
            self.request_of(waiting)  # those that ask the same by now are lined up as one
        return was_refused and waiting.refused_at_version is None

    def leave(self, tenant: str) -> None:
        """Take a tenant out."""
        self.places.pop(tenant, None)

    def clear(self) -> None:
        """Take all out."""
        self.places.clear()
        self._take_those_that_came()

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

    async def line_up(self, cluster: Cluster) -> NamespaceTurns:
        """Return the turns of those to try; those refused at this version of the room already are left out."""
        self._take_those_that_came()
        began, turns, now = time.monotonic(), NamespaceTurns(), self._clock()
        version, kept_for = cluster.room_version, {kept.tenant for kept in cluster.kept()}
        nobody_holds = not cluster.plugin_nodes()
        alone: list[WaitingTenant] = []
        alike: dict[tuple[str, int | None], list[WaitingTenant]] = {}
        for number, waiting in enumerate(list(self.places.values())):
            if not number % _AT_ONCE or waiting.key is None:
                began = await slices.turns_of_others(began)
            if waiting.refused_at_version == version and now < waiting.retry_at:
                continue
            if nobody_holds and waiting.tenant not in kept_for and waiting.is_like_others:
                assert waiting.worked_out is not None
                alike.setdefault((waiting.worked_out.asks, waiting.refused_at_version), []).append(waiting)
            else:
                self._know_key(waiting)
                alone.append(waiting)
        alone += [lot.pop() for lot in alike.values() if len(lot) == 1]
        for first in range(0, len(alone), _AT_ONCE):
            turns.add_all(self._keyed(alone[first : first + _AT_ONCE]))
            began = await slices.turns_of_others(began)
        for lot in filter(None, alike.values()):
            turns.add_alike(self._keyed(lot))
            began = await slices.turns_of_others(began)
        self.line_up_those_that_came(turns)
        return turns

    def alike(self, refused: WaitingTenant, cluster: Cluster, turns: NamespaceTurns) -> list[WaitingTenant]:
        """Return those that are refused with one, since they ask the same; they are lined up no longer. The others that
        were lined up with it are: it, or they, may ask for something else by now."""
        known = refused.worked_out
        if known is None or who_asks_matters(cluster, known.request):
            return []
        kept_for = {kept.tenant for kept in cluster.kept()}
        refused_too: list[WaitingTenant] = []
        others: list[WaitingTenant] = []
        for other in turns.take_alike():
            same = other.worked_out is not None and other.worked_out.asks == known.asks
            (refused_too if same and other.tenant not in kept_for else others).append(other)
        turns.add_all(self._keyed(others))
        return list(filter(self.has, refused_too))

    def line_up_those_that_came(self, turns: NamespaceTurns) -> None:
        """Add those that have come meanwhile to the turns."""
        turns.add_all(self._keyed(self._take_those_that_came()))

    def _take_those_that_came(self) -> list[WaitingTenant]:
        came, self._came = self._came, []
        self.arrived.clear()
        return came

    def _keyed(self, waiting: Iterable[WaitingTenant]) -> Iterator[tuple[QueueKey, WaitingTenant]]:
        """Yield those that wait still, with their keys."""
        for each in waiting:
            if self.has(each) and (key := self._know_key(each)) is not None:
                yield key, each

    def _know_key(self, waiting: WaitingTenant) -> QueueKey | None:
        """Return its key; None if it asks for nothing any more."""
        if waiting.key is None and self.request_of(waiting) is not None and waiting.worked_out is not None:
            waiting.key = waiting.worked_out.key
        return waiting.key
