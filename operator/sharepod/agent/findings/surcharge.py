"""Surcharge: time for which a tenant's kernels ran beyond its charged time. Pure: callers pass readings.

Guarantees:
- A tenant whose kernels run within its charged time, within NVML's error, never has a surcharge: see B1 of
  `beyond_turns.py`.
- Busy time beyond that is surcharged once, without delay after the first second.

A sample of NVML covers 1/6 s to 1 s before it is read. Turns come around some five times a second. Readings at exact
seconds would always see the same part of each round, and miss the others. The times between readings are therefore
`irregular`.
"""

from __future__ import annotations

from .beyond_turns import NOTHING, Beyond

TOLERANCE = 0.1
"""Part of the time for which a tenant may be busy beyond its charged time: the driver's own work for a process, such as
clearing memory, which no hook can gate."""
SLACK_S = 1.0
"""Seconds of busy time beyond the charged time before any is surcharged. A turn is ended early for a process that seems
to have no processor time, and its work may end just after."""
IRREGULAR = 0.2
"""Part by which the time between two readings varies, up and down."""


def irregular(interval_s: float, drawn: float) -> float:
    """Return the seconds until the next reading. `drawn`: a random number from 0 to 1."""
    return interval_s * (1 + IRREGULAR * (2 * drawn - 1))


class SurchargeMeter:
    """Busy time of one tenant on one GPU beyond its charged time. One leaky bucket for each possible length of samples;
    the surcharge is the overflow of all."""

    def __init__(self) -> None:
        self._last: tuple[float, Beyond] | None = None
        self._levels: Beyond = NOTHING

    def observe(self, now: float, beyond_s: Beyond) -> float:
        """Add a reading; return the seconds to surcharge.

        Args:
            now: Time of the reading, in seconds.
            beyond_s: Seconds in which the tenant's kernels ran beyond its charged time, since a fixed moment.
        """
        last, self._last = self._last, (now, beyond_s)
        if last is None:
            return 0.0
        tolerated = TOLERANCE * (now - last[0])
        levels = [
            max(0.0, level + new - old - tolerated)
            for level, new, old in zip(self._levels, beyond_s, last[1], strict=True)
        ]
        spilled = max(0.0, min(levels) - SLACK_S)
        self._levels = tuple(level - spilled for level in levels)
        return spilled
