"""Every way to take device memory, by the symbol of the driver's function that takes it.

The structures of cuda.h are packed by hand.
"""

from __future__ import annotations

import os
import struct
import tempfile
from collections.abc import Callable
from contextlib import ExitStack

from hook.world.caller import Caller, In, Out

MIB = 1 << 20
PAGE = 2 * MIB
PINNED, ON_DEVICE, DESCRIPTOR = 1, 1, 1
FLOAT = 0x20
SPARSE = 0x40
ALLOCATION_NODE = 10
HEAP = 2
"""CU_LIMIT_MALLOC_HEAP_SIZE"""
FIRST_HEAP = 8 * MIB

PHYSICAL = struct.pack("<iiiiQ8x", PINNED, DESCRIPTOR, ON_DEVICE, 0, 0)


def pool_properties(most: int = 0, handles: int = DESCRIPTOR) -> bytes:
    return struct.pack("<iiiiQQ56x", PINNED, handles, ON_DEVICE, 0, 0, most)


def node_parameters(size: int) -> bytes:
    """Return a CUDA_MEM_ALLOC_NODE_PARAMS. The driver writes the address into its last 8 bytes."""
    return pool_properties() + struct.pack("<QQQQ", 0, 0, size, 0)


def box(size: int, flags: int = 0) -> bytes:
    """Return a CUDA_ARRAY3D_DESCRIPTOR of about `size` bytes."""
    return struct.pack("<QQQiII4x", 1024, size >> 14, 0, FLOAT, 4, flags)


def tile(array: int, x: int, handle: int) -> bytes:
    """Return a CUarrayMapInfo that maps a tile of an array to the memory; `handle` 0: that unmaps the tile."""
    place = struct.pack("<8I", 0, 0, x, 0, 0, 128, 128, 1)
    return (
        struct.pack("<i4xQi4x", 0, array, 0) + place + struct.pack("<iiQQII8x", 1 if handle else 2, 0, handle, 0, 1, 0)
    )


