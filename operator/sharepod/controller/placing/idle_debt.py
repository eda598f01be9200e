"""Idle debt: GPU time that was idle for the head of the queue, and has not been paid off. Pure.

Guarantees:
- In the long run the idle time is at most `ratio` of the GPU time, or one reservation per `LONGEST_PAUSE_S` if that is
  more. The debt is paid off at that rate, and a new reservation begins without debt.
- No pause is longer than `LONGEST_PAUSE_S`: in a small cluster GPUs are reserved once a day, at any cost.
"""

from __future__ import annotations

LONGEST_PAUSE_S = 86_400.0
"""Longest time that a debt delays a reservation, in seconds: one day, the longest fair waiting time."""


class IdleDebt:
    """Idle GPU seconds beyond the permitted ratio.

    Args:
        ratio: Most of the GPU time that may be idle, above 0; 1: all.
        now: Monotonic seconds.
    """

    def __init__(self, ratio: float, now: float) -> None:
        self._ratio = ratio
        self._at = now
        self._owed = 0.0
        self.gpus = 0
        """How many GPUs there are."""

    def count(self, now: float, idle: float) -> None:
        """Count the time since the last call. `idle`: number of unused GPUs in that time."""
        passed, self._at = max(0.0, now - self._at), now
        owed = self._owed + (idle - self._per_s) * passed
        self._owed = min(max(0.0, owed), self._per_s * LONGEST_PAUSE_S)

    @property
    def _per_s(self) -> float:
        return self._ratio * self.gpus

    def paid_in_s(self) -> float:
        """Return the seconds until the debt is paid if no more GPUs become idle; 0.0 without debt."""
        return self._owed / self._per_s if self._owed > 0 and self._per_s > 0 else 0.0
