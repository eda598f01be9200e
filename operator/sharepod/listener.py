"""Listening socket, of a tenant or of an HTTP server: accepts at a limited rate and hands connections on.

Guarantees:
- No more than `per_s` connections a second are accepted, in bursts of at most `burst`. The socket's backlog bounds how
  many wait.
- A process without free descriptors pauses for a second, instead of spinning on a readable socket.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Mapping

import structlog

from sharepod.rate_limit import RateLimiter

log = structlog.get_logger(__name__)

_BATCH = 4
"""Connections that are accepted before the loop runs other tasks."""
_EXHAUSTED_PAUSE_S = 1.0
"""Seconds until the next attempt after descriptors have run out, because a client has to disconnect first."""
_THROTTLE_PAUSE_S = 0.1
"""Seconds for which nothing is accepted once the rate is exceeded. This bounds useless wake-ups to ten a second."""


class Listener:
    """Listening socket on the event loop. Owns `sock`.

    Args:
        sock: Listening socket, non-blocking.
        owner: Key-values that name the owner in the log, such as `tenant` and its id.
        admit: Called with each connection, which it then owns. Raises `OSError` if no descriptor is left.
        per_s: Connections accepted a second.
        burst: Connections accepted at once.
    """

    def __init__(
        self,
        sock: socket.socket,
        owner: Mapping[str, str],
        admit: Callable[[socket.socket], None],
        *,
        per_s: float,
        burst: float,
    ) -> None:
        self._sock = sock
        self._owner = owner
        self._admit = admit
        self._loop = asyncio.get_running_loop()
        self._limiter = RateLimiter(self._loop.time(), per_s=per_s, burst=burst)
        self._paused: asyncio.TimerHandle | None = None
        self._exhausted_logged = False
        self._throttle_logged = False
        self._open = True
        self._loop.add_reader(sock.fileno(), self._accept)

    def close(self) -> None:
        """Close the socket and stop accepting."""
        if not self._open:
            return
        self._open = False
        self._loop.remove_reader(self._sock.fileno())
        self._sock.close()
        if self._paused is not None:
            self._paused.cancel()
            self._paused = None

    def _accept(self) -> None:
        for _ in range(_BATCH):
            if not self._open:
                return
            if not self._limiter.take(self._loop.time()):
                self._throttle()
                return
            try:
                sock, _address = self._sock.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                self._exhausted(error)
                return
            try:
                self._admit(sock)
            except OSError as error:
                sock.close()
                self._exhausted(error)
                return
            self._exhausted_logged = False

    def _throttle(self) -> None:
        if not self._throttle_logged:
            log.warning("connections come too fast and have to wait", **self._owner)
            self._throttle_logged = True
        self._pause(_THROTTLE_PAUSE_S)

    def _exhausted(self, error: OSError) -> None:
        if not self._exhausted_logged:
            log.error("cannot accept a connection, trying again", error=error.strerror, **self._owner)
            self._exhausted_logged = True
        self._pause(_EXHAUSTED_PAUSE_S)

    def _pause(self, seconds: float) -> None:
        if self._open and self._paused is None:
            self._loop.remove_reader(self._sock.fileno())
            self._paused = self._loop.call_later(seconds, self._resume)

    def _resume(self) -> None:
        self._paused = None
        if self._open:
            self._loop.add_reader(self._sock.fileno(), self._accept)
