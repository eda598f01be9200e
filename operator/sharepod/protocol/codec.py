"""Codec of the frames: bytes to frames and back.

Guarantees:
- Any bytes give a frame that is valid by itself, or a `ProtocolError`.
- Conditions that depend on the receiver's state are the receiver's to check: that a GPU index is one of the tenant's,
  that a grant is the present one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from sharepod.protocol._wire import ffi as _ffi
from sharepod.protocol._wire import lib as _lib

from .frames import (
    MAGIC,
    MAX_GPUS,
    TEXT_BYTES,
    UUID_BYTES,
    VERSION_MAX,
    VERSION_MIN,
    AgentFrame,
    ClientFrame,
    Drained,
    Draining,
    Frame,
    GpuTerms,
    Grant,
    Hello,
    Limits,
    MemInfo,
    Memory,
    ProtocolError,
    Recall,
    Refused,
    RefusedReason,
    Release,
    Reserve,
    Reserved,
    Revoke,
    Want,
    Welcome,
)

_SIZE_MAX = 1 << 62
"""Largest size in bytes that a frame may carry: sums of a few of them stay below 2**64, where C would wrap around."""
_HEADER = _ffi.sizeof("struct shp_header")
_ALL_GPUS = (1 << MAX_GPUS) - 1

_Raw = Any
"""Pointer to one of the header's structs."""


def parse_client(packet: bytes) -> ClientFrame:
    """Parse a packet from a client. Raise `ProtocolError`."""
    frame: ClientFrame = _parse(packet, _FROM_CLIENT)
    return frame


def parse_agent(packet: bytes) -> AgentFrame:
    """Parse a packet from the agent. Raise `ProtocolError`."""
    frame: AgentFrame = _parse(packet, _FROM_AGENT)
    return frame


def encode(frame: Frame, *, version: int = VERSION_MAX) -> bytes:
    """Return the packet of a frame. Raise `OverflowError` if a value does not fit its field: a defect of the caller.

    Args:
        frame: the frame.
        version: version of the protocol that was agreed on.
    """
    kind, struct, write = _WRITERS[type(frame)]
    raw = _ffi.new(f"struct {struct} *")
    raw.header.magic = MAGIC
    raw.header.version = frame.version_min if isinstance(frame, Hello) else version
    raw.header.type = kind
    raw.header.size = _ffi.sizeof(raw[0])
    raw.header.seq = getattr(frame, "seq", 0)
    write(raw, frame)
    return bytes(_ffi.buffer(raw))


def _parse(packet: bytes, readers: Mapping[int, tuple[str, Callable[[_Raw], Frame]]]) -> Any:
    if len(packet) < _HEADER:
        raise ProtocolError(f"a packet of {len(packet)} bytes is shorter than a header")
    header = _ffi.from_buffer("struct shp_header *", packet)
    if header.magic != MAGIC:
        raise ProtocolError(f"magic {header.magic:#x} is not {MAGIC:#x}")
    reader = readers.get(header.type)
    if reader is None:
        raise ProtocolError(f"frame type {header.type} is not one that this side may send")
    struct, read = reader
    size = _ffi.sizeof(f"struct {struct}")
    if len(packet) != size or header.size != size:
        raise ProtocolError(
            f"frame type {header.type} has {size} bytes; the packet has {len(packet)} and says {header.size}"
        )
    if header.type != _lib.SHP_HELLO and not VERSION_MIN <= header.version <= VERSION_MAX:
        raise ProtocolError(f"version {header.version} is not one of {VERSION_MIN} to {VERSION_MAX}")
    return read(_ffi.from_buffer(f"struct {struct} *", packet))


# ---- checks


def _flags(value: int, known: int) -> int:
    if value & ~known:
        raise ProtocolError(f"flags {value:#x} has unknown bits")
    return value


def _gpu(value: int) -> int:
    if value >= MAX_GPUS:
        raise ProtocolError(f"gpu {value} is not below {MAX_GPUS}")
    return value


def _mask(value: int) -> int:
    if not 0 < value <= _ALL_GPUS:
        raise ProtocolError(f"gpu_mask {value:#x} names no GPU, or one beyond {MAX_GPUS}")
    return value


