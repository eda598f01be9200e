"""Turns of namespaces: in which order those that wait are tried in one pass through the queue.

Guarantees:
- Higher effective priority comes first, then the better standing of the namespace.
- Among equals of these, namespaces take turns, each with its own oldest first: a namespace's n-th is tried before the
  (n+1)-th of any other, and of several that are n-th the oldest first.
- One that comes during a pass has a turn with its namespace, whose next turn is the present one at the earliest: the
  first of a namespace waits for one of each other namespace, and not for all of them.
- Those that ask the same may be lined up as one: the oldest is tried first, and each other one after it unless the
  answer was for all of them.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterable

from sharepod.placement.engine import QueueKey

from .waiting import WaitingTenant

_Rank = tuple[int, int]
"""Priority and standing, as a queue key begins."""
Keyed = tuple[QueueKey, WaitingTenant]
"""One that waits, with its key."""
_Entry = tuple[QueueKey, int, WaitingTenant, list[Keyed]]
"""Key, number of the entry, and one that waits, with those that ask the same, the oldest last."""


class NamespaceTurns:
    """Those that are still to be tried in a pass."""

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self._lines: dict[tuple[_Rank, str], list[_Entry]] = {}
        """Heaps of those of each namespace."""
        self._next: list[tuple[_Rank, int, QueueKey, str]] = []
        """Heap of the namespaces, each with its turn and the key of its first; an entry that is no longer so is passed
        over."""
        self._turns: dict[tuple[_Rank, str], int] = {}
        """Next turn of each namespace."""
        self._present: dict[_Rank, int] = {}
        """Turn of the one that was taken last."""
        self._alike: list[Keyed] = []
        """Those that ask the same as the one that was taken last, the oldest last."""
        self._untried: set[str] = set()
        self._count = 0

    @property
    def has_untried(self) -> bool:
        """Return whether any was never refused, or is to be tried whatever has changed since."""
        return bool(self._untried)

    def add_all(self, waiting: Iterable[Keyed]) -> None:
        """Add some that wait, each with its key."""
        entries: list[_Entry] = [(key, next(self._numbers), each, []) for key, each in waiting]
        self._count += len(entries)
        self._add(entries)

    def add_alike(self, waiting: Iterable[Keyed]) -> None:
        """Add some of one namespace and rank that ask the same, each with its key."""
        youngest_first = sorted(waiting, key=lambda item: item[0], reverse=True)
        self._count += len(youngest_first)
        if youngest_first:
            key, oldest = youngest_first.pop()
            self._add([(key, next(self._numbers), oldest, youngest_first)])

    def take(self) -> WaitingTenant | None:
        """Take the next one; None if there is none."""
        if self._alike:
            key, oldest = self._alike.pop()
            self._add([(key, next(self._numbers), oldest, self._alike)])
            self._alike = []
        while self._next:
            rank, turn, key, namespace = heapq.heappop(self._next)
            line = self._lines[rank, namespace]
            if not line or line[0][0] != key or self._turns[rank, namespace] != turn:
                continue
            _, _, waiting, self._alike = heapq.heappop(line)
            self._count -= 1
            self._untried.discard(waiting.tenant)
            self._present[rank] = turn
            self._turns[rank, namespace] = turn + 1
            if line:
                heapq.heappush(self._next, (rank, turn + 1, line[0][0], namespace))
            return waiting
        return None

    def take_alike(self) -> list[WaitingTenant]:
        """Take those that were lined up as asking the same as the one that was taken last."""
        alike, self._alike = self._alike, []
        self._count -= len(alike)
        return [waiting for _, waiting in alike]

    def _add(self, entries: list[_Entry]) -> None:
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
            heapq.heappush(self._next, (rank, turn, self._lines[rank, namespace][0][0], namespace))

    def __len__(self) -> int:
        return self._count
