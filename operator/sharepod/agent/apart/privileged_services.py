"""Privileged process's handlers of the worker's calls: actions on the node, after checks.

The worker parses input from tenants, so the privileged process treats it as hostile.

Guarantees:
- For a tenant that is not in the ledger, the worker can only have its files removed.
- The content of a tenant's directory comes from the ledger and from this process; the worker only triggers the writes.
- A process is killed only by policy, and only if /proc or a connection to the tenant's socket shows that it is the
  tenant's.
- A tenant's listening socket survives a restart of the worker: new connections wait in its backlog.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import select
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import structlog

from sharepod.agent.devices.context_overhead import FILE as CONTEXTS_FILE
from sharepod.agent.devices.inventory import Inventory
from sharepod.agent.settings import AgentSettings, UnenforcedPolicy
from sharepod.agent.sockets.peers import NodePeers, peer_of
from sharepod.agent.state.consumption_file import FILE as CONSUMPTION_FILE
from sharepod.agent.state.directory import StateDir
from sharepod.agent.state.files import FolderFiles
from sharepod.agent.state.handover import Inheritance, Survivor, start_time
from sharepod.agent.state.kept_descriptors import KeptDescriptors
from sharepod.agent.tenants.entry import limits_text
from sharepod.agent.tenants.observer import FINDINGS_FILE, OwnerOf, Replaced, Residue, nothing_replaced
from sharepod.agent.tenants.process_end import end_here
from sharepod.api.gpunode import Mode, Tenant, TenantState
from sharepod.timeshare import AccountSnapshot
from sharepod.web.metrics_access import ACCESS_REVIEWS, TOKEN_REVIEWS, Review

from . import calls
from .link import Answerer, Call, Failure, PartService, Taker, failure_of

log = structlog.get_logger(__name__)

_FILES = frozenset((CONTEXTS_FILE, CONSUMPTION_FILE, FINDINGS_FILE))
"""Names of the files that the worker may read and replace."""
_CONNECTED_MAX = 65_536
"""Most processes whose connection to a tenant is remembered."""


@dataclass(frozen=True)
class _Opened:
    """Open files of one tenant. `handover`: descriptor of its handover file. `left`: state of the tenant, as an
    earlier agent stored it in that file."""

    handover: int
    slots: int
    left: Inheritance
    listener: socket.socket
    unwritten: OSError | None


class PrivilegedServices:
    """Services of the privileged process for the worker.

    Args:
        settings: Settings of the agent.
        inventory: Source of readings of the GPUs.
        kept: Descriptors of which the supervisor keeps copies.
        on_report: Called with the worker's facts.
    """

    def __init__(
        self,
        settings: AgentSettings,
        inventory: Inventory,
        kept: KeptDescriptors,
        on_report: Callable[[calls.WorkerReport], None],
    ) -> None:
        self.residue: Residue = lambda tenant_id: None
        self.owner_of: OwnerOf = lambda pid: None
        self.replaced: Replaced = nothing_replaced
        self.review: Review | None = None
        """Function that asks the API server whether a client may read the metrics. None: every client may."""
        self.rows: Mapping[str, Tenant] = {}
        """Rows of the ledger by id, including rows that are being applied."""
        self.known = False
        """True once a ledger has been read."""
        self.state = StateDir(settings.state_dir, settings.hook_file, fail_open=settings.fail_open, kept=kept)
        self._settings = settings
        self._inventory = inventory
        self._files = FolderFiles(settings.state_dir)
        self._disk = asyncio.Lock()
        self._digest = ""
        self._listeners: dict[str, socket.socket] = {}
        self._survivors: dict[str, dict[int, int]] = {}
        """Processes that an earlier agent's worker recorded in the handover file: tenant id -> pid -> start time."""
        self._connected: dict[int, tuple[str, int]] = {}
        """Processes that have connected to a tenant's socket: pid -> (tenant id, start time)."""
        self._on_report = on_report

    async def prepare(self) -> None:
        """Prepare the state directory and the hook. Raises `StateDirError`."""
        self._digest = await asyncio.to_thread(self.state.prepare)

    def close(self) -> None:
        """Close the listening sockets of this process."""
        for listener in self._listeners.values():
            listener.close()
        self._listeners.clear()

    def service(self) -> PartService:
        """Return the handlers of the worker's calls."""
        answers: list[tuple[Call[Any, Any], Answerer]] = [
            (calls.PRIVILEGED_PREPARE, self._prepared),
            (calls.PRIVILEGED_CREATE, self._create),
            (calls.PRIVILEGED_COMPLETE, self._complete),
            (calls.PRIVILEGED_OPEN, self._open),
            (calls.PRIVILEGED_WATCH, self._watch),
            (calls.PRIVILEGED_SHUT, self._shut),
            (calls.PRIVILEGED_REMOVE, self._remove),
            (calls.PRIVILEGED_EXISTING, self._existing),
            (calls.PRIVILEGED_READ_FILE, self._read_file),
            (calls.PRIVILEGED_REPLACE_FILE, self._replace_file),
            (calls.PRIVILEGED_IDENTIFY, self._identify),
            (calls.PRIVILEGED_READ, self._read),
            (calls.PRIVILEGED_REVIEW, self._review),
        ]
        takes: list[tuple[Call[Any, Any], Taker]] = [
            (calls.PRIVILEGED_UNHEARD, self._unheard),
            (calls.PRIVILEGED_UNHEARD_ALL_BUT, self._unheard_all_but),
            (calls.PRIVILEGED_END, self._end),
            (calls.PRIVILEGED_REPORT, self._on_report),
        ]
        return PartService(
            {call.name: (call, answer) for call, answer in answers},
            {call.name: (call, take) for call, take in takes},
            calls.ERRORS,
        )

    # ---- directories and files

    async def _prepared(self, _none: None, descriptors: list[int]) -> tuple[str, Sequence[int]]:
        _refuse(descriptors)
        return self._digest, ()

    async def _create(self, wanted: calls.DirectoryWanted, descriptors: list[int]) -> tuple[None, Sequence[int]]:
        _refuse(descriptors)
        row = self._row(wanted.tenant)
        async with self._disk:
            await asyncio.to_thread(self.state.create, row.id, _limits_of(row))
        return None, ()

    async def _complete(
        self, wanted: calls.DirectoryWanted, descriptors: list[int]
    ) -> tuple[Failure | None, Sequence[int]]:
        _refuse(descriptors)
        row = self._row(wanted.tenant)
        async with self._disk:
            unwritten = await asyncio.to_thread(self.state.complete, row.id, _limits_of(row))
        return None if unwritten is None else failure_of(unwritten), ()

    async def _open(
        self, asked: tuple[calls.FilesAsked, ...], descriptors: list[int]
    ) -> tuple[tuple[calls.FilesMade | Failure, ...], Sequence[int]]:
        """Complete the directories of several tenants and open their files, in one call to a thread."""
        _refuse(descriptors)
        wanted = [(self._row(each.tenant), min(each.slots, self._settings.connections_max)) for each in asked]
        answers: list[calls.FilesMade | Failure] = []
        opened: list[int] = []
        async with self._disk:
            present = {row.id: self._listeners.get(row.id) for row, _slots in wanted}
            made = await asyncio.to_thread(lambda: [self._opened(row, slots, present[row.id]) for row, slots in wanted])
            for (row, _slots), each in zip(wanted, made, strict=True):
                if isinstance(each, OSError):
                    answers.append(failure_of(each))
                    continue
                self._listeners[row.id] = each.listener
                self._survivors[row.id] = {survivor.pid: survivor.start for survivor in each.left.survivors}
                opened += each.handover, os.dup(each.listener.fileno())
                answers.append(_as_files_made(each))
        return tuple(answers), opened

    def _opened(self, row: Tenant, slots: int, listener: socket.socket | None) -> _Opened | OSError:
        """Open one tenant's files. `listener`: this process's listening socket for the tenant, if any."""
        try:
            unwritten = self.state.complete(row.id, _limits_of(row))
            descriptor, slots, left = self.state.make_handover(row.id, row.gpus, slots)
        except OSError as error:
            return error
        try:
            return _Opened(descriptor, slots, left, self._heard(row.id, listener), unwritten)
        except OSError as error:
            os.close(descriptor)
            return error

    def _heard(self, tenant_id: str, listener: socket.socket | None) -> socket.socket:
        """Return a listening socket that serves the tenant's directory: the present one, the one of a killed
        predecessor, or a new one."""
        listener = listener or self.state.inherit(tenant_id)
        if listener is not None and self.state.heard(tenant_id, listener):
            return listener
        fresh = self.state.listen(tenant_id)
        if listener is not None:
            listener.close()
        return fresh

    def _unheard(self, tenant_id: str) -> None:
        listener = self._listeners.pop(tenant_id, None)
        if listener is not None:
            listener.close()
        if StateDir.serves(tenant_id):
            self.state.unheard(tenant_id)

    def _unheard_all_but(self, tenant_ids: Sequence[str]) -> None:
        self.state.unheard_all_but([each for each in tenant_ids if StateDir.serves(each)])

    async def _watch(
        self, wanted: tuple[calls.WatchWanted, ...], descriptors: list[int]
    ) -> tuple[tuple[bool, ...], Sequence[int]]:
        _refuse(descriptors)
        node = NodePeers()
        starts = [(each.pid, self._survivors.get(each.tenant, {}).get(each.pid)) for each in wanted]
        pidfds = [None if start is None else node.watch(Survivor(pid, start, ())) for pid, start in starts]
        there = tuple(pidfd is not None for pidfd in pidfds)
        return there, tuple(pidfd for pidfd in pidfds if pidfd is not None)

    async def _shut(self, tenant_id: str, descriptors: list[int]) -> tuple[None, Sequence[int]]:
        _refuse(descriptors)
        row = self._row(tenant_id)
        if row.state is not TenantState.RELEASING:
            raise PermissionError(1, f"tenant {tenant_id} is not being released")
        async with self._disk:
            await asyncio.to_thread(self.state.shut, row.id)
        return None, ()

    async def _remove(self, tenant_id: str, descriptors: list[int]) -> tuple[None, Sequence[int]]:
        _refuse(descriptors)
        if tenant_id in self.rows or not StateDir.serves(tenant_id) or self._left_of(tenant_id) is not None:
            raise PermissionError(1, f"something is left of tenant {tenant_id}")
        self._survivors.pop(tenant_id, None)
        async with self._disk:
            await asyncio.to_thread(self.state.remove, tenant_id)
        return None, ()

    async def _existing(self, _none: None, descriptors: list[int]) -> tuple[tuple[str, ...], Sequence[int]]:
        _refuse(descriptors)
        return await asyncio.to_thread(self.state.existing), ()

    async def _read_file(self, name: str, descriptors: list[int]) -> tuple[str, Sequence[int]]:
        _refuse(descriptors)
        _check_file(name)
        async with self._disk:
            return (await asyncio.to_thread(self._files.read, name)).decode(), ()

    async def _replace_file(self, wanted: calls.FileContent, descriptors: list[int]) -> tuple[None, Sequence[int]]:
        _refuse(descriptors)
        _check_file(wanted.name)
        async with self._disk:
            await asyncio.to_thread(self._files.replace, wanted.name, wanted.content.encode(), durable=wanted.durable)
        return None, ()

    # ---- processes

    async def _identify(self, tenant_id: str, descriptors: list[int]) -> tuple[calls.Identity, Sequence[int]]:
        with contextlib.ExitStack() as stack:
            for descriptor in descriptors:
                stack.callback(os.close, descriptor)
            if not self.known:
                raise BlockingIOError(errno.EAGAIN, "no ledger has been read yet")
            row = self._row(tenant_id)
            listener = await self._listener_of(row.id)
            if len(descriptors) != 1 or listener is None:
                raise PermissionError(1, f"no connection to tenant {tenant_id}")
            sock = socket.socket(fileno=os.dup(descriptors[0]))
            stack.callback(sock.close)
            # the peer of a listening socket would be the privileged process itself, which called listen
            listens = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
            if listens or sock.getsockname() != listener.getsockname():
                raise PermissionError(1, f"not a connection to the socket of tenant {tenant_id}")
            pid, pidfd = peer_of(sock)
        start = start_time(pid) if pidfd is not None else None
        if pidfd is not None and _has_ended(pidfd):
            start = None  # the start time may belong to a new process with the same pid
        if start is not None:
            self._remember(pid, row.id, start)
        return calls.Identity(pid, start, pidfd is not None), () if pidfd is None else (pidfd,)

    async def _listener_of(self, tenant_id: str) -> socket.socket | None:
        """Return the tenant's listening socket, which a killed predecessor may have left. None if there is none."""
        if tenant_id not in self._listeners:
            async with self._disk:
                listener = await asyncio.to_thread(self.state.inherit, tenant_id)
                if listener is not None:
                    self._listeners[tenant_id] = listener
        return self._listeners.get(tenant_id)

    def _remember(self, pid: int, tenant_id: str, start: int) -> None:
        self._connected.pop(pid, None)
        if len(self._connected) >= _CONNECTED_MAX:
            del self._connected[next(iter(self._connected))]
        self._connected[pid] = (tenant_id, start)

    async def _read(
        self, wanted: calls.ReadingWanted, descriptors: list[int]
    ) -> tuple[calls.SeenOnNode, Sequence[int]]:
        _refuse(descriptors)
        reading = await self._inventory.read()
        pids = frozenset(process.pid for process in reading.processes)
        owners = {pid: owner for pid in pids if (owner := self.owner_of(pid)) is not None}
        residue = {each: self._left_of(each) for each in wanted.leaving if StateDir.serves(each)}
        replaced = {
            tenant_id: dict(self.replaced(tenant_id, present, hooked))
            for tenant_id, (present, hooked) in _processes_of(pids, wanted.clients, owners).items()
            if tenant_id in self.rows
        }
        return calls.SeenOnNode(reading, residue, owners, replaced), ()

    def _left_of(self, tenant_id: str) -> str | None:
        """Return what remains of the tenant, as text; None if nothing does. Before a ledger has been read, every tenant
        may remain."""
        return self.residue(tenant_id) if self.known else "no ledger has been read yet"

    def _end(self, wanted: calls.EndWanted) -> None:
        if self._settings.unenforced_policy is not UnenforcedPolicy.KILL or wanted.tenant not in self.rows:
            return

        def is_the_tenants(pid: int) -> bool:
            if self.owner_of(pid) == wanted.tenant:
                return True
            return self._connected.get(pid) == (wanted.tenant, start_time(pid))

        if not end_here(wanted.tenant, wanted.pid, is_the_tenants):
            log.warning(
                "process not killed: it has exited, or is not the tenant's", tenant=wanted.tenant, pid=wanted.pid
            )

    async def _review(
        self, wanted: calls.ReviewWanted, descriptors: list[int]
    ) -> tuple[Mapping[str, Any], Sequence[int]]:
        _refuse(descriptors)
        if self.review is None or wanted.path not in (TOKEN_REVIEWS, ACCESS_REVIEWS):
            raise PermissionError(1, "no review of this kind")
        try:
            return await self.review(wanted.path, wanted.body), ()
        except OSError:
            raise
        except Exception as error:  # the API server answered the review with an error
            raise OSError(5, str(error)) from None

    def _row(self, tenant_id: str) -> Tenant:
        row = self.rows.get(tenant_id)
        if row is None or not StateDir.serves(tenant_id):
            raise PermissionError(1, f"the ledger has no tenant {tenant_id!r}")
        return row


