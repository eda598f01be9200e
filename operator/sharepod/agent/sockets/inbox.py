"""What the clients of one tenant send, read in the tenant's own turns.

Guarantees: whatever they send, and however many they are, the agent's loop has one thing to look at, which takes no
more of a turn than the tenant's part of it; and no more in a second than `per_s` frames, or the time that these may
take. What is beyond that waits in the senders' own sockets. Of those who keep on sending too much without waiting for
an answer, the loudest is told of.
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
"""Frames that are handled before other tenants get their turn."""
_BURST_S = 0.25
"""What comes at once may be as much as may come in so long."""
_FRAME_S = 25e-6
"""A frame that takes the agent longer counts as several."""
_CHARGED_S = 0.005
"""Of what seems to have taken longer, the rest was some other program's doing."""
_THROTTLE_PAUSE_S = 0.1
"""So long nothing is read of a tenant that sends too much."""
_FLOOD_S = 1.0
"""Who sends most of what is too much for so long is told of."""
_STREAK_MAX = 128
"""More frames than any hook has on the way at once; no more than fit into a socket."""


class Sender(Protocol):
    """A client's connection."""

    streak: int
    """Frames that were handled since its socket was last found empty."""
    longest_streak: int
    """The most that this has been lately."""

    def fileno(self) -> int: ...

    def read(self, most: int, until: float) -> int:
        """Handles what has come: at most so many frames, and none that begins after `until` but the first. How
        many."""


class Inbox:
    """`on_flood` is given who floods it."""

    def __init__(
        self, tenant_id: str, budget: FrameBudget, *, per_s: float, on_flood: Callable[[Sender], None]
    ) -> None:
        self.throttled = 0
        """How often its clients had to wait because they sent too much."""
        self._tenant_id = tenant_id
        self._budget = budget
        self._on_flood = on_flood
        self._loop = asyncio.get_running_loop()
        self._limiter = RateLimiter(self._loop.time(), per_s=per_s, burst=_BURST_S * per_s)
        self._senders: dict[int, Sender] = {}
        self._paused: asyncio.TimerHandle | None = None
        self._over_since = self._resumed_at = -math.inf
        self._epoll = select.epoll()
        self._loop.add_reader(self._epoll.fileno(), self._turn)

    def add(self, sender: Sender) -> None:
        """Reads what it sends. Raises `OSError` where there is no room for it."""
        self._epoll.register(sender.fileno(), select.EPOLLIN)
        self._senders[sender.fileno()] = sender

    def remove(self, sender: Sender) -> None:
        """Reads it no more. Before its socket is closed."""
        if self._senders.pop(sender.fileno(), None) is not None:
            self._epoll.unregister(sender.fileno())

    def close(self) -> None:
        """Reads nothing any more."""
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
        """Its clients have taken the agent so much time otherwise."""
        self._limiter.charge(min(seconds, _CHARGED_S) / _FRAME_S)

    def _turn(self) -> None:
        begun = now = self._loop.time()
        until, frames = self._budget.begin_turn(), 0
        ready = self._epoll.poll(0, FRAMES_A_TURN)
        for fd, _events in ready:
            sender = self._senders.get(fd)
            if sender is None:
                continue
            if not self._limiter.take(now):
                self._throttle(now)
                break
            # Who has more to say comes last in the next turn. Two at least: the second shows who has not.
            handled = sender.read(max(2, FRAMES_A_TURN // len(ready)), until)
            self._limiter.charge(handled - 1)
            frames += handled
            now = self._loop.time()
            if now >= until:
                break
        self._limiter.charge(max(0.0, min(now - begun, _CHARGED_S) / _FRAME_S - frames))

    def _throttle(self, now: float) -> None:
        """Reads nothing of the tenant's clients for a moment."""
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
