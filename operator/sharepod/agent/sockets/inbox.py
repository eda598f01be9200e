"""Reading end of all connections of one tenant: one epoll instance, read in the tenant's own turns of the event loop.

One call of C (native/frame_reader.c) finds the readable connections, reads them, and recognises the frames about time.

Frames about time are handled as they are read. Frames about memory are deferred (`put_off`) until the readable sockets
of all tenants have been read. So the return of a token never waits for the program's allocations.

Guarantees:
- However many clients a tenant has, the event loop watches one descriptor for them.
- A tenant's frames take no more of one turn of the loop than the tenant's part of `FrameBudget`.
- At most `per_s` frames a second are handled, and fewer if they take longer than 25 us each. Further frames wait. The
  frames of one reading, and up to `_PUT_OFF_MAX` deferred frames, wait in the inbox; all others wait in the senders'
  sockets.
- While the tenant is over its rate, deferred frames wait, and frames about time are still read at `_URGENT` of the
  rate.
- Deferred frames are answered in the order in which they came.
- If clients send too many frames for `_FLOOD_S` without waiting for answers, the client with most frames is passed to
  `on_flood`.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import select
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

from sharepod.agent.sockets._frame_reader import ffi as _ffi
from sharepod.agent.sockets._frame_reader import lib as _lib
from sharepod.protocol import ClientFrame
from sharepod.rate_limit import RateLimiter

from .frame_budget import FrameBudget

_new, _receive = _ffi.new, _lib.shp_receive
_NO_SOCKET = -1
"""Marks a packet in the buffer whose connection was closed after it was read."""

FRAMES_A_TURN = 32
"""Frames of one tenant that are read, and deferred frames that are answered, before other tenants get their turn. If as
many clients have several frames each, up to twice as many are read."""
_BURST_S = 0.25
"""Seconds of `frames_per_s` that may come at once, because all processes of a tenant may start or reconnect
together."""
_FRAME_S = 25e-6
"""Seconds of the agent's time that one frame pays for; a frame that takes longer is charged as several. Documented with
the setting `frames_per_s`; at the default of 10,000 a second, one tenant takes a quarter of a core at most."""
_CHARGED_S = 0.005
"""Longest time, in seconds, that is charged for one turn. In a longer turn, another program on the node has
interrupted the agent."""
_THROTTLE_PAUSE_S = 0.1
"""Seconds for which nothing is read from a tenant over its rate. This bounds useless wake-ups to ten a second."""
_FLOOD_S = 1.0
"""Seconds over the rate after which the client with most frames is passed to `on_flood`."""
_PUT_OFF_MAX = 128
"""Most deferred frames of one tenant: twice the frames that the threads of one process may have in flight."""
_URGENT = 0.1
"""Part of `frames_per_s` that is read while the tenant is over its rate. A process sends three frames for each grant:
at the default rate this suffices for 30 processes at ten grants a second."""
_STREAK_MAX = 128
"""Longest streak of frames that does not count as a flood: more than any hook has in flight, and no more than fit into
a socket."""


class Received(Protocol):
    """Packet from a client, or the end of its connection: struct shp_received of frame_reader.h."""

    socket: int
    size: int
    type: int
    emptied: int
    flags: int
    grant_id: int
    value: int
    packet: object


class Sender(Protocol):
    """Connection of one client, as the inbox reads it."""

    streak: int
    """Frames that were handled since the client's socket was last found empty."""
    longest_streak: int
    """Longest streak since the inbox last reset this."""

    def fileno(self) -> int: ...

    def take(self, received: Received) -> None:
        """Handle or defer a packet, or the end of the connection."""

    def answer(self, frame: ClientFrame) -> None:
        """Handle a deferred frame."""


