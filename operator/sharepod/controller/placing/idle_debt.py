"""Idle debt: GPU time that was idle on reserved GPUs beyond a permitted ratio. It falls as time passes. Pure.

Guarantees:
- In the long run the idle time is at most `ratio` of the GPU time. The debt falls at that rate, and a new reservation
  begins only without debt.
- Exception: no pause between two reservations is longer than `LONGEST_PAUSE_S`. So even in a small cluster, GPUs are
  reserved once a day, although that may exceed the ratio.
"""

from __future__ import annotations

LONGEST_PAUSE_S = 86_400.0
"""Longest delay of a reservation by debt, in seconds: one day, the default of `fair_wait`."""


class IdleDebt:
    """Account of idle GPU-seconds beyond the permitted ratio.

    Args:
        ratio: Largest part of all GPU time that may be idle, above 0. 1 means no bound.
        now: Monotonic seconds.
    """

    def __init__(self, ratio: float, now: float) -> None:
        self._ratio = ratio
        self._at = now
        self._owed = 0.0
        self.gpus = 0
        """Number of GPUs in the cluster."""

    def count(self, now: float, idle: float) -> None:
        """Add the time since the last call to the debt. `idle`: number of idle reserved GPUs in that time."""
        passed, self._at = max(0.0, now - self._at), now
        owed = self._owed + (idle - self._per_s) * passed
        self._owed = min(max(0.0, owed), self._per_s * LONGEST_PAUSE_S)

    @property
    def _per_s(self) -> float:
        return self._ratio * self.gpus

    def paid_in_s(self) -> float:
        """Return the seconds until the debt is 0, if no reserved GPU is idle until then. 0.0 without debt."""
        return self._owed / self._per_s if self._owed > 0 and self._per_s > 0 else 0.0
