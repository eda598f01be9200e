"""Worker's proxies: implementations of `Surroundings` and `Inventory` that have the privileged process act on the node.

Guarantees:
- No call blocks the event loop: I/O runs in a thread, and the thread waits for the privileged process.
- While the privileged process is away, new connections wait for its return. Every other call fails with `OSError`, and
  its caller must retry.
"""

from __future__ import annotations

import asyncio
import socket
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence, Set
from pathlib import Path
from typing import Any, TypeVar

import structlog

from sharepod.agent.devices.inventory import InventoryError, Reading
from sharepod.agent.sockets.peers import Identified, Peer
from sharepod.agent.state.directory import StateDir
from sharepod.agent.state.handover import Handover, Inheritance, Survivor
from sharepod.agent.state.tenant_files import FilesWanted, TenantFiles
from sharepod.timeshare import AccountSnapshot

from . import calls
from .link import DESCRIPTORS_MAX, Call, Failure, Line, LinkLostError

log = structlog.get_logger(__name__)

_Argument = TypeVar("_Argument")
_Result = TypeVar("_Result")

_TIMEOUT_S = 30.0
"""Seconds that the privileged process may take for a call with disk I/O."""
_AWAY_S = 5.0
"""Seconds that a thread waits for an absent privileged process, which is restarted within milliseconds."""
_AGAIN_S = 0.02
"""Seconds between two calls to a privileged process that has not read a ledger yet."""
_STARTS_MAX = 65_536
"""Most processes whose start time is remembered."""