def image(size: int) -> bytes:
    """Return a module of `size` bytes, half of them code, half a variable."""
    return b"fakecuda code=%d table=%d\0" % (size // 2, size // 2)


Way = Callable[[Caller, int, ExitStack], None]


def take(symbol: str, caller: Caller, size: int) -> ExitStack:
    """Take about `size` bytes of the first device by a function, with the objects that the call needs.

    Args:
        symbol: A key of WAYS.
        size: Bytes, a multiple of 4 MiB.

    Returns: A stack that frees everything when it is closed.
    Raises DriverError if a call fails; nothing that was created for the call is then left.
    """
    with ExitStack() as undo:
        WAYS[symbol](caller, size, undo)
        return undo.pop_all()


def _simple(symbol: str, free: str, *after: int, width: int = 8) -> Way:
    def way(caller: Caller, size: int, undo: ExitStack) -> None:
        undo.callback(caller.ok, free, caller.new(symbol, size, *after, size=width))

    return way


def _pitched(symbol: str, free: str, width: int) -> Way:
    def way(caller: Caller, size: int, undo: ExitStack) -> None:
        address, _ = caller.ok(symbol, Out(width), Out(width), 1 << 12, size >> 12, 4)
        undo.callback(caller.ok, free, int.from_bytes(address, "little"))

    return way


def _array(symbol: str, shape: Callable[[int], bytes], *after: int) -> Way:
    free = "cuMipmappedArrayDestroy" if "Mipmap" in symbol else "cuArrayDestroy"

    def way(caller: Caller, size: int, undo: ExitStack) -> None:
        undo.callback(caller.ok, free, caller.new(symbol, In(shape(size)), *after))

    return way


def _stream(caller: Caller, undo: ExitStack) -> int:
    stream = caller.new("cuStreamCreate", 1)
    undo.callback(caller.ok, "cuStreamDestroy_v2", stream)
    return stream


def _pooled(symbol: str) -> Way:
    """Take memory of the current pool, or of a pool that is created for this."""

    def way(caller: Caller, size: int, undo: ExitStack) -> None:
        stream = _stream(caller, undo)
        pool = []
        if "FromPool" in symbol:
            pool = [caller.new("cuMemPoolCreate", In(pool_properties()))]
            undo.callback(caller.ok, "cuMemPoolDestroy", pool[0])
        undo.callback(caller.ok, "cuStreamSynchronize", stream)
        undo.callback(caller.ok, "cuMemFreeAsync", caller.new(symbol, size, *pool, stream), stream)

    return way


def _physical(caller: Caller, size: int, undo: ExitStack) -> None:
    undo.callback(caller.ok, "cuMemRelease", caller.new("cuMemCreate", size, In(PHYSICAL), 0))


def _mapped(caller: Caller, size: int, undo: ExitStack) -> None:
    """Take memory that only its mapping keeps."""
    address = caller.new("cuMemAddressReserve", size, 0, 0, 0)
    undo.callback(caller.ok, "cuMemAddressFree", address, size)
    with ExitStack() as made:
        handle = caller.new("cuMemCreate", size, In(PHYSICAL), 0)
        made.callback(caller.ok, "cuMemRelease", handle)
        caller.ok("cuMemMap", address, size, 0, handle, 0)
    undo.callback(caller.ok, "cuMemUnmap", address, size)


def _retained(caller: Caller, size: int, undo: ExitStack) -> None:
    """Take memory that only a handle keeps; the handle was retained through a mapping."""
    with ExitStack() as mapping:
        address = caller.new("cuMemAddressReserve", size, 0, 0, 0)
        mapping.callback(caller.ok, "cuMemAddressFree", address, size)
        handle = caller.new("cuMemCreate", size, In(PHYSICAL), 0)
        with ExitStack() as made:
            made.callback(caller.ok, "cuMemRelease", handle)
            caller.ok("cuMemMap", address, size, 0, handle, 0)
        mapping.callback(caller.ok, "cuMemUnmap", address, size)
        undo.callback(caller.ok, "cuMemRelease", caller.new("cuMemRetainAllocationHandle", address))


def _tiles(symbol: str) -> Way:
    """Take memory that only a tile of an array keeps."""

    def way(caller: Caller, size: int, undo: ExitStack) -> None:
        array = caller.new("cuArray3DCreate_v2", In(box(64 * MIB, SPARSE)))
        undo.callback(caller.ok, "cuArrayDestroy", array)
        with ExitStack() as made:
            handle = caller.new("cuMemCreate", size, In(PHYSICAL), 0)
            made.callback(caller.ok, "cuMemRelease", handle)
            caller.ok(symbol, In(tile(array, 0, handle)), 1, 0)

    return way


def _bound(symbol: str) -> Way:
    """Take memory that only a multicast object keeps, bound by its handle or by the address at which it is mapped."""

    def way(caller: Caller, size: int, undo: ExitStack) -> None:
        team = caller.new("cuMulticastCreate", In(struct.pack("<I4xQQQ", 1, size, 0, 0)))
        undo.callback(caller.ok, "cuMemRelease", team)
        caller.ok("cuMulticastAddDevice", team, 0)
        device = [0] if symbol.endswith("_v2") else []
        with ExitStack() as made:
            handle = caller.new("cuMemCreate", size, In(PHYSICAL), 0)
            made.callback(caller.ok, "cuMemRelease", handle)
            if "Addr" in symbol:
                address = caller.new("cuMemAddressReserve", size, 0, 0, 0)
                made.callback(caller.ok, "cuMemAddressFree", address, size)
                caller.ok("cuMemMap", address, size, 0, handle, 0)
                made.callback(caller.ok, "cuMemUnmap", address, size)
                caller.ok(symbol, team, *device, 0, address, size, 0)
            else:
                caller.ok(symbol, team, *device, 0, handle, 0, size, 0)
        undo.callback(caller.ok, "cuMulticastUnbind", team, 0, 0, size)

    return way


def _imported(caller: Caller, size: int, undo: ExitStack) -> None:
    """Take memory and import a second handle to it."""
    handle = caller.new("cuMemCreate", size, In(PHYSICAL), 0)
    undo.callback(caller.ok, "cuMemRelease", handle)
    descriptor = caller.new("cuMemExportToShareableHandle", handle, DESCRIPTOR, 0, size=4)
    undo.callback(caller.ok, "close", descriptor)
    imported = caller.new("cuMemImportFromShareableHandle", descriptor, DESCRIPTOR)
    undo.callback(caller.ok, "cuMemRelease", imported)


def _add_node(symbol: str, caller: Caller, graph: int, size: int) -> None:
    if symbol == "cuGraphAddMemAllocNode":
        caller.ok(symbol, Out(8), graph, None, 0, In(node_parameters(size)))
        return
    parameters = struct.pack("<i12x", ALLOCATION_NODE) + node_parameters(size).ljust(232, b"\0") + bytes(8)
    edges = [] if symbol == "cuGraphAddNode" else [None]
    caller.ok(symbol, Out(8), graph, None, *edges, 0, In(parameters))


def _instantiate(symbol: str, caller: Caller, graph: int) -> int:
    if symbol.startswith("cuGraphInstantiateWithParams"):
        return caller.new(symbol, graph, In(bytes(32)))
    if symbol == "cuGraphInstantiateWithFlags":
        return caller.new(symbol, graph, 0)
    return caller.new(symbol, graph, Out(8), Out(64), 64)


def _graph(symbol: str) -> Way:
    """Create a graph that allocates by the function, and launch or upload it."""

    def way(caller: Caller, size: int, undo: ExitStack) -> None:
        add = symbol if symbol.startswith("cuGraphAdd") else "cuGraphAddMemAllocNode"
        make = symbol if symbol.startswith("cuGraphInstantiate") else "cuGraphInstantiateWithFlags"
        run = symbol if symbol.startswith(("cuGraphLaunch", "cuGraphUpload")) else "cuGraphLaunch"
        undo.callback(caller.ok, "cuDeviceGraphMemTrim", 0)
        stream = _stream(caller, undo)
        graph = caller.new("cuGraphCreate", 0)
        undo.callback(caller.ok, "cuGraphDestroy", graph)
        _add_node(add, caller, graph, size)
        executable = _instantiate(make, caller, graph)
        undo.callback(caller.ok, "cuGraphExecDestroy", executable)
        undo.callback(caller.ok, "cuStreamSynchronize", stream)
        caller.ok(run, executable, stream)

    return way


def _captured(symbol: str) -> Way:
    """Capture a stream-ordered allocation into a graph, and launch the graph."""

    def way(caller: Caller, size: int, undo: ExitStack) -> None:
        undo.callback(caller.ok, "cuDeviceGraphMemTrim", 0)
        stream = _stream(caller, undo)
        pool = [caller.new("cuDeviceGetDefaultMemPool", 0)] if "FromPool" in symbol else []
        caller.ok("cuStreamBeginCapture_v2", stream, 0)
        address = caller.new(symbol.removesuffix(CAPTURED), size, *pool, stream)
        caller.ok("cuMemFreeAsync", address, stream)
        graph = int.from_bytes(caller.ok("cuStreamEndCapture", stream, Out(8))[0], "little")
        undo.callback(caller.ok, "cuGraphDestroy", graph)
        executable = _instantiate("cuGraphInstantiateWithFlags", caller, graph)
        undo.callback(caller.ok, "cuGraphExecDestroy", executable)
        undo.callback(caller.ok, "cuStreamSynchronize", stream)
        caller.ok("cuGraphLaunch", executable, stream)

    return way


def _heap(caller: Caller, size: int, undo: ExitStack) -> None:
    caller.ok("cuCtxSetLimit", HEAP, FIRST_HEAP + size)
    undo.callback(caller.ok, "cuCtxSetLimit", HEAP, FIRST_HEAP)


def _context(symbol: str, *between: int | None, after: tuple[int | None, ...] = ()) -> Way:
    """Create a context, in a process without one. `size` has no effect."""

    def way(caller: Caller, size: int, undo: ExitStack) -> None:
        undo.callback(caller.ok, "cuCtxDestroy_v2", caller.new(symbol, *between, 0, 0, *after))

    return way


def _primary(caller: Caller, size: int, undo: ExitStack) -> None:
    context = caller.new("cuDevicePrimaryCtxRetain", 0)
    undo.callback(caller.ok, "cuDevicePrimaryCtxRelease_v2", 0)
    caller.ok("cuCtxSetCurrent", context)
    undo.callback(caller.ok, "cuCtxSetCurrent", None)


def _green(caller: Caller, size: int, undo: ExitStack) -> None:
    resource = caller.ok("cuDeviceGetDevResource", 0, Out(1024), 1)[0]
    description = caller.new("cuDevResourceGenerateDesc", In(resource), 1)
    green = caller.new("cuGreenCtxCreate", description, 0, 1)
    undo.callback(caller.ok, "cuGreenCtxDestroy", green)
    caller.ok("cuCtxSetCurrent", caller.new("cuCtxFromGreenCtx", green))
    undo.callback(caller.ok, "cuCtxSetCurrent", None)


def _module(symbol: str, *after: int | None) -> Way:
    unload = "cuLibraryUnload" if "Library" in symbol else "cuModuleUnload"

    def way(caller: Caller, size: int, undo: ExitStack) -> None:
        content = In(image(size))
        if symbol in ("cuModuleLoad", "cuLibraryLoadFromFile"):
            file, name = tempfile.mkstemp()
            undo.callback(os.unlink, name)
            with os.fdopen(file, "wb") as written:
                written.write(content.content)
            content = In(name.encode() + b"\0")
        module = loaded = caller.new(symbol, content, *after)
        undo.callback(caller.ok, unload, loaded)
        if "Library" in symbol:
            module = caller.new("cuLibraryGetModule", loaded)
        caller.new("cuModuleGetFunction", module, In(b"noop\0"))

    return way


def _plain_box(size: int) -> bytes:
    return struct.pack("<QQiI", 1024, size >> 14, FLOAT, 4)


def _old_box(size: int) -> bytes:
    return struct.pack("<IIiI", 1024, size >> 14, FLOAT, 4)


def _old_3d_box(size: int) -> bytes:
    return struct.pack("<IIIiII", 1024, size >> 14, 0, FLOAT, 4, 0)


CAPTURED = " in a capture"

CONTEXTS: dict[str, Way] = {
    "cuCtxCreate": _context("cuCtxCreate"),
    "cuCtxCreate_v2": _context("cuCtxCreate_v2"),
    "cuCtxCreate_v3": _context("cuCtxCreate_v3", None, 0),
    "cuCtxCreate_v4": _context("cuCtxCreate_v4", None),
    "cuGLCtxCreate": _context("cuGLCtxCreate"),
    "cuGLCtxCreate_v2": _context("cuGLCtxCreate_v2"),
    "cuVDPAUCtxCreate": _context("cuVDPAUCtxCreate", after=(0, None)),
    "cuVDPAUCtxCreate_v2": _context("cuVDPAUCtxCreate_v2", after=(0, None)),
    "cuDevicePrimaryCtxRetain": _primary,
    "cuGreenCtxCreate": _green,
}
"""Functions that create a context, for a process without one. They take the bytes of a context, whatever `size`."""

MODULES: dict[str, Way] = {
    "cuModuleLoad": _module("cuModuleLoad"),
    "cuModuleLoadData": _module("cuModuleLoadData"),
    "cuModuleLoadDataEx": _module("cuModuleLoadDataEx", 0, None, None),
    "cuModuleLoadFatBinary": _module("cuModuleLoadFatBinary"),
    "cuLibraryLoadData": _module("cuLibraryLoadData", None, None, 0, None, None, 0),
    "cuLibraryLoadFromFile": _module("cuLibraryLoadFromFile", None, None, 0, None, None, 0),
}

WAYS: dict[str, Way] = {
    "cuMemAlloc": _simple("cuMemAlloc", "cuMemFree", width=4),
    "cuMemAlloc_v2": _simple("cuMemAlloc_v2", "cuMemFree_v2"),
    "cuMemAllocManaged": _simple("cuMemAllocManaged", "cuMemFree_v2", 1),
    "cuMemAllocPitch": _pitched("cuMemAllocPitch", "cuMemFree", 4),
    "cuMemAllocPitch_v2": _pitched("cuMemAllocPitch_v2", "cuMemFree_v2", 8),
    "cuArrayCreate": _array("cuArrayCreate", _old_box),
    "cuArrayCreate_v2": _array("cuArrayCreate_v2", _plain_box),
    "cuArray3DCreate": _array("cuArray3DCreate", _old_3d_box),
    "cuArray3DCreate_v2": _array("cuArray3DCreate_v2", box),
    "cuMipmappedArrayCreate": _array("cuMipmappedArrayCreate", box, 3),
    **{
        symbol: _pooled(symbol)
        for symbol in (
            "cuMemAllocAsync",
            "cuMemAllocAsync_ptsz",
            "cuMemAllocFromPoolAsync",
            "cuMemAllocFromPoolAsync_ptsz",
        )
    },
    "cuMemAllocAsync" + CAPTURED: _captured("cuMemAllocAsync" + CAPTURED),
    "cuMemAllocFromPoolAsync" + CAPTURED: _captured("cuMemAllocFromPoolAsync" + CAPTURED),
    "cuMemCreate": _physical,
    "cuMemMap": _mapped,
    "cuMemRetainAllocationHandle": _retained,
    "cuMemImportFromShareableHandle": _imported,
    **{
        symbol: _bound(symbol)
        for symbol in (
            "cuMulticastBindMem",
            "cuMulticastBindMem_v2",
            "cuMulticastBindAddr",
            "cuMulticastBindAddr_v2",
        )
    },
    "cuMemMapArrayAsync": _tiles("cuMemMapArrayAsync"),
    "cuMemMapArrayAsync_ptsz": _tiles("cuMemMapArrayAsync_ptsz"),
    **{
        symbol: _graph(symbol)
        for symbol in (
            "cuGraphAddMemAllocNode",
            "cuGraphAddNode",
            "cuGraphAddNode_v2",
            "cuGraphAddNode_v3",
            "cuGraphInstantiate",
            "cuGraphInstantiate_v2",
            "cuGraphInstantiateWithFlags",
            "cuGraphInstantiateWithParams",
            "cuGraphInstantiateWithParams_ptsz",
            "cuGraphLaunch",
            "cuGraphLaunch_ptsz",
            "cuGraphUpload",
            "cuGraphUpload_ptsz",
        )
    },
    "cuCtxSetLimit": _heap,
    **CONTEXTS,
    **MODULES,
}
