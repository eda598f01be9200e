"""Alarm of the placement loop: wakes the loop now, or at a set time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

_SOONEST_S = 0.05
"""Shortest time in seconds until a wake-up, so that a time in the past does not make the loop run without a pause."""


class Alarm:
    """Alarm of one loop. `clock`: seconds; wake-up times are times of this clock."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._timer: asyncio.TimerHandle | None = None
        self.rung = asyncio.Event()
        """Set when the loop must run. The loop clears it at the beginning of a pass."""

    def ring(self) -> None:
        """Wake the loop now."""
        self.rung.set()

    def ring_at(self, at: float) -> None:
        """Wake the loop at `at`, or at the time that was set before, whichever is earlier."""
        loop = asyncio.get_running_loop()
        delay = max(_SOONEST_S, at - self._clock())
        if self._timer is None or self._timer.cancelled() or self._timer.when() > loop.time() + delay:
            if self._timer is not None:
                self._timer.cancel()
            self._timer = loop.call_later(delay, self._ring_in_time)

    def _ring_in_time(self) -> None:
        self._timer = None
        self.rung.set()
