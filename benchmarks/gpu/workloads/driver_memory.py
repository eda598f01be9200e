"""Allocates device memory directly through the driver until it is refused, and reports the size: the calls behind the
allocators of frameworks.

    --allocator device    cuMemAlloc: PyTorch's native allocator, CuPy
    --allocator pool      cuMemAllocAsync: cudaMallocAsync
    --allocator virtual   cuMemCreate and cuMemMap into one range: segments that grow
    --allocator graph     memory nodes of graphs, launched
"""

from __future__ import annotations

import argparse
import ctypes
from collections.abc import Callable

from conversation import Answer, by_hand
from driver_calls import CAPTURE_MODES, Driver, DriverError
from filling import fill

_DEVICE = 1  # CU_MEM_ALLOCATION_TYPE_PINNED, and CU_MEM_LOCATION_TYPE_DEVICE
_READ_WRITE = 3


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _Properties(ctypes.Structure):
    """CUmemAllocationProp of cuda.h."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", _Location),
        ("win32", ctypes.c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    )


class _Access(ctypes.Structure):
    """CUmemAccessDesc of cuda.h."""

    _fields_ = (("location", _Location), ("flags", ctypes.c_int))


class Memory:
    """Memory that stays allocated until `clear` is called."""

    def __init__(self, allocator: str) -> None:
        self._driver = Driver()
        self._stream = self._driver.stream()
        self._take = {"device": self._alloc, "pool": self._alloc_async, "virtual": self._map, "graph": self._launch}[
            allocator
        ]
        self._undo: list[Callable[[], None]] = []
        self._room = 0  # of `virtual`: first address of its range that is not mapped yet

    def fill(self, *, chunk: int, most: int) -> Answer:
        """Allocate pieces of `chunk` bytes until one is refused, or `most` bytes in all."""
        if self._take == self._map:
            base = ctypes.c_ulonglong()
            self._driver.call("cuMemAddressReserve", ctypes.byref(base), ctypes.c_size_t(most), ctypes.c_size_t(0),
                              ctypes.c_ulonglong(0), ctypes.c_ulonglong(0))  # fmt: skip
            self._undo.append(lambda: self._driver.call("cuMemAddressFree", base, ctypes.c_size_t(most)))
            self._room = base.value
        filled = fill(self._take, chunk=chunk, most=most)
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        self._driver.call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
        return filled | {"free": free.value, "total": total.value}

    def clear(self) -> Answer:
        """Free all allocated memory."""
        while self._undo:
            self._undo.pop()()
        self._driver.call("cuStreamSynchronize", self._stream)
        return {}

    # ---- ways to allocate one piece

    def _alloc(self, size: int) -> None:
        pointer = ctypes.c_ulonglong()
        self._driver.call("cuMemAlloc_v2", ctypes.byref(pointer), ctypes.c_size_t(size))
        self._undo.append(lambda: self._driver.call("cuMemFree_v2", pointer))

    def _alloc_async(self, size: int) -> None:
        pointer = ctypes.c_ulonglong()
        self._driver.call("cuMemAllocAsync", ctypes.byref(pointer), ctypes.c_size_t(size), self._stream)
        self._undo.append(lambda: self._driver.call("cuMemFreeAsync", pointer, self._stream))

    def _map(self, size: int) -> None:
        here = _Location(_DEVICE, self._driver.device)
        properties = _Properties(type=_DEVICE, location=here)
        handle, at = ctypes.c_ulonglong(), ctypes.c_ulonglong(self._room)
        length, none = ctypes.c_size_t(size), ctypes.c_size_t(0)
        self._driver.call("cuMemCreate", ctypes.byref(handle), length, ctypes.byref(properties), ctypes.c_ulonglong(0))
        self._driver.call("cuMemMap", at, length, none, handle, ctypes.c_ulonglong(0))
        self._driver.call("cuMemSetAccess", at, length, ctypes.byref(_Access(here, _READ_WRITE)), ctypes.c_size_t(1))
        self._driver.call("cuMemRelease", handle)  # the mapping keeps the memory
        self._room += size
        self._undo.append(lambda: self._driver.call("cuMemUnmap", at, length))

    def _launch(self, size: int) -> None:
        graph, executable, pointer = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_ulonglong()
        self._driver.call("cuStreamBeginCapture_v2", self._stream, CAPTURE_MODES["thread local"])
        try:
            self._driver.call("cuMemAllocAsync", ctypes.byref(pointer), ctypes.c_size_t(size), self._stream)
        finally:
            self._driver.call("cuStreamEndCapture", self._stream, ctypes.byref(graph))
        try:
            self._driver.call("cuGraphInstantiateWithFlags", ctypes.byref(executable), graph, ctypes.c_ulonglong(0))
        finally:
            self._driver.call("cuGraphDestroy", graph)
        try:
            self._driver.call("cuGraphLaunch", executable, self._stream)
            self._driver.call("cuStreamSynchronize", self._stream)
        except DriverError:
            self._driver.call("cuGraphExecDestroy", executable)
            raise

        def undo() -> None:
            self._driver.call("cuMemFreeAsync", pointer, self._stream)
            self._driver.call("cuStreamSynchronize", self._stream)
            self._driver.call("cuGraphExecDestroy", executable)

        self._undo.append(undo)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--allocator", choices=["device", "pool", "virtual", "graph"], default="device")
    memory = Memory(parser.parse_args().allocator)
    by_hand({"fill": memory.fill, "clear": memory.clear}, None)


if __name__ == "__main__":
    main()
