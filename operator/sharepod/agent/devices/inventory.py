"""Inventory of the node: its GPUs and the processes on them, as readings; and an inventory from a file.

Guarantees:
- A reading is complete; otherwise `InventoryError` is raised.
- A reading takes no longer than its timeout.
- A `fresh` reading began after it was requested, so it contains every process that existed at the request.
- A GPU that cannot be read any more stays in the reading as unhealthy, with the reason, until the agent ends. The next
  agent does not know such a GPU.
"""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Protocol

import yaml
from pydantic import AfterValidator, BeforeValidator, Field, ValidationError

from sharepod.api.gpunode import Gpu, Health, Link
from sharepod.api.objects import MAX_GPUS, Model
from sharepod.api.units import UnitError, parse_quantity

_UUID = re.compile(r"^GPU-[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}$")


class InventoryError(Exception):
    """Error for an inventory that cannot be read. The message has the cause and the remedy."""


@dataclass(frozen=True)
class UtilizationSample:
    """Sample of how busy one process kept a GPU."""

    until: float
    """End of the time that the sample covers, in seconds of `time.monotonic`."""
    part: float
    """Part of the covered time (0 to 1) in which kernels of the process ran."""


@dataclass(frozen=True)
class Process:
    """Process on a GPU."""

    pid: int
    """Pid in the agent's PID namespace."""
    uuid: str
    """UUID of the GPU."""
    memory: int
    """Device memory in bytes; 0 if the driver does not report it."""
    utilization: float | None = None
    """Part of the time since the last reading (0 to 1) in which kernels of the process ran; None if not reported."""
    samples: tuple[UtilizationSample, ...] = ()
    """Samples whose mean is `utilization`, if the driver reports when they ended."""


@dataclass(frozen=True)
class Reading:
    """GPUs of the node and the processes on them at one moment."""

    gpus: tuple[Gpu, ...]
    """GPUs in order of their index."""
    processes: tuple[Process, ...]
    fresh: bool = True
    """False if the driver does not answer, so that this repeats an earlier reading."""
    unread: frozenset[str] = frozenset()
    """UUIDs of the GPUs whose processes could not be read."""
    exhaustive: bool = False
    """True if the list of processes is complete on each GPU that is not `unread`."""
    utilization: Mapping[str, float] = field(default_factory=dict)
    """Part of the time (0 to 1) in which any kernel ran on a GPU, by UUID. A GPU is missing if the driver does not
    report this."""
    xids: Mapping[str, Mapping[int, int]] = field(default_factory=dict)
    """Number of reports of each Xid since the node's boot, by GPU UUID, as far as an agent was running."""
    driver: str = ""
    """Version of the driver."""


XIDS_TOLERATED = frozenset((13, 31, 43, 45, 63, 68, 92, 94, 109))
"""Xids after which the GPU still counts as healthy: errors of a program (13, 31, 43, 45, 68, 109), memory errors that
the GPU has contained or remapped (63, 94), and a notice (92). See NVIDIA's catalogue of Xid errors."""


def failure(xids: Collection[int], tolerated: Collection[int]) -> str | None:
    """Return why a GPU with these reported Xids counts as failed, as text; None if it does not."""
    fatal = sorted(set(xids).difference(tolerated))
    if not fatal:
        return None
    return (
        f"the driver reported Xid {', '.join(map(str, fatal))}; look it up in NVIDIA's list of Xid errors, "
        "reset or replace the GPU and restart the node; or, without a restart of the node, remove `xids.json` from the "
        "agent's state directory and restart the agent"
    )


class Inventory(Protocol):
    """Source of readings: NVML or a file."""

    @property
    def simulated(self) -> bool:
        """True if there are no real GPUs behind the readings."""

    async def read(self) -> Reading:
        """Return a reading that began after this call, or the last one with `fresh` False. Raise `InventoryError`."""


def is_gpu_uuid(text: str) -> bool:
    """Return whether `text` is the UUID of a physical GPU in NVML's form (the UUID of a MIG instance is not)."""
    return _UUID.match(text) is not None


def _checked_uuid(text: str) -> str:
    if not is_gpu_uuid(text):
        raise ValueError(
            f"{text!r} is not the UUID of a GPU; write GPU-xxxxxxxx-xxxx-xxxx-xxxx-xxxxxxxxxxxx with hexadecimal digits"
        )
    return text


