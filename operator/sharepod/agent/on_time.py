"""Event loop whose timers are on time to microseconds, where the kernel has timers with a descriptor.

asyncio's own waits for whole milliseconds, rounded up: a GPU would idle for half a millisecond, on average, wherever a
hand-off goes by a timer.

Guarantees:
- A timer that is due within `_EXACT_S` fires when it is due; one that is due later, up to a millisecond after it.
- Where such a timer cannot be made or set, the loop is asyncio's own.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import select
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

_EXACT_S = 0.02
"""Seconds: a millisecond more is nothing to what waits for longer than 20 ms, and costs no system call."""
_CLOCK_MONOTONIC, _CLOEXEC_NONBLOCK = 1, os.O_CLOEXEC | os.O_NONBLOCK

_libc = ctypes.CDLL(None, use_errno=True)
_Result = TypeVar("_Result")


class _Times(ctypes.Structure):
    """struct itimerspec: interval and value, each in seconds and nanoseconds."""

    _fields_ = (
        ("interval_s", ctypes.c_long),
        ("interval_ns", ctypes.c_long),
        ("value_s", ctypes.c_long),
        ("value_ns", ctypes.c_long),
    )


class OnTimeSelector(selectors.EpollSelector):
    """Selector that waits for a timer's descriptor instead of for whole milliseconds. The descriptor reports each end
    of the timer once, so that it is never read."""

    def __init__(self) -> None:
        super().__init__()
        self._timer: int = _libc.timerfd_create(_CLOCK_MONOTONIC, _CLOEXEC_NONBLOCK)
        if self._timer >= 0:
            self._selector.register(self._timer, select.EPOLLIN | select.EPOLLET)  # type: ignore[attr-defined]

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """Wait until a descriptor is ready or `timeout` is over, in seconds; None: without end."""
        if timeout is None or not 0 < timeout < _EXACT_S or self._timer < 0:
            return super().select(timeout)
        times = _Times(value_ns=int(timeout * 1e9) + 1)
        if _libc.timerfd_settime(self._timer, 0, ctypes.byref(times), None) != 0:
            return super().select(timeout)
        return super().select(2 * _EXACT_S)

    def close(self) -> None:
        """Close the timer and the descriptor of the selector."""
        super().close()
        if self._timer >= 0:
            os.close(self._timer)
            self._timer = -1


def run(main: Coroutine[Any, Any, _Result]) -> _Result:
    """Run a coroutine to its end in such a loop; return its result."""
    with asyncio.Runner(loop_factory=lambda: asyncio.SelectorEventLoop(OnTimeSelector())) as runner:
        return runner.run(main)
