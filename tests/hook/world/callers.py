"""Callers of an agent: they connect to tenants' sockets repeatedly, and measure for how long no agent answers."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from sharepod import protocol

_PAUSE_S = 0.04
"""Seconds between two calls of one tenant: 25 calls a second, a quarter of the number that an agent accepts."""
_PATIENCE_S = 5.0
"""Seconds for which one call waits for an answer."""


@dataclass
class Interruption:
    """Times without an agent while one agent follows another, as callers measured them: the longest of all tenants."""

    refused_s: float = 0.0
    """Seconds from a failed attempt to connect until a successful one."""
    unanswered_s: float = 0.0
    """Seconds from an attempt until the agent had sent WELCOME."""
    answered_at: float = 0.0
    """Wall-clock time at which all tenants had an answer again."""


class Callers:
    """Callers of the tenants in these directories, one thread each. They are observers, which use no GPU. A context
    manager.
    """

    def __init__(self, directories: Sequence[Path]) -> None:
        self._callers = [_Caller(directory / "agent.sock") for directory in directories]

    def __enter__(self) -> Self:
        for caller in self._callers:
            caller.start()
        self.settled()
        return self

    def __exit__(self, *_exception: object) -> None:
        for caller in self._callers:
            caller.ended.set()
        for caller in self._callers:
            caller.join()

    def settled(self, seconds: float = 30.0) -> Interruption:
        """Wait until each caller has an answer to a call that began after now. Return the longest times so far."""
        begin, deadline = time.monotonic(), time.monotonic() + seconds
        while not all(caller.answered_call > begin for caller in self._callers):
            assert time.monotonic() < deadline, f"no answer within {seconds:g} s"
            time.sleep(0.001)
        seen = [caller.seen for caller in self._callers]
        return Interruption(
            max(each.refused_s for each in seen),
            max(each.unanswered_s for each in seen),
            max(each.answered_at for each in seen),
        )


class _Caller(threading.Thread):
    def __init__(self, path: Path) -> None:
        super().__init__(name="caller", daemon=True)
        self._path = path
        self.ended = threading.Event()
        self.seen = Interruption()
        self.answered_call = 0.0
        """Start of the last call that was answered."""

    def run(self) -> None:
        asked_at = refused_at = None
        while not self.ended.is_set():
            begin = time.monotonic()
            asked_at = asked_at or begin
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
                sock.settimeout(_PATIENCE_S)
                try:
                    sock.connect(str(self._path))
                except OSError:
                    refused_at = refused_at or begin
                    time.sleep(0.001)
                    continue
                if refused_at is not None:
                    self.seen.refused_s = max(self.seen.refused_s, time.monotonic() - refused_at)
                    refused_at = None
                if not _welcomed(sock):
                    continue
            slow = time.monotonic() - asked_at
            if slow > self.seen.unanswered_s:
                self.seen.unanswered_s, self.seen.answered_at = slow, time.time()
            asked_at, self.answered_call = None, begin
            self.ended.wait(_PAUSE_S)


def _welcomed(sock: socket.socket) -> bool:
    with contextlib.suppress(OSError):
        sock.send(protocol.encode(protocol.Hello(1, 1, observes=True)))
        return bool(sock.recv(protocol.FRAME_MAX))
    return False