class Inbox:
    """Reading end of one tenant's connections.

    Args:
        tenant_id: The tenant, for its part of `budget`.
        budget: Budget of the node, shared by all inboxes.
        per_s: Frames of this tenant handled a second.
        on_flood: Called with the flooding client, which it must close.
    """

    def __init__(
        self, tenant_id: str, budget: FrameBudget, *, per_s: float, on_flood: Callable[[Sender], None]
    ) -> None:
        self.throttled = 0
        """Number of pauses in reading because the tenant exceeded its rate."""
        self._tenant_id = tenant_id
        self._budget = budget
        self._on_flood = on_flood
        self._loop = asyncio.get_running_loop()
        self._limiter = RateLimiter(self._loop.time(), per_s=per_s, burst=_BURST_S * per_s)
        self._urgent = RateLimiter(self._loop.time(), per_s=_URGENT * per_s, burst=_URGENT * _BURST_S * per_s)
        """Limiter of the frames that are read while the tenant exceeds the rate of `_limiter`."""
        self._senders: dict[int, Sender] = {}
        """Connections by descriptor."""
        self._put_off: deque[tuple[Sender, ClientFrame]] = deque()
        """Deferred frames, the oldest first."""
        self._answering: asyncio.Handle | None = None
        """Scheduled call of `_answer`; set while frames are deferred."""
        self._deaf = False
        """True while no socket is read, until the pause ends."""
        self._paused: asyncio.TimerHandle | None = None
        self._over_since = self._resumed_at = -math.inf
        """Loop time since when the tenant has been over its rate, and loop time at which reading last resumed after a
        pause."""
        self._received: Sequence[Received] = _new("shp_received[]", 2 * FRAMES_A_TURN)
        """Buffer of one reading. It has `_count` entries (packets and ends of connections), of which `_handled` were
        handled."""
        self._handled = self._count = 0
        self._more: asyncio.Handle | None = None
        """Scheduled call of `_handle_more`; set while some entries that were read are not handled."""
        self._epoll = select.epoll()
        self._poller = self._epoll.fileno()
        self._loop.add_reader(self._epoll.fileno(), self._turn)

    def add(self, sender: Sender) -> None:
        """Start reading a connection. Raises `OSError` if epoll has no room for it."""
        self._epoll.register(sender.fileno(), select.EPOLLIN)
        self._senders[sender.fileno()] = sender

    def remove(self, sender: Sender) -> None:
        """Stop reading a connection, and drop its frames. Call this before the socket is closed."""
        descriptor = sender.fileno()
        if self._senders.pop(descriptor, None) is not None:
            self._epoll.unregister(descriptor)
        for one in itertools.islice(self._received, self._handled, self._count):
            if one.socket == descriptor:  # the next connection may get the same descriptor
                one.socket = _NO_SOCKET
        if self._put_off:
            self._put_off = deque(each for each in self._put_off if each[0] is not sender)

    def put_off(self, sender: Sender, frame: ClientFrame) -> None:
        """Defer a frame: `sender.answer(frame)` is called at the tenant's rate, once all sockets that are readable now
        have been read."""
        self._put_off.append((sender, frame))
        if self._answering is None and self._paused is None:
            self._answering = self._loop.call_soon(self._answer)

    def close(self) -> None:
        """Stop reading all connections."""
        if self._epoll.closed:
            return
        for handle in (self._paused, self._answering, self._more):
            if handle is not None:
                handle.cancel()
        if not self._deaf:
            self._loop.remove_reader(self._epoll.fileno())
        self._paused = self._answering = self._more = None
        self._handled = self._count = 0
        self._epoll.close()
        self._senders.clear()
        self._put_off.clear()

    def charge(self, seconds: float) -> None:
        """Charge the tenant for other time that its clients took from the agent, in seconds."""
        self._limiter.charge(min(seconds, _CHARGED_S) / _FRAME_S)

    def charge_frame(self) -> None:
        """Charge the tenant for a frame that the loop's wait has read and handled."""
        self._limiter.charge(1)

    def _turn(self) -> None:
        # 1. Start this tenant's part of the loop's turn.
        begun = now = self._loop.time()
        until, frames = self._budget.begin_turn(), 0
        if self._handled == self._count and not self._receive(now):
            return
        # 2. Handle received packets, at least one.
        received, before = self._received, len(self._put_off)
        while self._handled < self._count:
            one = received[self._handled]
            self._handled += 1
            sender = self._senders.get(one.socket)
            if sender is None:  # an earlier frame of this turn has closed the connection
                continue
            sender.take(one)
            frames += 1
            now = self._loop.time()
            if now >= until:
                break
        if self._handled < self._count and self._more is None:
            self._more = self._loop.call_soon(self._handle_more)
        # 3. Charge the handled frames, and the time that they took beyond `_FRAME_S` each.
        answered = frames - max(0, len(self._put_off) - before)
        self._limiter.charge(answered)
        if self._paused is not None:
            self._urgent.charge(answered)
        self._charge_time(now - begun, answered)

    def _receive(self, now: float) -> bool:
        """Read from the clients into the buffer. Return True if any packet or end of a connection was read."""
        # If the tenant exceeds its rate, read only few frames, so that frames about time are still handled, or none for
        # a moment.
        if self._limiter.wait_s(now) > 0:
            self._throttle(now)
        over_rate = self._paused is not None and self._urgent.wait_s(now) > 0
        if over_rate or len(self._put_off) >= _PUT_OFF_MAX or self._epoll.closed:
            self._stop_reading()
            return False
        self._handled, self._count = 0, _receive(self._poller, self._received, FRAMES_A_TURN)
        return self._count > 0

    def _handle_more(self) -> None:
        self._more = None
        if self._handled < self._count:
            self._turn()

    def _answer(self) -> None:
        """Answer deferred frames until the tenant's part of this turn of the loop is over."""
        self._answering = None
        begun = now = self._loop.time()
        until, frames = self._budget.begin_turn(), 0
        while self._put_off and now < until and frames < FRAMES_A_TURN:
            if not self._limiter.take(now):
                self._throttle(now)
                break
            sender, frame = self._put_off.popleft()
            sender.answer(frame)
            frames += 1
            now = self._loop.time()
        self._charge_time(now - begun, frames)
        if self._put_off and self._paused is None and not self._epoll.closed:
            self._answering = self._loop.call_soon(self._answer)
        if self._deaf and self._paused is None and len(self._put_off) < _PUT_OFF_MAX:
            self._read_on()

    def _charge_time(self, seconds: float, frames: int) -> None:
        self._limiter.charge(max(0.0, min(seconds, _CHARGED_S) / _FRAME_S - frames))

    def _throttle(self, now: float) -> None:
        """Pause answers about memory, and read few frames. Pass the flooding client to `on_flood` once the tenant has
        been over its rate for `_FLOOD_S`."""
        if self._paused is not None or self._epoll.closed:
            return
        self.throttled += 1
        self._limiter.set_rate(now, self._budget.throttled_rate(now, self._tenant_id))
        if now - self._resumed_at > _FLOOD_S:
            self._reset_streaks(now)
        elif now - self._over_since > _FLOOD_S:
            loudest = max(self._senders.values(), key=lambda sender: sender.longest_streak)
            if loudest.longest_streak > _STREAK_MAX:
                self._on_flood(loudest)
            self._reset_streaks(now)
        if self._answering is not None:
            self._answering.cancel()
            self._answering = None
        self._paused = self._loop.call_later(_THROTTLE_PAUSE_S, self._resume)

    def _stop_reading(self) -> None:
        if not self._deaf and not self._epoll.closed:
            self._deaf = True
            self._loop.remove_reader(self._epoll.fileno())

    def _read_on(self) -> None:
        if self._deaf and not self._epoll.closed:
            self._deaf = False
            self._loop.add_reader(self._epoll.fileno(), self._turn)

    def _reset_streaks(self, now: float) -> None:
        self._over_since = now
        for sender in self._senders.values():
            sender.longest_streak = 0

    def _resume(self) -> None:
        self._paused = None
        self._resumed_at = self._loop.time()
        if self._put_off:
            self._answering = self._loop.call_soon(self._answer)
        if len(self._put_off) < _PUT_OFF_MAX:
            self._read_on()
