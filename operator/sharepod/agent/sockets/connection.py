"""One process's connection: frames in, frames out.

Every byte from the other side is hostile until parsed, and every frame until checked against the tenant's own GPUs.
Nothing here waits: a client that does not read what it is sent is given up, and one that breaks the protocol is
closed.
"""

from __future__ import annotations

import array
import asyncio
import socket
from collections.abc import Callable
from typing import Protocol

import structlog

from sharepod import protocol
from sharepod.protocol import ProtocolError, RefusedReason

from .inbox import Inbox
from .refusals import ClientRefusal

log = structlog.get_logger(__name__)

_HELLO_WITHIN_S = 5.0
"""A client that has not said who it is by then is closed."""


class Service(Protocol):
    """What a tenant does with its clients' frames. Each may raise `ProtocolError`."""

    def terms(self) -> tuple[protocol.GpuTerms, ...]: ...

    @property
    def grace_ms(self) -> int: ...

    @property
    def hints_fd(self) -> int: ...

    def on_hello(self, client: HookConnection) -> None: ...

    def record_refusal(self, why: ClientRefusal, *, pid: int, error: str | None = None) -> None: ...

    def handle(self, client: HookConnection, frame: protocol.ClientFrame) -> None: ...


class HookConnection:
    """From accept to close. `pid`: of the process that connected, as the kernel says. `closed` is called once, from
    the loop. Takes over `sock`, but where it raises `OSError`."""

    def __init__(
        self, sock: socket.socket, pid: int, service: Service, inbox: Inbox, closed: Callable[[HookConnection], None]
    ) -> None:
        self.pid = pid
        self.greeted = False
        self.observes = False
        """It uses no GPU: it may ask what the tenant uses, and nothing else."""
        self.handover_open = True
        """It has not asked for memory yet, so that it may still declare what it holds from an earlier connection."""
        self.streak = self.longest_streak = 0
        """Frames that were handled since its socket was last found empty; the most that this has been lately."""
        self._inbox = inbox
        self._sock = sock
        self._service = service
        self._closed = closed
        self._alive = True
        self._version = protocol.VERSION_MAX
        self._loop = asyncio.get_running_loop()
        sock.setblocking(False)
        inbox.add(self)
        self._greeting = self._loop.call_later(_HELLO_WITHIN_S, self._late)

    def fileno(self) -> int:
        """Of its socket."""
        return self._sock.fileno()

    def read(self, most: int, until: float) -> int:
        """Handles what has come: at most so many frames, and none that begins after `until` but the first."""
        for handled in range(1, most + 1):
            if not self._read_one() or not self._alive or self._loop.time() >= until:
                return handled
        return most

    def send(self, frame: protocol.AgentFrame) -> None:
        """Sends, or gives the client up if it does not read."""
        self._send(protocol.encode(frame, version=self._version))

    def refuse(self, reason: RefusedReason, text: str) -> None:
        """Says why, and closes."""
        self.send(protocol.Refused(reason, text))
        self.close()

    def close(self) -> None:
        """Closes the socket now; `closed` is called in the loop's next turn, so that no caller is re-entered."""
        if not self._alive:
            return
        self._alive = False
        self._greeting.cancel()
        self._inbox.remove(self)
        self._sock.close()
        self._loop.call_soon(self._closed, self)

    def _send(self, packet: bytes, fd: int | None = None) -> None:
        if not self._alive:
            return
        ancillary = [] if fd is None else [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd]))]
        try:
            self._sock.sendmsg([packet], ancillary, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
        except BlockingIOError:
            self._service.record_refusal(ClientRefusal.UNREAD, pid=self.pid)
            self.close()
        except OSError as error:
            log.debug("client is gone", pid=self.pid, error=error.strerror)
            self.close()

    def _read_one(self) -> bool:
        """Handles one frame; whether there was one."""
        try:
            # Without room for ancillary bytes the kernel drops descriptors that a client sends.
            packet = self._sock.recv(protocol.FRAME_MAX + 1)
        except (BlockingIOError, InterruptedError):
            self.streak = 0
            return False
        except OSError:
            packet = b""
        self.streak += 1
        self.longest_streak = max(self.longest_streak, self.streak)
        if not packet:
            self.close()
            return False
        why = ClientRefusal.MALFORMED
        try:
            frame = protocol.parse_client(packet)
            why = ClientRefusal.OUT_OF_PLACE
            self._handle(frame)
        except ProtocolError as error:
            self._service.record_refusal(why, pid=self.pid, error=str(error))
            self.close()
        except Exception as error:
            # A frame that nobody thought of must not become one more traceback each time it is sent.
            self._service.record_refusal(why, pid=self.pid, error=repr(error))
            self.close()
        return True

    def _late(self) -> None:
        if not self.greeted:
            self._service.record_refusal(ClientRefusal.SILENT, pid=self.pid)
            self.close()

    def _handle(self, frame: protocol.ClientFrame) -> None:
        if isinstance(frame, protocol.Hello):
            self._greet(frame)
        elif not self.greeted:
            raise ProtocolError(f"{type(frame).__name__} before Hello")
        else:
            if self.observes and not isinstance(frame, protocol.MemInfo):
                raise ProtocolError(f"{type(frame).__name__} from one that said it only observes")
            self._service.handle(self, frame)

    def _greet(self, hello: protocol.Hello) -> None:
        if self.greeted:
            raise ProtocolError("a second Hello")
        version = min(hello.version_max, protocol.VERSION_MAX)
        if version < max(hello.version_min, protocol.VERSION_MIN):
            ours = f"{protocol.VERSION_MIN} to {protocol.VERSION_MAX}"
            self.refuse(RefusedReason.VERSION, f"this agent speaks versions {ours}; restart the pod to get its hook")
            return
        self.greeted, self.observes = True, hello.observes
        self._greeting.cancel()
        self._version = version
        welcome = protocol.Welcome(0, self._service.terms(), self._service.grace_ms)
        self._send(protocol.encode(welcome, version=version), fd=self._service.hints_fd)
        self._service.on_hello(self)
