"""Time of day, for charging budgets and for comparison with the times in objects.

Guarantee: a leader whose clock is wrong by more than a minute uses the API server's clock instead, and logs this.

With a clock years ahead, each budget would enter a far period with full credit, and stay there after the correction.
With a clock hours ahead, each ending Pod would seem overdue, so other Pods would be evicted instead.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import structlog

_TOLERATED_S = 60.0
"""Seconds by which the two clocks may differ. Without any real difference, a late answer causes some."""
_LOG_S = 600.0
"""Shortest time in seconds between two log lines about a wrong clock."""

log = structlog.get_logger(__name__)


class TimeOfDay:
    """Time of day in milliseconds since 1970.

    Args:
        behind_s: Returns the seconds by which this machine's clock is behind the API server's.
        clock: Monotonic seconds.
        wall_ns: This machine's time of day, in nanoseconds since 1970.
    """

    def __init__(
        self,
        behind_s: Callable[[], float],
        clock: Callable[[], float],
        wall_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        self._behind_s = behind_s
        self._clock = clock
        self._wall_ns = wall_ns
        self._told_at = float("-inf")

    def __call__(self) -> int:
        """Return the time of day now."""
        own, behind = self._wall_ns() // 1_000_000, self._behind_s()
        if abs(behind) <= _TOLERATED_S:
            return own
        now = self._clock()
        if now >= self._told_at + _LOG_S:
            self._told_at = now
            log.error(
                "the clock of this machine differs from the API server's; budgets and ages go by the API server's. "
                "Set the clock (NTP) of the operator's node",
                behind_s=round(behind),
            )
        return own + round(behind * 1000)

    def seconds(self) -> float:
        """Return the time of day now in seconds since 1970."""
        return self() / 1000
