"""Calls of the probed process that put ungated work into a stream: work that does not run on the multiprocessors."""

from __future__ import annotations

import ctypes
import time
from typing import Any

COPY_BYTES = 64 << 20
COPIES = 320
"""Number of copies that one call makes. Together they take the double's copy engine one second."""

_HOST_FUNCTION = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_CALLBACK = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p)


class _Wait(ctypes.Structure):
    """CUstreamBatchMemOpParams, as a wait for 32 bits."""

    _fields_ = (
        ("operation", ctypes.c_int),
        ("address", ctypes.c_uint64),
        ("value", ctypes.c_uint64),
        ("flags", ctypes.c_uint),
        ("rest", ctypes.c_uint64 * 3),
    )


class PastCalls:
    """Mix-in of the probe's calls: `ungated`, `ungated_ends`, `stream_query`, `hold` and `release`."""

    handles: dict[str, ctypes.c_void_p]

    def __init__(self) -> None:
        self.word = ctypes.c_uint32(0)
        self.kept: list[Any] = []
        self.words: dict[str, ctypes.c_uint32] = {}

    def cuda(self, name: str, *arguments: Any) -> int:
        raise NotImplementedError

    def _wait_value(self, stream: ctypes.c_void_p | None) -> int:
        address = ctypes.c_uint64(ctypes.addressof(self.word))
        return self.cuda("cuStreamWaitValue32_v2", stream, address, ctypes.c_uint32(1), 1)

    def _wait_context(self, way: str, name: str) -> int:
        """Make all streams wait that belong to the current context, or to the green context `NAME-context`, where NAME
        is the stream's name.
        """
        event, other, current = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
        code = self.cuda("cuStreamCreate", ctypes.byref(other), 1) or self._wait_value(other)
        code = code or self.cuda("cuEventCreate", ctypes.byref(event), 2)
        code = code or self.cuda("cuEventRecord", event, other)
        if way == "green":
            return code or self.cuda("cuGreenCtxWaitEvent", self.handles[f"{name}-context"], event)
        code = code or self.cuda("cuCtxGetCurrent", ctypes.byref(current))
        return code or self.cuda("cuCtxWaitEvent", current, event)

    def ungated(self, way: str, name: str) -> tuple[int, Any]:
        """Put ungated work into the stream (`name` empty: the legacy stream). It lasts until `ungated_ends`; with the
        way `copy`, for one second.
        """
        stream = self.handles[name] if name else None
        if way == "value":
            return self._wait_value(stream), None
        if way == "batch":
            wait = _Wait(1, ctypes.addressof(self.word), 1, 1)
            return self.cuda("cuStreamBatchMemOp_v2", stream, 1, ctypes.byref(wait), 0), None
        if way in ("function", "callback"):
            calls = {"function": ("cuLaunchHostFunc", _HOST_FUNCTION), "callback": ("cuStreamAddCallback", _CALLBACK)}
            symbol, kind = calls[way]

            def until_it_ends(*_: Any) -> None:
                while not self.word.value:
                    time.sleep(0.0005)

            self.kept.append(kind(until_it_ends))
            return self.cuda(symbol, stream, self.kept[-1], None, *([0] if way == "callback" else [])), None
        if way == "event":
            event, other = ctypes.c_void_p(), ctypes.c_void_p()
            code = self.cuda("cuStreamCreate", ctypes.byref(other), 1) or self._wait_value(other)
            code = code or self.cuda("cuEventCreate", ctypes.byref(event), 2)
            code = code or self.cuda("cuEventRecord", event, other)
            return code or self.cuda("cuStreamWaitEvent", stream, event, 0), None
        if way in ("context", "green"):
            return self._wait_context(way, name), None
        address, code = ctypes.c_uint64(), 0
        host = ctypes.create_string_buffer(8)
        code = self.cuda("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(COPY_BYTES))
        for _ in range(COPIES):
            code = code or self.cuda("cuMemcpyHtoDAsync_v2", address, host, ctypes.c_size_t(COPY_BYTES), stream)
        return code, None

    def ungated_ends(self) -> tuple[int, Any]:
        self.word.value = 1
        return 0, None

    def ungated_again(self) -> tuple[int, Any]:
        """Let later work of `ungated` last until the next `ungated_ends`."""
        self.word.value = 0
        return 0, None

    def hold(self, key: str, name: str) -> tuple[int, Any]:
        """Let the stream wait until this key is released."""
        word = self.words.setdefault(key, ctypes.c_uint32(0))
        address = ctypes.c_uint64(ctypes.addressof(word))
        return self.cuda("cuStreamWaitValue32_v2", self.handles[name], address, ctypes.c_uint32(1), 1), None

    def release(self, key: str) -> tuple[int, Any]:
        self.words[key].value = 1
        return 0, None

    def do_nothing(self, name: str) -> tuple[int, Any]:
        """Put a function that does nothing into the stream."""
        self.kept.append(_HOST_FUNCTION(lambda _: None))
        return self.cuda("cuLaunchHostFunc", self.handles[name], self.kept[-1], None), None

    def copy_nowhere(self) -> tuple[int, Any]:
        """Put a copy of 0 bytes between host addresses into the legacy stream."""
        host = ctypes.c_uint64(ctypes.addressof(self.word))
        return self.cuda("cuMemcpyAsync", host, host, ctypes.c_size_t(0), None), None

    def stream_query(self, name: str) -> tuple[int, Any]:
        return self.cuda("cuStreamQuery", self.handles[name] if name else None), None