def _bytes(value: int, *, least: int = 0) -> int:
    if not least <= value <= _SIZE_MAX:
        raise ProtocolError(f"{value} bytes is out of range")
    return value


def _text(field: Any, size: int) -> str:
    raw = bytes(_ffi.buffer(field, size))
    end = raw.find(b"\0")
    if end < 0:
        raise ProtocolError("a text is not terminated")
    try:
        return raw[:end].decode("utf-8")
    except UnicodeDecodeError:
        raise ProtocolError("a text is not UTF-8") from None


def _build(field: Any) -> str:
    text = _text(field, 64)
    if not all(character in "0123456789abcdef" for character in text):
        raise ProtocolError("build is not hexadecimal")
    return text


def _put_text(field: Any, size: int, text: str) -> None:
    raw = text.encode("utf-8")[: size - 1]
    raw = raw.decode("utf-8", "ignore").encode("utf-8")
    _ffi.memmove(field, raw, len(raw))


# ---- from clients


def _read_hello(raw: _Raw) -> Hello:
    if not 1 <= raw.version_min <= raw.version_max or raw.header.version != raw.version_min:
        raise ProtocolError(
            f"versions {raw.version_min} to {raw.version_max} in a frame of {raw.header.version} make no range"
        )
    flags = _flags(raw.flags, _lib.SHP_HELLO_NO_MEMBARRIER | _lib.SHP_HELLO_OBSERVES)
    return Hello(
        raw.version_min,
        raw.version_max,
        _build(raw.build),
        bool(flags & _lib.SHP_HELLO_NO_MEMBARRIER),
        bool(flags & _lib.SHP_HELLO_OBSERVES),
    )


def _write_hello(raw: _Raw, frame: Hello) -> None:
    raw.version_min, raw.version_max = frame.version_min, frame.version_max
    raw.flags = _lib.SHP_HELLO_NO_MEMBARRIER if frame.no_membarrier else 0
    raw.flags |= _lib.SHP_HELLO_OBSERVES if frame.observes else 0
    _put_text(raw.build, 64, frame.build)


def _read_want(raw: _Raw) -> Want:
    return Want(_mask(raw.gpu_mask))


def _write_want(raw: _Raw, frame: Want) -> None:
    raw.gpu_mask = frame.gpu_mask


def _read_drained(raw: _Raw) -> Drained:
    flags = _flags(raw.flags, _lib.SHP_DRAINED_WANT | _lib.SHP_DRAINED_IDLE)
    return Drained(raw.grant_id, raw.launches, bool(flags & _lib.SHP_DRAINED_WANT), bool(flags & _lib.SHP_DRAINED_IDLE))


def _write_drained(raw: _Raw, frame: Drained) -> None:
    raw.grant_id, raw.launches = frame.grant_id, frame.launches
    raw.flags = (_lib.SHP_DRAINED_WANT if frame.wanting else 0) | (_lib.SHP_DRAINED_IDLE if frame.idle else 0)


def _read_draining(raw: _Raw) -> Draining:
    return Draining(raw.grant_id, raw.expected_ns)


def _write_draining(raw: _Raw, frame: Draining) -> None:
    raw.grant_id, raw.expected_ns = frame.grant_id, frame.expected_ns


def _read_reserve(raw: _Raw) -> Reserve:
    flags = _flags(raw.flags, _lib.SHP_RESERVE_HANDOVER | _lib.SHP_RESERVE_GROWN | _lib.SHP_RESERVE_AHEAD)
    handover, grown = bool(flags & _lib.SHP_RESERVE_HANDOVER), bool(flags & _lib.SHP_RESERVE_GROWN)
    ahead = bool(flags & _lib.SHP_RESERVE_AHEAD)
    if handover + grown + ahead > 1:
        raise ProtocolError("a reserve that is two of handover, growth and ahead of need")
    return Reserve(raw.header.seq, _gpu(raw.gpu), _bytes(raw.bytes, least=1), handover, grown, ahead)


