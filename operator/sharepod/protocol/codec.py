"""Codec of the frames: bytes to frames and back.

The formats come from the binding `_wire`, which the C compiler has compared with protocol.h. A frame takes two calls of
`struct`: one for the header, one for the body.

Guarantees:
- Any bytes result in a frame that is valid by itself, or in a `ProtocolError`.
- The receiver must check values that depend on its state, such as a GPU index of the tenant, or the id of the current
  grant.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from struct import Struct
from typing import Any

from sharepod.protocol._wire import ffi as _ffi
from sharepod.protocol._wire import lib as _lib

from .frames import (
    MAGIC,
    MAX_GPUS,
    TEXT_BYTES,
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
_ALL_GPUS = (1 << MAX_GPUS) - 1
_BUILD_BYTES = 64

_Reader = Callable[..., Frame]
"""Reader: takes the header's `seq`, `version` and the values of the fields that follow."""
_Writer = Callable[[Any], tuple[int | bytes, ...]]
"""Writer: returns the values of the fields that follow the header."""


def _format_of(ctype: Any) -> str:
    """Return the format string for Python's `struct`; arrays and nested structs become bytes."""
    codes = {1: "B", 2: "H", 4: "I", 8: "Q"}
    fields = [(field.offset, field.type) for _, field in ctype.fields]
    sizes = [_ffi.sizeof(kind) for _, kind in fields]
    ends = [offset + size for (offset, _), size in zip(fields, sizes, strict=True)]
    assert [offset for offset, _ in fields] == [0, *ends[:-1]], f"{ctype.cname} has no gaps"
    assert ends[-1] == _ffi.sizeof(ctype), f"{ctype.cname} has no gap at its end"
    primitive = [kind.kind == "primitive" for _, kind in fields]
    return "".join(codes[size] if plain else f"{size}s" for size, plain in zip(sizes, primitive, strict=True))


_HEADER = Struct("=" + _format_of(_ffi.typeof("struct shp_header")))
_GPU = Struct("=" + _format_of(_ffi.typeof("struct shp_gpu")))
_UUID_BYTES: int = _lib.SHP_UUID_BYTES