def _size(value: object) -> int:
    if not isinstance(value, int | float | str):
        raise ValueError(f"{value!r} is not a quantity; write a size such as 40Gi")
    try:
        return int(parse_quantity(value))
    except UnitError as error:
        raise ValueError(str(error)) from None


_GpuUuid = Annotated[str, AfterValidator(_checked_uuid)]
_Size = Annotated[int, BeforeValidator(_size)]
_Ratio = Annotated[float, Field(ge=0, le=1)]


class _InventoryFileGpu(Model):
    uuid: _GpuUuid
    index: Annotated[int, Field(ge=0)]
    model: str
    memory: _Size
    health: Health = Health.HEALTHY
    numa_node: int | None = None
    links: tuple[Link, ...] = ()
    shareable: bool = True
    reason: str = ""
    busy: _Ratio | None = None
    xids: tuple[int, ...] = ()
    processes_unread: bool = False


class _InventoryFileProcess(Model):
    pid: Annotated[int, Field(gt=0)]
    uuid: _GpuUuid
    memory: _Size = 0
    busy: _Ratio | None = None


class _InventoryFile(Model):
    gpus: Annotated[tuple[_InventoryFileGpu, ...], Field(max_length=MAX_GPUS)]
    processes: tuple[_InventoryFileProcess, ...] = ()


class SimulatedInventory:
    """Inventory from a YAML file, which is read again whenever it changes:

        gpus: [{uuid, index, model, memory, health?, numaNode?, links?, shareable?, reason?, busy?, xids?,
        processesUnread?}]
        processes: [{pid, uuid, memory?, busy?}]

    `busy` is the utilization (0 to 1), `xids` lists the reported Xids. With `processesUnread: true` the GPU's processes
    cannot be read. While the file is not valid, each reading raises `InventoryError`.
    """

    simulated = True

    def __init__(self, path: Path, xids_tolerated: Collection[int] = XIDS_TOLERATED) -> None:
        self._path = path
        self._xids_tolerated = xids_tolerated
        self._stamp: tuple[int, int, int] | None = None
        self._reading: Reading | None = None

    async def read(self) -> Reading:
        """Return a reading from the file. An unchanged file is not read again."""
        return await asyncio.to_thread(self._load)

    def _load(self) -> Reading:
        try:
            stat = self._path.stat()
            stamp = (stat.st_mtime_ns, stat.st_ino, stat.st_size)
            if self._reading is None or stamp != self._stamp:
                self._reading = self._parse(self._path.read_text(encoding="utf-8"))
                self._stamp = stamp
        except OSError as error:
            raise InventoryError(f"cannot read the inventory file {self._path}: {error.strerror or error}") from None
        return self._reading

    def _parse(self, text: str) -> Reading:
        try:
            file = _InventoryFile.model_validate(yaml.safe_load(text))
        except (yaml.YAMLError, ValidationError, UnicodeDecodeError) as error:
            raise InventoryError(f"the inventory file {self._path} is not valid: {error}") from None
        for what in ("uuid", "index"):
            values = [getattr(gpu, what) for gpu in file.gpus]
            twice = sorted({str(value) for value in values if values.count(value) > 1})
            if twice:
                raise InventoryError(
                    f"the inventory file {self._path} is not valid: {what} {', '.join(twice)} appears twice"
                )
        gpus = tuple(self._gpu(gpu) for gpu in sorted(file.gpus, key=lambda gpu: gpu.index))
        known = {gpu.uuid for gpu in gpus}
        for process in file.processes:
            if process.uuid not in known:
                raise InventoryError(
                    f"the inventory file {self._path} is not valid: process {process.pid} is on {process.uuid}, "
                    "which is not a GPU of the file"
                )
        return Reading(
            gpus,
            tuple(Process(p.pid, p.uuid, p.memory, p.busy) for p in file.processes),
            unread=frozenset(gpu.uuid for gpu in file.gpus if gpu.processes_unread),
            utilization={gpu.uuid: gpu.busy for gpu in file.gpus if gpu.busy is not None},
            xids={gpu.uuid: Counter(gpu.xids) for gpu in file.gpus if gpu.xids},
            driver="simulated",
        )

    def _gpu(self, listed: _InventoryFileGpu) -> Gpu:
        gpu = Gpu(**listed.model_dump(exclude={"busy", "xids", "processes_unread"}))
        failed = failure(listed.xids, self._xids_tolerated)
        if failed is None:
            return gpu
        return gpu.model_copy(update={"health": Health.UNHEALTHY, "reason": failed})
