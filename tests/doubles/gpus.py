"""State of the simulated GPUs, from Python: create the state file, read it, and release hung kernels.

`create_state(path, devices)` creates the file that `FAKE_CUDA_STATE` names. `read_state(path)` returns the device time
and memory of each process that has used it. Ended processes are included until new processes need their entries in the
file. The layout is that of `libcuda/device/state.h`.
"""

from __future__ import annotations

import fcntl
import os
import struct
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

MAGIC = 0x314B4146
LAYOUT = 5
MAX_DEVICES = 16
MAX_CLIENTS = 256
QUEUE_DEPTH = 1024
"""Unfinished operations that one stream can hold (device/fake.h). A further launch waits in the driver."""

KINDS = ("linear", "managed", "array", "pool", "virtual", "graph", "module", "context")

_HEADER = struct.Struct("=IIIIQ")
_DEVICE = struct.Struct("=16s64sQQ")
_CLIENT = struct.Struct("=64sII")
_USAGE = struct.Struct(f"=QQQQQQQQ{len(KINDS)}QQQ")
_FLOCK = struct.Struct("=hhxxxxqqixxxx")
_CLIENT_BYTES = _CLIENT.size + _USAGE.size * MAX_DEVICES
_CLIENTS_AT = _HEADER.size + _DEVICE.size * MAX_DEVICES
_STATE_BYTES = _CLIENTS_AT + _CLIENT_BYTES * MAX_CLIENTS
"""Bytes of the file that this module reads. A table of shared memory follows in the file."""
_SHARES_BYTES = 512 * (48 + 2 * MAX_CLIENTS)
_CLIENT_LOCK_BYTE = 1 << 25
_F_OFD_GETLK = 36


@dataclass(frozen=True)
class DeviceState:
    """One simulated GPU."""

    uuid: str
    model: str
    memory: int
    """Memory of the GPU in bytes."""
    busy_until: int
    """Time up to which the device has work, CLOCK_MONOTONIC in ns."""


@dataclass(frozen=True)
class Usage:
    """One client's use of one device. Times in ns, `last_end` on CLOCK_MONOTONIC; memory in bytes."""

    submitted: int
    kernels: int
    busy_ns: int
    last_end: int
    memory: int
    peak: int
    copies: int
    """Number of transfers with host memory, which `submitted` does not count."""
    misused: int
    """Number of calls with a handle of an ended context, and of calls while the library ends. Only the first device has
    this count."""
    kinds: dict[str, int]
    """Parts of `memory` in bytes by kind; KINDS lists the kinds."""
    behind: int
    """Number of launches that have not begun and were accepted behind an unfinished wait of their stream, or of a
    stream that it waits for."""
    behind_end: int
    """End of the last launch that was accepted behind an unfinished wait (see `behind`)."""


def _usage(content: bytes, at: int) -> Usage:
    fields = _USAGE.unpack_from(content, at)
    submitted, kernels, busy_ns, last_end, memory, peak, copies, misused = fields[:8]
    kinds = dict(zip(KINDS, fields[8:-2], strict=True))
    return Usage(submitted, kernels, busy_ns, last_end, memory, peak, copies, misused, kinds, *fields[-2:])


@dataclass(frozen=True)
class ClientState:
    """One process that uses, or used, the devices."""

    label: str
    pid: int
    """Pid that the process itself sees."""
    alive: bool
    usage: dict[str, Usage]
    """Use by UUID of the device."""


@dataclass(frozen=True)
class State:
    """All devices and clients at one moment."""

    devices: tuple[DeviceState, ...]
    clients: tuple[ClientState, ...]

    def client(self, label: str) -> ClientState:
        """Return the client with this label. KeyError unless there is exactly one."""
        found = [client for client in self.clients if client.label == label]
        if len(found) != 1:
            raise KeyError(
                f"{len(found)} clients are labelled {label!r}; there are {[client.label for client in self.clients]}"
            )
        return found[0]

    def busy_ns(self, label: str, gpu: str | None = None) -> int:
        """Return the device time in ns of all clients with a label, on one device. Without a device: on all devices."""
        return sum(
            usage.busy_ns
            for client in self.clients
            if client.label == label
            for device, usage in client.usage.items()
            if gpu in (None, device)
        )


def _uuid_bytes(gpu: str) -> bytes:
    return uuid.UUID(gpu.removeprefix("GPU-")).bytes


