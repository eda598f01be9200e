"""Scripted agent: the other end of the hook's socket, controlled by a test.

It uses the wire format of `sharepod.protocol` in a thread of its own, and stores every received frame with its time.
Without instructions it only welcomes clients, and answers memory requests from a minimal ledger.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from sharepod.protocol import (
    FRAME_MAX,
    PULSE_VERSION,
    VERSION_MAX,
    AgentFrame,
    ClientFrame,
    Drained,
    Draining,
    GpuTerms,
    Grant,
    Hello,
    HintsPage,
    Limits,
    MemInfo,
    Memory,
    Pulse,
    PulsePage,
    Recall,
    Refused,
    RefusedReason,
    Release,
    Reserve,
    Reserved,
    Revoke,
    Want,
    Welcome,
    encode,
    parse_client,
)

Got = TypeVar("Got", Hello, Want, Draining, Drained, Reserve, Release, MemInfo)

GRACE_MS = 1000


@dataclass(frozen=True)
class Received:
    """Frame of a client, and the time of its receipt."""

    time: int
    """Time of receipt, CLOCK_MONOTONIC in ns."""
    frame: ClientFrame
    version: int
    """Version in the frame's header."""


@dataclass
class Client:
    """Connection of one process of the tenant."""

    socket: socket.socket
    received: list[Received] = field(default_factory=list)
    credited: list[int] = field(default_factory=list)
    """Bytes credited, by GPU."""
    handed_over: list[int] = field(default_factory=list)
    """Bytes of each RESERVE with HANDOVER."""
    grown: list[int] = field(default_factory=list)
    """Bytes of each RESERVE with GROWN."""
    closed: bool = False
    pulse: Callable[[], Pulse] = lambda: Pulse(0, 0, 0)
    """Function that returns the last content of the client's pulse page, or nothing if it has no pulse page."""


