"""The double of libcuda: how many bytes of device memory each kind of call takes, and when they are free again."""

from __future__ import annotations

from pathlib import Path

import pytest
from doubles.gpus import create_state
from hook.conftest import DEVICE_MEMORY, GPU_0, MIB
from hook.world.driver_script import memory_program

PAGE = 2 * MIB


def test_allocations_are_rounded_and_come_back(state: Path) -> None:
    memory_program(
        state,
        """
a, m = alloc(1), new("cuMemAllocManaged", 513, 1, kind=c_uint64).value
assert (took("linear"), took("managed")) == (512, 1024)
ok("cuMemFree_v2", a), ok("cuMemFree_v2", m)
assert (took("linear"), took("managed")) == (0, 0)
assert call("cuMemFree_v2", a) == 1
assert call("cuMemAlloc_v2", byref(c_uint64()), 1 << 40) == 2
""",
    )


def test_arrays_take_their_levels(state: Path) -> None:
    memory_program(
        state,
        """
array = new("cuArray3DCreate_v2", byref(Shape(100, 3, 0, 0x20, 1, 0)))
assert took("array") == 448 * 8 == 3584
mipmap = new("cuMipmappedArrayCreate", byref(Shape(64, 64, 0, 0x20, 4, 0)), c_uint(3))
assert took("array") == 3584 + 65536 + 16384 + 4096
sparse = new("cuArray3DCreate_v2", byref(Shape(4096, 4096, 0, 0x20, 4, 0x40)))
assert took("array") == 3584 + 86016
ok("cuMipmappedArrayDestroy", mipmap), ok("cuArrayDestroy", array), ok("cuArrayDestroy", sparse)
assert took("array") == 0
""",
    )


def test_physical_memory_lives_as_long_as_its_references_and_mappings(state: Path) -> None:
    memory_program(
        state,
        """
prop = Physical(1, 1, Where(1, 0))
handle = new("cuMemCreate", 2 * PAGE, byref(prop), 0, kind=c_uint64).value
assert took("virtual") == 2 * PAGE
assert call("cuMemCreate", byref(c_uint64()), PAGE + 512, byref(prop), 0) == 1, "not a multiple of the granularity"
address = new("cuMemAddressReserve", 8 * PAGE, 0, 0, 0, kind=c_uint64).value
assert took("virtual") == 2 * PAGE, "addresses take nothing"
for at in (0, 2):
    ok("cuMemMap", address + at * PAGE, 2 * PAGE, 0, handle, 0)
assert call("cuMemMap", address + PAGE, PAGE, 0, handle, 0) == 1, "mapped already"
ok("cuMemRelease", handle)
again = new("cuMemRetainAllocationHandle", c_uint64(address + 5), kind=c_uint64).value
assert again == handle
ok("cuMemRelease", handle)
assert call("cuMemRelease", handle) == 1
assert took("virtual") == 2 * PAGE
assert call("cuMemAddressFree", address, 8 * PAGE) == 1, "still mapped"
assert call("cuMemUnmap", address, PAGE) == 1, "a part of a mapping"
ok("cuMemUnmap", address, 4 * PAGE)
assert took("virtual") == 0
ok("cuMemAddressFree", address, 8 * PAGE)
assert new("cuMemCreate", PAGE, byref(prop), 0, kind=c_uint64).value == handle, "values are used again"
host = new("cuMemCreate", PAGE, byref(Physical(1, 0, Where(2, 0))), 0, kind=c_uint64)
assert took("virtual") == PAGE, "host memory is none of the device's"
""",
    )


def test_exported_memory_stays_until_its_last_descriptor_is_closed(state: Path) -> None:
    memory_program(
        state,
        """
prop = Physical(1, 1, Where(1, 0))
handle = new("cuMemCreate", PAGE, byref(prop), 0, kind=c_uint64).value
descriptor = c_int(-1)
ok("cuMemExportToShareableHandle", byref(descriptor), handle, 1, 0)
imported = new("cuMemImportFromShareableHandle", c_uint64(descriptor.value), 1, kind=c_uint64).value
assert imported != handle and took("virtual") == PAGE
ok("cuMemRelease", handle)
copy = os.dup(descriptor.value)
os.close(descriptor.value)
assert took("virtual") == PAGE, "an imported handle costs nothing and keeps the memory"
ok("cuMemRelease", imported)
assert took("virtual") == PAGE, "a copy of the descriptor is left"
os.close(copy)
assert call("cuMemRelease", handle) == 1
assert took("virtual") == 0
""",
    )


