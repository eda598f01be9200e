"""Event loop whose timers fire within microseconds, by timerfd.

asyncio's own selector waits for whole milliseconds, rounded up. So at each hand-off that a timer starts, a GPU would be
idle for another 0.5 ms on average. The loop's wait for descriptors and timers is written in C (native/timed_wait.c),
because every hand-off begins and ends with a wait. During the wait, the C code also
- checks the heartbeats of tenants' processes, some 200 times a second while tenants share a GPU (`SilenceWatch`);
- carries out prepared hand-offs: it sends the next grant when the holder has drained (`LoopHandOffs`,
  native/hand_offs.c).

Guarantees:
- A timer that is due within `_EXACT_NS` fires when it is due. A later timer fires at most 1 ms late.
- If the wait has carried out a hand-off, Python is notified before any other callback runs.
- If a timerfd cannot be created or set, the loop waits as asyncio's own loop does.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import select
import selectors
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from sharepod.agent._timed_wait import ffi as _ffi
from sharepod.agent._timed_wait import lib as _lib
from sharepod.protocol import Beat

_EXACT_NS: int = _lib.SHP_EXACT_NS
"""Longest wait, in nanoseconds, that ends exactly when it is due: 20 ms. A longer wait may end 1 ms late, which is
negligible for it and saves a system call."""
_MOST = 64
"""Most ready descriptors that one wait returns. The next wait returns the others first."""
_NEVER_NS = 2**63 - 1
"""Moment for "no alarm" and "no bound": the largest signed 64-bit number."""
_BEATS_MOST: int = _lib.SHP_BEATS_MOST
"""Most processes that the silence watch can watch at the same time."""
_READ, _WRITE = ~select.EPOLLOUT, ~select.EPOLLIN
"""Masks of epoll's events for a read and a write; errors allow both."""
_CLOCK_MONOTONIC, _CLOEXEC_NONBLOCK = 1, os.O_CLOEXEC | os.O_NONBLOCK

_libc = ctypes.CDLL(None, use_errno=True)
_wait = _lib.shp_timed_wait
_hand_on, _next_made = _lib.shp_hand_on, _lib.shp_next_made
_WANTS: int = _lib.SHP_WANTS
"""Index of the order that applies if the holder wants more time, among the two orders of a prepared hand-off."""
_Result = TypeVar("_Result")


class OnTimeSelector(selectors.EpollSelector):
    """Selector that waits on a timerfd instead of for whole milliseconds. The timerfd is edge-triggered, so it is never
    read."""

    def __init__(self) -> None:
        super().__init__()
        self._found = _ffi.new("shp_ready[]", _MOST)
        self.silence_watch = _ffi.new("shp_silence_watch *")
        """Memory that the wait reads: the alarm, and the processes to check for heartbeats."""
        self.hand_offs = LoopHandOffs()
        """Prepared hand-offs that the wait carries out."""
        self._poller = self.fileno()
        self._timer: int = _libc.timerfd_create(_CLOCK_MONOTONIC, _CLOEXEC_NONBLOCK)
        if self._timer >= 0:
            self._selector.register(self._timer, select.EPOLLIN | select.EPOLLET)  # type: ignore[attr-defined]
        self.silence_watch.timer, self.silence_watch.alarm = self._timer, _NEVER_NS

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """Wait until a descriptor is ready or `timeout` seconds are over. None: no timeout. Return the ready
        descriptors.
        """
        hand_offs = self.hand_offs
        if hand_offs.stale:
            hand_offs.prepare()
        # Rounded up: a timer that fired early would have to be set again for the rest.
        wait_ns = -1 if timeout is None else int(timeout * 1e9) + 1 if timeout > 0 else 0
        timer = self._timer if 0 < wait_ns < _EXACT_NS else -1
        count = _wait(self._poller, timer, wait_ns, self._found, _MOST, self.silence_watch, hand_offs.kept)
        if hand_offs.kept.made:
            hand_offs.report()
        if count < 0:
            raise OSError(-count, os.strerror(-count))
        keys: dict[int, selectors.SelectorKey] = self._fd_to_key  # type: ignore[attr-defined]
        ready: list[tuple[selectors.SelectorKey, int]] = []
        for place in range(count):
            found = self._found[place]
            key = keys.get(found.descriptor)  # only the timerfd has no key
            if key is not None:
                events = found.events
                wanted = (selectors.EVENT_READ if events & _READ else 0) | (
                    selectors.EVENT_WRITE if events & _WRITE else 0
                )
                ready.append((key, wanted & key.events))
        return ready

    def close(self) -> None:
        """Close the timer and the selector's descriptor."""
        super().close()
        if self._timer >= 0:
            os.close(self._timer)
            self._timer = -1


