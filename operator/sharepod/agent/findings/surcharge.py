"""Surcharge: charges a tenant afterwards for time in which its kernels ran although it was not charged. Pure: callers
pass readings.

Guarantees:
- A tenant whose kernels run only in its charged time, within NVML's error, never gets a surcharge (B1 of
  `beyond_turns.py`).
- If a tenant's busy time beyond its charged time exceeds `SLACK_S` and `TOLERANCE`, the tenant is surcharged for all of
  this time, from its beginning. Each further second is surcharged at once. So over time the tenant gains at most
  `TOLERANCE` plus NVML's rounding.

A sample of NVML covers 1/6 s to 1 s before it is read. Each tenant has some five turns a second. Readings at exact
seconds would always see the same part of this cycle and miss the other parts. The times between readings are therefore
`irregular`.
"""

from __future__ import annotations

from .beyond_turns import NOTHING, Beyond

TOLERANCE = 0.01
"""Part of the time for which a tenant may be busy beyond its charged time. No hook can gate the driver's own work for a
process, such as clearing memory."""
SLACK_S = 0.5
"""Seconds of busy time beyond the charged time that are tolerated before a surcharge. They cover the creation of
contexts, and turns that the agent ended early because a process seemed to have no processor time."""
CAUGHT_S = 60.0
"""Seconds without tolerance after a surcharge of more than twice `TOLERANCE`: 60 s, as long as the tenant then takes
exclusive turns."""
_EMPTY = 1e-6
"""Level, in seconds, up to which a bucket counts as empty. It covers rounding errors."""
IRREGULAR = 0.2
"""Part by which the time between two readings varies at random, up and down."""


def irregular(interval_s: float, drawn: float) -> float:
    """Return the seconds until the next reading: `interval_s`, varied by `IRREGULAR`. `drawn`: a random number from 0
    to 1."""
    return interval_s * (1 + IRREGULAR * (2 * drawn - 1))


class SurchargeMeter:
    """Meter of one tenant's surcharges on one GPU. NVML does not report the length of its samples, so a value is kept
    for each possible length, and the least value counts."""

    def __init__(self) -> None:
        self._last: tuple[float, Beyond] | None = None
        self._levels: Beyond = NOTHING
        """For each length: level of a leaky bucket, in seconds. Busy time beyond the charged time flows in, and it
        drains at the rate `TOLERANCE`."""
        self._whole: Beyond = NOTHING
        """For each length: inflow into the bucket since it was last empty, less surcharges. A surcharge charges it."""
        self._caught_until = 0.0

    def observe(self, now: float, beyond_s: Beyond) -> float:
        """Add a reading. Return the seconds to surcharge now.

        Args:
            now: Time of the reading, in seconds.
            beyond_s: Seconds in which the tenant's kernels ran beyond its charged time, since a fixed moment.
        """
        last, self._last = self._last, (now, beyond_s)
        if last is None:
            return 0.0
        grown = [new - old for new, old in zip(beyond_s, last[1], strict=True)]
        caught = now < self._caught_until
        tolerated = 0.0 if caught else TOLERANCE * (now - last[0])
        self._levels = tuple(
            max(0.0, level + each - tolerated) for level, each in zip(self._levels, grown, strict=True)
        )
        self._whole = tuple(
            whole + each if level > _EMPTY else 0.0
            for whole, each, level in zip(self._whole, grown, self._levels, strict=True)
        )
        spilled = min(self._whole)
        if spilled <= 0 or (not caught and min(self._levels) <= SLACK_S):
            return 0.0
        if not caught or spilled > 2 * TOLERANCE * (now - last[0]):
            self._caught_until = now + CAUGHT_S
        self._levels = tuple(max(0.0, level - spilled) for level in self._levels)
        self._whole = tuple(whole - spilled for whole in self._whole)
        return spilled