def _write_reserve(raw: _Raw, frame: Reserve) -> None:
    raw.gpu, raw.bytes = frame.gpu, frame.bytes
    raw.flags = (
        (_lib.SHP_RESERVE_HANDOVER if frame.handover else 0)
        | (_lib.SHP_RESERVE_GROWN if frame.grown else 0)
        | (_lib.SHP_RESERVE_AHEAD if frame.ahead else 0)
    )


def _read_release(raw: _Raw) -> Release:
    flags = _flags(raw.flags, _lib.SHP_RELEASE_RECALLED)
    return Release(_gpu(raw.gpu), _bytes(raw.bytes, least=0 if flags else 1), bool(flags))


def _write_release(raw: _Raw, frame: Release) -> None:
    raw.gpu, raw.bytes = frame.gpu, frame.bytes
    raw.flags = _lib.SHP_RELEASE_RECALLED if frame.recalled else 0


def _read_meminfo(raw: _Raw) -> MemInfo:
    return MemInfo(raw.header.seq, _gpu(raw.gpu), _bytes(raw.idle))


def _write_meminfo(raw: _Raw, frame: MemInfo) -> None:
    raw.gpu, raw.idle = frame.gpu, frame.idle


# ---- from the agent


def _read_terms(raw: _Raw) -> tuple[tuple[GpuTerms, ...], int]:
    if not 1 <= raw.gpu_count <= MAX_GPUS:
        raise ProtocolError(f"gpu_count {raw.gpu_count} is not 1 to {MAX_GPUS}")
    terms = []
    for gpu in raw.gpus[0 : raw.gpu_count]:
        if not gpu.request_milli <= gpu.limit_milli <= 1000:
            raise ProtocolError(
                f"request {gpu.request_milli} and limit {gpu.limit_milli} are not request <= limit <= 1000"
            )
        enforced = bool(_flags(gpu.flags, _lib.SHP_GPU_MEMORY_ENFORCED))
        uuid = bytes(_ffi.buffer(gpu.uuid, UUID_BYTES))
        memory = _bytes(gpu.memory)
        terms.append(GpuTerms(uuid, gpu.request_milli, gpu.limit_milli, memory, enforced, gpu.context_kib))
    return tuple(terms), raw.grace_ms


def _write_terms(raw: _Raw, frame: Welcome | Limits) -> None:
    raw.gpu_count, raw.grace_ms = len(frame.gpus), frame.grace_ms
    for index, terms in enumerate(frame.gpus):
        gpu = raw.gpus[index]
        _ffi.memmove(gpu.uuid, terms.uuid, UUID_BYTES)
        gpu.request_milli, gpu.limit_milli, gpu.memory = terms.request_milli, terms.limit_milli, terms.memory
        gpu.flags = _lib.SHP_GPU_MEMORY_ENFORCED if terms.enforced else 0
        gpu.context_kib = terms.context_kib


def _read_welcome(raw: _Raw) -> Welcome:
    gpus, grace_ms = _read_terms(raw)
    return Welcome(raw.header.seq, gpus, grace_ms)


def _read_limits(raw: _Raw) -> Limits:
    return Limits(*_read_terms(raw))


_GRANT_FLAGS = (
    _lib.SHP_GRANT_METERED,
    _lib.SHP_GRANT_ANNOUNCE,
    _lib.SHP_GRANT_RENEWS,
    _lib.SHP_GRANT_SHORT,
    _lib.SHP_GRANT_PROMPT,
)
"""Flags of a grant, in the order of the fields of `Grant`."""


def _read_grant(raw: _Raw) -> Grant:
    flags = _flags(raw.flags, sum(_GRANT_FLAGS))
    return Grant(
        raw.grant_id,
        raw.quantum_ns,
        _mask(raw.gpu_mask),
        *(bool(flags & bit) for bit in _GRANT_FLAGS),
    )


def _write_grant(raw: _Raw, frame: Grant) -> None:
    raw.grant_id, raw.quantum_ns, raw.gpu_mask = frame.grant_id, frame.quantum_ns, frame.gpu_mask
    told = (frame.metered, frame.announce, frame.renews, frame.short, frame.prompt)
    raw.flags = sum(bit for bit, is_set in zip(_GRANT_FLAGS, told, strict=True) if is_set)