class Order(NamedTuple):
    """Order to the loop's wait: send a grant to the next tenant's process once the holder has drained. It applies only
    if the holder drains between `since` and `until` (CLOCK_MONOTONIC, nanoseconds)."""

    socket: int
    """Descriptor of the socket of the next tenant's process."""
    packet: bytes
    since: int
    until: int


class Made(NamedTuple):
    """Hand-off that the loop's wait has carried out. Moments are CLOCK_MONOTONIC in nanoseconds. `place`: number of the
    GPU."""

    place: int
    wanting: bool
    """True if the holder wants more time."""
    seen_at: int
    """Moment at which the holder's DRAINED frame was read."""
    sent_at: int
    """Moment at which the grant had been sent."""


class LoopHandOffs:
    """Prepared hand-offs, at most one for each of `PLACES` GPUs, which the loop's wait carries out without Python.

    Guarantees:
    - A prepared hand-off is carried out at most once, and never after `drop`.
    - Python is notified of each hand-off before any other callback runs, in the order in which the holders drained.
    """

    PLACES: int = _lib.SHP_HAND_OFFS_MOST

    def __init__(self) -> None:
        self.kept = _ffi.new("shp_hand_offs *")
        self.stale = False
        """True if hand-offs must be prepared again before the next wait."""
        self._prepare: Callable[[], object] | None = None
        self._made: Callable[[Made], object] | None = None
        self._reported: Callable[[], object] | None = None
        self.kept.until = _NEVER_NS
        for place in self.kept.places:
            place.socket = -1

    def claim(
        self, prepare: Callable[[], object], made: Callable[[Made], object], reported: Callable[[], object]
    ) -> bool:
        """Register the callbacks. Return False if callbacks are already registered.

        Args:
            prepare: Called before a wait if `stale` is set.
            made: Called after the wait, for each hand-off that it has carried out.
            reported: Called once after the calls of `made`.
        """
        if self._prepare is not None:
            return False
        self._prepare, self._made, self._reported = prepare, made, reported
        return True

    def release(self) -> None:
        """Remove the callbacks and all prepared hand-offs."""
        for place in range(self.PLACES):
            self.drop(place)
        self._prepare = self._made = self._reported = None
        self.stale, self.kept.made, self.kept.count = False, 0, 0
        for place in self.kept.places:
            place.made = 0

    def end_by(self, moment: int | None) -> None:
        """Carry out no hand-off after `moment`. None: no bound."""
        self.kept.until = _NEVER_NS if moment is None else min(moment, _NEVER_NS)

    def put(self, place: int, holder: int, grant_id: int, orders: tuple[Order | None, Order | None]) -> None:
        """Prepare a hand-off of a GPU, to be carried out once its holder has drained.

        Args:
            place: Number of the GPU, from 0.
            holder: Descriptor of the socket of the holder's process.
            grant_id: Id of the grant that the holder drains.
            orders: (order if the holder wants more time, order if it does not). None: no hand-off in that case.
        """
        kept = self.kept.places[place]
        for order, into in zip(orders, kept.orders, strict=True):
            into.size = 0 if order is None else len(order.packet)
            if order is not None:
                into.since, into.until, into.socket = order.since, order.until, order.socket
                _ffi.memmove(into.grant, order.packet, into.size)
        kept.grant_id, kept.socket = grant_id, holder
        self.kept.count = max(self.kept.count, place + 1)

    def drop(self, place: int) -> None:
        """Cancel the prepared hand-off of a GPU."""
        self.kept.places[place].socket = -1

    def look(self) -> bool:
        """Check all holders now, and carry out the hand-offs whose holders have drained. Return True if there were
        any."""
        return bool(_hand_on(self.kept))

    def prepare(self) -> None:
        """Call the registered `prepare`, and clear `stale`."""
        self.stale = False
        if self._prepare is not None:
            self._guarded(self._prepare)

    def report(self) -> None:
        """Call `made` for each hand-off that was carried out, then `reported`."""
        kept = self.kept
        while kept.made and self._made is not None:
            number = _next_made(kept)
            place = kept.places[number]
            self._guarded(self._made, Made(number, place.order == _WANTS, place.seen_at, place.sent_at))
            _hand_on(kept)
        if self._reported is not None:
            self._guarded(self._reported)

    def _guarded(self, call: Callable[..., object], *arguments: object) -> None:
        """Call a callback. If it raises, drop all prepared hand-offs and report the error; the loop continues."""
        try:
            call(*arguments)
        except Exception as error:
            for place in range(self.PLACES):
                self.drop(place)
            message = "a hand-off that was prepared has failed"
            asyncio.get_running_loop().call_exception_handler({"message": message, "exception": error})


