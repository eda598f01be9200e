"""The frames of the protocol as frozen values. One that exists is valid for its type.

Units as in the header: bytes, nanoseconds, thousandths of a GPU's time. `seq` is a client's request number.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from sharepod.protocol._wire import lib as _lib

MAGIC: int = _lib.SHP_MAGIC
VERSION_MIN: int = _lib.SHP_VERSION_MIN
VERSION_MAX: int = _lib.SHP_VERSION_MAX
MAX_GPUS: int = _lib.SHP_MAX_GPUS
UUID_BYTES: int = _lib.SHP_UUID_BYTES
TEXT_BYTES: int = _lib.SHP_TEXT_BYTES
FRAME_MAX: int = _lib.SHP_FRAME_MAX
HINTS_BYTES: int = _lib.SHP_HINTS_BYTES


class ProtocolError(Exception):
    """Bytes that are no frame, or a frame that may not come now. The connection is closed on it."""


class RefusedReason(IntEnum):
    """Why a daemon closes a connection."""

    VERSION = _lib.SHP_REFUSED_VERSION
    RELEASING = _lib.SHP_REFUSED_RELEASING
    FULL = _lib.SHP_REFUSED_FULL


@dataclass(frozen=True, slots=True)
class Hello:
    version_min: int
    version_max: int
    build: str = ""
    no_membarrier: bool = False
    observes: bool = False
    """It uses no GPU and only asks what the tenant uses."""


@dataclass(frozen=True, slots=True)
class Want:
    gpu_mask: int


@dataclass(frozen=True, slots=True)
class Drained:
    grant_id: int
    launches: int = 0
    wanting: bool = False
    idle: bool = False


@dataclass(frozen=True, slots=True)
class Draining:
    grant_id: int
    expected_ns: int
    """Until the GPU has finished, as the hook guesses."""


@dataclass(frozen=True, slots=True)
class Reserve:
    seq: int
    gpu: int
    bytes: int
    handover: bool = False
    """Held already, from an earlier connection."""
    grown: bool = False
    """Taken by the driver already, without a call that could have been refused."""
    ahead: bool = False
    """More than is needed now: answered at once, and a refusal is not counted."""


@dataclass(frozen=True, slots=True)
class Release:
    gpu: int
    bytes: int
    recalled: bool = False


@dataclass(frozen=True, slots=True)
class MemInfo:
    seq: int
    gpu: int
    idle: int = 0


@dataclass(frozen=True, slots=True)
class GpuTerms:
    """What a tenant was granted on one GPU. `uuid`: the 16 raw bytes. `context_kib`: what each process's context takes
    of its memory, 0: unknown."""

    uuid: bytes
    request_milli: int
    limit_milli: int
    memory: int
    enforced: bool
    context_kib: int = 0


@dataclass(frozen=True, slots=True)
class Welcome:
    seq: int
    gpus: tuple[GpuTerms, ...]
    grace_ms: int


@dataclass(frozen=True, slots=True)
class Limits:
    gpus: tuple[GpuTerms, ...]
    grace_ms: int


@dataclass(frozen=True, slots=True)
class Grant:
    grant_id: int
    quantum_ns: int
    gpu_mask: int
    metered: bool
    announce: bool = False
    """`Draining` may be sent under it."""
    renews: bool = False
    """New terms of one that is held: who has drained it meanwhile does nothing."""


@dataclass(frozen=True, slots=True)
class Revoke:
    grant_id: int


@dataclass(frozen=True, slots=True)
class Reserved:
    seq: int
    gpu: int
    bytes: int
    """Credited; 0: over the limit."""


@dataclass(frozen=True, slots=True)
class Recall:
    gpu: int
    bytes: int


@dataclass(frozen=True, slots=True)
class Memory:
    seq: int
    gpu: int
    limit: int
    used: int


@dataclass(frozen=True, slots=True)
class Refused:
    reason: RefusedReason
    text: str


ClientFrame = Hello | Want | Draining | Drained | Reserve | Release | MemInfo
AgentFrame = Welcome | Grant | Revoke | Reserved | Recall | Memory | Limits | Refused
Frame = ClientFrame | AgentFrame
