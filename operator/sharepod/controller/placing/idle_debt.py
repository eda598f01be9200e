"""Idle debt: GPU time that stood idle for the head of the line, and has not been paid off. Pure.

Guarantees:
- In the long run no more stands idle than `ratio` of the GPU time, or than one reservation a `LONGEST_PAUSE_S` costs
  where that is more: the debt is paid off at that rate, and a new reservation begins without debt.
- No pause is longer than `LONGEST_PAUSE_S`: in a small cluster GPUs are kept once a day, whatever that costs.
"""

from __future__ import annotations

LONGEST_PAUSE_S = 86_400.0
"""Longest time that a debt keeps a reservation from beginning: a day, the longest that a turn may take."""


class IdleDebt:
    """GPU seconds that stood idle beyond what may.

    Args:
        ratio: Most of the GPU time that may stand idle, above 0; 1: all.
        now: Monotonic seconds.
    """

    def __init__(self, ratio: float, now: float) -> None:
        self._ratio = ratio
        self._at = now
        self._owed = 0.0
        self.gpus = 0
        """How many GPUs there are."""

    def count(self, now: float, idle: float) -> None:
        """Count the time since the last call. `idle`: how many of the GPUs nobody had in it."""
        passed, self._at = max(0.0, now - self._at), now
        owed = self._owed + (idle - self._per_s) * passed
        self._owed = min(max(0.0, owed), self._per_s * LONGEST_PAUSE_S)

    @property
    def _per_s(self) -> float:
        return self._ratio * self.gpus

    def paid_in_s(self) -> float:
        """Return the seconds until nothing is owed, if nothing more stands idle; 0.0 if nothing is owed now."""
        return self._owed / self._per_s if self._owed > 0 and self._per_s > 0 else 0.0
