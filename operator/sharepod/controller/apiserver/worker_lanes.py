"""Worker lanes: decide whose work may begin now, so that slow work delays only its own owner (a namespace). A piece of
work is the handling of one key. It waits for the API server, which may wait for the admission webhook of one namespace.
A waiting worker uses hardly any processor time, so further work may begin in its place.

Guarantees:
- At most `workers` pieces of work are in the quick lane, and no owner has more than three quarters of it.
- Work that has lasted `SLOW_S` moves from the quick lane to the slow lane, which holds `_SLOW_LANE` times `workers`
  pieces. So a quick owner waits for at most `SLOW_S`, however many other owners become slow at once.
- An owner with slow work counts as slow until `FORGIVEN_S` after its last slow work.
- New work of slow owners begins in the slow lane, while that lane has fewer than `workers` pieces. One slow owner has
  at most half of `workers` pieces under way.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import Generic, TypeVar

Key = TypeVar("Key")

SLOW_S = 1.0
"""Seconds after which work counts as slow: ten times the duration of a write on a busy API server."""
FORGIVEN_S = 30.0
"""Seconds for which an owner stays slow after its last slow work. So an owner with only some slow work does not regain
the quick lane between them."""

_SLOW_LANE = 6
"""Size of the slow lane as a multiple of `workers`: more work than can become slow within the timeout of a write."""


class WorkerLanes(Generic[Key]):
    """Quick and slow lane of a queue with `workers` workers. Times are monotonic seconds.

    Args:
        workers: Size of the quick lane.
        owned: True if work has owners. Without owners, all work may use every worker and is never slow.
    """

    def __init__(self, workers: int, *, owned: bool) -> None:
        self._workers = workers
        self._slow_s = SLOW_S if owned else math.inf
        self._most_of_an_owner = workers - workers // 4 if owned else workers
        self._most_of_a_slow_owner = max(1, workers // 2)
        self._quick: dict[Key, tuple[str, float]] = {}
        """For each key, in order of beginning: (owner, time of beginning) of the work in the quick lane."""
        self._slow: dict[Key, tuple[str, float]] = {}
        self._quick_of: Counter[str] = Counter()
        self._slow_of: Counter[str] = Counter()
        self._slow_until: dict[str, float] = {}
        """For each slow owner, in order of the last slow work: time at which the owner counts as quick again."""

    def __len__(self) -> int:
        return len(self._quick) + len(self._slow)

    def __contains__(self, key: Key) -> bool:
        return key in self._quick or key in self._slow

    def may_begin(self, owner: str) -> bool:
        """Return True if work of this owner may begin now."""
        if owner in self._slow_until:
            under_way = self._slow_of[owner] + self._quick_of[owner]
            return len(self._slow) < self._workers and under_way < self._most_of_a_slow_owner
        return len(self._quick) < self._workers and self._quick_of[owner] < self._most_of_an_owner

    def begin(self, key: Key, owner: str, now: float) -> None:
        """Record that work on a key begins."""
        if owner in self._slow_until:
            self._slow[key] = owner, now
            self._slow_of[owner] += 1
        else:
            self._quick[key] = owner, now
            self._quick_of[owner] += 1

    def end(self, key: Key, now: float) -> None:
        """Record that work on a key has ended."""
        for lane, of in ((self._quick, self._quick_of), (self._slow, self._slow_of)):
            if (found := lane.pop(key, None)) is not None:
                owner, began = found
                of[owner] -= 1
                if not of[owner]:
                    del of[owner]
                if now >= began + self._slow_s:
                    self._is_slow(owner, now)

    def settle(self, now: float) -> None:
        """Move slow work to the slow lane while that lane has a free place. Drop owners that count as quick again."""
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
        """Return the time at which the next work in the quick lane will move to the slow lane. None if the quick lane
        is empty or the slow lane is full.
        """
        first = next(iter(self._quick.values()), None)
        return None if first is None or not self._has_room() else first[1] + self._slow_s

    def _has_room(self) -> bool:
        return len(self._slow) < _SLOW_LANE * self._workers

    def _is_slow(self, owner: str, now: float) -> None:
        self._slow_until.pop(owner, None)
        self._slow_until[owner] = now + FORGIVEN_S
