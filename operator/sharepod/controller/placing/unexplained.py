"""Waiting tenants whose refusal has no explanation, or an old one, in the order in which they are explained.

Guarantees:
- Namespaces take turns, each with its longest unexplained requests first.
- Only requests whose turn has come are read, so the work does not grow with the number of waiting requests.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping

from .waiting import ByExplanation, RequestGroup, WaitingTenant


class Unexplained:
    """Waiting tenants whose refusal must be explained. `groups`: returns the request groups, each of which keeps such
    tenants among its own members."""

    def __init__(self, groups: Callable[[], Iterable[RequestGroup]]) -> None:
        self._groups = groups
        self._alone: dict[str, WaitingTenant] = {}
        """Waiting tenants outside groups, by tenant."""
        self._by_namespace: dict[str, ByExplanation] = {}
        """For each namespace: waiting tenants outside groups, in the order of their last explanation."""

    def add(self, waiting: WaitingTenant) -> None:
        """Add a waiting tenant after a refusal."""
        if waiting.group is not None:
            waiting.group.not_explained(waiting)
            return
        self._alone[waiting.tenant] = waiting
        namespace = _namespace(waiting)
        if namespace not in self._by_namespace:
            self._by_namespace[namespace] = ByExplanation(self._is_alone)
        self._by_namespace[namespace].add(waiting)

    def _is_alone(self, waiting: WaitingTenant) -> bool:
        if waiting.group is not None:
            self.leave_out(waiting)
        return self._alone.get(waiting.tenant) is waiting

    def add_anew(self, waiting: WaitingTenant) -> None:
        """Add a waiting tenant whose reason must be computed again although it was not refused again."""
        waiting.explained_version = None
        self.add(waiting)

    def has(self, waiting: WaitingTenant) -> bool:
        """Return True if a waiting tenant's refusal must still be explained."""
        if waiting.group is None:
            return self._alone.get(waiting.tenant) is waiting
        return waiting.explained_version != waiting.refused_at_version

    def explained(self, waiting: WaitingTenant, at: float) -> None:
        """Remove a waiting tenant whose refusal was explained at `at`, monotonic seconds."""
        waiting.explained_at, waiting.explained_version = at, waiting.refused_at_version
        self.leave_out(waiting)
        if waiting.group is not None:
            waiting.group.explained(waiting)

    def leave_out(self, waiting: WaitingTenant) -> None:
        """Remove a waiting tenant: it is tried again, no longer waits, or is in a request group now."""
        self._alone.pop(waiting.tenant, None)

    def next_after(self, latest: float) -> float | None:
        """Return when the oldest explanation after `latest` was computed. Only the tenant to explain next of each
        namespace and group counts. None if there is none."""
        firsts = itertools.chain(
            (alone.first for alone in self._by_namespace.values()),
            (group.first_unexplained for group in self._groups()),
        )
        return min((first.explained_at for first in filter(None, firsts) if first.explained_at > latest), default=None)

    def due(self, places: Mapping[str, WaitingTenant], latest: float) -> Iterator[WaitingTenant]:
        """Yield the tenants whose last explanation was at `latest` or before. The caller must explain or remove each.
        Tenants that no longer wait are skipped. `places`: the waiting tenants."""
        lines: dict[str, list[Iterator[WaitingTenant]]] = {}
        for namespace, alone in list(self._by_namespace.items()):
            if alone.first is None:
                del self._by_namespace[namespace]
            else:
                lines[namespace] = [self._waiting(places, alone.due(latest))]
        for group in self._groups():
            if (first := group.first_unexplained) is not None and first.explained_at <= latest:
                lines.setdefault(_namespace(first), []).append(group.due(latest))
        in_turn = (heapq.merge(*some, key=_explained_at) for some in lines.values())
        return filter(None, itertools.chain.from_iterable(itertools.zip_longest(*in_turn)))

    def _waiting(self, places: Mapping[str, WaitingTenant], due: Iterator[WaitingTenant]) -> Iterator[WaitingTenant]:
        """Yield the tenants that still wait. Remove all other tenants."""
        for waiting in due:
            if places.get(waiting.tenant) is waiting:
                yield waiting
            else:
                self.leave_out(waiting)


def _explained_at(waiting: WaitingTenant) -> float:
    return waiting.explained_at


def _namespace(waiting: WaitingTenant) -> str:
    return waiting.key[3] if waiting.key is not None else ""
