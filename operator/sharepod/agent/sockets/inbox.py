"""Reading end of all connections of one tenant: one epoll instance, read in the tenant's own turns of the event loop.

Guarantees:
- However many clients a tenant has, the event loop watches one descriptor for them.
- A tenant's frames take no more of one turn of the loop than the tenant's part of `FrameBudget`.
- No more than `per_s` frames a second are handled, fewer if they take longer than 25 us each; the rest waits in the
  senders' own sockets.
- Of clients that keep on sending too much without waiting for an answer, the one that sent most is named to `on_flood`.
"""

from __future__ import annotations

import asyncio
import math
import select
from collections.abc import Callable
from typing import Protocol

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
        (loop time). Return how many were handled."""


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
        self._senders: dict[int, Sender] = {}
        """By file descriptor."""
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
        """Stop reading a connection; call it before the socket is closed."""
        if self._senders.pop(sender.fileno(), None) is not None:
            self._epoll.unregister(sender.fileno())

    def close(self) -> None:
        """Stop reading all connections."""
        if self._epoll.closed:
            return
        if self._paused is not None:
            self._paused.cancel()
            self._paused = None
        else:
            self._loop.remove_reader(self._epoll.fileno())
        self._epoll.close()
        self._senders.clear()

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
            # 2. A tenant over its rate is not read for a moment.
            if not self._limiter.take(now):
                self._throttle(now)
                break
            # 3. Read each connection for an equal part of the turn. At least two frames: the second attempt shows an
            #    empty socket. A connection with more to read comes last in the next turn (epoll's order).
            handled = sender.read(max(2, FRAMES_A_TURN // len(ready)), until)
            self._limiter.charge(handled - 1)
            frames += handled
            now = self._loop.time()
            if now >= until:
                break
        # 4. Charge time beyond what the frames have paid for.
        self._limiter.charge(max(0.0, min(now - begun, _CHARGED_S) / _FRAME_S - frames))

    def _throttle(self, now: float) -> None:
        """Pause reading; name the client that floods once the tenant has been over its rate for `_FLOOD_S`."""
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
        self._loop.remove_reader(self._epoll.fileno())
        self._paused = self._loop.call_later(_THROTTLE_PAUSE_S, self._resume)

    def _reset_streaks(self, now: float) -> None:
        self._over_since = now
        for sender in self._senders.values():
            sender.longest_streak = 0

    def _resume(self) -> None:
        self._paused = None
        self._resumed_at = self._loop.time()
        self._loop.add_reader(self._epoll.fileno(), self._turn)
