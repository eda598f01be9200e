"""The double of libcuda: how many bytes of device memory each kind of call takes, and when they are free again."""

from __future__ import annotations

from pathlib import Path

import pytest
from doubles.gpus import create_state
from hook.conftest import DEVICE_MEMORY, GPU_0, MIB
from hook.world.driver_script import memory_program

PAGE = 2 * MIB


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
assert took("graph") == 6 * MIB, "the next graph uses the existing memory"
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
