"""Moves: test steps that use a kind of device memory in other ways than by one allocation and its release.

A move makes driver calls in the process `caller`. It returns the memory that the process then holds, or None. If the
driver refuses a call, the move frees all that it has created and raises DriverError. It raises AssertionError if a call
succeeds that must fail.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from hook.world.allocating import (
    DESCRIPTOR,
    FIRST_HEAP,
    HEAP,
    MIB,
    PAGE,
    PHYSICAL,
    SPARSE,
    box,
    node_parameters,
    pool_properties,
    tile,
)
from hook.world.caller import By, Caller, In, Out

RELEASE_THRESHOLD = 4
"""CU_MEMPOOL_ATTR_RELEASE_THRESHOLD"""


@dataclass
class Held:
    """Memory that a process holds, and how to free it."""

    name: str
    give: ExitStack


Move = Callable[[Caller, int, random.Random, Sequence[Caller]], Held | None]


def several_from_a_pool(caller: Caller, size: int, chance: random.Random, others: Sequence[Caller]) -> Held:
    """Use a pool with a threshold and a limit of its own. Some of its allocations are freed; some outlive it."""
    with ExitStack() as undo:
        stream = _stream(caller, undo)
        pool = [caller.new("cuMemPoolCreate", In(pool_properties(chance.choice((0, 64 * MIB, 256 * MIB)))))]
        undo.callback(_each, pool, caller, "cuMemPoolDestroy")
        undo.callback(caller.ok, "cuStreamSynchronize", stream)
        held: list[int] = []
        undo.callback(_each, held, caller, "cuMemFreeAsync", stream)
        threshold = chance.choice((0, 8 * MIB, 1 << 40))
        caller.ok("cuMemPoolSetAttribute", pool[0], RELEASE_THRESHOLD, In(threshold.to_bytes(8, "little")))
        for _ in range(chance.randrange(1, 5)):
            held.append(caller.new("cuMemAllocFromPoolAsync", size // chance.randrange(1, 9), pool[0], stream))
            if chance.random() < 0.3:
                caller.ok("cuMemFreeAsync", held.pop(), stream)
            if chance.random() < 0.3:
                caller.ok("cuStreamSynchronize", stream)
            if chance.random() < 0.3:
                caller.ok("cuMemPoolTrimTo", pool[0], chance.choice((0, 16 * MIB)))
        if chance.random() < 0.5:
            _each(pool, caller, "cuMemPoolDestroy")
        return Held("several from a pool", undo.pop_all())


def another_current_pool(caller: Caller, size: int, chance: random.Random, others: Sequence[Caller]) -> Held:
    """Set a pool as the device's current pool for a while."""
    with ExitStack() as undo:
        stream = _stream(caller, undo)
        pool = [caller.new("cuMemPoolCreate", In(pool_properties()))]
        undo.callback(_each, pool, caller, "cuMemPoolDestroy")
        undo.callback(caller.ok, "cuStreamSynchronize", stream)
        default = caller.new("cuDeviceGetDefaultMemPool", 0)
        caller.ok("cuDeviceSetMemPool", 0, pool[0])
        with ExitStack() as current:
            current.callback(caller.ok, "cuDeviceSetMemPool", 0, default)
            undo.callback(caller.ok, "cuMemFreeAsync", caller.new("cuMemAllocAsync", size, stream), stream)
        if chance.random() < 0.5:
            _each(pool, caller, "cuMemPoolDestroy")
        return Held("from another current pool", undo.pop_all())


def freed_on_a_stream(caller: Caller, size: int, chance: random.Random, others: Sequence[Caller]) -> None:
    """Free memory of cuMemAlloc on a stream, and memory of a pool by cuMemFree."""
    with ExitStack() as undo:
        stream = _stream(caller, undo)
        undo.callback(caller.ok, "cuStreamSynchronize", stream)
        caller.ok("cuMemFreeAsync", caller.new("cuMemAlloc_v2", size), stream)
        caller.ok("cuMemFree_v2", caller.new("cuMemAllocAsync", size, stream))