def test_a_pool_holds_more_than_it_gave_out_until_the_host_waits(state: Path) -> None:
    memory_program(
        state,
        """
def read(pool, which):
    value = c_uint64()
    ok("cuMemPoolGetAttribute", pool, which, byref(value))
    return value.value

pool = new("cuDeviceGetDefaultMemPool", 0)
a = new("cuMemAllocAsync", MIB, stream, kind=c_uint64).value
assert (took("pool"), read(pool, 5), read(pool, 7)) == (32 * MIB, 32 * MIB, MIB)
b = new("cuMemAllocAsync", 40 * MIB, stream, kind=c_uint64).value
assert took("pool") == 64 * MIB
ok("cuMemFreeAsync", b, stream)
ok("cuStreamSynchronize", stream)
assert took("pool") == 2 * MIB, "the threshold is 0"
ok("cuMemPoolSetAttribute", pool, 4, byref(c_uint64(16 * MIB)))
c = new("cuMemAllocAsync", 20 * MIB, stream, kind=c_uint64).value
ok("cuMemFreeAsync", c, stream)
ok("cuCtxSynchronize")
assert took("pool") == 16 * MIB
ok("cuMemPoolSetAttribute", pool, 4, byref(c_uint64(2**64 - 1)))
ok("cuMemFreeAsync", new("cuMemAllocAsync", 40 * MIB, stream, kind=c_uint64).value, stream)
kept = took("pool")
ok("cuCtxSynchronize")
assert took("pool") == kept >= 40 * MIB, "all of it"
ok("cuMemPoolTrimTo", pool, 0)
assert took("pool") == 2 * MIB
ok("cuMemFree_v2", a)
ok("cuMemPoolTrimTo", pool, 0)
assert (took("pool"), read(pool, 6), read(pool, 8)) == (0, 64 * MIB, 41 * MIB)
""",
    )


def test_what_a_stream_freed_serves_others_when_its_work_is_over(state: Path) -> None:
    memory_program(
        state,
        """
module = new("cuModuleLoadData", b"")
kernel = new("cuModuleGetFunction", module, b"hang")
other = new("cuStreamCreate", 1)
a = new("cuMemAllocAsync", 2 * MIB, stream, kind=c_uint64).value
assert took("pool") == 2 * MIB
ok("cuLaunchKernel", kernel, 1, 1, 1, 1, 1, 1, 0, stream, None, None)
ok("cuMemFreeAsync", a, stream)
b = new("cuMemAllocAsync", 2 * MIB, stream, kind=c_uint64).value
assert took("pool") == 2 * MIB, "the same stream"
ok("cuMemFreeAsync", b, stream)
new("cuMemAllocAsync", 2 * MIB, other, kind=c_uint64)
assert took("pool") == 6 * MIB, "another stream, before the work is over"
os._exit(0)
""",
        FAKE_CUDA_POOL_CHUNK=str(PAGE),
    )


def test_a_made_pool_keeps_to_its_own_limit_and_ends_with_its_last_allocation(state: Path) -> None:
    memory_program(
        state,
        """
pool = new("cuMemPoolCreate", byref(Pool(1, 0, Where(1, 0), None, 6 * MIB)))
a = new("cuMemAllocFromPoolAsync", 5 * MIB, pool, stream, kind=c_uint64).value
assert took("pool") == 6 * MIB
assert call("cuMemAllocFromPoolAsync", byref(c_uint64()), 2 * MIB, pool, stream) == 2
ok("cuMemPoolDestroy", pool)
assert took("pool") == 6 * MIB
ok("cuMemFreeAsync", a, stream)
ok("cuStreamSynchronize", stream)
assert took("pool") == 0
""",
    )


