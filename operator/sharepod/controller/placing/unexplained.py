"""Refusals that have no reason yet, or an old one: whose reason is worked out next.

Guarantees:
- Namespaces take turns, each with those first that have waited longest for an explanation.
- Of a lot those alone are looked at that have their turn: what it costs does not grow with those that wait.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping

from .waiting import Lot, WaitingTenant


class Unexplained:
    """Tenants whose refusal is to be explained. `lots`: returns the lots, which know that of their own."""

    def __init__(self, lots: Callable[[], Iterable[Lot]]) -> None:
        self._lots = lots
        self._alone: dict[str, WaitingTenant] = {}
        """The others."""

    def add(self, waiting: WaitingTenant) -> None:
        """Add one."""
        if waiting.lot is None:
            self._alone[waiting.tenant] = waiting
        else:
            waiting.lot.not_explained(waiting)

    def add_anew(self, waiting: WaitingTenant) -> None:
        """Add one whose reason is to be told anew, though it was not refused again."""
        waiting.explained_version = None
        self.add(waiting)

    def has(self, waiting: WaitingTenant) -> bool:
        """Return whether the refusal of one that waits is still to be explained."""
        if waiting.lot is None:
            return self._alone.get(waiting.tenant) is waiting
        return waiting.explained_version != waiting.refused_at_version

    def explained(self, waiting: WaitingTenant, at: float) -> None:
        """Take one out whose refusal was explained then, monotonic seconds."""
        waiting.explained_at, waiting.explained_version = at, waiting.refused_at_version
        self.leave_out(waiting)
        if waiting.lot is not None:
            waiting.lot.explained(waiting)

    def leave_out(self, waiting: WaitingTenant) -> None:
        """Take one out that is tried again, or waits no longer, or is in a lot by now."""
        self._alone.pop(waiting.tenant, None)

    def next_after(self, latest: float) -> float | None:
        """Return when the first of those was last explained whose last explanation is later than that; None if there
        is none. Monotonic seconds."""
        firsts = (first for lot in self._lots() if (first := lot.first_unexplained) is not None)
        told = (waiting.explained_at for waiting in itertools.chain(self._alone.values(), firsts))
        return min((at for at in told if at > latest), default=None)

    def due(self, places: Mapping[str, WaitingTenant], latest: float) -> Iterator[WaitingTenant]:
        """Yield those to explain now: their last explanation was at that time or before. Those that wait no longer are
        left out. `places`: those that wait."""
        left = [one for one in self._alone.values() if one.lot is not None or places.get(one.tenant) is not one]
        for waiting in left:
            self.leave_out(waiting)
        alone: dict[str, list[WaitingTenant]] = {}
        due = (waiting for waiting in self._alone.values() if waiting.explained_at <= latest)
        for waiting in sorted(due, key=_explained_at):
            alone.setdefault(_namespace(waiting), []).append(waiting)
        lines: dict[str, list[Iterable[WaitingTenant]]] = {namespace: [those] for namespace, those in alone.items()}
        for lot in self._lots():
            if (first := lot.first_unexplained) is not None:
                lines.setdefault(_namespace(first), []).append(lot.due(latest))
        in_turn = (heapq.merge(*some, key=_explained_at) for some in lines.values())
        return filter(None, itertools.chain.from_iterable(itertools.zip_longest(*in_turn)))


def _explained_at(waiting: WaitingTenant) -> float:
    return waiting.explained_at


def _namespace(waiting: WaitingTenant) -> str:
    return waiting.key[3] if waiting.key is not None else ""
