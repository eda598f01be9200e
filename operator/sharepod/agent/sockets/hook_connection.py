"""Connection of one process, from accept to close: parses, checks and answers its frames.

Guarantees:
- Every byte from the client is treated as hostile until it is parsed. Every frame is checked against the tenant's own
  GPUs.
- No call waits. If a client does not read the agent's frames, its connection is closed.
- If a client breaks the protocol, its connection is closed. An exception in a handler affects only its connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable, Sequence
from typing import Protocol

import structlog

from sharepod import protocol
from sharepod.agent.sockets._frame_reader import ffi as _ffi
from sharepod.protocol import ProtocolError, RefusedReason
from sharepod.protocol._wire import lib as _lib

from .inbox import Inbox, Received
from .peers import send_packet
from .refusals import ClientRefusal

log = structlog.get_logger(__name__)

_HELLO_WITHIN_S = 5.0
"""Seconds after accept within which a client must send Hello, or it is disconnected. A hook sends Hello at once."""

_MEMORY = (protocol.Reserve, protocol.Release, protocol.MemInfo)
"""Frames about memory. The inbox defers them until frames about time are handled, except frames of a handover."""

_PACKET_MOST: int = _ffi.sizeof(_ffi.typeof("shp_received").fields[-1][1].type)
"""Most bytes of a packet that are kept."""

# copied, because cffi looks a constant up by name at each use
_DRAINED: int = _lib.SHP_DRAINED
_DRAINING: int = _lib.SHP_DRAINING
_WANT: int = _lib.SHP_WANT
_WANTING: int = _lib.SHP_DRAINED_WANT
_IDLE: int = _lib.SHP_DRAINED_IDLE


class Service(Protocol):
    """The served tenant, as its connections use it."""

    @property
    def tenant_id(self) -> str:
        """Id of the tenant, for the log."""

    def terms(self) -> tuple[protocol.GpuTerms, ...]:
        """Return the tenant's share of each of its GPUs."""

    @property
    def grace_ms(self) -> int:
        """Milliseconds within which a client must close its gate and drain."""

    @property
    def hints_fd(self) -> int:
        """Descriptor of the hints page, to send to the client."""

    def on_hello(self, client: HookConnection) -> None:
        """Record a client that has completed Hello."""

    def record_refusal(self, why: ClientRefusal, *, pid: int, error: str | None = None) -> None:
        """Count a client that is disconnected for the reason `why`."""

    def handle(self, client: HookConnection, frame: protocol.ClientFrame) -> None:
        """Handle a frame after Hello. Raises `ProtocolError`."""