def test_a_graphs_memory_is_taken_at_its_first_launch_and_kept_until_trimmed(state: Path) -> None:
    memory_program(
        state,
        """
graph = c_void_p()
ok("cuStreamBeginCapture_v2", stream, 0)
a = new("cuMemAllocAsync", MIB, stream, kind=c_uint64).value
ok("cuMemsetD8Async", a, 0, MIB, stream)
ok("cuMemFreeAsync", a, stream)
ok("cuStreamEndCapture", stream, byref(graph))
node = Alloc(Pool(1, 0, Where(1, 0)), None, 0, 3 * MIB, 0)
handle = c_void_p()
ok("cuGraphAddMemAllocNode", byref(handle), graph, None, 0, byref(node))
assert node.address != 0
exe = new("cuGraphInstantiateWithFlags", graph, 0)
assert (took("graph"), took("pool")) == (0, 0)
for _ in range(2):
    ok("cuGraphLaunch", exe, stream)
    assert took("graph") == 6 * MIB
ok("cuGraphExecDestroy", exe)
assert took("graph") == 6 * MIB
second = new("cuGraphInstantiateWithFlags", graph, 0)
ok("cuGraphUpload", second, stream)
assert took("graph") == 6 * MIB, "the next graph uses what is there"
ok("cuGraphExecDestroy", second)
ok("cuDeviceGraphMemTrim", 0)
assert took("graph") == 0
""",
    )


def test_a_context_has_its_own_cost_and_takes_its_memory_along(tmp_path: Path, double: Path) -> None:
    state = create_state(tmp_path / "gpus", [(GPU_0, "Simulated GPU", DEVICE_MEMORY)], context_bytes=100 * MIB)
    memory_program(
        state,
        """
assert took("context") == 100 * MIB
second = new("cuCtxCreate_v2", c_uint(0), 0)
assert took("context") == 100 * MIB, "once for each process and device"
alloc(MIB)
ok("cuCtxSetLimit", 2, 24 * MIB)
assert took("context") == 116 * MIB
ok("cuCtxSetLimit", 0, 1025)
assert took("context") == 116 * MIB + 16 * 132 * 2048, "a stack is rounded up"
assert call("cuCtxSetLimit", 2, 2 << 30) == 2
value = new("cuCtxGetLimit", 2, kind=c_size_t)
assert value.value == 24 * MIB
ok("cuCtxDestroy_v2", second)
assert (took("context"), took("linear")) == (100 * MIB, 0)
ok("cuDevicePrimaryCtxRelease_v2", 0)
assert took("context") == 0
""",
    )


@pytest.mark.parametrize("mode", ["LAZY", "EAGER"])
def test_a_module_takes_its_variables_when_loaded_and_its_code_when_used(state: Path, mode: str) -> None:
    script = """
EAGER = os.environ["CUDA_MODULE_LOADING"] == "EAGER"
image = b"fakecuda code=3000 table=1000 flag=4"
module = new("cuModuleLoadData", image)
assert took("module") == (4608 if EAGER else 1536)
new("cuModuleGetFunction", module, b"noop"), new("cuModuleGetFunction", module, b"hang")
assert took("module") == 4608
size = c_size_t()
address = c_uint64()
ok("cuModuleGetGlobal_v2", byref(address), byref(size), module, b"table")
assert size.value == 1000
ok("cuMemsetD8_v2", address.value, 0, 1000)
assert call("cuModuleGetGlobal_v2", None, None, module, b"else") == 500
assert call("cuMemFree_v2", address.value) == 1, "a variable is the module's"
ok("cuModuleUnload", module)
assert took("module") == 0
library = new("cuLibraryLoadData", image, None, None, 0, None, None, 0)
assert took("module") == (4608 if EAGER else 0), "a library is loaded where it is used"
kernel = new("cuLibraryGetKernel", library, b"noop")
ok("cuLaunchKernel", kernel, 1, 1, 1, 1, 1, 1, 0, stream, None, None)
assert took("module") == 4608
second = new("cuCtxCreate_v2", c_uint(0), 0)
new("cuKernelGetFunction", kernel)
assert took("module") == 9216
ok("cuCtxDestroy_v2", second)
ok("cuCtxSetCurrent", context)
assert took("module") == 4608
ok("cuLibraryUnload", library)
assert took("module") == 0
assert call("cuModuleLoadData", byref(c_void_p()), b"fakecuda code=0 a=512 b=%d" % (1 << 40)) == 2
assert took("module") == 0, "all or nothing"
assert call("cuModuleLoad", byref(c_void_p()), b"/nowhere") == 301
"""
    memory_program(state, script, CUDA_MODULE_LOADING=mode)


