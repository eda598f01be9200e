"""Runtime of one shared tenant: its socket, its clients (connected processes), its hints page. It dispatches clients'
frames to the token and the memory ledgers.

Guarantees:
- A client is served only once the agent watches its process by a pidfd. So the credits of a process are free as soon as
  it exits.
- At most `connections_max` processes and connections are served. A further process is refused and retries.
- Clients cannot use up the descriptors that the agent needs for its own work (`_DESCRIPTORS_KEPT`).
- After `stop` no client is served. Processes are watched until `close`.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import math
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
from sharepod.agent.sockets.frame_budget import FrameBudget
from sharepod.agent.sockets.hook_connection import HookConnection
from sharepod.agent.sockets.inbox import Inbox, Sender
from sharepod.agent.sockets.peers import NodePeers, Peer, PeerProcesses, Peers, send_packet
from sharepod.agent.sockets.refusals import ClientRefusal, RefusalLog
from sharepod.agent.state.handover import Handover, Inheritance, Survivor
from sharepod.api.gpunode import CoRunningPolicy, Latency, MemoryIsolation, Tenant
from sharepod.listener import Listener
from sharepod.protocol import ProtocolError, RefusedReason
from sharepod.timeshare import AccountSnapshot

log = structlog.get_logger(__name__)

_DESCRIPTORS_KEPT = 64
"""Descriptors that clients may not use up, so that the agent can still open files and reach the API server."""


class ServedTenant:
    """Runtime of one shared tenant, from its listening socket to `close`.

    Args:
        row: The tenant's row of the ledger.
        listener: Listening socket in the tenant's directory; owned.
        tokens: The node's token scheduler.
        settings: Settings of the agent.
        changed: Called when the tenant's processes or their state have changed.
        budget: The node's budget of processor time for frames.
        handover: File with the tenant's state for the next agent; owned.
        left: State that an earlier agent has left.
        peers: Source of the identities of processes behind connections.

    Raises `OSError` if the processes that an earlier agent left cannot be watched.
    """

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
        peers: Peers | None = None,
    ) -> None:
        self.row = row
        self._peers: Peers = peers or NodePeers()
        self._unidentified = 0
        """Number of accepted connections whose process is still being identified."""
        self.processes = PeerProcesses(self._exited)
        self.greeted_ever = left.greeted
        """True once any hook of the tenant has connected, to this agent or an earlier one."""
        self._measured_from = -math.inf if left.greeted else math.inf
        """Loop time at which a hook has been connected for the whole window of `TimeUsage.held_milli`, so that the
        value counts."""
        self._hooked: set[int] = set()
        """Pids of processes that have sent Hello as users of a GPU. A connection without Hello, or of an observer, does
        not count."""
        self.memory = TenantMemory(row, recall_ms=settings.recall_ms, handover=handover, left=left)
        self._tokens = tokens
        self._settings = settings
        self._changed = changed
        self._connections: set[HookConnection] = set()
        self._users: set[HookConnection] = set()
        """Connections that have completed Hello and may use a GPU."""
        self._closed_connections: deque[HookConnection] = deque()
        """Closed connections whose token and memory have not been released yet."""
        self.context_kib: Callable[[str], int] = lambda uuid: 0
        """Returns the KiB that a CUDA context takes on a GPU, by UUID; 0 if unknown."""
        self._unaware: set[int] = set()
        """Pids of processes that connected before the size of contexts was known, and so reserve no memory for
        theirs."""
        self._handover = handover
        self._budget = budget
        self._loop = asyncio.get_running_loop()
        self.refusals = RefusalLog(row.id, self._loop.time)
        """Counts and logs the refused clients of this tenant."""
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
        self._listener: Listener | None = self._listening(listener)

    # ---- changes of the row, readings of the inventory

    def update(self, row: Tenant) -> None:
        """Apply new rates or memory on the same GPUs, and notify every client."""
        assert row.gpus == self.row.gpus, "a tenant never moves"
        self.row = row
        self._set_rates()
        self.memory.set_limits(row)
        self._hints.limits_changed()
        for client in list(self._connections):
            if client.greeted:
                client.send(protocol.Limits(self.terms(), self.grace_ms))

    def begin_reading(self) -> None:
        """Start a reading of the driver, see `TenantMemory.begin_reading`."""
        self.memory.begin_reading()

    def observe(self, memory_of: Mapping[str, Mapping[int, int]], *, unread: Collection[str], exhaustive: bool) -> None:
        """Pass the memory use of the tenant's processes, as the driver reports it, to the memory ledgers.

        Args:
            memory_of: Bytes in use, by GPU UUID and pid.
            unread: UUIDs of GPUs that could not be read.
            exhaustive: True if a process that is not listed for a GPU uses nothing there.
        """
        self.memory.observe(memory_of, unread=unread, absent=self.processes.pids if exhaustive else ())

    def checkpoint(self) -> None:
        """Write the time account for the next agent, if it can have changed."""
        if self._listener is not None and self.connected:
            self._handover.keep_account(self._tokens.snapshot(self.row.id))

    def stop(self, reason: str | None) -> None:
        """Close the socket and all clients. `reason`: text that they are sent first; None: none. Processes are watched
        until `close`."""
        if self._listener is None:
            return
        self._listener.close()
        self._listener = None
        for client in list(self._connections):
            if reason is None:
                client.close()
            else:
                client.refuse(RefusedReason.RELEASING, reason)
        self._handover.keep_account(self._tokens.snapshot(self.row.id))
        self._tokens.remove(self.row.id)
        self._inbox.close()
        self._connections.clear()
        self._users.clear()
        self.memory.close()
        self._handover.close()
        self._hints.close()

    def close(self) -> None:
        """Stop serving and watching."""
        self.stop(None)
        self.processes.close()

    # ---- state for readers

    @property
    def throttled(self) -> int:
        """Number of times that the tenant was throttled because its clients sent too many frames."""
        return self._inbox.throttled

    @property
    def connected(self) -> int:
        """Number of connected clients that may use a GPU."""
        return len(self._users)

    @property
    def hooked(self) -> frozenset[int]:
        """Pids of running processes whose hook has connected, to this agent or an earlier one."""
        return frozenset(self._hooked)

    def beyond_credits(self, gpu: str, by_pid: Mapping[int, int]) -> dict[int, int]:
        """Return by pid the bytes that a process uses on a GPU beyond its credits. Only processes that reserve nothing
        for contexts count. `by_pid`: bytes by the driver."""
        self._unaware &= self.processes.pids
        return {pid: by_pid[pid] - self.memory.credited(gpu, pid) for pid in self._unaware if by_pid.get(pid)}

    # ---- `Service` of a connection

    @property
    def tenant_id(self) -> str:
        """Id of the tenant."""
        return self.row.id

    def terms(self) -> tuple[protocol.GpuTerms, ...]:
        """Return the tenant's share of each of its GPUs, in the ledger's order."""
        row = self.row
        enforced = row.memory_isolation is MemoryIsolation.ENFORCED
        return tuple(
            protocol.GpuTerms(
                uuid_bytes(gpu), row.request_milli, row.limit_milli, row.memory, enforced, self.context_kib(gpu)
            )
            for gpu in row.gpus
        )

    @property
    def measured(self) -> bool:
        """True once a hook has been connected for the whole averaging window of the tenant's usage."""
        return self._loop.time() >= self._measured_from

    @property
    def grace_ms(self) -> int:
        """Milliseconds within which a client must close its gate and drain."""
        return self._settings.grace_ms

    @property
    def hints_fd(self) -> int:
        """Descriptor of the hints page, to send to clients."""
        return self._hints.fd

    def on_hello(self, client: HookConnection) -> None:
        """Record that a client has completed Hello: it is now a user of the GPUs, unless it is an observer."""
        if client.observes:
            return
        self._users.add(client)
        if len(self._users) == 1 or not client.samples_progress:
            self._connected()
        if not any(self.context_kib(gpu) for gpu in self.row.gpus):
            self._unaware.add(client.pid)
        if not self.greeted_ever:
            self.greeted_ever = True
            self._measured_from = self._loop.time() + self._settings.timeshare().window_ns / 1e9
            self._handover.keep_greeted()
        if client.pid in self.processes:
            self._hooked.add(client.pid)
            self.memory.admit(client)
        log.debug("client connected", tenant=self.row.id, pid=client.pid)
        self._changed()

    def record_refusal(self, why: ClientRefusal, *, pid: int, error: str | None = None) -> None:
        """Count a refused client, and log it at most every 10 s."""
        self.refusals.add(why, pid=pid, error=error)

    def handle(self, client: HookConnection, frame: protocol.ClientFrame) -> None:
        """Dispatch a frame of a welcomed client to token or memory. Raises `ProtocolError`."""
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
        """Watch a process that was a client of an earlier agent; free its credits if it has exited."""
        pidfd = self._peers.watch(survivor)
        if pidfd is None:
            self.memory.exited(survivor.pid)
            return
        self.processes.add(survivor.pid, pidfd)
        self._hooked.add(survivor.pid)

    def _set_rates(self, resumed: AccountSnapshot | None = None) -> None:
        self._tokens.set_tenant(
            self.row.id,
            self.row.gpus,
            request_milli=self.row.request_milli,
            limit_milli=self.row.limit_milli,
            interactive=self.row.latency is Latency.INTERACTIVE,
            group=None if self.row.group is None else f"{self.row.namespace}/{self.row.group}",
            contended=self._set_contended,
            bar=self._bar,
            together=self._set_together,
            resumed=resumed,
        )

    def _listening(self, listener: socket.socket) -> Listener:
        settings = self._settings
        return Listener(
            listener,
            {"tenant": self.row.id},
            self._admit,
            per_s=settings.connects_per_s,
            burst=settings.connections_max,
        )

    def _set_together(self, together: bool) -> None:
        self._hints.co_running = together

    def _set_contended(self, contended: bool) -> None:
        self._hints.contended = contended

    def _bar(self, grant_id: int) -> None:
        self._hints.bar(grant_id)

    def _disconnect_flooder(self, client: Sender) -> None:
        assert isinstance(client, HookConnection)
        self.record_refusal(
            ClientRefusal.FLOOD, pid=client.pid, error=f"{client.longest_streak} frames without a pause"
        )
        client.close()

    def _admit(self, sock: socket.socket) -> None:
        """Admit a new connection, or refuse it. Raises `OSError` if its process cannot be watched."""
        pid = self._peers.pid(sock)
        if len(self._connections) + self._unidentified >= self._settings.connections_max or self._has_no_place(pid):
            self._turn_away(sock, pid or 0)
            return
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        if most != resource.RLIM_INFINITY and sock.fileno() >= most - _DESCRIPTORS_KEPT:
            raise OSError(errno.EMFILE, "no descriptors left for clients; raise the agent's limit of open files")
        peer = self._peers.identify(self.row.id, sock, self._identified)
        if peer is None:
            self._unidentified += 1
        else:
            self._take_in(sock, peer)

    def _has_no_place(self, pid: int | None) -> bool:
        """Return True if serving the process `pid` would exceed `connections_max`. A process that lost its connection
        keeps its place."""
        return pid is not None and len(self.processes) >= self._settings.connections_max and pid not in self.processes

    def _identified(self, sock: socket.socket, peer: Peer | None) -> None:
        """Admit or refuse a connection whose process has been identified. `peer`: None if it could not be."""
        self._unidentified -= 1
        if peer is None:
            sock.close()
        elif self._listener is None or self._has_no_place(peer.pid):
            if peer.pidfd is not None:
                os.close(peer.pidfd)
            if self._listener is None:
                sock.close()
            else:
                self._turn_away(sock, peer.pid)
        else:
            try:
                self._take_in(sock, peer)
            except OSError as error:
                log.error("cannot accept a connection", tenant=self.row.id, pid=peer.pid, error=error.strerror)
                sock.close()

    def _take_in(self, sock: socket.socket, peer: Peer) -> None:
        if peer.pidfd is not None:
            self.processes.add(peer.pid, peer.pidfd)
        client = HookConnection(sock, peer.pid, self, self._inbox, self._connection_closed)
        self._connections.add(client)

    def _turn_away(self, sock: socket.socket, pid: int) -> None:
        """Refuse a connection with a reason, so that the hook launches nothing and retries. Without a reason the hook
        would assume that the agent is away, and launch by its own clock while other processes of the tenant run."""
        text = (
            f"the tenant has {self._settings.connections_max} processes connected, as many as the agent's setting "
            "connections_max allows; this one waits for another to end"
        )
        self.record_refusal(ClientRefusal.FULL, pid=pid, error=text)
        with contextlib.suppress(OSError):  # the process may have exited
            send_packet(sock, protocol.encode(protocol.Refused(RefusedReason.FULL, text)))
        sock.close()

    def _exited(self, pid: int) -> None:
        """Free the token and the credits of a process that has exited. Also close its connection: a child process may
        still hold the socket open."""
        for client in [client for client in self._connections if client.pid == pid]:
            client.close()
        self._hooked.discard(pid)
        self._tokens.exited(self.row.id, pid)
        self.memory.exited(pid)
        self._changed()

    def _connection_closed(self, client: HookConnection) -> None:
        """Queue a closed connection. Its token and memory are released in slices, because a thousand connections may
        close at once."""
        self._closed_connections.append(client)
        if len(self._closed_connections) == 1:
            self._settle_closed()

    def _settle_closed(self) -> None:
        begun, until = self._loop.time(), self._budget.begin_turn()
        while self._closed_connections:
            self._settle(self._closed_connections[0])
            self._closed_connections.popleft()
            if self._loop.time() >= until:
                break
        self._inbox.charge(self._loop.time() - begun)
        if self._closed_connections:
            self._loop.call_soon(self._settle_closed)

    def _connected(self) -> None:
        """Update the token scheduler: whether a process of the tenant is connected, and whether the tenant may co-run.
        It may if its row allows it and all its processes sample their progress."""
        allowed = self.row.co_running is not CoRunningPolicy.DENY
        concurrent = allowed and all(user.samples_progress for user in self._users)
        self._tokens.set_connected(self.row.id, connected=bool(self._users), concurrent=concurrent)

    def _settle(self, client: HookConnection) -> None:
        if client not in self._connections:
            return
        self._connections.discard(client)
        alive = client.pid in self.processes
        self._tokens.connection_lost(self.row.id, client, alive=alive)
        if client in self._users:
            self._users.discard(client)
            if not self._users or not client.samples_progress:
                self._connected()
        self.memory.disconnected(client, alive=alive)
        self._changed()


def uuid_bytes(gpu: str) -> bytes:
    """Return a GPU's UUID, which NVML prints as text, as 16 bytes."""
    return UUID(gpu.removeprefix("GPU-")).bytes
