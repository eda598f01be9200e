"""Calls between the agent's two processes: names, arguments and results.

The *privileged process* has rights on the node; the *worker* has none, and serves tenants. The name of a call
(`PRIVILEGED_...`, `WORKER_...`) begins with the process that is called.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import Field, TypeAdapter

from sharepod.agent.devices.held_gpus import PluginPod
from sharepod.agent.devices.inventory import InventoryError, Reading
from sharepod.agent.state.directory import StateDirError
from sharepod.agent.tenants.registry import UntakenRowsError
from sharepod.api.gpunode import Gpu, PluginHolder, Pool, Tenant, TenantStatus

from .link import DESCRIPTORS_MAX, Call, Failure

ERRORS: Mapping[str, type[Exception]] = {
    kind.__name__: kind for kind in (InventoryError, StateDirError, UntakenRowsError)
}
"""Errors that arrive at the other process with their type, by name."""

OPENED_MAX = DESCRIPTORS_MAX // 2
"""Most tenants in one call that opens files: each tenant has two of a frame's `DESCRIPTORS_MAX` descriptors."""

_Id = Annotated[str, Field(max_length=128)]
_Ids = Annotated[tuple[_Id, ...], Field(max_length=2048)]
_Pid = Annotated[int, Field(ge=1, le=1 << 22)]
_Pids = Annotated[tuple[_Pid, ...], Field(max_length=65_536)]


@dataclass(frozen=True)
class DirectoryWanted:
    """Request to complete the directory of a tenant. `limits`: content of its limits file; None: an Exclusive
    tenant."""

    tenant: _Id
    limits: str | None


@dataclass(frozen=True)
class FilesAsked:
    """Request to complete the directory of a shared tenant and open its files."""

    tenant: _Id
    slots: Annotated[int, Field(ge=1, le=1 << 17)]


@dataclass(frozen=True)
class HandoverMade:
    """A tenant's handover file that was opened for the worker, with the state that an earlier agent left in it."""

    slots: int
    survivors: tuple[tuple[int, int, tuple[int, ...]], ...]
    """For each process that still runs: (pid, start time, bytes by GPU)."""
    untracked: tuple[int, ...]
    account: tuple[int, ...] | None
    greeted: bool


@dataclass(frozen=True)
class FilesMade:
    """Files that were opened for a tenant. The answer carries the descriptors of its handover file and listening
    socket."""

    handover: HandoverMade
    unwritten: Failure | None
    """Error if the disk could not store a change of the directory, which an earlier agent had completed. None if it
    could."""


@dataclass(frozen=True)
class WatchWanted:
    """Request for a pidfd of a process that a tenant's handover file lists, so that the worker notices its exit."""

    tenant: _Id
    pid: _Pid


@dataclass(frozen=True)
class FileContent:
    """New content of a file by which an agent leaves state to the next agent."""

    name: _Id
    content: Annotated[str, Field(max_length=4 << 20)]
    durable: bool


@dataclass(frozen=True)
class Identity:
    """Identity of a process that has connected to a tenant's socket."""

    pid: int
    start: int | None
    watched: bool
    """True if the answer carries a pidfd of the process."""


@dataclass(frozen=True)
class ReadingWanted:
    """Request to read the GPUs, and to search /proc for processes of the tenants that it names."""

    leaving: _Ids
    """Ids of tenants of which no process should be left."""
    clients: Annotated[dict[_Id, tuple[_Pids, _Pids]], Field(max_length=2048)]
    """For each tenant: pids of its connected processes, and of the subset whose connection came from the hook."""


@dataclass(frozen=True)
class SeenOnNode:
    """Answer to `ReadingWanted`: a reading of the GPUs, and facts from /proc at the same moment."""

    reading: Reading
    residue: dict[str, str | None]
    """By tenant: what remains of the tenant on the node, as text; None: nothing."""
    owners: dict[int, str]
    """For each process on the GPUs that runs in a tenant's Pod: pid -> tenant id."""
    replaced: dict[str, dict[int, str]]
    """For each tenant: pids of processes whose hook was replaced, with the evidence."""


@dataclass(frozen=True)
class EndWanted:
    """Request to kill a process of a tenant."""

    tenant: _Id
    pid: _Pid


@dataclass(frozen=True)
class ReviewWanted:
    """Request to the privileged process to have the API server review a token or an access."""

    path: str
    body: dict[str, Any]


@dataclass(frozen=True)
class WorkerReport:
    """Facts that the worker reports for the GPUNode's status."""

    gpus: tuple[Gpu, ...]
    gpus_known: bool
    tenants: tuple[TenantStatus, ...]
    unhealthy: str | None
    consumption: list[dict[str, Any]]
    consumed_at: str | None
    moved: bool
    """True if facts other than usage have changed since the last report."""


