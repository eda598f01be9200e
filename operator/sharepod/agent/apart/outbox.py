"""Send queue of a socket: frames with descriptors, which are sent with the first byte of their frame."""

from __future__ import annotations

import array
import asyncio
import os
import socket
from collections import deque
from collections.abc import Callable, Sequence

from sharepod.agent.sockets.peers import EXHAUSTED

_AGAIN_S = 0.02
"""Seconds until a frame is sent again that Linux had no memory for."""


class Outbox:
    """Frames to be sent over `sock`, in order.

    Args:
        sock: Connected stream socket, non-blocking.
        failed: Called if sending has failed permanently.
        sent: Called after each sent frame that was an answer.
    """

    def __init__(self, sock: socket.socket, failed: Callable[[], None], sent: Callable[[], None]) -> None:
        self._sock = sock
        self._failed = failed
        self._sent = sent
        self._loop = asyncio.get_running_loop()
        self._frames: deque[tuple[memoryview, list[int], int]] = deque()
        self._writing = False
        self._again: asyncio.TimerHandle | None = None
        """Timer for a frame that Linux had no memory for."""
        self.waiting = 0
        """Unsent bytes of the frames in the queue."""
        self.answers = 0
        """Number of answers in the queue."""
        self.of_answers = 0
        """Bytes of the answers in the queue."""

    def put(self, frame: bytes, descriptors: list[int], *, answer: bool) -> None:
        """Send a frame now, or as soon as the socket has room. Owns the descriptors."""
        self._frames.append((memoryview(frame), descriptors, len(frame) if answer else 0))
        self.waiting += len(frame)
        self.answers += answer
        self.of_answers += len(frame) if answer else 0
        if not self._writing and self._again is None:
            self._write()

    def close(self) -> None:
        """Drop the queue. Call this before the socket is closed."""
        self._rest()
        for _frame, descriptors, _answer in self._frames:
            close_all(descriptors)
        self._frames.clear()

    def _write(self) -> None:
        self._again = None
        while self._frames:
            data, descriptors, answer = self._frames[0]
            ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))] if descriptors else []
            try:
                sent = self._sock.sendmsg([data], ancillary, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
            except BlockingIOError:
                if not self._writing:
                    self._writing = True
                    self._loop.add_writer(self._sock.fileno(), self._write)
                return
            except OSError as error:
                if error.errno in EXHAUSTED:
                    self._rest()
                    self._again = self._loop.call_later(_AGAIN_S, self._write)
                    return
                self._failed()
                return
            close_all(descriptors)
            self.waiting -= sent
            if sent < len(data):
                self._frames[0] = (data[sent:], [], answer)
                continue
            self._frames.popleft()
            if answer:
                self.answers -= 1
                self.of_answers -= answer
                self._sent()
        self._rest()

    def _rest(self) -> None:
        """Stop waiting for room in the socket."""
        if self._again is not None:
            self._again.cancel()
            self._again = None
        if self._writing:
            self._writing = False
            self._loop.remove_writer(self._sock.fileno())


def close_all(descriptors: Sequence[int] | deque[int]) -> None:
    """Close descriptors, and empty their list."""
    for descriptor in descriptors:
        os.close(descriptor)
    if isinstance(descriptors, list | deque):
        descriptors.clear()
