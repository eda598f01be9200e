"""Turns of namespaces: in which order those that wait are tried in one pass through the queue.

Guarantees:
- Higher effective priority comes first, then the better standing of the namespace.
- Among equals of these, namespaces take turns, each with its own oldest first: a namespace's n-th is tried before the
  (n+1)-th of any other, and of several that are n-th the oldest first.
- One that comes during a pass has a turn with its namespace, whose next turn is the present one at the earliest: the
  first of a namespace waits for one of each other namespace, and not for all of them.
- A lot is lined up as one: the oldest is tried first, and alone from then on, and each other one after it unless the
  lot is left out.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterable

from sharepod.placement.engine import QueueKey

from .waiting import Lot, WaitingTenant

_Rank = tuple[int, int]
"""Priority and standing, as a queue key begins."""
Keyed = tuple[QueueKey, WaitingTenant]
"""One that waits, with its key."""
_Entry = tuple[QueueKey, int, WaitingTenant, Lot | None]
"""Key, number of the entry, and one that waits, with the lot of which it is the oldest."""


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
        self.lot: Lot | None = None
        """Lot of the one that was taken last."""
        self._untried: set[str] = set()

    @property
    def has_untried(self) -> bool:
        """Return whether any was never refused, or is to be tried whatever has changed since."""
        return bool(self._untried)

    def add_all(self, waiting: Iterable[Keyed]) -> None:
        """Add some that wait, each with its key."""
        self._add([(key, next(self._numbers), each, None) for key, each in waiting])

    def add_lot(self, lot: Lot) -> None:
        """Add those of a lot."""
        oldest = lot.oldest
        if oldest is not None and oldest.key is not None:
            self._add([(oldest.key, next(self._numbers), oldest, lot)])

    def take(self) -> WaitingTenant | None:
        """Take the next one; None if there is none."""
        if self.lot is not None:
            self.add_lot(self.lot)
            self.lot = None
        while self._next:
            rank, turn, key, namespace = heapq.heappop(self._next)
            line = self._lines[rank, namespace]
            if not line or line[0][0] != key or self._turns[rank, namespace] != turn:
                continue
            _, _, waiting, lot = heapq.heappop(line)
            self._untried.discard(waiting.tenant)
            if lot is not None and lot.oldest is not waiting:  # it has left the lot meanwhile
                self._push(rank, namespace)
                self.add_lot(lot)
                continue
            if lot is not None:
                lot.remove(waiting)
            self.lot = lot
            self._present[rank] = turn
            self._turns[rank, namespace] = turn + 1
            self._push(rank, namespace)
            return waiting
        return None

    def leave_out_lot(self) -> None:
        """Try those no more that are left in the lot of the one that was taken last."""
        self.lot = None

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
            self._push(rank, namespace)

    def _push(self, rank: _Rank, namespace: str) -> None:
        """Have a namespace's first wait for its next turn, if it has any."""
        line = self._lines[rank, namespace]
        if line:
            heapq.heappush(self._next, (rank, self._turns[rank, namespace], line[0][0], namespace))

    def __len__(self) -> int:
        rest = len(self.lot) if self.lot is not None else 0
        entries = itertools.chain.from_iterable(self._lines.values())
        return rest + sum(len(lot) if lot is not None else 1 for _, _, _, lot in entries)