def test_the_forms_of_32_bits_have_addresses_below_4_gib(state: Path) -> None:
    memory_program(
        state,
        """
address, pitch, size = c_uint(), c_uint(), c_uint()
ok("cuMemAlloc", byref(address), 1000)
pitched = new("cuMemAllocPitch", byref(pitch), 100, 3, 4, kind=c_uint)
assert (took("linear"), pitch.value) == (1024 + 1536, 512)
ok("cuMemGetAddressRange", byref(c_uint()), byref(size), address.value + 3)
assert size.value == 1000
ok("cuMemcpyDtoD", pitched.value, address.value, 1000)
ok("cuMemFree", address.value), ok("cuMemFree_v2", pitched.value)
assert took("linear") == 0
ok("cuMemGetInfo", byref(size), None)
assert size.value == 1 << 30
ok("cuCtxDestroy", new("cuCtxCreate", c_uint(0), 0))
""",
    )


def test_memory_mapped_to_a_sparse_array_stays_until_it_is_unmapped(state: Path) -> None:
    memory_program(
        state,
        """
class Tile(ctypes.Structure):
    _fields_ = [("kind", c_int), ("array", c_void_p), ("type", c_int), ("place", c_uint * 9), ("operation", c_int),
                ("handles", c_int), ("handle", c_uint64), ("offset", c_uint64), ("devices", c_uint), ("flags", c_uint),
                ("reserved", c_uint * 2)]

def tile(array, x, handle):
    return Tile(0, array, 0, (0, 0, 0, x, 0, 0, 128, 128, 1), 1 if handle else 2, 0, handle, 0, 1, 0)

prop = Physical(1, 0, Where(1, 0))
array = new("cuArray3DCreate_v2", byref(Shape(4096, 4096, 0, 0x20, 1, 0x40)))
first = new("cuMemCreate", PAGE, byref(prop), 0, kind=c_uint64).value
ok("cuMemMapArrayAsync", (Tile * 2)(tile(array, 0, first), tile(array, 128, first)), c_uint(2), stream)
ok("cuMemRelease", first)
assert took("virtual") == PAGE
assert call("cuMemMapArrayAsync", byref(tile(array, 256, first)), c_uint(1), stream) == 1, "no reference to it is left"
ok("cuMemMapArrayAsync", byref(tile(array, 0, 0)), c_uint(1), stream)
assert took("virtual") == PAGE
second = new("cuMemCreate", PAGE, byref(prop), 0, kind=c_uint64).value
ok("cuMemMapArrayAsync", byref(tile(array, 128, second)), c_uint(1), stream)
assert took("virtual") == PAGE, "the second took the place of the first"
ok("cuMemRelease", second)
assert took("virtual") == PAGE
ok("cuArrayDestroy", array)
assert took("virtual") == 0
dense = new("cuArray3DCreate_v2", byref(Shape(4096, 4096, 0, 0x20, 1, 0)))
third = new("cuMemCreate", PAGE, byref(prop), 0, kind=c_uint64).value
assert call("cuMemMapArrayAsync", byref(tile(dense, 0, third)), c_uint(1), stream) == 1
""",
    )


