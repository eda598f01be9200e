"""Invalid calls of every function of the driver, generated from the table of entry points.

Each call has arguments that fit the parameter types, except one bad argument: a null pointer, a null handle, a device
that does not exist, or a size or number out of range.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from hook.world.allocating import FLOAT
from hook.world.caller import Argument, By, Caller, In
from table.render import Row, read_table

ROOM = 512
"""Bytes behind each pointer: more than the largest structure that a call reads."""
ENDED = "the process ended"
FILL = b"\xa5" * 8
"""Value of variables before a call that may write them."""
PAGE = 2 << 20
OUT_OF_MEMORY = 2
NOT_CAPTURING = 401

_SCALARS = (
    "CUdeviceptr", "CUcontext", "CUarray", "CUmipmappedArray", "CUmemGenericAllocationHandle", "CUmemoryPool",
    "CUgraph", "CUgraphExec", "CUgraphNode", "CUgreenCtx", "CUdeviceptr_v1", "size_t", "unsigned int", "int",
)  # fmt: skip
"""Types that a call writes if its parameter is a pointer to one of them."""
_BAD_NUMBERS: Mapping[str, tuple[int, ...]] = {
    "size_t": (0, 1 << 60, (1 << 64) - 1),
    "unsigned int": (0, 0xFFFFFFFF),
    "int": (-1, 0x7FFFFFFF),
    "unsigned long long": (0, 1 << 60, (1 << 64) - 1),
    "CUdevice": (-1, 2, 99, 0x7FFFFFFF),
    "CUlimit": (0x7FFFFFFF,),
    "CUstreamCaptureMode": (0x7FFFFFFF,),
    "CUdeviceptr": (0, 1 << 60),
    "CUdeviceptr_v1": (0,),
    "CUmemGenericAllocationHandle": (0,),
    "CUmemAllocationHandleType": (0x7FFFFFFF,),
    "CUmemRangeHandleType": (0x7FFFFFFF,),
}
_HANDLES = {
    "CUstream": "stream", "CUevent": "event", "CUfunction": "function", "CUgraph": "graph", "CUgraphExec": "exec",
    "CUmemoryPool": "pool", "CUarray": "array", "CUcontext": "context",
}  # fmt: skip
"""Types of handles for which `Handles` has a valid one."""
_WAITS = re.compile(r"Synchronize$|Callback|LaunchHostFunc|GetProcAddress|ThreadExchange|cuInit$")
"""Functions that get no invalid calls: their arguments cannot be chosen by type, or they call the program back."""


@dataclass(frozen=True)
class InvalidCall:
    """One call, and its bad argument."""

    symbol: str
    what: str
    arguments: tuple[Argument | str, ...]
    """Arguments of the call. A string is the name of a handle of `Handles`."""


def _kind(parameter: str) -> str:
    """Return the type of a parameter, without its name."""
    text = re.sub(r"\[\w*\]$", "*", parameter.strip())
    kind = re.sub(r"\s*\b\w+\s*(\**)$", r"\1", text) if not text.endswith("*") else re.sub(r"\w+(\*+)$", r"\1", text)
    return re.sub(r"\s*\*", " *", kind).strip()


def _good(kind: str) -> Argument | str:
    if kind.endswith("*"):
        scalar = kind.removesuffix(" *") in _SCALARS
        return In(FILL if scalar else bytes(ROOM))
    if kind in _HANDLES:
        return _HANDLES[kind]
    others: dict[str, Argument | str] = {"CUdeviceptr": "address", "size_t": 64, "CUmemLocation": By(bytes(8))}
    return others.get(kind, 0)


def _bad(kind: str) -> Iterator[tuple[str, Argument]]:
    if kind.endswith("*") or kind in _HANDLES or kind == "CUstream":
        yield "null", None
    for number in _BAD_NUMBERS.get(kind, ()):
        yield hex(number), number


def _calls(row: Row) -> Iterator[InvalidCall]:
    kinds = [_kind(parameter) for parameter in row.parameters.split(",") if parameter.strip() not in ("", "void")]
    good = [_good(kind) for kind in kinds]
    for index, kind in enumerate(kinds):
        for what, argument in _bad(kind):
            yield InvalidCall(row.symbol, f"{index}:{what}", (*good[:index], argument, *good[index + 1 :]))
    if kinds:
        yield InvalidCall(
            row.symbol, "all 0", tuple(By(bytes(8)) if kind == "CUmemLocation" else None for kind in kinds)
        )


def invalid_calls(*, wrapped: bool = True) -> list[InvalidCall]:
    """Return invalid calls of the functions that the hook wraps, or of the other functions."""
    rows = [row for row in read_table() if row.wrapped == wrapped and not _WAITS.search(row.name)]
    return [call for row in rows for call in _calls(row)]


class Handles:
    """Valid handles in a caller's process, and the primary context of its first device."""

    def __init__(self, caller: Caller) -> None:
        caller.start()
        module = caller.new("cuModuleLoadData", In(b"\0"))
        graph = caller.new("cuGraphCreate", 0)
        self.caller = caller
        self.usable = True
        """False after a call has ended the context, the stream or the memory of the process."""
        self.named = {
            "context": caller.new("cuCtxGetCurrent"),
            "stream": caller.new("cuStreamCreate", 1),
            "event": caller.new("cuEventCreate", 0),
            "function": caller.new("cuModuleGetFunction", module, In(b"noop\0")),
            "graph": graph,
            "exec": caller.new("cuGraphInstantiateWithFlags", graph, 0),
            "pool": caller.new("cuDeviceGetDefaultMemPool", 0),
            "address": caller.new("cuMemAlloc_v2", PAGE),
            "array": caller.new("cuArrayCreate_v2", In(struct.pack("<QQiI", 64, 64, FLOAT, 1))),
        }

    def answer(self, call: InvalidCall) -> str:
        """Make the call, and return its CUresult. After a failure, also return which variables it has changed, except
        after a refusal for lack of memory. Then restore the process. EOFError if the process has ended.
        """
        arguments = [self.named[one] if isinstance(one, str) else one for one in call.arguments]
        code, contents = self.caller.raw(call.symbol, *arguments)
        self.usable = (
            self.caller.code("cuCtxSetCurrent", self.named["context"]) == 0
            and self.caller.code("cuStreamEndCapture", self.named["stream"], In(FILL)) in (0, NOT_CAPTURING)
            and self.caller.code("cuCtxSynchronize") == 0
            and self.caller.code("cuMemGetAddressRange_v2", None, None, self.named["address"]) == 0
        )
        changed = [content != FILL for content in contents if len(content) == len(FILL)]
        return f"{code}" if code in (0, OUT_OF_MEMORY) else f"{code} {changed}"


def answers(environment: Mapping[str, str], calls: Iterable[InvalidCall]) -> dict[tuple[str, str], str]:
    """Return the result of each call. After a call that ended the process, a new process continues."""
    found: dict[tuple[str, str], str] = {}
    handles: Handles | None = None
    try:
        for call in calls:
            handles = handles or Handles(Caller(environment))
            try:
                found[call.symbol, call.what] = handles.answer(call)
            except EOFError:
                found[call.symbol, call.what] = ENDED
                handles.usable = False
            if not handles.usable:
                handles.caller.close()
                handles = None
    finally:
        if handles is not None:
            handles.caller.close()
    return found
