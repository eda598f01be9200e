"""One tenant being served: its socket, its clients, its hints page; what they hold stands in its token and memory.

It begins with a listening socket and ends with `close`; what it was told about the tenant's row it holds to until it
is told anew.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import resource
import socket
from collections import deque
from collections.abc import Callable, Collection, Mapping
from uuid import UUID

import structlog

from sharepod import protocol
from sharepod.agent.settings import AgentSettings
from sharepod.agent.shares.tenant_memory import TenantMemory
from sharepod.agent.shares.tokens import Tokens
from sharepod.agent.sockets.connection import HookConnection
from sharepod.agent.sockets.frame_budget import FrameBudget
from sharepod.agent.sockets.inbox import Inbox, Sender
from sharepod.agent.sockets.listener import Listener
from sharepod.agent.sockets.peers import EXHAUSTED, PeerProcesses, peer_of, peer_pid
from sharepod.agent.sockets.refusals import ClientRefusal, RefusalLog
from sharepod.agent.state.handover import Handover, Inheritance, Survivor, start_time
from sharepod.api.gpunode import MemoryIsolation, Tenant
from sharepod.protocol import ProtocolError, RefusedReason
from sharepod.timeshare import AccountSnapshot

log = structlog.get_logger(__name__)

_DESCRIPTORS_KEPT = 64
"""So many descriptors are not given to clients: the agent's own work needs some."""


class ServedTenant:
    """`changed` is called when what is known of the tenant's processes became different."""

    def __init__(
        self,
        row: Tenant,
        listener: socket.socket,
        tokens: Tokens,
        settings: AgentSettings,
        changed: Callable[[], None],
        *,
        budget: FrameBudget,
        handover: Handover,
        left: Inheritance,
    ) -> None:
        """`left`: what an earlier agent left of the tenant. Raises `OSError` where its processes cannot be watched."""
        self.row = row
        self.processes = PeerProcesses(self._exited)
        self.greeted_ever = left.greeted
        """Whether any hook has connected, be it to an earlier agent."""
        self._hooked: set[int] = set()
        """Pids of processes that said hello as ones that use the GPU. To connect, or to look on, is not enough."""
        self.memory = TenantMemory(row, recall_ms=settings.recall_ms, handover=handover, left=left)
        self._tokens = tokens
        self._settings = settings
        self._changed = changed
        self._connections: set[HookConnection] = set()
        self._users: set[HookConnection] = set()
        """Of these, those that have said hello and may use a GPU."""
        self._lost: deque[HookConnection] = deque()
        """Those that are closed, of which nobody else knows it yet."""
        self.context_kib: Callable[[str], int] = lambda uuid: 0
        """By UUID, what each process's context takes; 0: not known."""
        self._untold: set[int] = set()
        """Pids that were told nothing of it, and so reserve nothing for it."""
        self._handover = handover
        self._budget = budget
        self._loop = asyncio.get_running_loop()
        self.refusals = RefusalLog(row.id, self._loop.time)
        """Why its clients were closed."""
        try:
            for survivor in left.survivors:
                self._watch(survivor)
            self._hints = protocol.HintsPage()
        except OSError:
            self.processes.close()
            raise
        try:
            self._inbox = Inbox(row.id, budget, per_s=settings.frames_per_s, on_flood=self._disconnect_flooder)
        except OSError:
            self.processes.close()
            self._hints.close()
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
        for client in list(self._connections):
            if reason is None:
                client.close()
            else:
                client.refuse(RefusedReason.RELEASING, reason)
        self._handover.keep_account(self._tokens.state(self.row.id))
        self._tokens.remove(self.row.id)
        self._inbox.close()
        self._connections.clear()
        self._users.clear()
        self.memory.close()
        self._handover.close()
        self._hints.close()

    def close(self) -> None:
        """Ends all of it."""
        self.stop(None)
        self.processes.close()

    # ---- what is known

    @property
    def throttled(self) -> int:
        """How often its clients had to wait because they sent too much."""
        return self._inbox.throttled

    @property
    def connected(self) -> int:
        """Clients that have said hello, may use a GPU, and are there."""
        return len(self._users)

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

    def on_hello(self, client: HookConnection) -> None:
        """A hook has connected."""
        if client.observes:
            return
        self._users.add(client)
        if len(self._users) == 1:
            self._tokens.set_connected(self.row.id, connected=True)
        if not any(self.context_kib(gpu) for gpu in self.row.gpus):
            self._untold.add(client.pid)
        if not self.greeted_ever:
            self.greeted_ever = True
            self._handover.keep_greeted()
        if client.pid in self.processes:
            self._hooked.add(client.pid)
            self.memory.admit(client)
        log.debug("client connected", tenant=self.row.id, pid=client.pid)
        self._changed()

    def record_refusal(self, why: ClientRefusal, *, pid: int, error: str | None = None) -> None:
        """A client is being closed."""
        self.refusals.add(why, pid=pid, error=error)

    def handle(self, client: HookConnection, frame: protocol.ClientFrame) -> None:
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

    def _watch(self, survivor: Survivor) -> None:
        """A process that was a client of an earlier agent."""
        try:
            pidfd = os.pidfd_open(survivor.pid)
        except OSError as error:
            if error.errno in EXHAUSTED:
                raise
            self.memory.exited(survivor.pid)
            return
        if start_time(survivor.pid) == survivor.start:
            self.processes.add(survivor.pid, pidfd)
            self._hooked.add(survivor.pid)
        else:
            os.close(pidfd)
            self.memory.exited(survivor.pid)

    def _set_rates(self, resumed: AccountSnapshot | None = None) -> None:
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

    def _disconnect_flooder(self, client: Sender) -> None:
        assert isinstance(client, HookConnection)
        self.record_refusal(
            ClientRefusal.FLOOD, pid=client.pid, error=f"{client.longest_streak} frames without a pause"
        )
        client.close()

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
        client = HookConnection(sock, pid, self, self._inbox, self._gone)
        self._connections.add(client)

    def _turn_away(self, sock: socket.socket) -> None:
        """Says that there are too many; the hook launches nothing meanwhile and tries again. Without the word it would
        go by its own clock, beside the others, as if there were no agent."""
        text = (
            f"the tenant has {self._settings.connections_max} processes connected, as many as the agent's setting "
            "connections_max allows; this one waits for another to end"
        )
        self.record_refusal(ClientRefusal.FULL, pid=peer_pid(sock), error=text)
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

    def _gone(self, client: HookConnection) -> None:
        """Its connection is closed. What follows of it is done in slices: a thousand may close at once."""
        self._lost.append(client)
        if len(self._lost) == 1:
            self._let_go()

    def _let_go(self) -> None:
        begun, until = self._loop.time(), self._budget.begin_turn()
        while self._lost:
            self._forget(self._lost[0])
            self._lost.popleft()
            if self._loop.time() >= until:
                break
        self._inbox.charge(self._loop.time() - begun)
        if self._lost:
            self._loop.call_soon(self._let_go)

    def _forget(self, client: HookConnection) -> None:
        if client not in self._connections:
            return
        self._connections.discard(client)
        alive = client.pid in self.processes
        self._tokens.connection_lost(self.row.id, client, alive=alive)
        if client in self._users:
            self._users.discard(client)
            if not self._users:
                self._tokens.set_connected(self.row.id, connected=False)
        self.memory.gone(client, alive=alive)
        self._changed()


def uuid_bytes(gpu: str) -> bytes:
    """The raw bytes of a GPU's UUID as NVML prints it."""
    return UUID(gpu.removeprefix("GPU-")).bytes