def pieces_of_addresses(caller: Caller, size: int, chance: random.Random, others: Sequence[Caller]) -> Held:
    """Map physical memory more than once; release, retain and unmap it piece by piece."""
    pieces, each = 4, max(PAGE, size // 4 // PAGE * PAGE)
    with ExitStack() as undo:
        address = caller.new("cuMemAddressReserve", pieces * each, 0, 0, 0)
        undo.callback(caller.ok, "cuMemAddressFree", address, pieces * each)
        mapped: list[int] = []
        undo.callback(_each, mapped, caller, "cuMemUnmap", each)
        handles: list[int] = []
        undo.callback(_each, handles, caller, "cuMemRelease")
        for piece in range(pieces):
            if not handles or chance.random() < 0.5:
                handles.append(caller.new("cuMemCreate", each, In(PHYSICAL), 0))
            at = address + piece * each
            caller.ok("cuMemMap", at, each, 0, chance.choice(handles), 0)
            mapped.append(at)
            if chance.random() < 0.4:
                caller.ok("cuMemRelease", handles.pop(chance.randrange(len(handles))))
            if chance.random() < 0.3:
                handles.append(caller.new("cuMemRetainAllocationHandle", chance.choice(mapped)))
            if chance.random() < 0.3:
                caller.ok("cuMemUnmap", mapped.pop(chance.randrange(len(mapped))), each)
            if chance.random() < 0.1:
                assert caller.code("cuMemMap", at + pieces * each, each, 0, handles[0] if handles else 1, 0) != 0
        return Held("pieces of addresses", undo.pop_all())


def tiles_of_an_array(caller: Caller, size: int, chance: random.Random, others: Sequence[Caller]) -> Held:
    """Map tiles of a sparse array that share memory, map them again and unmap them."""
    with ExitStack() as undo:
        array = caller.new("cuArray3DCreate_v2", In(box(64 * MIB, SPARSE)))
        undo.callback(caller.ok, "cuArrayDestroy", array)
        handles: list[int] = []
        undo.callback(_each, handles, caller, "cuMemRelease")
        for _ in range(chance.randrange(1, 6)):
            if not handles or chance.random() < 0.4:
                handles.append(caller.new("cuMemCreate", max(PAGE, size // 8 // PAGE * PAGE), In(PHYSICAL), 0))
            handle = 0 if chance.random() < 0.2 else chance.choice(handles)
            caller.ok("cuMemMapArrayAsync", In(tile(array, 128 * chance.randrange(3), handle)), 1, 0)
            if chance.random() < 0.3:
                caller.ok("cuMemRelease", handles.pop())
        return Held("tiles of an array", undo.pop_all())


def handed_to_another(caller: Caller, size: int, chance: random.Random, others: Sequence[Caller]) -> Held:
    """Share physical memory by a descriptor, which keeps it, and memory of cuMemAlloc by IPC. A sibling process that
    opens the memory of cuMemAlloc is not charged.
    """
    with ExitStack() as undo:
        handles = [caller.new("cuMemCreate", size, In(PHYSICAL), 0)]
        undo.callback(_each, handles, caller, "cuMemRelease")
        descriptors = [caller.new("cuMemExportToShareableHandle", handles[0], DESCRIPTOR, 0, size=4)]
        undo.callback(_each, descriptors, caller, "close")
        imported = [caller.new("cuMemImportFromShareableHandle", descriptors[0], DESCRIPTOR)]
        undo.callback(_each, imported, caller, "cuMemRelease")
        references = [(handles, "cuMemRelease"), (descriptors, "close"), (imported, "cuMemRelease")]
        for reference, end in chance.sample(references, chance.randrange(3)):  # the other references keep the memory
            _each(reference, caller, end)
        if others:
            other = chance.choice(others)
            with ExitStack() as shared:
                address = caller.new("cuMemAlloc_v2", 3 * MIB)
                shared.callback(caller.ok, "cuMemFree_v2", address)
                (named,) = caller.ok("cuIpcGetMemHandle", Out(64), address)
                other.ok("cuIpcCloseMemHandle", other.new("cuIpcOpenMemHandle_v2", By(named), 1))
        return Held("a handle and its copy", undo.pop_all())


def a_context_with_all_its_memory(caller: Caller, size: int, chance: random.Random, others: Sequence[Caller]) -> None:
    """End a second context, and with it the memory that was allocated in it."""
    first = caller.new("cuCtxGetCurrent")
    with ExitStack() as undo:
        undo.callback(caller.ok, "cuCtxSetCurrent", first)
        context = caller.new("cuCtxCreate_v2", 0, 0)
        undo.callback(caller.ok, "cuCtxDestroy_v2", context)
        for _ in range(chance.randrange(1, 4)):
            caller.new("cuMemAlloc_v2", size // 4)
        caller.new("cuArray3DCreate_v2", In(box(size // 4)))
        if chance.random() < 0.5:
            caller.ok("cuCtxSetLimit", HEAP, FIRST_HEAP + 4 * MIB)


def a_graph_that_is_used_again(caller: Caller, size: int, chance: random.Random, others: Sequence[Caller]) -> Held:
    """Upload and launch two executables of one graph. The second one uses the memory that the first one left
    reserved."""
    with ExitStack() as undo:
        undo.callback(caller.ok, "cuDeviceGraphMemTrim", 0)
        stream = _stream(caller, undo)
        graph = caller.new("cuGraphCreate", 0)
        undo.callback(caller.ok, "cuGraphDestroy", graph)
        for _ in range(chance.randrange(1, 3)):
            _, node = caller.ok(
                "cuGraphAddMemAllocNode", Out(8), graph, None, 0, In(node_parameters(max(1, size // 3)))
            )
            caller.ok("cuGraphAddMemFreeNode", Out(8), graph, None, 0, int.from_bytes(node[-8:], "little"))
        for _ in range(2):
            with ExitStack() as once:
                executable = caller.new("cuGraphInstantiateWithFlags", graph, 0)
                once.callback(caller.ok, "cuGraphExecDestroy", executable)
                once.callback(caller.ok, "cuStreamSynchronize", stream)
                if chance.random() < 0.3:
                    caller.ok("cuGraphUpload", executable, stream)
                for _ in range(chance.randrange(1, 4)):
                    caller.ok("cuGraphLaunch", executable, stream)
                if chance.random() < 0.5:
                    undo.push(once.pop_all())
            if chance.random() < 0.3:
                caller.ok("cuDeviceGraphMemTrim", 0)
        return Held("graphs", undo.pop_all())


def what_must_fail(caller: Caller, size: int, chance: random.Random, others: Sequence[Caller]) -> None:
    """Make invalid calls. Each must fail and change no ledger."""
    address = caller.new("cuMemAlloc_v2", 4096)
    assert caller.code("cuMemFree_v2", address + 512) != 0
    caller.ok("cuMemFree_v2", address)
    for symbol, arguments in (
        ("cuMemFree_v2", (address,)),
        ("cuMemFree_v2", (12345,)),
        ("cuMemAlloc_v2", (None, size)),
        ("cuMemAlloc_v2", (Out(8), 0)),
        ("cuMemCreate", (Out(8), PAGE + 1, In(PHYSICAL), 0)),
        ("cuMemCreate", (Out(8), PAGE, None, 0)),
        ("cuMemUnmap", (address, PAGE)),
        ("cuMemUnmap", (address, 1 << 62)),
        ("cuArray3DCreate_v2", (Out(8), None)),
        ("cuArrayDestroy", (None,)),
        ("cuMemAllocPitch_v2", (Out(8), Out(8), 100, 100, 3)),
        ("cuMemFreeAsync", (12345, None)),
        ("cuMemAlloc_v2", (Out(8), 1 << 60)),
    ):
        assert caller.code(symbol, *arguments) != 0, symbol


def modules(caller: Caller, size: int, chance: random.Random, others: Sequence[Caller]) -> None:
    """Load and unload a module that takes no memory."""
    module = caller.new("cuModuleLoadData", In(b"\0"))
    caller.new("cuModuleGetFunction", module, In(b"noop\0"))
    caller.ok("cuModuleUnload", module)


MOVES: tuple[Move, ...] = (
    several_from_a_pool,
    another_current_pool,
    freed_on_a_stream,
    pieces_of_addresses,
    tiles_of_an_array,
    handed_to_another,
    a_context_with_all_its_memory,
    a_graph_that_is_used_again,
    what_must_fail,
    modules,
)


def _stream(caller: Caller, undo: ExitStack) -> int:
    stream = caller.new("cuStreamCreate", 1)
    undo.callback(caller.ok, "cuStreamDestroy_v2", stream)
    return stream


def _each(handles: list[int], caller: Caller, symbol: str, *after: int) -> None:
    while handles:
        caller.ok(symbol, handles.pop(), *after)