@dataclass(frozen=True)
class InForce:
    """Result of applying the ledger's rows in the worker."""

    directories: tuple[str, ...]
    """Ids of tenants whose directories may be mounted into their pods."""
    unservable: dict[str, str]
    report: WorkerReport
    """The worker's facts with these rows applied."""
    failure: Failure | None
    """Error if the state directory could not store all files. None if it could."""


@dataclass(frozen=True)
class Pods:
    """Kubelet's report about GPUs of NVIDIA's device plugin."""

    given: dict[str, PluginPod] | None
    problem: str | None
    offered: frozenset[str] = frozenset()


@dataclass(frozen=True)
class LedgerHeader:
    """Pool of a node, and Pods that hold GPUs of NVIDIA's device plugin for SharePod. Sent before the ledger's rows."""

    pool: Pool
    holders: tuple[PluginHolder, ...]


@dataclass(frozen=True)
class ServingState:
    """Serving state of the agent: whether it is a standby, and why it could not serve."""

    stands_by: bool
    unfit: str | None


_MANY_IDS = 512 << 10
_A_FILE = _A_READING = _A_LEDGER = 8 << 20
_A_REPORT = 4 << 20

_NOTHING: TypeAdapter[None] = TypeAdapter(type(None))
_FLAG = TypeAdapter(bool)
_ID: TypeAdapter[str] = TypeAdapter(_Id)
_IDS: TypeAdapter[tuple[str, ...]] = TypeAdapter(_Ids)
_TEXT = TypeAdapter(str)

PRIVILEGED_PREPARE = Call("prepare", _NOTHING, _TEXT)
PRIVILEGED_CREATE = Call("create", TypeAdapter(DirectoryWanted), _NOTHING)
PRIVILEGED_COMPLETE: Call[DirectoryWanted, Failure | None] = Call(
    "complete", TypeAdapter(DirectoryWanted), TypeAdapter(Failure | None)
)
PRIVILEGED_OPEN: Call[tuple[FilesAsked, ...], tuple[FilesMade | Failure, ...]] = Call(
    "open",
    TypeAdapter(Annotated[tuple[FilesAsked, ...], Field(max_length=OPENED_MAX)]),
    TypeAdapter(tuple[FilesMade | Failure, ...]),
)
PRIVILEGED_UNHEARD = Call("unheard", _ID, _NOTHING)
PRIVILEGED_UNHEARD_ALL_BUT = Call("unheard all but", _IDS, _NOTHING, _MANY_IDS)
PRIVILEGED_WATCH: Call[tuple[WatchWanted, ...], tuple[bool, ...]] = Call(
    "watch",
    TypeAdapter(Annotated[tuple[WatchWanted, ...], Field(max_length=DESCRIPTORS_MAX)]),
    TypeAdapter(tuple[bool, ...]),
)
PRIVILEGED_SHUT = Call("shut", _ID, _NOTHING)
PRIVILEGED_REMOVE = Call("remove", _ID, _NOTHING)
PRIVILEGED_EXISTING = Call("existing", _NOTHING, TypeAdapter(tuple[str, ...]))
PRIVILEGED_READ_FILE = Call("read file", _ID, _TEXT)
PRIVILEGED_REPLACE_FILE = Call("replace file", TypeAdapter(FileContent), _NOTHING, _A_FILE)
PRIVILEGED_IDENTIFY = Call("identify", _ID, TypeAdapter(Identity))
PRIVILEGED_READ = Call("read", TypeAdapter(ReadingWanted), TypeAdapter(SeenOnNode), _A_READING)
PRIVILEGED_END = Call("end", TypeAdapter(EndWanted), _NOTHING)
PRIVILEGED_REVIEW = Call("review", TypeAdapter(ReviewWanted), TypeAdapter(dict[str, Any]))
PRIVILEGED_REPORT = Call("report", TypeAdapter(WorkerReport), _NOTHING, _A_REPORT)

WORKER_START = Call("start", _NOTHING, _NOTHING)
WORKER_TAKE_STOCK = Call("take stock", _FLAG, _NOTHING)
WORKER_APPLY: Call[tuple[Tenant, ...], InForce] = Call(
    "apply", TypeAdapter(tuple[Tenant, ...]), TypeAdapter(InForce), _A_LEDGER
)
WORKER_KNOW_LEDGER = Call("know ledger", TypeAdapter(LedgerHeader), _NOTHING, _A_LEDGER)
WORKER_KNOW_PODS = Call("know pods", TypeAdapter(Pods), _NOTHING, _A_LEDGER)
WORKER_TAKEN_IN: Call[tuple[str, ...], None] = Call("taken in", TypeAdapter(tuple[str, ...]), _NOTHING, _A_REPORT)
WORKER_STAND = Call("stand", TypeAdapter(ServingState), _NOTHING)
WORKER_CLOSE = Call("close", _NOTHING, _NOTHING)
