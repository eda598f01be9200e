"""Turns of namespaces: in which order those that wait are tried in one pass through the queue.

Guarantees:
- Higher effective priority comes first, then the better standing of the namespace.
- Among equals of these, namespaces take turns, each with its own oldest first: a namespace's n-th is tried before the
  (n+1)-th of any other, and of several that are n-th the oldest first.
- One that comes during a pass has the turn after the last of its namespace, or the present one: it waits for one of
  each other namespace, and not for all of them.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable

from sharepod.placement.engine import QueueKey

from .waiting import WaitingTenant

_Rank = tuple[int, int]
"""Priority and standing, as a queue key begins."""


class NamespaceTurns:
    """Those that are still to be tried in a pass."""

    def __init__(self) -> None:
        self._heap: list[tuple[_Rank, int, QueueKey, str, WaitingTenant]] = []
        self._last: dict[tuple[_Rank, str], int] = {}
        """Turn of the last of each namespace."""
        self._present: dict[_Rank, int] = {}
        """Turn of the one that was taken last."""

    def add_all(self, waiting: Iterable[tuple[QueueKey, WaitingTenant]]) -> None:
        """Add some that wait, each with its key."""
        for key, each in sorted(waiting, key=lambda item: item[0]):
            rank, namespace = (key[0], key[1]), key[3]
            last = self._last.get((rank, namespace), -1)
            turn = self._last[rank, namespace] = max(last + 1, self._present.get(rank, 0))
            heapq.heappush(self._heap, (rank, turn, key, each.tenant, each))

    def take(self) -> WaitingTenant | None:
        """Take the next one; None if there is none."""
        if not self._heap:
            return None
        rank, turn, _, _, waiting = heapq.heappop(self._heap)
        self._present[rank] = turn
        return waiting

    def __len__(self) -> int:
        return len(self._heap)