class _Body:
    """Body of the frames of one type: the fields after the header."""

    __slots__ = ("fields", "kind", "read", "size", "write")

    def __init__(self, kind: int, name: str, read: _Reader, write: _Writer) -> None:
        ctype = _ffi.typeof(f"struct {name}")
        _, after = _format_of(ctype).split("s", 1)  # the header is the first field
        self.kind = kind
        self.fields = Struct("=" + after)
        self.size: int = _ffi.sizeof(ctype)
        """Bytes of the whole frame."""
        self.read = read
        self.write = write


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
        version: negotiated version of the protocol.
    """
    body = _BODIES[type(frame)]
    if isinstance(frame, Hello):
        version = frame.version_min
    try:
        header = _HEADER.pack(MAGIC, version, body.kind, body.size, getattr(frame, "seq", 0))
        return header + body.fields.pack(*body.write(frame))
    except struct.error as error:
        raise OverflowError(f"{frame} does not fit its fields: {error}") from None


def _parse(packet: bytes, bodies: Mapping[int, _Body]) -> Any:
    if len(packet) < _HEADER.size:
        raise ProtocolError(f"a packet of {len(packet)} bytes is shorter than a header")
    magic, version, kind, size, seq = _HEADER.unpack_from(packet)
    if magic != MAGIC:
        raise ProtocolError(f"magic {magic:#x} is not {MAGIC:#x}")
    body = bodies.get(kind)
    if body is None:
        raise ProtocolError(f"frame type {kind} may not be sent by this side")
    if len(packet) != body.size or size != body.size:
        raise ProtocolError(f"frame type {kind} has {body.size} bytes; the packet has {len(packet)} and states {size}")
    if kind != _HELLO and not VERSION_MIN <= version <= VERSION_MAX:
        raise ProtocolError(f"version {version} is not one of {VERSION_MIN} to {VERSION_MAX}")
    return body.read(seq, version, *body.fields.unpack_from(packet, _HEADER.size))


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


def _text(raw: bytes) -> str:
    end = raw.find(b"\0")
    if end < 0:
        raise ProtocolError("a text is not terminated")
    try:
        return raw[:end].decode("utf-8")
    except UnicodeDecodeError:
        raise ProtocolError("a text is not UTF-8") from None


def _build(raw: bytes) -> str:
    text = _text(raw)
    if not all(character in "0123456789abcdef" for character in text):
        raise ProtocolError("build is not hexadecimal")
    return text


def _raw_text(text: str, size: int) -> bytes:
    """Return a text as UTF-8, cut so that it fits into `size` bytes with a final zero."""
    raw = text.encode("utf-8")[: size - 1]
    return raw.decode("utf-8", "ignore").encode("utf-8")


# ---- from clients

# Copied once, because the binding looks constants up by name at each use.
_HELLO: int = _lib.SHP_HELLO
_NO_MEMBARRIER: int = _lib.SHP_HELLO_NO_MEMBARRIER
_OBSERVES: int = _lib.SHP_HELLO_OBSERVES
_DRAINED_WANT: int = _lib.SHP_DRAINED_WANT
_DRAINED_IDLE: int = _lib.SHP_DRAINED_IDLE
_HANDOVER: int = _lib.SHP_RESERVE_HANDOVER
_GROWN: int = _lib.SHP_RESERVE_GROWN
_AHEAD: int = _lib.SHP_RESERVE_AHEAD
_RECALLED: int = _lib.SHP_RELEASE_RECALLED


def _read_hello(seq: int, version: int, least: int, most: int, flags: int, build: bytes) -> Hello:
    if not 1 <= least <= most or version != least:
        raise ProtocolError(f"versions {least} to {most} in a frame of {version} make no range")
    _flags(flags, _NO_MEMBARRIER | _OBSERVES)
    return Hello(least, most, _build(build), bool(flags & _NO_MEMBARRIER), bool(flags & _OBSERVES))


def _write_hello(frame: Hello) -> tuple[int | bytes, ...]:
    flags = (_NO_MEMBARRIER if frame.no_membarrier else 0) | (_OBSERVES if frame.observes else 0)
    return frame.version_min, frame.version_max, flags, _raw_text(frame.build, _BUILD_BYTES)


def _read_want(seq: int, version: int, gpu_mask: int, reserved: int) -> Want:
    return Want(_mask(gpu_mask))


def _write_want(frame: Want) -> tuple[int, ...]:
    return frame.gpu_mask, 0


def _read_drained(seq: int, version: int, grant_id: int, launches: int, flags: int, reserved: int) -> Drained:
    _flags(flags, _DRAINED_WANT | _DRAINED_IDLE)
    return Drained(grant_id, launches, bool(flags & _DRAINED_WANT), bool(flags & _DRAINED_IDLE))


def _write_drained(frame: Drained) -> tuple[int, ...]:
    flags = (_DRAINED_WANT if frame.wanting else 0) | (_DRAINED_IDLE if frame.idle else 0)
    return frame.grant_id, frame.launches, flags, 0


def _read_draining(seq: int, version: int, grant_id: int, expected_ns: int) -> Draining:
    return Draining(grant_id, expected_ns)


def _write_draining(frame: Draining) -> tuple[int, ...]:
    return frame.grant_id, frame.expected_ns


def _read_reserve(seq: int, version: int, gpu: int, flags: int, size: int) -> Reserve:
    _flags(flags, _HANDOVER | _GROWN | _AHEAD)
    handover, grown, ahead = bool(flags & _HANDOVER), bool(flags & _GROWN), bool(flags & _AHEAD)
    if handover + grown + ahead > 1:
        raise ProtocolError("a reserve that is two of handover, growth and ahead of need")
    return Reserve(seq, _gpu(gpu), _bytes(size, least=1), handover, grown, ahead)


def _write_reserve(frame: Reserve) -> tuple[int, ...]:
    flags = (_HANDOVER if frame.handover else 0) | (_GROWN if frame.grown else 0) | (_AHEAD if frame.ahead else 0)
    return frame.gpu, flags, frame.bytes


def _read_release(seq: int, version: int, gpu: int, flags: int, size: int) -> Release:
    _flags(flags, _RECALLED)
    return Release(_gpu(gpu), _bytes(size, least=0 if flags else 1), bool(flags))


def _write_release(frame: Release) -> tuple[int, ...]:
    return frame.gpu, _RECALLED if frame.recalled else 0, frame.bytes


def _read_meminfo(seq: int, version: int, gpu: int, reserved: int, idle: int) -> MemInfo:
    return MemInfo(seq, _gpu(gpu), _bytes(idle))


def _write_meminfo(frame: MemInfo) -> tuple[int, ...]:
    return frame.gpu, 0, frame.idle


# ---- from the agent

_RESERVE_OK: int = _lib.SHP_RESERVE_OK
_OVER_LIMIT: int = _lib.SHP_RESERVE_OVER_LIMIT
_ENFORCED: int = _lib.SHP_GPU_MEMORY_ENFORCED


def _read_terms(gpu_count: int, gpus: bytes) -> tuple[GpuTerms, ...]:
    if not 1 <= gpu_count <= MAX_GPUS:
        raise ProtocolError(f"gpu_count {gpu_count} is not 1 to {MAX_GPUS}")
    terms = []
    for uuid, request_milli, limit_milli, memory, flags, context_kib in _GPU.iter_unpack(gpus[: gpu_count * _GPU.size]):
        if not request_milli <= limit_milli <= 1000:
            raise ProtocolError(f"request {request_milli} and limit {limit_milli} are not request <= limit <= 1000")
        enforced = bool(_flags(flags, _ENFORCED))
        terms.append(GpuTerms(uuid, request_milli, limit_milli, _bytes(memory), enforced, context_kib))
    return tuple(terms)


def _write_terms(frame: Welcome | Limits) -> tuple[int | bytes, ...]:
    if len(frame.gpus) > MAX_GPUS:
        raise OverflowError(f"terms of {len(frame.gpus)} GPUs: a frame has room for {MAX_GPUS}")
    if any(len(gpu.uuid) < _UUID_BYTES for gpu in frame.gpus):
        raise ValueError(f"a UUID has {_UUID_BYTES} bytes")
    gpus = [
        _GPU.pack(gpu.uuid, gpu.request_milli, gpu.limit_milli, gpu.memory, _ENFORCED * gpu.enforced, gpu.context_kib)
        for gpu in frame.gpus
    ]
    return len(frame.gpus), frame.grace_ms, b"".join(gpus)


def _read_welcome(seq: int, version: int, gpu_count: int, grace_ms: int, gpus: bytes) -> Welcome:
    return Welcome(seq, _read_terms(gpu_count, gpus), grace_ms)


def _read_limits(seq: int, version: int, gpu_count: int, grace_ms: int, gpus: bytes) -> Limits:
    return Limits(_read_terms(gpu_count, gpus), grace_ms)


_METERED: int = _lib.SHP_GRANT_METERED
_ANNOUNCE: int = _lib.SHP_GRANT_ANNOUNCE
_RENEWS: int = _lib.SHP_GRANT_RENEWS
_SHORT: int = _lib.SHP_GRANT_SHORT
_PROMPT: int = _lib.SHP_GRANT_PROMPT
_CONCURRENT: int = _lib.SHP_GRANT_CONCURRENT
_GRANT_FLAGS = _METERED | _ANNOUNCE | _RENEWS | _SHORT | _PROMPT | _CONCURRENT


def _read_grant(seq: int, version: int, grant_id: int, quantum_ns: int, gpu_mask: int, flags: int) -> Grant:
    _flags(flags, _GRANT_FLAGS)
    flagged = (bool(flags & bit) for bit in (_METERED, _ANNOUNCE, _RENEWS, _SHORT, _PROMPT, _CONCURRENT))
    return Grant(grant_id, quantum_ns, _mask(gpu_mask), *flagged)


def _write_grant(frame: Grant) -> tuple[int, ...]:
    flags = (
        (_METERED if frame.metered else 0)
        | (_ANNOUNCE if frame.announce else 0)
        | (_RENEWS if frame.renews else 0)
        | (_SHORT if frame.short else 0)
        | (_PROMPT if frame.prompt else 0)
        | (_CONCURRENT if frame.concurrent else 0)
    )
    return frame.grant_id, frame.quantum_ns, frame.gpu_mask, flags


def _read_revoke(seq: int, version: int, grant_id: int) -> Revoke:
    return Revoke(grant_id)


def _write_revoke(frame: Revoke) -> tuple[int, ...]:
    return (frame.grant_id,)


def _read_reserved(seq: int, version: int, gpu: int, status: int, size: int) -> Reserved:
    credited = _bytes(size)
    if (status == _RESERVE_OK) != (credited > 0) or status > _OVER_LIMIT:
        raise ProtocolError(f"status {status} with {credited} bytes credited")
    return Reserved(seq, _gpu(gpu), credited)


def _write_reserved(frame: Reserved) -> tuple[int, ...]:
    return frame.gpu, _RESERVE_OK if frame.bytes else _OVER_LIMIT, frame.bytes


def _read_recall(seq: int, version: int, gpu: int, reserved: int, size: int) -> Recall:
    return Recall(_gpu(gpu), _bytes(size, least=1))


def _write_recall(frame: Recall) -> tuple[int, ...]:
    return frame.gpu, 0, frame.bytes


def _read_memory(seq: int, version: int, gpu: int, reserved: int, limit: int, used: int) -> Memory:
    return Memory(seq, _gpu(gpu), _bytes(limit), _bytes(used))


def _write_memory(frame: Memory) -> tuple[int, ...]:
    return frame.gpu, 0, frame.limit, frame.used


def _read_refused(seq: int, version: int, reason: int, reserved: int, text: bytes) -> Refused:
    try:
        return Refused(RefusedReason(reason), _text(text))
    except ValueError:
        raise ProtocolError(f"refused for reason {reason}, which is none") from None


def _write_refused(frame: Refused) -> tuple[int | bytes, ...]:
    return frame.reason, 0, _raw_text(frame.text, TEXT_BYTES)


_BODIES: dict[type[Frame], _Body] = {
    Hello: _Body(_lib.SHP_HELLO, "shp_hello", _read_hello, _write_hello),
    Want: _Body(_lib.SHP_WANT, "shp_want", _read_want, _write_want),
    Draining: _Body(_lib.SHP_DRAINING, "shp_draining", _read_draining, _write_draining),
    Drained: _Body(_lib.SHP_DRAINED, "shp_drained", _read_drained, _write_drained),
    Reserve: _Body(_lib.SHP_RESERVE, "shp_reserve", _read_reserve, _write_reserve),
    Release: _Body(_lib.SHP_RELEASE, "shp_release", _read_release, _write_release),
    MemInfo: _Body(_lib.SHP_MEMINFO, "shp_meminfo", _read_meminfo, _write_meminfo),
    Welcome: _Body(_lib.SHP_WELCOME, "shp_welcome", _read_welcome, _write_terms),
    Grant: _Body(_lib.SHP_GRANT, "shp_grant", _read_grant, _write_grant),
    Revoke: _Body(_lib.SHP_REVOKE, "shp_revoke", _read_revoke, _write_revoke),
    Reserved: _Body(_lib.SHP_RESERVED, "shp_reserved", _read_reserved, _write_reserved),
    Recall: _Body(_lib.SHP_RECALL, "shp_recall", _read_recall, _write_recall),
    Memory: _Body(_lib.SHP_MEMORY, "shp_memory", _read_memory, _write_memory),
    Limits: _Body(_lib.SHP_LIMITS, "shp_welcome", _read_limits, _write_terms),
    Refused: _Body(_lib.SHP_REFUSED, "shp_refused", _read_refused, _write_refused),
}
_FIRST_AGENT_TYPE: int = _lib.SHP_WELCOME
_FROM_CLIENT = {body.kind: body for body in _BODIES.values() if body.kind < _FIRST_AGENT_TYPE}
_FROM_AGENT = {body.kind: body for body in _BODIES.values() if body.kind >= _FIRST_AGENT_TYPE}