def _read_revoke(raw: _Raw) -> Revoke:
    return Revoke(raw.grant_id)


def _write_revoke(raw: _Raw, frame: Revoke) -> None:
    raw.grant_id = frame.grant_id


def _read_reserved(raw: _Raw) -> Reserved:
    credited = _bytes(raw.bytes)
    if (raw.status == _lib.SHP_RESERVE_OK) != (credited > 0) or raw.status > _lib.SHP_RESERVE_OVER_LIMIT:
        raise ProtocolError(f"status {raw.status} with {credited} bytes credited")
    return Reserved(raw.header.seq, _gpu(raw.gpu), credited)


def _write_reserved(raw: _Raw, frame: Reserved) -> None:
    raw.gpu, raw.bytes = frame.gpu, frame.bytes
    raw.status = _lib.SHP_RESERVE_OK if frame.bytes else _lib.SHP_RESERVE_OVER_LIMIT


def _read_recall(raw: _Raw) -> Recall:
    return Recall(_gpu(raw.gpu), _bytes(raw.bytes, least=1))


def _write_recall(raw: _Raw, frame: Recall) -> None:
    raw.gpu, raw.bytes = frame.gpu, frame.bytes


def _read_memory(raw: _Raw) -> Memory:
    return Memory(raw.header.seq, _gpu(raw.gpu), _bytes(raw.limit), _bytes(raw.used))


def _write_memory(raw: _Raw, frame: Memory) -> None:
    raw.gpu, raw.limit, raw.used = frame.gpu, frame.limit, frame.used


def _read_refused(raw: _Raw) -> Refused:
    try:
        return Refused(RefusedReason(raw.reason), _text(raw.text, TEXT_BYTES))
    except ValueError:
        raise ProtocolError(f"refused for reason {raw.reason}, which is none") from None


def _write_refused(raw: _Raw, frame: Refused) -> None:
    raw.reason = frame.reason
    _put_text(raw.text, TEXT_BYTES, frame.text)


_TABLE: tuple[tuple[type[Frame], int, str, Callable[[_Raw], Frame], Callable[[_Raw, Any], None]], ...] = (
    (Hello, _lib.SHP_HELLO, "shp_hello", _read_hello, _write_hello),
    (Want, _lib.SHP_WANT, "shp_want", _read_want, _write_want),
    (Draining, _lib.SHP_DRAINING, "shp_draining", _read_draining, _write_draining),
    (Drained, _lib.SHP_DRAINED, "shp_drained", _read_drained, _write_drained),
    (Reserve, _lib.SHP_RESERVE, "shp_reserve", _read_reserve, _write_reserve),
    (Release, _lib.SHP_RELEASE, "shp_release", _read_release, _write_release),
    (MemInfo, _lib.SHP_MEMINFO, "shp_meminfo", _read_meminfo, _write_meminfo),
    (Welcome, _lib.SHP_WELCOME, "shp_welcome", _read_welcome, _write_terms),
    (Grant, _lib.SHP_GRANT, "shp_grant", _read_grant, _write_grant),
    (Revoke, _lib.SHP_REVOKE, "shp_revoke", _read_revoke, _write_revoke),
    (Reserved, _lib.SHP_RESERVED, "shp_reserved", _read_reserved, _write_reserved),
    (Recall, _lib.SHP_RECALL, "shp_recall", _read_recall, _write_recall),
    (Memory, _lib.SHP_MEMORY, "shp_memory", _read_memory, _write_memory),
    (Limits, _lib.SHP_LIMITS, "shp_welcome", _read_limits, _write_terms),
    (Refused, _lib.SHP_REFUSED, "shp_refused", _read_refused, _write_refused),
)
_FIRST_AGENT_TYPE: int = _lib.SHP_WELCOME
_FROM_CLIENT = {kind: (struct, read) for _, kind, struct, read, _ in _TABLE if kind < _FIRST_AGENT_TYPE}
_FROM_AGENT = {kind: (struct, read) for _, kind, struct, read, _ in _TABLE if kind >= _FIRST_AGENT_TYPE}
_WRITERS = {frame: (kind, struct, write) for frame, kind, struct, _, write in _TABLE}