class LoopAlarm:
    """Alarm: the loop calls one function at a set moment. Setting the moment needs no system call and no new object.

    Args:
        silence_watch: Memory that the loop's wait reads, with the moment of the alarm.
    """

    def __init__(self, silence_watch: Any) -> None:
        self._silence_watch = silence_watch
        self._ring: Callable[[], object] | None = None

    def claim(self, ring: Callable[[], object]) -> bool:
        """Register the function to call when the alarm is due. Return False if one is already registered."""
        if self._ring is not None:
            return False
        self._ring = ring
        return True

    def release(self) -> None:
        """Unregister the function and clear the alarm."""
        self._ring = None
        self.set(None)

    def set(self, at_ns: int | None) -> None:
        """Set the moment (CLOCK_MONOTONIC, nanoseconds) of one call, which replaces the former moment. None: no
        call.
        """
        self._silence_watch.alarm = _NEVER_NS if at_ns is None or at_ns > _NEVER_NS else at_ns

    def rung(self) -> None:
        """Call the registered function."""
        if self._ring is not None:
            self._ring()


class SilenceWatch:
    """Silence watch: finds holders whose processes write no heartbeats. The loop's wait checks them in C.

    Args:
        silence_watch: Memory that the loop's wait reads, with a table of the watched processes.
    """

    def __init__(self, silence_watch: Any) -> None:
        self._silence_watch = silence_watch
        self._watched: dict[str, tuple[int, Sequence[Beat]]] = {}
        """For each tenant: (its first place in the table, its processes). The references keep mapped the shared memory
        to which the processes write."""
        self._free: dict[int, list[int]] = {}
        """Gaps between used places of the table: for each length, the first places of such gaps."""
        self._over: Callable[[int], None] | None = None

    @property
    def keeps(self) -> bool:
        """True if at least one tenant is watched."""
        return bool(self._watched)

    def keep(self, tenants: Mapping[str, Sequence[Beat]], due_ns: int, over: Callable[[int], None]) -> bool:
        """Watch exactly these tenants. Return True if any is watched. Return False if they have too many processes for
        the table; no tenant is watched then.

        Args:
            tenants: Processes of each tenant, by tenant id. A tenant is silent if none of them writes a heartbeat for
            its patience (silence.py).
            due_ns: Moment of the first check (CLOCK_MONOTONIC, ns).
            over: Called when a tenant is silent, with the moment at which the check was due. The watch of all tenants
            has then ended.
        """
        self.end()
        self._over = over
        for tenant, beats in tenants.items():
            if not self.put(tenant, beats, over):
                self.end()
                return False
        self._silence_watch.due = due_ns
        return bool(tenants)

    def put(self, tenant: str, beats: Sequence[Beat], over: Callable[[int], None]) -> bool:
        """Watch one more tenant, or replace the processes of a watched tenant. Return False if the table has no room;
        the tenant is then not watched. Arguments as for `keep`. The next check is made no later than the end of the
        patience with this tenant."""
        if tenant in self._watched:
            self.drop(tenant)
        silence_watch, size, due = self._silence_watch, len(beats), 0
        first = self._place_for(size)
        if first is None:
            return False
        for place, beat in enumerate(beats, first):
            silence_watch.beats[place] = (
                beat.address,
                beat.offset_ns,
                beat.since_ns,
                beat.patience_ns,
                beat.ahead_ns,
                first,
            )
            due = max(due, beat.since_ns + beat.patience_ns)
        if not self._watched or due < silence_watch.due:
            silence_watch.due = due
        if first == silence_watch.count:
            silence_watch.count = first + size
        self._watched[tenant] = first, beats
        self._over = over
        return True

    def drop(self, tenant: str) -> None:
        """Stop watching a tenant."""
        watched = self._watched.pop(tenant, None)
        if watched is None:
            return
        if not self._watched:
            self.end()
            return
        first, beats = watched
        for place in range(first, first + len(beats)):
            self._silence_watch.beats[place].pulse = 0
        self._free.setdefault(len(beats), []).append(first)

    def _place_for(self, size: int) -> int | None:
        """Return the first of `size` adjacent free places of the table. None if there are not as many."""
        gaps = self._free.get(size)
        if gaps:
            return gaps.pop()
        # No gap has this size: move all tenants together.
        if self._free and self._silence_watch.count + size > _BEATS_MOST:
            due, watched = self._silence_watch.due, self._watched.copy()
            self.end()
            for tenant, (_first, beats) in watched.items():
                self.put(tenant, beats, self._over or _ignored)
            self._silence_watch.due = due
        return int(self._silence_watch.count) if 0 < size <= _BEATS_MOST - self._silence_watch.count else None

    def watches(self, tenant: str) -> bool:
        """Return whether a tenant is watched."""
        return tenant in self._watched

    def end(self) -> None:
        """Stop watching all tenants."""
        self._silence_watch.count = self._silence_watch.silent = 0
        self._watched.clear()
        self._free.clear()

    def silent(self) -> None:
        """End the watch, and call `over`, because the wait has found a silent tenant."""
        over, due = self._over, int(self._silence_watch.due)
        self.end()
        if over is not None:
            over(due)


