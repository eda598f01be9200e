"""Line of those that wait for a place, in the order in which they are tried.

Guarantees:
- Those that come while others are tried are known: they can be lined up among them.
- Who asks for nothing any more leaves the line when looked at.
- Where many come at once, or wait, other tasks get turns while their places in the order are worked out.
- Those that ask the same and were refused as one are lined up as one, unless GPUs are kept for one of them or holders
  make places: a pass costs one step for all of them, however many wait.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping

from sharepod.placement.engine import QueueKey
from sharepod.placement.state.cluster import Cluster
from sharepod.placement.state.types import PlacementRequest

from . import slices
from .namespace_turns import NamespaceTurns
from .requests import PlacementRequests
from .waiting import Lot, WaitingTenant, who_asks_matters

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
        self.alone: dict[str, WaitingTenant] = {}
        """Those of them that are in no lot."""
        self.lots: list[Lot] = []
        """Lots of the others: empty ones may be among them."""
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
            self.places[tenant] = self.alone[tenant] = waiting = WaitingTenant(tenant, self._clock())
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
        waiting = self.places.pop(tenant, None)
        if waiting is not None and waiting.lot is not None:
            waiting.lot.remove(waiting)
        self.alone.pop(tenant, None)

    def clear(self) -> None:
        """Take all out."""
        self._let_go(self.places)
        self.places.clear()
        self.alone.clear()
        self.lots.clear()
        self._take_those_that_came()

    def has(self, waiting: WaitingTenant) -> bool:
        """Return whether this one waits still."""
        return self.places.get(waiting.tenant) is waiting

    def of_priority(self, least: int) -> list[WaitingTenant]:
        """Return those of at least that priority, and those of which none is known."""
        lots = (lot for lot in self.lots if lot.oldest is not None and _priority(lot.oldest) >= least)
        alone = (waiting for waiting in self.alone.values() if waiting.key is None or _priority(waiting) >= least)
        return [*alone, *itertools.chain.from_iterable(lots)]

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
        self._let_go(kept_for if nobody_holds else self.places)
        alone: list[WaitingTenant] = []
        alike: dict[tuple[str, int | None], list[WaitingTenant]] = {}
        for number, waiting in enumerate(list(self.alone.values())):
            if not number % _AT_ONCE or waiting.key is None:
                began = await slices.turns_of_others(began)
            if not self.has(waiting) or waiting.lot is not None:
                continue
            if nobody_holds and waiting.tenant not in kept_for and waiting.is_like_others:
                assert waiting.worked_out is not None
                alike.setdefault((waiting.worked_out.asks, waiting.refused_at_version), []).append(waiting)
            elif waiting.refused_at_version != version or now >= waiting.retry_at:
                self._know_key(waiting)
                alone.append(waiting)
        alone += [each for each in self._into_lots(alike) if each.refused_at_version != version]
        for first in range(0, len(alone), _AT_ONCE):
            turns.add_all(self._keyed(alone[first : first + _AT_ONCE]))
            began = await slices.turns_of_others(began)
        for lot in self.lots:
            if lot.refused_at_version != version:
                turns.add_lot(lot)
        self.line_up_those_that_came(turns)
        return turns

    def refused(self, tried: WaitingTenant, cluster: Cluster, turns: NamespaceTurns) -> None:
        """Note that one was refused, and with it those that were lined up with it if they ask the same: they are lined
        up no longer. The others that were are: it may ask for something else by now."""
        version = tried.refused_at_version = cluster.room_version
        lot, known = turns.lot, tried.worked_out
        if lot is None or known is None or known.asks != lot.asks or who_asks_matters(cluster, known.request):
            return
        for kept in cluster.kept():
            if (member := self.places.get(kept.tenant)) is not None and member.lot is lot:
                lot.remove(member)
                turns.add_all(self._keyed([member]))
        turns.leave_out_lot()
        lot.refused(version)
        if tried.is_like_others and self.has(tried):
            lot.add([tried])

    def _let_go(self, tenants: Iterable[str]) -> None:
        """Have these be tried alone: whether there is a place depends on who asks."""
        for tenant in tenants if self.lots else ():
            waiting = self.places.get(tenant)
            if waiting is not None and waiting.lot is not None:
                waiting.lot.remove(waiting)

    def _into_lots(self, alike: Mapping[tuple[str, int | None], list[WaitingTenant]]) -> list[WaitingTenant]:
        """Put those that ask the same, and were refused at the same version, into lots; return those that nobody is
        like, or that have changed meanwhile."""
        lots: dict[tuple[str, int | None], Lot] = {}
        for lot in filter(len, self.lots):
            found = lots.setdefault((lot.asks, lot.refused_at_version), lot)
            if found is not lot:
                found.add(lot.take_apart())
        alone: list[WaitingTenant] = []
        for asked, those in alike.items():
            if asked not in lots and len(those) == 1:
                alone += those
                continue
            same = [each for each in those if self.has(each) and _asked(each) == asked]
            if len(same) < len(those):
                alone += [each for each in those if self.has(each) and _asked(each) != asked]
            if same:
                lots.setdefault(asked, Lot(*asked, self.alone)).add(same)
        self.lots = list(lots.values())
        return alone

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


def _priority(waiting: WaitingTenant) -> int:
    assert waiting.key is not None
    return -waiting.key[0]


def _asked(waiting: WaitingTenant) -> tuple[str, int | None]:
    """Return what one asks, and the version of its last refusal."""
    return waiting.worked_out.asks if waiting.worked_out is not None else "", waiting.refused_at_version
