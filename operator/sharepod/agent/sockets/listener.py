"""A listening socket, of a tenant or of the agent's HTTP: who connects is handed on, no faster than is allowed.

What waits in the socket while nobody is accepted is bounded by the kernel. An agent that has run out of descriptors
pauses, instead of turning in circles: a listener that cannot be served stays readable.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable

import structlog

from sharepod.rate_limit import RateLimiter

log = structlog.get_logger(__name__)

_BATCH = 4
"""Connections that are taken before other tenants get their turn."""
_EXHAUSTED_PAUSE_S = 1.0
_THROTTLE_PAUSE_S = 0.1


class Listener:
    """`whose`: named in the log. `admit` takes a connection over, or closes it; where it raises `OSError` there are no
    descriptors left. Takes over `sock`."""

    def __init__(
        self, sock: socket.socket, whose: str, admit: Callable[[socket.socket], None], *, per_s: float, burst: float
    ) -> None:
        self.throttled = 0
        """How often connecting had to wait."""
        self._sock = sock
        self._whose = whose
        self._admit = admit
        self._loop = asyncio.get_running_loop()
        self._limiter = RateLimiter(self._loop.time(), per_s=per_s, burst=burst)
        self._paused: asyncio.TimerHandle | None = None
        self._exhausted_logged = False
        self._throttle_logged = False
        self._open = True
        self._loop.add_reader(sock.fileno(), self._accept)

    def close(self) -> None:
        """Nobody connects any more."""
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
        self.throttled += 1
        if not self._throttle_logged:
            log.warning("processes connect too often, they have to wait", to=self._whose)
            self._throttle_logged = True
        self._pause(_THROTTLE_PAUSE_S)

    def _exhausted(self, error: OSError) -> None:
        if not self._exhausted_logged:
            log.error("cannot accept clients, trying again", to=self._whose, error=error.strerror)
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