class ScriptedAgent:
    """Server of `agent.sock` in a tenant's directory, until `close`.

    `vanish` and `appear` simulate an agent that ends and comes back.
    """

    def __init__(self, directory: Path, gpus: Sequence[GpuTerms], *, grace_ms: int = GRACE_MS) -> None:
        self.directory = directory
        self.gpus = tuple(gpus)
        self.grace_ms = grace_ms
        self.clients: list[Client] = []
        self.on_want: Callable[[Client], Grant | None] = lambda client: None
        """Function that returns the answer to a WANT, or to a DRAINED that counts as a WANT; None: no answer yet."""
        self.answer_memory = True
        """False: RESERVE and MEMINFO are not answered."""
        self.refuse: RefusedReason | None = None
        """Answer to HELLO: REFUSED with this reason."""
        self.turn_away: RefusedReason | None = None
        """Answer to a new connection, which is then closed before HELLO is read."""
        self.version = VERSION_MAX
        """Version of the protocol in WELCOME."""
        self.mute = False
        """True: nothing is read, like by an agent that hangs."""
        self.hints = HintsPage()
        self._changed = threading.Condition()
        self._listener: socket.socket | None = None
        self._thread: threading.Thread | None = None
        self._stop = False
        self._grant_ids = 0
        self.last_grant = Grant(0, 0, 0, metered=False)
        """The newest grant, which a test may revoke."""
        self.appear()

    # ---- called by tests

    def appear(self) -> None:
        """Start to listen at the same path as before."""
        path = self.directory / "agent.sock"
        path.unlink(missing_ok=True)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
        self._listener.bind(str(path))
        path.chmod(0o666)
        self._listener.listen(64)
        self._stop = False
        self._thread = threading.Thread(target=self._serve, name="scripted-agent", daemon=True)
        self._thread.start()

    def vanish(self) -> None:
        self._stop = True
        if self._thread is not None:
            self._thread.join()
        with self._changed:
            for client in self.clients:
                client.socket.close()
                client.closed = True
            self.clients.clear()
        if self._listener is not None:
            self._listener.close()

    def close(self) -> None:
        self.vanish()
        self.hints.close()

    def next_grant(self, quantum_ms: float = 0, *, metered: bool = False, concurrent: bool = False) -> Grant:
        """Return the next GRANT without sending it. `quantum_ms` 0: until revoked."""
        self._grant_ids += 1
        gpus = (1 << len(self.gpus)) - 1
        self.last_grant = Grant(self._grant_ids, int(quantum_ms * 1e6), gpus, metered, concurrent=concurrent)
        return self.last_grant

    def send(self, client: Client, frame: AgentFrame) -> None:
        client.socket.send(encode(frame, version=self.version))

    def grant(self, client: Client, quantum_ms: float = 0, *, metered: bool = False, concurrent: bool = False) -> Grant:
        frame = self.next_grant(quantum_ms, metered=metered, concurrent=concurrent)
        self.send(client, frame)
        return frame

    def revoke(self, client: Client, grant: Grant) -> None:
        self.send(client, Revoke(grant.grant_id))

    def recall(self, client: Client, gpu: int, size: int) -> None:
        self.send(client, Recall(gpu, size))

    def change_limits(self, gpus: Sequence[GpuTerms]) -> None:
        with self._changed:  # a client gets the new limits either by WELCOME or by LIMITS
            self.gpus = tuple(gpus)
            for client in self.clients:
                self.send(client, Limits(self.gpus, self.grace_ms))

    def wait(self, condition: Callable[[], bool], what: str, timeout: float = 10) -> None:
        """Wait until the condition holds. AssertionError with `what` after `timeout` s."""
        deadline = time.monotonic() + timeout
        with self._changed:
            while not condition():
                left = deadline - time.monotonic()
                assert left > 0, (
                    f"waited {timeout} s in vain for {what}; got {[client.received for client in self.clients]}"
                )
                self._changed.wait(min(left, 0.01))

    def client(self, index: int = 0, timeout: float = 10) -> Client:
        """Wait for the HELLO of the client with this index, and return the client."""
        self.wait(lambda: len(self.clients) > index and bool(self.clients[index].received), f"client {index}", timeout)
        return self.clients[index]

    def frames(self, client: Client, kind: type[Got]) -> list[Got]:
        with self._changed:
            return [received.frame for received in client.received if isinstance(received.frame, kind)]

    def times(self, client: Client, kind: type[Got]) -> list[int]:
        with self._changed:
            return [received.time for received in client.received if isinstance(received.frame, kind)]

    def next_frame(self, client: Client, kind: type[Got], after: int = 0, timeout: float = 10) -> Got:
        """Wait for the frame of this type that follows `after` other frames of the type. Return it."""
        self.wait(lambda: len(self.frames(client, kind)) > after, f"{kind.__name__} number {after + 1}", timeout)
        return self.frames(client, kind)[after]

    def wait_asked(self, client: Client, times: int = 1, timeout: float = 10) -> None:
        """Wait until the client has requested the token `times` times, by WANT or with DRAINED."""

        def asked() -> bool:
            drained = self.frames(client, Drained)
            return len(self.frames(client, Want)) + sum(frame.wanting for frame in drained) >= times

        self.wait(asked, f"the token to be asked for {times} times", timeout)

    def used(self, gpu: int) -> int:
        """Return the bytes of a GPU credited to all connected clients."""
        return sum(client.credited[gpu] for client in self.clients if not client.closed)

    # ---- done without instructions

    def _serve(self) -> None:
        assert self._listener is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self._listener, selectors.EVENT_READ, None)
            while not self._stop:
                for key, _ in selector.select(0.01):
                    if key.data is None:
                        accepted, _ = self._listener.accept()
                        accepted.setblocking(False)
                        if self.turn_away is not None:
                            time.sleep(0.02)  # the client's HELLO has arrived by now
                            accepted.send(encode(Refused(self.turn_away, "as the test wants it")))
                            accepted.close()
                            continue
                        client = Client(accepted, credited=[0] * len(self.gpus))
                        selector.register(accepted, selectors.EVENT_READ, client)
                    elif not self.mute:
                        self._receive(selector, key.data)
                if self.mute:
                    time.sleep(0.005)

    def _receive(self, selector: selectors.BaseSelector, client: Client) -> None:
        while True:
            try:
                packet = client.socket.recv(FRAME_MAX + 1)
            except BlockingIOError:
                return
            except OSError:
                packet = b""
            with self._changed:
                if not packet:
                    client.closed = True
                    selector.unregister(client.socket)
                    client.socket.close()
                    self._changed.notify_all()
                    return
                frame = parse_client(packet)
                client.received.append(Received(time.monotonic_ns(), frame, int.from_bytes(packet[4:6], "little")))
                with contextlib.suppress(OSError):
                    self._handle(client, frame)
                self._changed.notify_all()

    def _handle(self, client: Client, frame: ClientFrame) -> None:
        match frame:
            case Hello():
                if self.refuse is not None:
                    self.send(client, Refused(self.refuse, "as the test wants it"))
                    client.socket.shutdown(socket.SHUT_RDWR)
                    return
                welcome = encode(Welcome(0, self.gpus, self.grace_ms), version=self.version)
                if self.version < PULSE_VERSION:
                    socket.send_fds(client.socket, [welcome], [self.hints.fd])
                else:
                    page = PulsePage()
                    client.pulse = page.read
                    socket.send_fds(client.socket, [welcome], [self.hints.fd, page.fd])
                    page.close_fd()
                self.clients.append(client)
            case Want() | Drained(wanting=True):
                grant = self.on_want(client)
                if grant is not None:
                    self.send(client, grant)
            case Reserve() if frame.handover:
                client.credited[frame.gpu] += frame.bytes
                client.handed_over.append(frame.bytes)
                self.send(client, Reserved(frame.seq, frame.gpu, frame.bytes))
            case Reserve() if frame.grown:
                client.credited[frame.gpu] += frame.bytes
                client.grown.append(frame.bytes)
                self.send(client, Reserved(frame.seq, frame.gpu, frame.bytes))
            case Reserve() if self.answer_memory:
                terms = self.gpus[frame.gpu]
                fits = not terms.enforced or self.used(frame.gpu) + frame.bytes <= terms.memory
                client.credited[frame.gpu] += frame.bytes if fits else 0
                self.send(client, Reserved(frame.seq, frame.gpu, frame.bytes if fits else 0))
            case Release():
                client.credited[frame.gpu] -= frame.bytes
                assert client.credited[frame.gpu] >= 0, "gave back more than it had"
            case MemInfo() if self.answer_memory:
                terms = self.gpus[frame.gpu]
                self.send(client, Memory(frame.seq, frame.gpu, terms.memory, self.used(frame.gpu) - frame.idle))
            case _:
                pass
