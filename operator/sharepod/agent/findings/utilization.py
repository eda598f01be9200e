"""How long each tenant's processes, and each GPU, were busy: what readings say, summed up. Pure: the time is passed in.

A reading tells a part of the time since the one before; between two readings that are far apart (the driver did not
answer) nothing is assumed.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from .rules import SlidingRate

WINDOW_S = 10.0
_MOST_S = 15.0
"""A reading speaks for at most so much time before it."""

Key = tuple[str, str]
"""Whose (a tenant's id; empty: the GPU's own), and the UUID of the GPU."""


class UtilizationMeter:
    """`observe` after each reading, with all that are to be known."""

    def __init__(self) -> None:
        self._at: float | None = None
        self._sums: dict[Key, float] = {}
        self._windows: dict[Key, SlidingRate] = {}
        self._told: frozenset[Key] = frozenset()

    def observe(self, now: float, busy: Mapping[Key, float], kept: Collection[Key] = ()) -> None:
        """`busy`: parts of the time since the last reading; `kept`: of whom nothing is told this time, but is to be
        again. All others are forgotten."""
        elapsed = min(_MOST_S, now - self._at) if self._at is not None else 0.0
        self._at = now
        self._told = frozenset(busy)
        for key, part in busy.items():
            self._sums[key] = self._sums.get(key, 0.0) + part * elapsed
            self._windows.setdefault(key, SlidingRate(WINDOW_S)).add(now, self._sums[key])
        for key in self._sums.keys() - busy.keys() - frozenset(kept):
            del self._sums[key]
            self._windows.pop(key, None)

    def seconds(self, key: Key) -> float | None:
        """For how long it was busy since it became known; None if it is not."""
        return self._sums.get(key)

    def ratio(self, key: Key) -> float | None:
        """The part of the last seconds that it was busy; None where the last reading did not tell."""
        return self._windows[key].rate if key in self._told else None
