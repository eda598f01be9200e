"""Surcharge: time for which a tenant's kernels ran beyond what it was charged. Pure: callers pass readings.

Guarantees:
- A tenant whose kernels run within the time that it was charged, within NVML's error, never has a surcharge: see B1 of
  `beyond_turns.py`.
- What is busy beyond that is surcharged once, and at once after the first second.

A sample of NVML covers the last sixth of a second to a second before it is read. Readings once a second, of turns that
come around five times a second, would see the same part of each round for a long time, and so nothing of what is busy
in the other parts. So readings are `irregular`.
"""

from __future__ import annotations

from .beyond_turns import NOTHING, Beyond

TOLERANCE = 0.1
"""Part of the time for which a tenant may be busy beyond what it was charged: work of the driver itself for a process,
such as clearing memory, that no hook can gate."""
SLACK_S = 1.0
"""Seconds of busy time beyond what was charged before any is surcharged: work that ends just after a turn was given up
for a process that seemed to have no processor time."""
IRREGULAR = 0.2
"""Part by which the time between two readings varies, up and down."""


def irregular(interval_s: float, drawn: float) -> float:
    """Return the seconds until the next reading. `drawn`: a random number from 0 to 1."""
    return interval_s * (1 + IRREGULAR * (2 * drawn - 1))


class SurchargeMeter:
    """Busy time of one tenant on one GPU beyond what it was charged: leaky buckets, one for each length that samples
    may have, that spill together as the surcharge."""

    def __init__(self) -> None:
        self._last: tuple[float, Beyond] | None = None
        self._levels: Beyond = NOTHING

    def observe(self, now: float, beyond_s: Beyond) -> float:
        """Take a reading; return the seconds to surcharge.

        Args:
            now: Time of the reading, in seconds.
            beyond_s: Seconds in which the tenant's kernels ran beyond what it was charged, since a fixed moment.
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