class RemoteDirectories:
    """Tenants' directories and files for the next agent, which the privileged process writes. Called from threads."""

    def __init__(self, line: Line, tenants_dir: Path, starts: dict[int, int]) -> None:
        self._line = line
        self._tenants_dir = tenants_dir
        self._starts = starts
        self._loop = asyncio.get_running_loop()
        self.pidfds: dict[tuple[int, int], int] = {}
        """For each (pid, start time) of a running process of an earlier agent: its pidfd, until `RemotePeers.watch`
        takes it."""

    def _ask(
        self, call: Call[_Argument, _Result], argument: _Argument, descriptors: Sequence[int] = ()
    ) -> tuple[_Result, list[int]]:
        asking = self._line.call(call, argument, descriptors, timeout_s=_TIMEOUT_S, wait_s=_AWAY_S)
        return asyncio.run_coroutine_threadsafe(asking, self._loop).result()

    def prepare(self) -> str:
        """Return the SHA-256 of the hook that the privileged process has installed."""
        return self._ask(calls.PRIVILEGED_PREPARE, None)[0]

    def create(self, tenant_id: str, limits: str | None) -> Path:
        """Have the privileged process complete a tenant's directory; return its path."""
        self._ask(calls.PRIVILEGED_CREATE, calls.DirectoryWanted(tenant_id, limits))
        return self.path(tenant_id)

    def complete(self, tenant_id: str, limits: str | None) -> OSError | None:
        """Have the privileged process complete a tenant's directory. Return the disk's error if the directory was
        complete before."""
        failure, _none = self._ask(calls.PRIVILEGED_COMPLETE, calls.DirectoryWanted(tenant_id, limits))
        return None if failure is None else _error(failure)

    def open_all(self, wanted: Sequence[FilesWanted]) -> list[TenantFiles | OSError]:
        """Have the privileged process complete shared tenants' directories and open their files. Return files or errors
        in the same order."""
        asked = tuple(calls.FilesAsked(each.tenant_id, each.slots) for each in wanted)
        answers, received = self._ask(calls.PRIVILEGED_OPEN, asked)
        descriptors = deque(received)
        opened: list[TenantFiles | OSError] = []
        for each, made in zip(wanted, answers, strict=True):
            if isinstance(made, Failure):
                opened.append(_error(made))
                continue
            handover, listener = descriptors.popleft(), _listening(descriptors.popleft())
            try:
                opened.append(self._adopted(each.gpus, made, handover, listener))
            except OSError as error:
                listener.close()
                opened.append(error)
        self._watch(wanted, opened)
        return opened

    def unheard(self, tenant_id: str) -> None:
        """Have the listening socket of a tenant closed."""
        self._line.notify(calls.PRIVILEGED_UNHEARD, tenant_id)

    def unheard_all_but(self, tenant_ids: Collection[str]) -> None:
        """Have the privileged process drop all descriptors that a killed agent has left, except these tenants'."""
        self._line.notify(calls.PRIVILEGED_UNHEARD_ALL_BUT, tuple(tenant_ids))

    def shut(self, tenant_id: str) -> None:
        """Have a tenant's socket and limits removed."""
        self._ask(calls.PRIVILEGED_SHUT, tenant_id)

    def remove(self, tenant_id: str) -> None:
        """Have a tenant's directory removed."""
        self._ask(calls.PRIVILEGED_REMOVE, tenant_id)

    def existing(self) -> tuple[str, ...]:
        """Return the ids of the tenants that have a directory."""
        return self._ask(calls.PRIVILEGED_EXISTING, None)[0]

    def path(self, tenant_id: str) -> Path:
        """Return the path of a tenant's directory."""
        assert StateDir.serves(tenant_id), f"{tenant_id!r} is not a name"
        return self._tenants_dir / tenant_id

    def read(self, name: str) -> bytes:
        """Return the content of a file by name; see `KeptFiles`."""
        return self._ask(calls.PRIVILEGED_READ_FILE, name)[0].encode()

    def replace(self, name: str, content: bytes, *, durable: bool = True) -> None:
        """Replace a file by name; see `KeptFiles`."""
        self._ask(calls.PRIVILEGED_REPLACE_FILE, calls.FileContent(name, content.decode(), durable))

    def _adopted(
        self, gpus: Sequence[str], files: calls.FilesMade, descriptor: int, listener: socket.socket
    ) -> TenantFiles:
        made = files.handover
        survivors = tuple(Survivor(pid, start, sizes) for pid, start, sizes in made.survivors)
        for survivor in survivors:
            self._starts[survivor.pid] = survivor.start
        account = AccountSnapshot(*made.account) if made.account else None
        left = Inheritance(survivors, made.untracked, account, made.greeted)
        handover = Handover.adopt(descriptor, gpus, made.slots, left, self._starts.get)
        return TenantFiles(handover, left, listener, None if files.unwritten is None else _error(files.unwritten))

    def _watch(self, wanted: Sequence[FilesWanted], opened: list[TenantFiles | OSError]) -> None:
        """Have the privileged process watch the processes that earlier agents left. If that fails for a tenant, replace
        its files in `opened` by the error."""
        survivors = [
            (number, survivor)
            for number, files in enumerate(opened)
            if isinstance(files, TenantFiles)
            for survivor in files.left.survivors
        ]
        for begin in range(0, len(survivors), DESCRIPTORS_MAX):
            some = survivors[begin : begin + DESCRIPTORS_MAX]
            asked = tuple(calls.WatchWanted(wanted[number].tenant_id, survivor.pid) for number, survivor in some)
            try:
                there, descriptors = self._ask(calls.PRIVILEGED_WATCH, asked)
            except OSError as error:
                for number in {number for number, _survivor in some}:
                    files, opened[number] = opened[number], error
                    if isinstance(files, TenantFiles):
                        files.close()
                continue
            pidfds = iter(descriptors)
            for (_number, survivor), runs in zip(some, there, strict=True):
                if runs:
                    self.pidfds[survivor.pid, survivor.start] = next(pidfds)


