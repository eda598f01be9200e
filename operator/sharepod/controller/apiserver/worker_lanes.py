"""Worker lanes: whose work may begin now, so that slow work delays only its owner.

Work waits for the API server, which may wait for the admission webhook of one namespace. A waiting worker uses little,
so its place is reassigned.

Guarantees:
- At most `workers` pieces of work are in the quick lane, and no owner has more than three quarters of it.
- Work that has lasted `SLOW_S` gives up its place in the quick lane, while at most `_SLOW_LANE` times `workers` pieces
  have done so. An owner that is not slow waits `SLOW_S` at most, however many others turn slow at once.
- From then on until `FORGIVEN_S` after its last slow work, an owner is slow: its work begins in the slow lane. Slow
  owners together begin at most `workers` pieces at a time, one owner at most half as many.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import Generic, TypeVar

Key = TypeVar("Key")

SLOW_S = 1.0
"""Seconds after which work is slow: ten times a write's time on a busy API server."""
FORGIVEN_S = 30.0
"""Seconds for which an owner stays slow after its last slow work: being slow only at times brings no advantage."""

_SLOW_LANE = 6
"""Size of the slow lane, in multiples of the quick lane: more than can turn slow within the timeout of a write."""


class WorkerLanes(Generic[Key]):
    """Lanes of `workers` workers. Times are monotonic seconds.

    Args:
        workers: See above.
        owned: Whether work has owners. Without owners, all work may use every worker and is never slow.
    """

    def __init__(self, workers: int, *, owned: bool) -> None:
        self._workers = workers
        self._slow_s = SLOW_S if owned else math.inf
        self._most_of_an_owner = workers - workers // 4 if owned else workers
        self._most_of_a_slow_owner = max(1, workers // 2)
        self._quick: dict[Key, tuple[str, float]] = {}
        """Owner and beginning of work in the quick lane, in order of its beginning."""
        self._slow: dict[Key, tuple[str, float]] = {}
        self._quick_of: Counter[str] = Counter()
        self._slow_of: Counter[str] = Counter()
        self._slow_until: dict[str, float] = {}
        """Slow owners in order of their last slow work: when they are forgiven."""

    def __len__(self) -> int:
        return len(self._quick) + len(self._slow)

    def __contains__(self, key: Key) -> bool:
        return key in self._quick or key in self._slow

    def may_begin(self, owner: str) -> bool:
        """Return whether work of this owner may begin."""
        if owner in self._slow_until:
            under_way = self._slow_of[owner] + self._quick_of[owner]
            return len(self._slow) < self._workers and under_way < self._most_of_a_slow_owner
        return len(self._quick) < self._workers and self._quick_of[owner] < self._most_of_an_owner

    def begin(self, key: Key, owner: str, now: float) -> None:
        """Note that work begins."""
        if owner in self._slow_until:
            self._slow[key] = owner, now
            self._slow_of[owner] += 1
        else:
            self._quick[key] = owner, now
            self._quick_of[owner] += 1

    def end(self, key: Key, now: float) -> None:
        """Note that work has ended, or is known to have ended."""
        for lane, of in ((self._quick, self._quick_of), (self._slow, self._slow_of)):
            if (found := lane.pop(key, None)) is not None:
                owner, began = found
                of[owner] -= 1
                if not of[owner]:
                    del of[owner]
                if now >= began + self._slow_s:
                    self._is_slow(owner, now)

    def settle(self, now: float) -> None:
        """Move slow work to the slow lane, as far as there is room, and forgive owners."""
        for owner, until in list(self._slow_until.items()):
            if now < until:
                break
            del self._slow_until[owner]
        for key, (owner, began) in list(self._quick.items()):
            if now < began + self._slow_s:
                break
            self._is_slow(owner, now)
            if self._has_room():
                del self._quick[key]
                self._quick_of[owner] -= 1
                self._slow[key] = owner, began
                self._slow_of[owner] += 1

    def settles_at(self) -> float | None:
        """Return when the next work in the quick lane will move; None if none will as things are."""
        first = next(iter(self._quick.values()), None)
        return None if first is None or not self._has_room() else first[1] + self._slow_s

    def _has_room(self) -> bool:
        return len(self._slow) < _SLOW_LANE * self._workers

    def _is_slow(self, owner: str, now: float) -> None:
        self._slow_until.pop(owner, None)
        self._slow_until[owner] = now + FORGIVEN_S
