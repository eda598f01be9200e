"""One tenant being served: its socket, its clients, its hints page; what they hold stands in its token and memory.

It begins with a listening socket and ends with `close`; what it was told about the tenant's row it holds to until it
is told anew.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import math
import os
import resource
import socket
from collections.abc import Callable, Collection, Mapping
from uuid import UUID

import structlog

from sharepod import protocol
from sharepod.api.gpunode import MemoryIsolation, Tenant
from sharepod.protocol import ProtocolError, RefusedReason
from sharepod.timeshare import AccountState

from .connection import Connection
from .handover import HandOver, Holder, Left, start_time
from .listener import Listener
from .pace import Pace
from .processes import EXHAUSTED, Processes, peer_of, peer_pid
from .refusals import Refusal, Refusals
from .settings import Settings
from .tenantmemory import TenantMemory
from .tokens import Tokens

log = structlog.get_logger(__name__)

_FRAMES_A_TURN = 32
"""Frames of all of one tenant's clients that are handled before other tenants get their turn."""
_HASTE_PAUSE_S = 0.1
"""So long nothing is read of a tenant that sends too much."""
_FLOOD_S = 1.0
"""Who sends most of what is too much for so long is disconnected."""
_AT_ONCE = 256
"""More frames than any hook has on the way at once."""
_DESCRIPTORS_KEPT = 64
"""So many descriptors are not given to clients: the agent's own work needs some."""


