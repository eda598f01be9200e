"""Event loop whose timers are on time to microseconds, where the kernel has timers with a descriptor.

asyncio's own waits for whole milliseconds, rounded up: a GPU would idle for half a millisecond, on average, wherever a
hand-off goes by a timer. The wait itself is C (native/timed_wait.c): every hand-off begins and ends with one.

Guarantees:
- A timer that is due within `_EXACT_NS` fires when it is due; one that is due later, up to a millisecond after it.
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

from sharepod.agent._timed_wait import ffi as _ffi
from sharepod.agent._timed_wait import lib as _lib

_EXACT_NS = 20_000_000
"""Nanoseconds: a millisecond more is nothing to what waits for longer than 20 ms, and costs no system call."""
_MOST = 64
"""Descriptors that one wait tells of at most; the others come first in the next."""
_READ, _WRITE = ~select.EPOLLOUT, ~select.EPOLLIN
"""Events that let one read, or write: errors both."""
_CLOCK_MONOTONIC, _CLOEXEC_NONBLOCK = 1, os.O_CLOEXEC | os.O_NONBLOCK

_libc = ctypes.CDLL(None, use_errno=True)
_wait = _lib.shp_timed_wait
_Result = TypeVar("_Result")


class OnTimeSelector(selectors.EpollSelector):
    """Selector that waits for a timer's descriptor instead of for whole milliseconds. The descriptor reports each end
    of the timer once, so that it is never read."""

    def __init__(self) -> None:
        super().__init__()
        self._found = _ffi.new("shp_ready[]", _MOST)
        self._poller = self.fileno()
        self._timer: int = _libc.timerfd_create(_CLOCK_MONOTONIC, _CLOEXEC_NONBLOCK)
        if self._timer >= 0:
            self._selector.register(self._timer, select.EPOLLIN | select.EPOLLET)  # type: ignore[attr-defined]

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """Wait until a descriptor is ready or `timeout` is over, in seconds; None: without end."""
        # A timeout is rounded up: a timer that fired early would be set again for the rest.
        wait_ns = -1 if timeout is None else int(timeout * 1e9) + 1 if timeout > 0 else 0
        timer = self._timer if 0 < wait_ns < _EXACT_NS else -1
        count = _wait(self._poller, timer, wait_ns, self._found, _MOST)
        if count < 0:
            raise OSError(-count, os.strerror(-count))
        keys: dict[int, selectors.SelectorKey] = self._fd_to_key  # type: ignore[attr-defined]
        ready: list[tuple[selectors.SelectorKey, int]] = []
        for place in range(count):
            found = self._found[place]
            key = keys.get(found.descriptor)  # the timer has none
            if key is not None:
                events = found.events
                wanted = (selectors.EVENT_READ if events & _READ else 0) | (
                    selectors.EVENT_WRITE if events & _WRITE else 0
                )
                ready.append((key, wanted & key.events))
        return ready

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
