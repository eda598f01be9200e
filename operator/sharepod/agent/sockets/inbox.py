"""Reading end of all connections of one tenant: one epoll instance, read in the tenant's own turns of the event loop.

Frames about time are handled as they are read. Frames about memory are put off (`put_off`), to be answered after
everything that all tenants had to read; so a token that a program gives back never waits for its allocations.

Guarantees:
- However many clients a tenant has, the event loop watches one descriptor for them.
- A tenant's frames take no more of one turn of the loop than the tenant's part of `FrameBudget`.
- No more than `per_s` frames a second are handled, fewer if they take longer than 25 us each; the rest waits, up to
  `_PUT_OFF_MAX` frames here and then in the senders' own sockets.
- Frames about time are read while the tenant is over its rate for frames about memory, at `_URGENT` of that rate.
- The frames that are put off are answered in the order in which they came.
- Of clients that keep on sending too much without waiting for an answer, the one that sent most is named to `on_flood`.
"""

from __future__ import annotations

import asyncio
import math
import select
from collections import deque
from collections.abc import Callable
from typing import Protocol

from sharepod.protocol import ClientFrame
from sharepod.rate_limit import RateLimiter

from .frame_budget import FrameBudget

FRAMES_A_TURN = 32
"""Frames of one tenant handled in one turn of the loop, before other tenants get their turn."""
_BURST_S = 0.25
"""Seconds of `frames_per_s` that may come at once: all processes of a tenant may start or reconnect together."""
_FRAME_S = 25e-6
"""Seconds of the agent's time that one frame pays for; a frame that takes longer is charged as several. Documented with
the setting `frames_per_s`; at the default of 10,000 a second, one tenant takes a quarter of a core at most."""
_CHARGED_S = 0.005
"""Seconds charged for one turn at most: a longer turn was interrupted by some other program on the node."""
_THROTTLE_PAUSE_S = 0.1
"""Seconds for which nothing is read from a tenant over its frame rate: at most ten useless wake-ups a second."""
_FLOOD_S = 1.0
"""Seconds over the rate after which the client that sent most is named to `on_flood`."""
_PUT_OFF_MAX = 128
"""Frames of one tenant that are put off at most: twice what the threads of one process may have on the way."""
_URGENT = 0.1
"""Part of `frames_per_s` that is read while the tenant is over its rate. A process sends three frames for each grant:
at the default rate there is room for 30 processes at ten grants a second."""
_STREAK_MAX = 128
"""Frames without a pause that are no flood: more than any hook has on the way at once, no more than fit into a
socket."""


class Sender(Protocol):
    """One client's connection, as the inbox reads it."""

    streak: int
    """Frames handled since its socket was last found empty."""
    longest_streak: int
    """The longest streak since the inbox last reset it."""

    def fileno(self) -> int: ...

    def read(self, most: int, until: float) -> int:
        """Handle the frames that have come: at most `most`, and after the first none that begins later than `until`
        (loop time). Return how many were handled or put off."""

    def answer(self, frame: ClientFrame) -> None:
        """Handle a frame that was put off."""


class Inbox:
    """Reading end of one tenant's connections.

    Args:
        tenant_id: The tenant, for its part of `budget`.
        budget: Budget of the node, shared by all inboxes.
        per_s: Frames of this tenant handled a second.
        on_flood: Called with the client that floods; closes it.
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
        """Rate at which sockets are read while the tenant is over `_limiter`'s."""
        self._senders: dict[int, Sender] = {}
        """By file descriptor."""
        self._put_off: deque[tuple[Sender, ClientFrame]] = deque()
        """Frames that were read and not answered, the oldest first."""
        self._answering: asyncio.Handle | None = None
        """Call of `_answer` in the next turn of the loop, while any frame is put off."""
        self._deaf = False
        """True while no socket is read, until the pause ends."""
        self._paused: asyncio.TimerHandle | None = None
        self._over_since = self._resumed_at = -math.inf
        """Loop time since when the tenant has been over its rate, and when reading last resumed after a pause."""
        self._epoll = select.epoll()
        self._loop.add_reader(self._epoll.fileno(), self._turn)

    def add(self, sender: Sender) -> None:
        """Start reading a connection. Raises `OSError` if the kernel has no room for it."""
        self._epoll.register(sender.fileno(), select.EPOLLIN)
        self._senders[sender.fileno()] = sender

    def remove(self, sender: Sender) -> None:
        """Stop reading a connection, and forget what it has sent; call it before the socket is closed."""
        if self._senders.pop(sender.fileno(), None) is not None:
            self._epoll.unregister(sender.fileno())
        if self._put_off:
            self._put_off = deque(each for each in self._put_off if each[0] is not sender)

    def put_off(self, sender: Sender, frame: ClientFrame) -> None:
        """Have `sender.answer(frame)` called once all sockets that are ready now have been read, at the tenant's
        rate."""
        self._put_off.append((sender, frame))
        if self._answering is None and self._paused is None:
            self._answering = self._loop.call_soon(self._answer)

    def close(self) -> None:
        """Stop reading all connections."""
        if self._epoll.closed:
            return
        for handle in (self._paused, self._answering):
            if handle is not None:
                handle.cancel()
        if not self._deaf:
            self._loop.remove_reader(self._epoll.fileno())
        self._paused = self._answering = None
        self._epoll.close()
        self._senders.clear()
        self._put_off.clear()

    def charge(self, seconds: float) -> None:
        """Charge the tenant for time that its clients took from the agent other than by frames."""
        self._limiter.charge(min(seconds, _CHARGED_S) / _FRAME_S)

    def _turn(self) -> None:
        # 1. Take this tenant's part of the loop's turn, and the connections that have something to read.
        begun = now = self._loop.time()
        until, frames = self._budget.begin_turn(), 0
        ready = self._epoll.poll(0, FRAMES_A_TURN)
        for fd, _events in ready:
            sender = self._senders.get(fd)
            if sender is None:  # closed by a frame of this turn
                continue
            # 2. Of a tenant over its rate few frames are read, for those about time; or none for a moment.
            if self._limiter.wait_s(now) > 0:
                self._throttle(now)
                if self._senders.get(fd) is not sender:  # it floods
                    continue
            if len(self._put_off) >= _PUT_OFF_MAX or (self._paused is not None and not self._urgent.take(now)):
                self._stop_reading()
                break
            # 3. Read each connection for an equal part of the turn. At least two frames: the second attempt shows an
            #    empty socket. A connection with more to read comes last in the next turn (epoll's order).
            before = len(self._put_off)
            handled = sender.read(max(2, FRAMES_A_TURN // len(ready)), until)
            handled -= max(0, len(self._put_off) - before)
            self._limiter.charge(handled)
            if self._paused is not None:
                self._urgent.charge(handled - 1)
            frames += handled
            now = self._loop.time()
            if now >= until:
                break
        # 4. Charge time beyond what the frames have paid for.
        self._charge_time(now - begun, frames)

    def _answer(self) -> None:
        """Answer frames that were put off, for this tenant's part of a turn of the loop."""
        self._answering = None
        begun = now = self._loop.time()
        until, frames = self._budget.begin_turn(), 0
        while self._put_off and now < until:
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
        """Answer nothing about memory for a pause, and read little; name the client that floods once the tenant has
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