class ServedTenant:
    """`changed` is called when what is known of the tenant's processes became different."""

    def __init__(
        self,
        row: Tenant,
        listener: socket.socket,
        tokens: Tokens,
        settings: Settings,
        changed: Callable[[], None],
        *,
        handover: HandOver,
        left: Left,
    ) -> None:
        """`left`: what an earlier agent left of the tenant. Raises `OSError` where its processes cannot be watched."""
        self.row = row
        self.processes = Processes(self._exited)
        self.greeted_ever = left.greeted
        """Whether any hook has connected, be it to an earlier agent."""
        self._hooked: set[int] = set()
        """Pids of processes that said hello as ones that use the GPU. To connect, or to look on, is not enough."""
        self.memory = TenantMemory(row, recall_ms=settings.recall_ms, handover=handover, left=left)
        self._tokens = tokens
        self._settings = settings
        self._changed = changed
        self._connections: set[Connection] = set()
        self.context_kib: Callable[[str], int] = lambda uuid: 0
        """By UUID, what each process's context takes; 0: not known."""
        self._untold: set[int] = set()
        """Pids that were told nothing of it, and so reserve nothing for it."""
        self._handover = handover
        self._frames_left = _FRAMES_A_TURN
        self._loop = asyncio.get_running_loop()
        self.refusals = Refusals(row.id, self._loop.time)
        """Why its clients were closed."""
        self.throttled = 0
        """How often its clients had to wait because they sent too much."""
        self._pace = Pace(self._loop.time(), per_s=settings.frames_per_s, burst=settings.frames_per_s)
        self._held_back: asyncio.TimerHandle | None = None
        self._flooded_since = self._flooded_at = -math.inf
        try:
            for holder in left.holders:
                self._watch(holder)
            self._hints = protocol.HintsPage()
        except OSError:
            self.processes.close()
            raise
        self._set_rates(left.account)
        self._listener: Listener | None = Listener(
            listener, row.id, self._admit, per_s=settings.connects_per_s, burst=settings.connections_max
        )

    # ---- what the ledger of the node says

    def update(self, row: Tenant) -> None:
        """New rates or memory of the same tenant on the same GPUs; every client is told."""
        assert row.gpus == self.row.gpus, "a tenant never moves"
        self.row = row
        self._set_rates()
        self.memory.set_limits(row)
        self._hints.limits_changed()
        for client in list(self._connections):
            if client.greeted:
                client.send(protocol.Limits(self.terms(), self.grace_ms))

    def begin_reading(self) -> None:
        """From now on the driver is being read."""
        self.memory.begin_reading()

    def observe(self, memory_of: Mapping[str, Mapping[int, int]], *, unread: Collection[str], exhaustive: bool) -> None:
        """What the driver says that this tenant's processes use, in bytes by UUID and pid. `unread`: GPUs that it did
        not say it of. `exhaustive`: who is not listed is not on that GPU."""
        self.memory.observe(memory_of, unread=unread, absent=self.processes.pids if exhaustive else ())

    def checkpoint(self) -> None:
        """Writes down the time account for the next agent, if it can have changed."""
        if self._listener is not None and self.connected:
            self._handover.keep_account(self._tokens.state(self.row.id))

    def stop(self, reason: str | None) -> None:
        """Closes socket and clients, with a word to them if there is a reason. Processes are watched on until
        `close`."""
        if self._listener is None:
            return
        self._listener.close()
        self._listener = None
        if self._held_back is not None:
            self._held_back.cancel()
            self._held_back = None
        for client in list(self._connections):
            if reason is None:
                client.close()
            else:
                client.refuse(RefusedReason.RELEASING, reason)
        self._handover.keep_account(self._tokens.state(self.row.id))
        self._tokens.remove(self.row.id)
        self._connections.clear()
        self.memory.close()
        self._handover.close()
        self._hints.close()

    def close(self) -> None:
        """Ends all of it."""
        self.stop(None)
        self.processes.close()

    # ---- what is known

    @property
    def connected(self) -> int:
        """Clients that have said hello, may use a GPU, and are there."""
        return sum(1 for client in self._connections if client.greeted and not client.observes)

    @property
    def hooked(self) -> frozenset[int]:
        """Its processes whose hook has connected, be it to an earlier agent."""
        return frozenset(self._hooked)

    def beyond_credits(self, gpu: str, by_pid: Mapping[int, int]) -> dict[int, int]:
        """Of its processes that reserve nothing for their contexts, what the driver counts of each on a GPU (`by_pid`,
        in bytes) beyond what it was credited."""
        self._untold &= self.processes.pids
        return {pid: by_pid[pid] - self.memory.credited(gpu, pid) for pid in self._untold if by_pid.get(pid)}

    # ---- Service of a connection

    def terms(self) -> tuple[protocol.GpuTerms, ...]:
        """What was granted, GPU by GPU."""
        row = self.row
        enforced = row.memory_isolation is MemoryIsolation.ENFORCED
        return tuple(
            protocol.GpuTerms(
                uuid_bytes(gpu), row.request_milli, row.limit_milli, row.memory, enforced, self.context_kib(gpu)
            )
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
        if client.observes:
            return
        if not any(self.context_kib(gpu) for gpu in self.row.gpus):
            self._untold.add(client.pid)
        if not self.greeted_ever:
            self.greeted_ever = True
            self._handover.keep_greeted()
        if client.pid in self.processes:
            self._hooked.add(client.pid)
            self.memory.admit(client)
        self._tokens.attend(self.row.id, present=True)
        log.debug("client connected", tenant=self.row.id, pid=client.pid)
        self._changed()

    def take_turn(self, client: Connection) -> bool:
        """Whether one more frame of this client may be handled in this turn of the loop."""
        if self._frames_left == 0:
            return False
        if not self._pace.take(self._loop.time()):
            self._hold_back()
            return False
        if self._frames_left == _FRAMES_A_TURN:
            self._loop.call_soon(self._next_turn)
        self._frames_left -= 1
        client.unbroken += 1
        return True

    def complain(self, why: Refusal, *, pid: int, error: str | None = None) -> None:
        """A client is being closed."""
        self.refusals.add(why, pid=pid, error=error)

    def handle(self, client: Connection, frame: protocol.ClientFrame) -> None:
        """A frame of a client that has said hello. Raises `ProtocolError`."""
        if (
            client.handover_open
            and not client.observes
            and not (isinstance(frame, protocol.Reserve) and frame.handover)
        ):
            self.memory.declared(client)
        match frame:
            case protocol.Want():
                if frame.gpu_mask >> len(self.row.gpus):
                    raise ProtocolError(f"gpu_mask {frame.gpu_mask:#x} names a GPU that is not the tenant's")
                self._tokens.want(self.row.id, client)
            case protocol.Draining():
                self._tokens.draining(self.row.id, client, frame)
            case protocol.Drained():
                self._tokens.drained(self.row.id, client, frame)
            case protocol.Reserve() | protocol.Release() | protocol.MemInfo():
                self.memory.handle(client, frame)
            case _:
                raise ProtocolError(f"{type(frame).__name__} may not come now")

    # ---- inside

    def _watch(self, holder: Holder) -> None:
        """A process that was a client of an earlier agent."""
        try:
            pidfd = os.pidfd_open(holder.pid)
        except OSError as error:
            if error.errno in EXHAUSTED:
                raise
            self.memory.exited(holder.pid)
            return
        if start_time(holder.pid) == holder.start:
            self.processes.add(holder.pid, pidfd)
            self._hooked.add(holder.pid)
        else:
            os.close(pidfd)
            self.memory.exited(holder.pid)

    def _set_rates(self, resumed: AccountState | None = None) -> None:
        self._tokens.set_tenant(
            self.row.id,
            self.row.gpus,
            request_milli=self.row.request_milli,
            limit_milli=self.row.limit_milli,
            contended=self._set_contended,
            resumed=resumed,
        )

    def _set_contended(self, contended: bool) -> None:
        self._hints.contended = contended

    def _next_turn(self) -> None:
        self._frames_left = _FRAMES_A_TURN

    def _hold_back(self) -> None:
        """Reads nothing of the tenant's clients for a moment. Of those who keep on sending too much without waiting for
        an answer, the one that sent most is closed."""
        if self._held_back is not None:
            return
        self.throttled += 1
        now = self._loop.time()
        if now - self._flooded_at > _FLOOD_S:
            self._flooded_since = now
        elif now - self._flooded_since > _FLOOD_S:
            self._flooded_since = now
            loudest = max(self._connections, key=lambda client: client.unbroken)
            if loudest.unbroken > _AT_ONCE:
                self.complain(Refusal.FLOOD, pid=loudest.pid, error=f"{loudest.unbroken} frames without a pause")
                loudest.close()
        for client in self._connections:
            client.pause()
        self._held_back = self._loop.call_later(_HASTE_PAUSE_S, self._go_on)

    def _go_on(self) -> None:
        self._held_back = None
        self._flooded_at = self._loop.time()
        for client in self._connections:
            client.resume()

    def _admit(self, sock: socket.socket) -> None:
        """Takes the client in, or closes it. Raises `OSError` where it cannot be watched."""
        full = self._settings.connections_max
        connected_before = peer_pid(sock) in self.processes  # it has lost a connection, and its place is its own
        if len(self._connections) >= full or (len(self.processes) >= full and not connected_before):
            self._turn_away(sock)
            return
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        if most != resource.RLIM_INFINITY and sock.fileno() >= most - _DESCRIPTORS_KEPT:
            raise OSError(errno.EMFILE, "no descriptors left for clients; raise the agent's limit of open files")
        pid, pidfd = peer_of(sock)
        if pidfd is not None:
            self.processes.add(pid, pidfd)
        client = Connection(sock, pid, self, self._gone)
        self._connections.add(client)
        if self._held_back is not None:
            client.pause()

    def _turn_away(self, sock: socket.socket) -> None:
        """Says that there are too many; the hook launches nothing meanwhile and tries again. Without the word it would
        go by its own clock, beside the others, as if there were no agent."""
        text = (
            f"the tenant has {self._settings.connections_max} processes connected, as many as the agent's setting "
            "connections_max allows; this one waits for another to end"
        )
        self.complain(Refusal.FULL, pid=peer_pid(sock), error=text)
        with contextlib.suppress(OSError):  # it need not be there any more
            sock.send(protocol.encode(protocol.Refused(RefusedReason.FULL, text)))
        sock.close()

    def _exited(self, pid: int) -> None:
        """Its socket may live on in a child; what it held does not."""
        for client in [client for client in self._connections if client.pid == pid]:
            client.close()
        self._hooked.discard(pid)
        self._tokens.exited(self.row.id, pid)
        self.memory.exited(pid)
        self._changed()

    def _gone(self, client: Connection) -> None:
        if client not in self._connections:
            return
        self._connections.discard(client)
        alive = client.pid in self.processes
        self._tokens.vanished(self.row.id, client, alive=alive)
        self._tokens.attend(self.row.id, present=self.connected > 0)
        self.memory.gone(client, alive=alive)
        self._changed()


def uuid_bytes(gpu: str) -> bytes:
    """The raw bytes of a GPU's UUID as NVML prints it."""
    return UUID(gpu.removeprefix("GPU-")).bytes
