"""Utilization of GPUs, in total and by tenant: the driver's readings, summed over time. Pure: callers pass times.

Each reading contains the part of the time since the last reading in which kernels ran. If the driver did not answer for
long, only `READING_MAX_S` of the gap counts.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from .sliding import SlidingRate

WINDOW_S = 10.0
"""Seconds over which `ratio` is computed. It equals the window of token time with which it is compared."""
READING_MAX_S = 15.0
"""Longest time in seconds that one reading stands for. It exceeds NVML's default timeout (10 s), so that no time is
lost with a slow driver. It is short, so that a driver that hung adds little."""

Key = tuple[str, str]
"""(tenant id, GPU UUID). An empty tenant id stands for the whole GPU."""


class UtilizationMeter:
    """Busy seconds, and utilization over the last `WINDOW_S`, for each `Key`."""

    def __init__(self) -> None:
        self._at: float | None = None
        self._sums: dict[Key, float] = {}
        self._windows: dict[Key, SlidingRate] = {}
        self._reported: frozenset[Key] = frozenset()

    def observe(self, now: float, utilization: Mapping[Key, float], kept: Collection[Key] = ()) -> None:
        """Add one reading.

        Args:
            now: time of the reading, in seconds.
            utilization: part of the time since the last reading (0 to 1) in which kernels ran.
            kept: keys to keep although this reading lacks their utilization. All others are dropped.
        """
        elapsed = min(READING_MAX_S, now - self._at) if self._at is not None else 0.0
        self._at = now
        self._reported = frozenset(utilization)
        for key, part in utilization.items():
            self._sums[key] = self._sums.get(key, 0.0) + part * elapsed
            self._windows.setdefault(key, SlidingRate(WINDOW_S)).add(now, self._sums[key])
        for key in self._sums.keys() - utilization.keys() - frozenset(kept):
            del self._sums[key]
            self._windows.pop(key, None)

    def seconds(self, key: Key) -> float | None:
        """Return the busy seconds since the key was first observed; None for an unknown key."""
        return self._sums.get(key)

    def ratio(self, key: Key) -> float | None:
        """Return the utilization (0 to 1) over the last `WINDOW_S`; None if the last reading lacked it."""
        return self._windows[key].rate if key in self._reported else None
