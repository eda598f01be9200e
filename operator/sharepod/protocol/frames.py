"""Frames of the protocol as frozen values, named as in the header. Every instance is valid for its type.

Units as in the header: bytes, nanoseconds (`_ns`), thousandths of a GPU's time (`_milli`). `seq` is the number of a
client's request; the answer has the same. `gpu` is an index into the tenant's GPUs, `gpu_mask` a bit for each of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from sharepod.protocol._wire import lib as _lib

MAGIC: int = _lib.SHP_MAGIC
VERSION_MIN: int = _lib.SHP_VERSION_MIN
VERSION_MAX: int = _lib.SHP_VERSION_MAX
MAX_GPUS: int = _lib.SHP_MAX_GPUS
TEXT_BYTES: int = _lib.SHP_TEXT_BYTES
FRAME_MAX: int = _lib.SHP_FRAME_MAX
HINTS_BYTES: int = _lib.SHP_HINTS_BYTES
PULSE_BYTES: int = _lib.SHP_PULSE_BYTES
PULSE_VERSION = 2
"""First version whose clients have a pulse page."""
CONCURRENT_VERSION = 3
"""First version whose clients sample their progress: `Grant.concurrent`, and the counters of the pulse page."""


class ProtocolError(Exception):
    """The bytes are not a frame, or the frame is not allowed at this point. The agent then closes the connection."""


class RefusedReason(IntEnum):
    """Reason why the agent closes a connection."""

    VERSION = _lib.SHP_REFUSED_VERSION
    RELEASING = _lib.SHP_REFUSED_RELEASING
    FULL = _lib.SHP_REFUSED_FULL


@dataclass(frozen=True, slots=True)
class Hello:
    """Client's first frame: the versions of the protocol that it supports, and how it uses the connection."""

    version_min: int
    version_max: int
    build: str = ""
    """SHA-256 of the hook, in hexadecimal; empty: unknown."""
    no_membarrier: bool = False
    """The client's operating system has no membarrier(2), so each launch executes a full memory fence instead."""
    observes: bool = False
    """The client uses no GPU. It only asks how much memory the tenant has and uses, as nvidia-smi does."""


@dataclass(frozen=True, slots=True)
class Want:
    """Client asks for the token of these GPUs."""

    gpu_mask: int


@dataclass(frozen=True, slots=True)
class Drained:
    """Client returns the token: its gate is closed and its GPU work has finished."""

    grant_id: int
    launches: int = 0
    """Launches under this grant: a statistic, not trusted."""
    wanting: bool = False
    """The client asks for the token again, as with `Want`."""
    idle: bool = False
    """The client returns the token early, because it has launched nothing for a while."""


@dataclass(frozen=True, slots=True)
class Draining:
    """Client has closed its gate and expects its last work to end soon; `Drained` follows."""

    grant_id: int
    expected_ns: int
    """Estimated time until the GPU has finished."""


@dataclass(frozen=True, slots=True)
class Reserve:
    """Client asks for credit: bytes of device memory. Answered by `Reserved`."""

    seq: int
    gpu: int
    bytes: int
    handover: bool = False
    """The client has the bytes already, from an earlier connection."""
    grown: bool = False
    """The driver has allocated the bytes already, without a call that the hook could refuse."""
    ahead: bool = False
    """The client does not need the credit yet. The agent answers at once, and counts no denied allocation."""


@dataclass(frozen=True, slots=True)
class Release:
    """Client returns credit that it does not need any more."""

    gpu: int
    bytes: int
    recalled: bool = False
    """True in the last frame of the answer to a `Recall`."""


@dataclass(frozen=True, slots=True)
class MemInfo:
    """Client asks for the tenant's memory limit and use. Answered by `Memory`."""

    seq: int
    gpu: int
    idle: int = 0
    """Unused bytes of the client's credit."""


@dataclass(frozen=True, slots=True)
class GpuTerms:
    """Terms of a tenant on one GPU."""

    uuid: bytes
    """The 16 raw bytes of the UUID."""
    request_milli: int
    limit_milli: int
    memory: int
    """Memory limit in bytes."""
    enforced: bool
    """True if allocations over the limit are refused. False if memory is only counted."""
    context_kib: int = 0
    """KiB of device memory that a CUDA context takes in each process; 0: unknown."""


@dataclass(frozen=True, slots=True)
class Welcome:
    """Agent's answer to `Hello`: the tenant's terms. Carries the hints page and, since version 2, the
    pulse page as descriptors."""

    seq: int
    gpus: tuple[GpuTerms, ...]
    grace_ms: int
    """Milliseconds for which the hook, at the end of a turn, may wait for threads that are inside a launch call."""


@dataclass(frozen=True, slots=True)
class Limits:
    """New terms of the tenant."""

    gpus: tuple[GpuTerms, ...]
    grace_ms: int


@dataclass(frozen=True, slots=True)
class Grant:
    """Agent grants the token: launches may pass until the quantum ends or `Revoke` comes."""

    grant_id: int
    quantum_ns: int
    gpu_mask: int
    metered: bool
    """The client keeps its queue bounded."""
    announce: bool = False
    """The client may send `Draining` under this grant."""
    renews: bool = False
    """True if the frame changes the terms of a grant that the client has. A client that has already drained that grant
    ignores the frame."""
    short: bool = False
    """The client keeps its queue short: it launches when its earlier launches are about to end."""
    prompt: bool = False
    """The client returns the token as soon as its work has ended."""
    concurrent: bool = False
    """Other tenants may hold the GPUs at the same time: the client samples its progress. A client of an earlier version
    than `CONCURRENT_VERSION` does not."""


@dataclass(frozen=True, slots=True)
class Revoke:
    """Agent revokes the token: close the gate, drain, answer `Drained`."""

    grant_id: int


@dataclass(frozen=True, slots=True)
class Reserved:
    """Agent's answer to `Reserve`."""

    seq: int
    gpu: int
    bytes: int
    """Bytes that are granted; 0: refused, because they exceed the limit."""


@dataclass(frozen=True, slots=True)
class Recall:
    """Agent asks for unused credit of this client, because another process of the tenant needs memory. Answered by
    `Release`."""

    gpu: int
    bytes: int


@dataclass(frozen=True, slots=True)
class Memory:
    """Agent's answer to `MemInfo`."""

    seq: int
    gpu: int
    limit: int
    """Memory limit of the tenant, in bytes."""
    used: int
    """Memory in use by the tenant, in bytes."""


@dataclass(frozen=True, slots=True)
class Refused:
    """Agent is about to close the connection."""

    reason: RefusedReason
    text: str


ClientFrame = Hello | Want | Draining | Drained | Reserve | Release | MemInfo
AgentFrame = Welcome | Grant | Revoke | Reserved | Recall | Memory | Limits | Refused
Frame = ClientFrame | AgentFrame