def _ignored(_due: int) -> None:
    pass


class OnTimeLoop(asyncio.SelectorEventLoop):
    """Event loop with exact timers, an alarm, a silence watch and prepared hand-offs."""

    def __init__(self) -> None:
        selector = OnTimeSelector()
        super().__init__(selector)
        self._looked_after = selector.silence_watch
        self.alarm = LoopAlarm(selector.silence_watch)
        self.silence_watch = SilenceWatch(selector.silence_watch)
        self.hand_offs = selector.hand_offs
        # Descriptor that is never written. The wait reports it as ready when the alarm is due or a tenant is silent.
        self._bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._looked_after.descriptor = self._bell
        self.add_reader(self._bell, self._tell)

    def close(self) -> None:
        """Close the loop and its descriptors."""
        if not self.is_closed():
            self.alarm.release()
            self.silence_watch.end()
            self.hand_offs.release()
            self.remove_reader(self._bell)
            os.close(self._bell)
        super().close()

    def _tell(self) -> None:
        found = self._looked_after
        if found.rang:
            found.rang = 0
            self.alarm.rung()
        if found.silent:
            self.silence_watch.silent()


def run(main: Coroutine[Any, Any, _Result]) -> _Result:
    """Run a coroutine to its end in an `OnTimeLoop`. Return its result."""
    with asyncio.Runner(loop_factory=OnTimeLoop) as runner:
        return runner.run(main)
