"""How fast something may go: so many a second, and at most `burst` at once. Pure: the time is passed in."""

from __future__ import annotations


class Pace:
    """A bucket that begins full."""

    def __init__(self, now: float, *, per_s: float, burst: float) -> None:
        self._per_s = per_s
        self._burst = burst
        self._level = burst
        self._at = now

    def set_rate(self, now: float, per_s: float) -> None:
        """From now on."""
        self._fill(now)
        self._per_s = per_s

    def charge(self, more: float) -> None:
        """What went was as much as so many more."""
        self._level -= more

    def take(self, now: float) -> bool:
        """Whether one more may go now."""
        self._fill(now)
        if self._level < 1:
            return False
        self._level -= 1
        return True

    def _fill(self, now: float) -> None:
        self._level = min(self._burst, self._level + max(0.0, now - self._at) * self._per_s)
        self._at = now
