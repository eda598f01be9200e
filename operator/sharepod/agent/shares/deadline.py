"""Timer for one function, with a moment that each hand-off sets again.

Guarantees:
- The function is called at the moment that was set last, or at a moment that was set before and is earlier. So the
  function must check whether anything is due.
- On the agent's loop (`on_time.LoopAlarm`) the call is never early by the kernel's clock. To set the moment needs no
  system call, no new object and no heap operation.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Protocol


class OneAlarm(Protocol):
    """The event loop's alarm, see `on_time.LoopAlarm`."""

    def claim(self, ring: Callable[[], object]) -> bool:
        """Register the function to call when the alarm is due. Return False if another component has already registered
        one.
        """

    def release(self) -> None:
        """Remove the callback."""

    def set(self, at_ns: int | None) -> None:
        """Set the moment of one call. None: no call."""


class Deadline:
    """Timer on the running loop.

    Args:
        clock: Monotonic clock in nanoseconds.
        due: Called when the moment has come.
    """

    def __init__(self, clock: Callable[[], int], due: Callable[[], object]) -> None:
        self._clock = clock
        self._call = due
        self._alarm: OneAlarm | None = None
        self._timer: asyncio.TimerHandle | None = None
        """Timer that is used if the loop has no alarm. A timer that is too early is kept, because most moments are
        postponed before they come."""
        self._timer_at = 0
        """Moment of the timer."""

    def set(self, at: int | None) -> None:
        """Set the moment of the call, in nanoseconds of the clock. None: no call."""
        if self._alarm is not None or (self._timer is None and self._claimed()):
            assert self._alarm is not None, "it was claimed"
            self._alarm.set(at)
            return
        if self._timer is not None and (at is None or at < self._timer_at):
            self._timer.cancel()
            self._timer = None
        if at is not None and self._timer is None:
            loop, self._timer_at = asyncio.get_running_loop(), at
            self._timer = loop.call_at(loop.time() + max(0, at - self._clock()) / 1e9, self._on_timer)

    def close(self) -> None:
        """Cancel the call."""
        if self._alarm is not None:
            self._alarm.release()
            self._alarm = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _claimed(self) -> bool:
        alarm: OneAlarm | None = getattr(asyncio.get_running_loop(), "alarm", None)
        if alarm is None or self._clock is not time.monotonic_ns or not alarm.claim(self._call):
            return False
        self._alarm = alarm
        return True

    def _on_timer(self) -> None:
        self._timer = None  # a timer that fired early is set again for the same moment
        self._call()
