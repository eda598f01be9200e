"""Moment at which a function is called; each hand-off sets it again.

Guarantees:
- The function is called at the last moment set, or at an earlier moment set before. It must check what is due.
- On the agent's loop (`on_time.LoopAlarm`) the call is never early by the kernel's clock. Setting the moment costs no
  system call, no object and no heap operation.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Protocol


class OneAlarm(Protocol):
    """The event loop's alarm, see `on_time.LoopAlarm`."""

    def claim(self, ring: Callable[[], object]) -> bool:
        """Have `ring` called when the alarm is due; return False if another component has claimed the alarm."""

    def release(self) -> None:
        """Remove the callback."""

    def set(self, at_ns: int | None) -> None:
        """Ring once at that moment; None: not at all."""


class Deadline:
    """The moment, on the running loop.

    Args:
        clock: Monotonic clock in nanoseconds.
        due: Called when the moment has come.
    """

    def __init__(self, clock: Callable[[], int], due: Callable[[], object]) -> None:
        self._clock = clock
        self._call = due
        self._alarm: OneAlarm | None = None
        self._timer: asyncio.TimerHandle | None = None
        """Timer used where there is no alarm. An early timer is kept: most moments are postponed before they come."""
        self._timer_at = 0
        """Moment of the timer."""

    def set(self, at: int | None) -> None:
        """Call at that moment, in nanoseconds of the clock; None: not at all."""
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
        self._timer = None  # an early timer is set again, for the same moment
        self._call()