class HookConnection:
    """Connection of one process to its tenant's socket. Owns `sock`, unless it raises `OSError`.

    Args:
        sock: Accepted socket.
        pid: Pid of the process that connected.
        inbox: Inbox of the tenant, which reads this connection.
        closed: Called once after the connection was closed, from the event loop.
    """

    def __init__(
        self, sock: socket.socket, pid: int, service: Service, inbox: Inbox, closed: Callable[[HookConnection], None]
    ) -> None:
        self.pid = pid
        self.greeted = False
        """True once the client has sent Hello and was accepted."""
        self.observes = False
        """True for an observer, a client that uses no GPU (a reader of NVML). It may only request memory sizes."""
        self.handover_open = True
        """True while the client may still declare memory that it got on an earlier connection: until its first frame of
        another kind."""
        self.heartbeat: protocol.Heartbeat | None = None
        """Heartbeats of the process. None if it has no pulse page (memory shared with the agent)."""
        self.version = protocol.VERSION_MIN
        """Version of the protocol that was negotiated by Hello. Before Hello, the first version."""
        self.closing: Callable[[], None] | None = None
        """Called before the socket is closed."""
        self.streak = self.longest_streak = 0
        """See `inbox.Sender`."""
        self._spoke_of_memory = False
        """True once a memory frame that is no handover has been read."""
        self._inbox = inbox
        self._sock = sock
        self._service = service
        self._closed = closed
        self._alive = True
        self._loop = asyncio.get_running_loop()
        sock.setblocking(False)
        inbox.add(self)
        self._hello_timer = self._loop.call_later(_HELLO_WITHIN_S, self._hello_overdue)

    def fileno(self) -> int:
        """Return the descriptor of the socket."""
        return self._sock.fileno()

    def take(self, received: Received) -> None:
        """Handle bytes and descriptors from the client, or defer them. Never raises."""
        self.streak += 1
        self.longest_streak = max(self.longest_streak, self.streak)
        if received.emptied:
            self.streak = 0
        if not received.size:
            self.close()
            return
        try:
            frame = frame_of(received)
        except ProtocolError as error:
            self._break_off(ClientRefusal.MALFORMED, str(error))
            return
        if self.greeted and isinstance(frame, _MEMORY) and not self._hands_over(frame):
            self._spoke_of_memory = True
            self._inbox.put_off(self, frame)
        else:
            self.answer(frame)

    def answer(self, frame: protocol.ClientFrame) -> None:
        """Handle a frame; close the client if the frame breaks the protocol. Never raises."""
        if not self._alive:
            return
        try:
            self._handle(frame)
        except ProtocolError as error:
            self._break_off(ClientRefusal.OUT_OF_PLACE, str(error))
        except Exception as error:
            # Log one line every few seconds, without a traceback per frame, because a client could fill the log with
            # them.
            self._break_off(ClientRefusal.OUT_OF_PLACE, repr(error))

    def send(self, frame: protocol.AgentFrame) -> None:
        """Send a frame; close the client if its socket is full. Never raises, never waits."""
        self._send(self.packet(frame))

    @property
    def samples_progress(self) -> bool:
        """True if the process samples its progress, so that its tenant may co-run."""
        return self.version >= protocol.CONCURRENT_VERSION and self.heartbeat is not None

    def packet(self, frame: protocol.AgentFrame) -> bytes:
        """Return a frame encoded in the client's version of the protocol."""
        return protocol.encode(frame, version=self.version)

    def taken(self) -> None:
        """Count a frame of this client that the loop's wait has already read from its socket."""
        self._inbox.charge_frame()

    def refuse(self, reason: RefusedReason, text: str) -> None:
        """Send the reason, then close."""
        self.send(protocol.Refused(reason, text))
        self.close()

    def close(self) -> None:
        """Close the socket now. `closed` is called in the loop's next turn, so that no caller is re-entered."""
        if not self._alive:
            return
        self._alive = False
        self._hello_timer.cancel()
        if self.closing is not None:
            self.closing()
        self._inbox.remove(self)
        self._sock.close()
        self._loop.call_soon(self._closed, self)

    def _send(self, packet: bytes, fds: Sequence[int] = ()) -> None:
        if not self._alive:
            return
        try:
            send_packet(self._sock, packet, fds)
        except BlockingIOError:
            self._service.record_refusal(ClientRefusal.UNREAD, pid=self.pid)
            self.close()
        except OSError as error:
            log.debug("client has disconnected", tenant=self._service.tenant_id, pid=self.pid, error=error.strerror)
            self.close()

    def _hands_over(self, frame: protocol.ClientFrame) -> bool:
        """Return True if a frame declares memory that the process already has. Such frames are valid only before its
        first frame of another kind."""
        return isinstance(frame, protocol.Reserve) and frame.handover and not self._spoke_of_memory

    def _break_off(self, why: ClientRefusal, error: str) -> None:
        self._service.record_refusal(why, pid=self.pid, error=error)
        self.close()

    def _hello_overdue(self) -> None:
        if not self.greeted:
            self._service.record_refusal(ClientRefusal.SILENT, pid=self.pid)
            self.close()

    def _handle(self, frame: protocol.ClientFrame) -> None:
        if isinstance(frame, protocol.Hello):
            self._welcome(frame)
        elif not self.greeted:
            raise ProtocolError(f"{type(frame).__name__} before Hello")
        else:
            if self.observes and not isinstance(frame, protocol.MemInfo):
                raise ProtocolError(f"{type(frame).__name__} from a client that declared itself an observer")
            self._service.handle(self, frame)

    def _welcome(self, hello: protocol.Hello) -> None:
        if self.greeted:
            raise ProtocolError("a second Hello")
        version = min(hello.version_max, protocol.VERSION_MAX)
        if version < max(hello.version_min, protocol.VERSION_MIN):
            ours = f"{protocol.VERSION_MIN} to {protocol.VERSION_MAX}"
            self.refuse(RefusedReason.VERSION, f"this agent speaks versions {ours}; restart the pod to get its hook")
            return
        self.greeted, self.observes = True, hello.observes
        self._hello_timer.cancel()
        self.version = version
        welcome = protocol.Welcome(0, self._service.terms(), self._service.grace_ms)
        fds = [self._service.hints_fd]
        with contextlib.ExitStack() as stack:
            if version >= protocol.PULSE_VERSION:
                with contextlib.suppress(
                    OSError
                ):  # without a pulse page, the agent has to wait until the client reports that it has drained
                    page = protocol.PulsePage()
                    stack.callback(page.close_fd)
                    self.heartbeat = protocol.Heartbeat(page.read, page)
                    fds.append(page.fd)
            self._send(protocol.encode(welcome, version=version), fds)
        self._service.on_hello(self)


def frame_of(received: Received) -> protocol.ClientFrame:
    """Return the frame that a packet contains. Raise `ProtocolError`."""
    kind = received.type
    if kind == _DRAINED:
        flags = received.flags
        return protocol.Drained(received.grant_id, received.value, bool(flags & _WANTING), bool(flags & _IDLE))
    if kind == _DRAINING:
        return protocol.Draining(received.grant_id, received.value)
    if kind == _WANT:
        return protocol.Want(received.value)
    if received.size > _PACKET_MOST:
        raise ProtocolError(f"a packet of {received.size} bytes is longer than any frame of a client")
    return protocol.parse_client(bytes(_ffi.buffer(received.packet, received.size)))
