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
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, TypeVar

from sharepod.agent._timed_wait import ffi as _ffi
from sharepod.agent._timed_wait import lib as _lib
from sharepod.protocol import Beat

_EXACT_NS: int = _lib.SHP_EXACT_NS
"""Nanoseconds: a millisecond more is nothing to what waits for longer than 20 ms, and costs no system call."""
_MOST = 64
"""Descriptors that one wait tells of at most; the others come first in the next."""
_NEVER_NS = 2**63 - 1
"""Moment at which an alarm that is not set rings."""
_BEATS_MOST: int = _lib.SHP_BEATS_MOST
"""Processes that are watched at most."""
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
        """Alarm and tenants that are looked after while this waits."""
        self._poller = self.fileno()
        self._timer: int = _libc.timerfd_create(_CLOCK_MONOTONIC, _CLOEXEC_NONBLOCK)
        if self._timer >= 0:
            self._selector.register(self._timer, select.EPOLLIN | select.EPOLLET)  # type: ignore[attr-defined]
        self.vigil.timer, self.vigil.alarm = self._timer, _NEVER_NS

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


class LoopAlarm:
    """Moment at which the loop calls a function, and which is moved without a system call or a new object.

    Args:
        vigil: What the loop's wait looks after.
    """

    def __init__(self, vigil: Any) -> None:
        self._vigil = vigil
        self._ring: Callable[[], object] | None = None

    def claim(self, ring: Callable[[], object]) -> bool:
        """Have `ring` called when the alarm rings. Return False if it is another's."""
        if self._ring is not None:
            return False
        self._ring = ring
        return True

    def release(self) -> None:
        """Give the alarm back; it rings no more."""
        self._ring = None
        self.set(None)

    def set(self, at_ns: int | None) -> None:
        """Let it ring once, at that moment in nanoseconds of CLOCK_MONOTONIC, and at no other; None: not at all."""
        self._vigil.alarm = _NEVER_NS if at_ns is None or at_ns > _NEVER_NS else at_ns

    def rung(self) -> None:
        """Call the function."""
        if self._ring is not None:
            self._ring()


class Vigil:
    """Watch over tenants that are expected to give signs of life, while the loop waits and without waking Python.

    Args:
        vigil: What the loop's wait looks after.
    """

    def __init__(self, vigil: Any) -> None:
        self._vigil = vigil
        self._watched: dict[str, tuple[int, Sequence[Beat]]] = {}
        """First place and processes of each tenant. They keep the memory in which the processes write."""
        self._free: dict[int, list[int]] = {}
        """First places of gaps below `count`, by their length."""
        self._over: Callable[[int], None] | None = None

    @property
    def keeps(self) -> bool:
        """True if a look is due at some moment."""
        return bool(self._watched)

    def keep(self, tenants: Mapping[str, Sequence[Beat]], due_ns: int, over: Callable[[int], None]) -> bool:
        """Watch these from now on, in place of others. Return False if they are too many, and nobody is watched.

        Args:
            tenants: By tenant the processes of which one has to give signs of life.
            due_ns: Moment of the first look, in nanoseconds of CLOCK_MONOTONIC.
            over: Called when a tenant is silent, with the moment at which that look was due. Nobody is watched then.
        """
        self.end()
        self._over = over
        for tenant, beats in tenants.items():
            if not self.put(tenant, beats, over):
                self.end()
                return False
        self._vigil.due = due_ns
        return bool(tenants)

    def put(self, tenant: str, beats: Sequence[Beat], over: Callable[[int], None]) -> bool:
        """Watch a tenant from now on, beside others, or by other processes than before. Return False if there is no
        place for it, and it is not watched. A look is due once its patience may end. Arguments as for `keep`."""
        if tenant in self._watched:
            self.drop(tenant)
        vigil, size, due = self._vigil, len(beats), 0
        first = self._place_for(size)
        if first is None:
            return False
        for place, beat in enumerate(beats, first):
            vigil.beats[place] = (
                beat.address,
                beat.offset_ns,
                beat.since_ns,
                beat.patience_ns,
                beat.ahead_ns,
                first,
            )
            due = max(due, beat.since_ns + beat.patience_ns)
        if not self._watched or due < vigil.due:
            vigil.due = due
        if first == vigil.count:
            vigil.count = first + size
        self._watched[tenant] = first, beats
        self._over = over
        return True

    def drop(self, tenant: str) -> None:
        """Watch a tenant no more."""
        watched = self._watched.pop(tenant, None)
        if watched is None:
            return
        if not self._watched:
            self.end()
            return
        first, beats = watched
        for place in range(first, first + len(beats)):
            self._vigil.beats[place].pulse = 0
        self._free.setdefault(len(beats), []).append(first)

    def _place_for(self, size: int) -> int | None:
        """Return the first of so many places in a row that are free; None if there are none."""
        gaps = self._free.get(size)
        if gaps:
            return gaps.pop()
        if self._free and self._vigil.count + size > _BEATS_MOST:  # the gaps are of other sizes: close them
            due, watched = self._vigil.due, self._watched.copy()
            self.end()
            for tenant, (_first, beats) in watched.items():
                self.put(tenant, beats, self._over or _ignored)
            self._vigil.due = due
        return int(self._vigil.count) if 0 < size <= _BEATS_MOST - self._vigil.count else None

    def watches(self, tenant: str) -> bool:
        """Return whether a tenant is watched."""
        return tenant in self._watched

    def end(self) -> None:
        """Watch nobody any more."""
        self._vigil.count = self._vigil.silent = 0
        self._watched.clear()
        self._free.clear()

    def silent(self) -> None:
        """Say that a tenant is silent."""
        over, due = self._over, int(self._vigil.due)
        self.end()
        if over is not None:
            over(due)


def _ignored(_due: int) -> None:
    pass


class OnTimeLoop(asyncio.SelectorEventLoop):
    """Event loop whose timers are on time, with an alarm and a vigil."""

    def __init__(self) -> None:
        selector = OnTimeSelector()
        super().__init__(selector)
        self._looked_after = selector.vigil
        self.alarm = LoopAlarm(selector.vigil)
        self.vigil = Vigil(selector.vigil)
        # Never written: the wait tells of it when the alarm rings and when a tenant is silent.
        self._bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._looked_after.descriptor = self._bell
        self.add_reader(self._bell, self._tell)

    def close(self) -> None:
        """Close the loop and what it has open."""
        if not self.is_closed():
            self.alarm.release()
            self.vigil.end()
            self.remove_reader(self._bell)
            os.close(self._bell)
        super().close()

    def _tell(self) -> None:
        found = self._looked_after
        if found.rang:
            found.rang = 0
            self.alarm.rung()
        if found.silent:
            self.vigil.silent()


def run(main: Coroutine[Any, Any, _Result]) -> _Result:
    """Run a coroutine to its end in such a loop; return its result."""
    with asyncio.Runner(loop_factory=OnTimeLoop) as runner:
        return runner.run(main)
