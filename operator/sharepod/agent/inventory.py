"""The GPUs of this node and the processes on them, as one reading at a time.

A reading is complete or an `InventoryError`; it never hangs longer than its timeout. A GPU that cannot be read stays
in the reading as unhealthy, with the reason: it never disappears.
"""

from __future__ import annotations

import asyncio
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Protocol

import yaml
from pydantic import AfterValidator, BeforeValidator, Field, ValidationError

from sharepod.api.gpunode import Gpu, Health, Link
from sharepod.api.objects import MAX_GPUS, Model
from sharepod.api.units import UnitError, parse_quantity

_UUID = re.compile(r"^GPU-[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}$")


class InventoryError(Exception):
    """The inventory cannot be read. The message says why and what would help."""


@dataclass(frozen=True)
class Process:
    """A process on a GPU. `pid` in the agent's PID namespace; `memory` in bytes, 0 where the driver does not say."""

    pid: int
    uuid: str
    memory: int


@dataclass(frozen=True)
class Reading:
    """GPUs in the order of their index, and the processes on them. `fresh`: not an earlier one repeated. `unread`: GPUs
    whose processes could not be read. `exhaustive`: on other GPUs there are no processes but these."""

    gpus: tuple[Gpu, ...]
    processes: tuple[Process, ...]
    fresh: bool = True
    unread: frozenset[str] = frozenset()
    exhaustive: bool = False


class Inventory(Protocol):
    """Where readings come from."""

    @property
    def simulated(self) -> bool:
        """There is no GPU behind it."""

    async def read(self) -> Reading:
        """The present state. Raises `InventoryError`."""


def is_gpu_uuid(text: str) -> bool:
    """Whether this is a UUID of a physical GPU as NVML prints it."""
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


class _FileGpu(Model):
    uuid: _GpuUuid
    index: Annotated[int, Field(ge=0)]
    model: str
    memory: _Size
    health: Health = Health.HEALTHY
    numa_node: int | None = None
    links: tuple[Link, ...] = ()
    shareable: bool = True
    reason: str = ""


class _FileProcess(Model):
    pid: Annotated[int, Field(gt=0)]
    uuid: _GpuUuid
    memory: _Size = 0


class _File(Model):
    gpus: Annotated[tuple[_FileGpu, ...], Field(max_length=MAX_GPUS)]
    processes: tuple[_FileProcess, ...] = ()


class SimulatedInventory:
    """GPUs from a YAML file, read again whenever the file changes:

        gpus: [{uuid, index, model, memory, health?, numaNode?, links?, shareable?, reason?}]
        processes: [{pid, uuid, memory?}]

    A file that became wrong is an `InventoryError` at each reading until it is mended.
    """

    simulated = True

    def __init__(self, path: Path) -> None:
        self._path = path
        self._stamp: tuple[int, int, int] | None = None
        self._reading: Reading | None = None

    async def read(self) -> Reading:
        """The file's content, from memory where it has not changed."""
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
            file = _File.model_validate(yaml.safe_load(text))
        except (yaml.YAMLError, ValidationError, UnicodeDecodeError) as error:
            raise InventoryError(f"the inventory file {self._path} is not valid: {error}") from None
        for what in ("uuid", "index"):
            values = [getattr(gpu, what) for gpu in file.gpus]
            twice = sorted({str(value) for value in values if values.count(value) > 1})
            if twice:
                raise InventoryError(
                    f"the inventory file {self._path} is not valid: {what} {', '.join(twice)} stands there twice"
                )
        gpus = tuple(Gpu(**gpu.model_dump()) for gpu in sorted(file.gpus, key=lambda gpu: gpu.index))
        known = {gpu.uuid for gpu in gpus}
        for process in file.processes:
            if process.uuid not in known:
                raise InventoryError(
                    f"the inventory file {self._path} is not valid: process {process.pid} is on {process.uuid}, "
                    "which is no GPU of the file"
                )
        return Reading(gpus, tuple(Process(p.pid, p.uuid, p.memory) for p in file.processes))
