"""The double of libcuda: how many bytes of device memory contexts and modules take."""

from __future__ import annotations

from pathlib import Path

import pytest
from doubles.gpus import create_state
from hook.conftest import DEVICE_MEMORY, GPU_0, MIB
from hook.world.driver_script import memory_program


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
