"""Surcharge: time for which a tenant's kernels ran beyond what it was charged. Pure: callers pass readings.

Guarantees:
- A tenant that is busy for no more than it was charged, within NVML's error, never has a surcharge.
- What is busy beyond that is surcharged once, and at once after the first second.
- An account that begins anew, since its row was released and made again between two readings, has no surcharge for what
  the earlier one was charged.

A sample of NVML covers the last sixth of a second to a second before it is read, so a turn of 100 ms that falls into
most samples, or out of them, looks half as long again, or half as long. Readings once a second, of turns that come
around five times a second, would see the same part of each round for a long time. So readings are `irregular`.
"""

from __future__ import annotations

TOLERANCE = 0.1
"""Part of the time by which NVML's samples may say more than was held: what a sample of a sixth of a second can show
of two tenants that take turns of 100 ms, beyond the half that each had."""
SLACK_S = 1.0
"""Seconds of busy time beyond what was charged before any is surcharged: work that ends just after a reading, and
samples that happen to show more than there was."""
IRREGULAR = 0.2
"""Part by which the time between two readings varies, up and down."""


def irregular(interval_s: float, drawn: float) -> float:
    """Return the seconds until the next reading. `drawn`: a random number from 0 to 1."""
    return interval_s * (1 + IRREGULAR * (2 * drawn - 1))


class SurchargeMeter:
    """Busy time of one tenant on one GPU beyond what it was charged: a leaky bucket that spills as the surcharge."""

    def __init__(self) -> None:
        self._last: tuple[float, float, float] | None = None
        self._level = 0.0

    def observe(self, now: float, busy_s: float, charged_s: float) -> float:
        """Take a reading; return the seconds to surcharge.

        Args:
            now: Time of the reading, in seconds.
            busy_s: Seconds in which the tenant's kernels ran, since a fixed moment.
            charged_s: Seconds that the tenant was charged, since a fixed moment.
        """
        last, self._last = self._last, (now, busy_s, charged_s)
        if last is None or charged_s < last[2]:
            return 0.0  # the first reading, or that of a new account
        elapsed, busy, charged = (new - old for new, old in zip(self._last, last, strict=True))
        self._level = max(0.0, self._level + busy - charged - TOLERANCE * elapsed)
        spilled = max(0.0, self._level - SLACK_S)
        self._level -= spilled
        return spilled
