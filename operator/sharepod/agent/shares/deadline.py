"""Timer for one function, whose moment is set again at each hand-off.

Guarantees:
- The function is called at the moment that was set last, or at an earlier moment that was set before. So the function
  must check whether anything is due.
- On the agent's loop (`on_time.LoopAlarm`), the call is never early by CLOCK_MONOTONIC. Setting the moment needs no
  system call, no new object and no heap operation, because each hand-off does it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Protocol


class OneAlarm(Protocol):
    """Alarm of the agent's event loop (`on_time.LoopAlarm`)."""

    def claim(self, ring: Callable[[], object]) -> bool:
        """Register the function to call when the alarm is due. Return False if another function is
        registered."""

    def release(self) -> None:
        """Unregister the function."""

    def set(self, at_ns: int | None) -> None:
        """Set the moment of the next call (CLOCK_MONOTONIC, ns). None: no call."""


class Deadline:
    """Timer on the running loop: the loop's alarm if it is free, else an asyncio timer.

    Args:
        clock: Monotonic clock in nanoseconds.
        due: Called when the moment has come.
    """

    def __init__(self, clock: Callable[[], int], due: Callable[[], object]) -> None:
        self._clock = clock
        self._call = due
        self._alarm: OneAlarm | None = None
        self._timer: asyncio.TimerHandle | None = None
        """asyncio timer for a loop without alarm. A timer that fires too early is left as it is: most moments are
        postponed before they come, and setting a timer costs more than a vain call."""
        self._timer_at = 0
        """Moment at which `_timer` fires."""

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
        self._timer = None  # a timer that fired early is set again by the function
        self._call()
