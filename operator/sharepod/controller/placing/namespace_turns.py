"""Turns of namespaces: the order in which waiting requests are tried in one pass through the queue.

Guarantees:
- Higher effective priority comes first, then the better standing of the namespace.
- Among namespaces of equal priority and standing, each turn tries one request per namespace, its oldest first. So the
  n-th request of each namespace is tried before the (n+1)-th of any other namespace. Within a turn the oldest request
  is first.
- A request that arrives during a pass gets the present turn or a later one. So the first request of a namespace waits
  for at most one request of each other namespace.
- A request group (requests of equal content that were refused together) has one turn. Its oldest request leaves the
  group and is tried first. The others follow, unless the caller skips the group because that request was refused.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterable, Mapping

from sharepod.placement.engine import QueueKey

from .queue_index import Entry, NamespaceQueue, Rank
from .waiting import RequestGroup, WaitingTenant

Keyed = tuple[QueueKey, WaitingTenant]
"""(queue key, waiting tenant)."""


class NamespaceTurns:
    """Requests to try in one pass, in the order of turns.

    Args:
        indexed: Requests of the queue index, by rank and namespace. They do not change during the pass.
        untried: Tenants whose request was never refused, or must be tried even if nothing has changed. `take` removes
            each tenant that it returns.
    """

    def __init__(
        self,
        indexed: Mapping[tuple[Rank, str], NamespaceQueue] | None = None,
        untried: set[str] | None = None,
    ) -> None:
        self._numbers = itertools.count()
        self._indexed = dict(indexed or {})
        self._lines: dict[tuple[Rank, str], list[Entry]] = {}
        """For each (rank, namespace): heap of the requests outside the index, such as new arrivals."""
        self._next: list[tuple[Rank, int, QueueKey, str]] = []
        """Heap of the namespaces: (rank, next turn, key of the first request, namespace). An entry is outdated, and
        skipped, if the turn or the first request has changed."""
        self._turns: dict[tuple[Rank, str], int] = {}
        """For each (rank, namespace): number of its next turn."""
        self._present: dict[Rank, int] = {}
        """For each rank: turn of the last taken request."""
        self.group: RequestGroup | None = None
        """Rest of the request group from which the last taken request came. None if it came from no group."""
        self._untried = untried if untried is not None else set()
        for rank, namespace in self._indexed:
            self._turns[rank, namespace] = 0
            self._push(rank, namespace)

    @property
    def has_untried(self) -> bool:
        """True if any request in the turns was never refused, or must be tried even if nothing has changed."""
        return bool(self._untried)

    def add_all(self, waiting: Iterable[Keyed]) -> None:
        """Add waiting requests, each with its queue key."""
        self._add([(key, next(self._numbers), each, None) for key, each in waiting])

    def add_entries(self, entries: Iterable[Entry]) -> None:
        """Add entries: waiting requests or request groups."""
        self._add([(key, next(self._numbers), each, group) for key, _, each, group in entries])

    def add_group(self, group: RequestGroup) -> None:
        """Add the requests of a request group."""
        oldest = group.oldest
        if oldest is not None and oldest.key is not None:
            self._add([(oldest.key, next(self._numbers), oldest, group)])

    def take(self) -> WaitingTenant | None:
        """Return the next request to try and remove it from the turns. None if no request is left."""
        if self.group is not None:
            self.add_group(self.group)
            self.group = None
        while self._next:
            rank, turn, key, namespace = heapq.heappop(self._next)
            if self._turns[rank, namespace] != turn or (first := self._first(rank, namespace)) is None:
                continue
            if first[0] != key:  # the namespace has another first request by now
                self._push(rank, namespace)
                continue
            _, _, waiting, group = first
            self._count(rank, namespace, first)
            self._untried.discard(waiting.tenant)
            if group is not None and group.oldest is not waiting:  # the oldest request has left the group
                self._push(rank, namespace)
                self.add_group(group)
                continue
            if group is not None:
                group.remove(waiting)
            self.group = group
            self._present[rank] = turn
            self._turns[rank, namespace] = turn + 1
            self._push(rank, namespace)
            return waiting
        return None

    def leave_out_group(self) -> None:
        """Skip the rest of the request group from which the last taken request came."""
        self.group = None

    def _first(self, rank: Rank, namespace: str) -> Entry | None:
        """Return the first entry of a namespace, from the index or outside it. None if there is none."""
        indexed, others = self._indexed.get((rank, namespace)), self._lines.get((rank, namespace))
        first = indexed.first if indexed is not None else None
        return min(first, others[0], key=_key) if first is not None and others else others[0] if others else first

    def _count(self, rank: Rank, namespace: str, taken: Entry) -> None:
        """Remove `taken`, which must be the first entry of the namespace."""
        others = self._lines.get((rank, namespace))
        if others and others[0] is taken:
            heapq.heappop(others)
        else:
            self._indexed[rank, namespace].take()

    def _add(self, entries: list[Entry]) -> None:
        changed = set()
        for entry in entries:
            rank, namespace = (entry[0][0], entry[0][1]), entry[0][3]
            heapq.heappush(self._lines.setdefault((rank, namespace), []), entry)
            changed.add((rank, namespace))
            if entry[2].refused_at_version is None:
                self._untried.add(entry[2].tenant)
        for rank, namespace in changed:
            turn = max(self._turns.get((rank, namespace), 0), self._present.get(rank, 0))
            self._turns[rank, namespace] = turn
            self._push(rank, namespace)

    def _push(self, rank: Rank, namespace: str) -> None:
        """Add a namespace to the heap for its next turn, if it has a request."""
        if (first := self._first(rank, namespace)) is not None:
            heapq.heappush(self._next, (rank, self._turns[rank, namespace], first[0], namespace))

    def __len__(self) -> int:
        """Return the number of requests that are still to be tried. A request group that was indexed before the pass
        counts as one.
        """
        rest = len(self.group) if self.group is not None else 0
        entries = itertools.chain.from_iterable(self._lines.values())
        others = sum(len(group) if group is not None else 1 for _, _, _, group in entries)
        return rest + others + sum(map(len, self._indexed.values()))


def _key(entry: Entry) -> QueueKey:
    return entry[0]