class RemotePeers:
    """Identities of processes behind connections. The worker sees no other process."""

    def __init__(self, line: Line, directories: RemoteDirectories, starts: dict[int, int]) -> None:
        self._line = line
        self._directories = directories
        self._starts = starts
        self._asking: set[asyncio.Task[None]] = set()

    def pid(self, sock: socket.socket) -> int | None:
        """Return None: only the privileged process can read the pid."""
        return None

    def identify(self, tenant_id: str, sock: socket.socket, later: Identified) -> Peer | None:
        """Request the identity of the connected process. Return None; `later` is called with the identity."""
        task = asyncio.get_running_loop().create_task(self._identify(tenant_id, sock, later), name="identify")
        self._asking.add(task)
        task.add_done_callback(self._asking.discard)
        return None

    def watch(self, survivor: Survivor) -> int | None:
        """Return the pidfd that the privileged process sent; None if the process has exited."""
        return self._directories.pidfds.pop((survivor.pid, survivor.start), None)

    async def _identify(self, tenant_id: str, sock: socket.socket, later: Identified) -> None:
        while True:
            await self._line.wait()
            try:
                found, descriptors = await self._line.call(calls.PRIVILEGED_IDENTIFY, tenant_id, [sock.fileno()])
            except LinkLostError:
                await asyncio.sleep(0)
                continue
            except BlockingIOError:  # the privileged process is new and has read no ledger yet
                await asyncio.sleep(_AGAIN_S)
                continue
            except OSError as error:
                log.warning("cannot find out who has connected", tenant=tenant_id, error=error.strerror)
                later(sock, None)
                return
            if found.start is not None:
                if len(self._starts) >= _STARTS_MAX:
                    self._starts.pop(next(iter(self._starts)))
                self._starts[found.pid] = found.start
            later(sock, Peer(found.pid, descriptors[0] if found.watched else None))
            return


class RemoteInventory:
    """Readings of the GPUs by the privileged process, with facts from /proc."""

    def __init__(
        self, line: Line, *, simulated: bool, timeout_s: float, wanted: Callable[[], calls.ReadingWanted]
    ) -> None:
        self._line = line
        self._simulated = simulated
        self._timeout_s = timeout_s
        self._wanted = wanted
        self._last: calls.SeenOnNode | None = None

    @property
    def simulated(self) -> bool:
        """True if there are no real GPUs behind the readings."""
        return self._simulated

    async def read(self) -> Reading:
        """Return a new reading. Raise `InventoryError`."""
        try:
            last, _none = await self._line.call(
                calls.PRIVILEGED_READ, self._wanted(), timeout_s=self._timeout_s, wait_s=_AWAY_S
            )
        except OSError as error:
            raise InventoryError(f"the process that reads the GPUs does not answer: {error.strerror}") from None
        self._last = last
        return last.reading

    def residue(self, tenant_id: str) -> str | None:
        """Return what remains of a tenant, by the last reading; None: nothing."""
        unknown = "its remaining processes have not been looked up yet"
        return unknown if self._last is None else self._last.residue.get(tenant_id, unknown)

    def owner_of(self, pid: int) -> str | None:
        """Return the tenant in whose Pod a process on the GPUs runs, by the last reading. None if it has none."""
        return self._last.owners.get(pid) if self._last is not None else None

    def replaced(self, tenant_id: str, pids: Set[int], hooked: Set[int]) -> Mapping[int, str]:
        """Return the evidence for each process of a tenant whose hook was replaced, by the last reading."""
        found = self._last.replaced.get(tenant_id, {}) if self._last is not None else {}
        return {pid: text for pid, text in found.items() if pid in pids}


async def review(line: Line, path: str, body: dict[str, Any]) -> Mapping[str, Any]:
    """Have the API server review a reader of metrics. Raises `OSError`."""
    return (await line.call(calls.PRIVILEGED_REVIEW, calls.ReviewWanted(path, body), timeout_s=5.0))[0]


def _error(failure: Failure) -> OSError:
    return OSError(failure.errno, failure.text, failure.filename)


def _listening(descriptor: int) -> socket.socket:
    listener = socket.socket(fileno=descriptor)
    listener.setblocking(False)
    return listener