def create_state(path: Path | str, devices: Sequence[tuple[str, str, int]], *, context_bytes: int = 0) -> Path:
    """Create a state file that every user may use. An older file is replaced.

    Args:
        devices: UUID, model and bytes of memory of each device.
        context_bytes: Bytes that a process's contexts together take on a device, in addition to the bytes that calls
            request.
    """
    if not 0 < len(devices) <= MAX_DEVICES:
        raise ValueError(f"{len(devices)} devices; the double has 1 to {MAX_DEVICES}")
    content = bytearray(_STATE_BYTES)
    _HEADER.pack_into(content, 0, MAGIC, LAYOUT, len(devices), 0, context_bytes)
    for index, (gpu, model, memory) in enumerate(devices):
        _DEVICE.pack_into(content, _HEADER.size + index * _DEVICE.size, _uuid_bytes(gpu), model.encode(), memory, 0)
    target = Path(path)
    draft = target.with_name(target.name + ".new")
    draft.write_bytes(content)
    os.truncate(draft, _STATE_BYTES + _SHARES_BYTES)
    draft.chmod(0o666)
    draft.replace(target)
    return target


def _alive(descriptor: int, index: int) -> bool:
    asked = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, _CLIENT_LOCK_BYTE + index, 1, 0)
    kind: int = _FLOCK.unpack(fcntl.fcntl(descriptor, _F_OFD_GETLK, asked))[0]
    return kind != fcntl.F_UNLCK


def read_state(path: Path | str) -> State:
    """Read the state of the devices and their clients. ValueError if the file has another layout."""
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        content = os.pread(descriptor, _STATE_BYTES, 0)
        magic, layout, count, _, _ = _HEADER.unpack_from(content)
        if (magic, layout, len(content)) != (MAGIC, LAYOUT, _STATE_BYTES):
            raise ValueError(f"{path} is not a state file of layout {LAYOUT}")
        devices = []
        for index in range(count):
            raw, model, memory, timeline = _DEVICE.unpack_from(content, _HEADER.size + index * _DEVICE.size)
            devices.append(
                DeviceState(f"GPU-{uuid.UUID(bytes=raw)}", model.rstrip(b"\0").decode(), memory, timeline >> 8)
            )
        clients = []
        for index in range(MAX_CLIENTS):
            at = _CLIENTS_AT + index * _CLIENT_BYTES
            label, pid, used = _CLIENT.unpack_from(content, at)
            if not used:
                continue
            usage = {
                device.uuid: _usage(content, at + _CLIENT.size + order * _USAGE.size)
                for order, device in enumerate(devices)
            }
            clients.append(ClientState(label.rstrip(b"\0").decode(), pid, _alive(descriptor, index), usage))
        return State(tuple(devices), tuple(clients))
    finally:
        os.close(descriptor)


def submitted_at(path: Path | str, pid: int, device: int = 0) -> int:
    """Return the offset in the file of a process's count `submitted` (8 bytes), for tests that map the file.

    KeyError if the process has not used the devices.
    """
    return _usage_at(path, pid, device)


def memory_at(path: Path | str, pid: int, device: int = 0) -> int:
    """Return the offset in the file of a process's `memory` (8 bytes). KeyError as for `submitted_at`."""
    return _usage_at(path, pid, device) + 4 * 8


def _usage_at(path: Path | str, pid: int, device: int) -> int:
    """Return the offset in the file of a process's usage of a device. If an ended process had the same pid, return the
    offset of the living process."""
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        content = os.pread(descriptor, _STATE_BYTES, 0)
        found = []
        for index in range(MAX_CLIENTS):
            _, its, used = _CLIENT.unpack_from(content, _CLIENTS_AT + index * _CLIENT_BYTES)
            if used and its == pid:
                found.append((_alive(descriptor, index), index))
    finally:
        os.close(descriptor)
    if not found:
        raise KeyError(f"no process {pid} has used {path}")
    return _CLIENTS_AT + max(found)[1] * _CLIENT_BYTES + _CLIENT.size + device * _USAGE.size


def release_hung_kernels(path: Path | str) -> None:
    """End every hung kernel that exists now or begins later."""
    with Path(path).open("r+b") as file:
        file.seek(12)
        file.write(struct.pack("=I", 1))