def test_what_is_bound_to_a_multicast_object_stays_until_it_is_unbound(state: Path) -> None:
    memory_program(
        state,
        """
class Multicast(ctypes.Structure):
    _fields_ = [("devices", c_uint), ("size", c_size_t), ("handles", c_uint64), ("flags", c_uint64)]

handle = new("cuMemCreate", 2 * PAGE, byref(Physical(1, 0, Where(1, 0))), 0, kind=c_uint64).value
object = new("cuMulticastCreate", byref(Multicast(1, 8 * PAGE, 0, 0)), kind=c_uint64).value
assert call("cuMulticastBindMem", object, 0, handle, 0, PAGE, 0) == 1, "its device is not of the team"
ok("cuMulticastAddDevice", object, 0)
ok("cuMulticastBindMem", object, 0, handle, 0, PAGE, 0)
assert call("cuMulticastBindMem", object, 0, handle, PAGE, PAGE, 0) == 1, "bound already"
address = new("cuMemAddressReserve", 8 * PAGE, 0, 0, 0, kind=c_uint64).value
ok("cuMemMap", address, 2 * PAGE, 0, handle, 0)
ok("cuMulticastBindAddr", object, 4 * PAGE, address, PAGE, 0)
ok("cuMemUnmap", address, 2 * PAGE), ok("cuMemRelease", handle)
assert took("virtual") == 2 * PAGE
ok("cuMulticastUnbind", object, 0, 0, PAGE)
ok("cuMemMap", address, 8 * PAGE, 0, object, 0)
ok("cuMemRelease", object)
assert took("virtual") == 2 * PAGE
ok("cuMemUnmap", address, 8 * PAGE)
assert took("virtual") == 0
""",
    )


def test_a_green_context_costs_as_any_other(tmp_path: Path, double: Path) -> None:
    state = create_state(tmp_path / "gpus", [(GPU_0, "Simulated GPU", DEVICE_MEMORY)], context_bytes=100 * MIB)
    memory_program(
        state,
        """
resource = (ctypes.c_ubyte * 1024)()
ok("cuDevicePrimaryCtxRelease_v2", 0)
assert took("context") == 0
ok("cuDeviceGetDevResource", 0, resource, 1)
green = new("cuGreenCtxCreate", new("cuDevResourceGenerateDesc", resource, c_uint(1)), 0, c_uint(1))
assert took("context") == 100 * MIB
ok("cuCtxSetCurrent", new("cuCtxFromGreenCtx", green))
alloc(MIB)
ok("cuGreenCtxDestroy", green)
assert (took("context"), took("linear")) == (0, 0)
""",
    )


def test_attributes_are_those_of_a_real_device(state: Path) -> None:
    memory_program(
        state,
        """
def attribute(number):
    value = c_int(-1)
    ok("cuDeviceGetAttribute", byref(value), number, 0)
    return value.value

MAX_BLOCK, WARP, SHARED_OPTIN, SM_THREADS, ENGINES, MAJOR, POOLS = 1, 10, 97, 39, 40, 75, 115
assert [attribute(n) for n in (MAX_BLOCK, WARP, SHARED_OPTIN, SM_THREADS, ENGINES, MAJOR, POOLS)] == [
    1024, 32, 232448, 2048, 3, 9, 1]
assert call("cuDeviceGetAttribute", byref(c_int()), 0, 0) == 1 == call("cuDeviceGetAttribute", byref(c_int()), 9999, 0)
""",
    )


def test_other_devices_have_rights_on_a_pool_and_a_context_once_they_are_given(state: Path) -> None:
    memory_program(
        state,
        """
class Access(ctypes.Structure):
    _fields_ = [("where", Where), ("flags", c_int)]

pool, flags = new("cuDeviceGetDefaultMemPool", 0), c_int(-1)
def rights(device):
    ok("cuMemPoolGetAccess", byref(flags), pool, byref(Where(1, device)))
    return flags.value
assert (rights(0), rights(1)) == (3, 0)
ok("cuMemPoolSetAccess", pool, byref(Access(Where(1, 1), 3)), c_size_t(1))
assert rights(1) == 3
assert call("cuMemPoolSetAccess", pool, byref(Access(Where(1, 0), 0)), c_size_t(1)) == 1, "its own device keeps them"
own, other = new("cuCtxGetCurrent"), new("cuDevicePrimaryCtxRetain", 1)
assert call("cuCtxDisablePeerAccess", other) == 705
ok("cuCtxEnablePeerAccess", other, 0)
assert call("cuCtxEnablePeerAccess", other, 0) == 704
assert call("cuCtxEnablePeerAccess", own, 0) == 101, "the same device"
ok("cuCtxDisablePeerAccess", other)
assert call("cuCtxDisablePeerAccess", other) == 705
""",
    )