def _limits_of(row: Tenant) -> str | None:
    return None if row.mode is Mode.EXCLUSIVE else limits_text(row)


def _as_files_made(opened: _Opened) -> calls.FilesMade:
    left = opened.left
    handover = calls.HandoverMade(
        opened.slots,
        tuple((survivor.pid, survivor.start, survivor.bytes) for survivor in left.survivors),
        left.untracked,
        _values(left.account) if left.account is not None else None,
        left.greeted,
    )
    return calls.FilesMade(handover, None if opened.unwritten is None else failure_of(opened.unwritten))


def _refuse(descriptors: list[int]) -> None:
    """Close the descriptors that came with a call that takes none."""
    for descriptor in descriptors:
        os.close(descriptor)


def _has_ended(pidfd: int) -> bool:
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(0))


def _processes_of(
    pids: frozenset[int], clients: Mapping[str, tuple[Sequence[int], Sequence[int]]], owners: Mapping[int, str]
) -> dict[str, tuple[set[int], set[int]]]:
    """Return for each tenant the pids of its processes on the GPUs, and of the subset whose connection came from the
    hook.

    Args:
        pids: Pids of the processes on the GPUs.
        clients: For each tenant: pids of its connected processes, and of the subset whose connection came from the
        hook.
        owners: Tenant in whose Pod a process runs, by pid. A connection has precedence.
    """
    tenant_of = dict(owners)
    # in reverse order, so that the first tenant wins if a process has connected to several
    for tenant_id, (connected, _hooked) in reversed(list(clients.items())):
        tenant_of |= dict.fromkeys(pids.intersection(connected), tenant_id)
    found: dict[str, tuple[set[int], set[int]]] = {}
    for pid, tenant_id in tenant_of.items():
        found.setdefault(tenant_id, (set(), set()))[0].add(pid)
    for tenant_id, (present, hooked) in found.items():
        hooked.update(present.intersection(clients.get(tenant_id, ((), ()))[1]))
    return found


def _values(account: AccountSnapshot) -> tuple[int, ...]:
    return tuple(getattr(account, field.name) for field in fields(account))


def _check_file(name: str) -> None:
    if name not in _FILES:
        raise PermissionError(1, f"{name!r} is not a file that an agent leaves to the next")
