"""One tenant being served: its socket, its clients, its memory ledgers, its hints page.

It begins with a listening socket and ends with `close`; what it was told about the tenant's row it holds to until it
is told anew.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable
from uuid import UUID

import structlog

from sharepod import protocol
from sharepod.api.gpunode import MemoryIsolation, Tenant
from sharepod.protocol import ProtocolError, RefusedReason

from . import memory
from .connection import Connection
from .memory import Credited, LedgerError, MemoryLedger, RecallFrom
from .processes import Processes, peer_of
from .settings import Settings
from .tokens import Tokens

log = structlog.get_logger(__name__)

_HANDOVER_MAX = 1 << 47
_ACCEPT_BATCH = 16


class ServedTenant:
    """`changed` is called when what is known of the tenant's processes became different."""

    def __init__(
        self, row: Tenant, listener: socket.socket, tokens: Tokens, settings: Settings, changed: Callable[[], None]
    ) -> None:
        self.row = row
        self.processes = Processes(self._exited)
        self.greeted_ever = False
        self._tokens = tokens
        self._settings = settings
        self._changed = changed
        self._connections: set[Connection] = set()
        self._ledgers = self._new_ledgers(row)
        self._hints = protocol.HintsPage()
        self._timer: asyncio.TimerHandle | None = None
        self._full_logged = False
        self._listener: socket.socket | None = listener
        self._loop = asyncio.get_running_loop()
        self._set_rates()
        self._loop.add_reader(listener.fileno(), self._accept)

    # ---- what the ledger of the node says

    def update(self, row: Tenant) -> None:
        """New rates or memory of the same tenant on the same GPUs; every client is told."""
        assert row.gpus == self.row.gpus, "a tenant never moves"
        self.row = row
        self._set_rates()
        now = time.monotonic_ns()
        for index, ledger in enumerate(self._ledgers):
            actions = ledger.set_limit(now, row.memory, enforced=row.memory_isolation is MemoryIsolation.ENFORCED)
            self._carry_out(index, actions)
        self._hints.limits_changed()
        for client in list(self._connections):
            if client.greeted:
                client.send(protocol.Limits(self.terms(), self.grace_ms))
        self._arm()

    def observe(self, memory_of: dict[str, int]) -> None:
        """What the driver says that this tenant's processes use, in bytes by UUID."""
        for gpu, ledger in zip(self.row.gpus, self._ledgers, strict=True):
            ledger.observe(memory_of.get(gpu, 0))

    def stop(self, reason: str | None) -> None:
        """Closes socket and clients, with a word to them if there is a reason. Processes are watched on until
        `close`."""
        if self._listener is None:
            return
        self._loop.remove_reader(self._listener.fileno())
        self._listener.close()
        self._listener = None
        for client in list(self._connections):
            if reason is None:
                client.close()
            else:
                client.refuse(RefusedReason.RELEASING, reason)
        self._tokens.remove(self.row.id)
        self._connections.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._hints.close()

    def close(self) -> None:
        """Ends all of it."""
        self.stop(None)
        self.processes.close()

    # ---- what is known

    @property
    def connected(self) -> int:
        """Clients that have said hello and are there."""
        return sum(1 for client in self._connections if client.greeted)

    def used(self) -> int:
        """Bytes in use on that of its GPUs where it uses most."""
        return max(ledger.used for ledger in self._ledgers)

    def used_by_gpu(self) -> dict[str, int]:
        """Bytes in use by UUID."""
        return {gpu: ledger.used for gpu, ledger in zip(self.row.gpus, self._ledgers, strict=True)}

    # ---- Service of a connection

    def terms(self) -> tuple[protocol.GpuTerms, ...]:
        """What was granted, GPU by GPU."""
        row = self.row
        enforced = row.memory_isolation is MemoryIsolation.ENFORCED
        return tuple(
            protocol.GpuTerms(uuid_bytes(gpu), row.request_milli, row.limit_milli, row.memory, enforced)
            for gpu in row.gpus
        )

    @property
    def grace_ms(self) -> int:
        """How long closing the gate may take."""
        return self._settings.grace_ms

    @property
    def hints_fd(self) -> int:
        """The page to pass on."""
        return self._hints.fd

    def welcomed(self, client: Connection) -> None:
        """A hook has connected."""
        self.greeted_ever = True
        self._tokens.attend(self.row.id, present=True)
        log.debug("client connected", tenant=self.row.id, pid=client.pid)
        self._changed()

    def handle(self, client: Connection, frame: protocol.ClientFrame) -> None:
        """A frame of a client that has said hello. Raises `ProtocolError`."""
        match frame:
            case protocol.Want():
                if frame.gpu_mask >> len(self.row.gpus):
                    raise ProtocolError(f"gpu_mask {frame.gpu_mask:#x} names a GPU that is not the tenant's")
                self._tokens.want(self.row.id, client)
            case protocol.Drained():
                self._tokens.drained(self.row.id, client, frame)
            case protocol.Reserve() | protocol.Release() | protocol.MemInfo():
                if frame.gpu >= len(self._ledgers):
                    raise ProtocolError(f"gpu {frame.gpu} is not the tenant's")
                try:
                    self._handle_memory(client, frame)
                except LedgerError as error:
                    raise ProtocolError(str(error)) from None
            case _:
                raise ProtocolError(f"{type(frame).__name__} may not come now")

    def _handle_memory(self, client: Connection, frame: protocol.Reserve | protocol.Release | protocol.MemInfo) -> None:
        ledger = self._ledgers[frame.gpu]
        now = time.monotonic_ns()
        match frame:
            case protocol.Reserve(handover=True):
                if not client.handover_open or frame.bytes > _HANDOVER_MAX:
                    raise ProtocolError("a handover after the first request for memory, or of more than any GPU has")
                ledger.handover(client, frame.bytes)
                client.send(protocol.Reserved(frame.seq, frame.gpu, frame.bytes))
            case protocol.Reserve():
                client.handover_open = False
                self._carry_out(frame.gpu, ledger.reserve(now, client, frame.seq, frame.bytes))
            case protocol.Release():
                actions = ledger.release(now, client, frame.bytes, recalled=frame.recalled)
                self._carry_out(frame.gpu, actions)
            case protocol.MemInfo():
                used = ledger.used_without(client, frame.idle)
                client.send(protocol.Memory(frame.seq, frame.gpu, ledger.limit, used))
        self._arm()

    # ---- inside

    def _new_ledgers(self, row: Tenant) -> tuple[MemoryLedger, ...]:
        enforced = row.memory_isolation is MemoryIsolation.ENFORCED
        recall_ns = self._settings.recall_ms * 1_000_000
        return tuple(MemoryLedger(row.memory, enforced=enforced, recall_ns=recall_ns) for _ in row.gpus)

    def _set_rates(self) -> None:
        self._tokens.set_tenant(
            self.row.id,
            self.row.gpus,
            request_milli=self.row.request_milli,
            limit_milli=self.row.limit_milli,
            contended=self._set_contended,
        )

    def _set_contended(self, contended: bool) -> None:
        self._hints.contended = contended

    def _accept(self) -> None:
        for _ in range(_ACCEPT_BATCH):
            if self._listener is None:
                return
            try:
                sock, _address = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                log.error("cannot accept a client", tenant=self.row.id, error=error.strerror)
                return
            self._admit(sock)

    def _admit(self, sock: socket.socket) -> None:
        full = self._settings.connections_max
        if len(self._connections) >= full or len(self.processes) >= full:
            if not self._full_logged:
                log.warning("tenant has too many processes connected, refusing more", tenant=self.row.id, most=full)
                self._full_logged = True
            sock.close()
            return
        self._full_logged = False
        pid, pidfd = peer_of(sock)
        if pidfd is not None:
            self.processes.add(pid, pidfd)
        self._connections.add(Connection(sock, pid, self, self._gone))

    def _exited(self, pid: int) -> None:
        """Its socket may live on in a child; what it held does not."""
        for client in [client for client in self._connections if client.pid == pid]:
            client.close()
        self._changed()

    def _gone(self, client: Connection) -> None:
        if client not in self._connections:
            return
        self._connections.discard(client)
        self._tokens.vanished(self.row.id, client)
        self._tokens.attend(self.row.id, present=self.connected > 0)
        now = time.monotonic_ns()
        for index, ledger in enumerate(self._ledgers):
            self._carry_out(index, ledger.vanish(now, client))
        self._arm()
        self._changed()

    def _carry_out(self, index: int, actions: list[memory.Action]) -> None:
        for action in actions:
            client = action.client
            assert isinstance(client, Connection), "the ledger's clients are connections"
            if isinstance(action, Credited):
                client.send(protocol.Reserved(action.seq, index, action.bytes))
            elif isinstance(action, RecallFrom):
                client.send(protocol.Recall(index, action.bytes))

    def _arm(self) -> None:
        """One timer for whichever request for memory has to be decided first."""
        due = min((when for ledger in self._ledgers if (when := ledger.next_deadline()) is not None), default=None)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if due is not None:
            delay = max(0, due - time.monotonic_ns()) / 1e9
            self._timer = self._loop.call_later(delay, self._decide)

    def _decide(self) -> None:
        self._timer = None
        now = time.monotonic_ns()
        for index, ledger in enumerate(self._ledgers):
            self._carry_out(index, ledger.expire(now))
        self._arm()


def uuid_bytes(gpu: str) -> bytes:
    """The raw bytes of a GPU's UUID as NVML prints it."""
    return UUID(gpu.removeprefix("GPU-")).bytes
