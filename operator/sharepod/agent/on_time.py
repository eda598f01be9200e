"""Event loop whose timers are on time to microseconds, where the kernel has timers with a descriptor.

asyncio's own waits for whole milliseconds, rounded up: a GPU would idle for half a millisecond, on average, wherever a
hand-off goes by a timer. The wait itself is C (native/timed_wait.c): every hand-off begins and ends with one. So are
the looks at who gives signs of life, which are due some 200 times a second while tenants share a GPU (`Vigil`).

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
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

from sharepod.agent._timed_wait import ffi as _ffi
from sharepod.agent._timed_wait import lib as _lib
from sharepod.protocol import Beat

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
        self.vigil = _ffi.new("shp_vigil *")
        """Processes that are expected to give signs of life while this waits."""
        self._poller = self.fileno()
        self._timer: int = _libc.timerfd_create(_CLOCK_MONOTONIC, _CLOEXEC_NONBLOCK)
        if self._timer >= 0:
            self._selector.register(self._timer, select.EPOLLIN | select.EPOLLET)  # type: ignore[attr-defined]
        self.vigil.timer = self._timer

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """Wait until a descriptor is ready or `timeout` is over, in seconds; None: without end."""
        # A timeout is rounded up: a timer that fired early would be set again for the rest.
        wait_ns = -1 if timeout is None else int(timeout * 1e9) + 1 if timeout > 0 else 0
        timer = self._timer if 0 < wait_ns < _EXACT_NS else -1
        count = _wait(self._poller, timer, wait_ns, self._found, _MOST, self.vigil)
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


class Vigil:
    """Watch over tenants that are expected to give signs of life, while the loop waits and without waking Python.

    Args:
        loop: The event loop.
        selector: Its selector.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, selector: OnTimeSelector) -> None:
        self._loop = loop
        self._vigil = selector.vigil
        self._beats: Sequence[Beat] = ()
        """They keep the memory in which the processes write."""
        self._over: Callable[[int], None] | None = None
        # Never written: the wait tells of it when a tenant is silent.
        self._descriptor = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._vigil.descriptor = self._descriptor
        loop.add_reader(self._descriptor, self._tell)

    @property
    def due_ns(self) -> int | None:
        """Moment of the next look, in nanoseconds of CLOCK_MONOTONIC; None: nobody is watched any more."""
        return int(self._vigil.due) if self._vigil.count else None

    def keep(self, tenants: Sequence[Sequence[Beat]], due_ns: int, over: Callable[[int], None]) -> bool:
        """Watch these from now on, in place of others. Return False if they are too many, and nobody is watched.

        Args:
            tenants: Of each tenant the processes of which one has to give signs of life.
            due_ns: Moment of the first look, in nanoseconds of CLOCK_MONOTONIC.
            over: Called when a tenant is silent, with the moment at which that look was due. Nobody is watched then.
        """
        beats = [beat for tenant in tenants for beat in tenant]
        if len(beats) > _lib.SHP_BEATS_MOST:
            self.end()
            return False
        numbers = [number for number, tenant in enumerate(tenants) for _beat in tenant]
        for place, beat in enumerate(beats):
            self._vigil.beats[place] = (
                _ffi.cast("const uint64_t *", beat.address),
                beat.offset_ns,
                beat.since_ns,
                beat.patience_ns,
                numbers[place],
            )
        self._beats, self._over = beats, over
        self._vigil.due, self._vigil.count = due_ns, len(beats)
        return bool(beats)

    def end(self) -> None:
        """Watch nobody any more."""
        self._vigil.count = 0
        self._beats = ()

    def close(self) -> None:
        """Give the descriptor back."""
        self.end()
        if self._descriptor >= 0:
            self._loop.remove_reader(self._descriptor)
            os.close(self._descriptor)
            self._descriptor = -1

    def _tell(self) -> None:
        if self._vigil.count == 0 and self._over is not None:  # else others are watched since the wait has ended
            self._beats = ()
            self._over(int(self._vigil.due))


class OnTimeLoop(asyncio.SelectorEventLoop):
    """Event loop whose timers are on time, with a vigil."""

    def __init__(self) -> None:
        selector = OnTimeSelector()
        super().__init__(selector)
        self.vigil = Vigil(self, selector)

    def close(self) -> None:
        """Close the loop and what it has open."""
        if not self.is_closed():
            self.vigil.close()
        super().close()


def run(main: Coroutine[Any, Any, _Result]) -> _Result:
    """Run a coroutine to its end in such a loop; return its result."""
    with asyncio.Runner(loop_factory=OnTimeLoop) as runner:
        return runner.run(main)
