"""Value of the program's variable after a call that the limit refused: 0, as after the driver's refusal."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hook.conftest import MIB, TENANT_MEMORY, Tenant, terms
from hook.world.allocating import PHYSICAL, box, pool_properties
from hook.world.caller import Argument, Caller, In
from hook.world.probe import OUT_OF_MEMORY

TOO_MUCH = TENANT_MEMORY + 1
FILLED = In(b"\xff" * 8)


@pytest.fixture
def caller(tenant: Tenant) -> Iterator[Caller]:
    tenant.agent()
    caller = Caller(tenant.environment())
    caller.start()
    yield caller
    caller.close()


@pytest.mark.parametrize(
    ("symbol", "arguments"),
    [
        ("cuMemAlloc_v2", (TOO_MUCH,)),
        ("cuMemAllocManaged", (TOO_MUCH, 1)),
        ("cuMemAllocPitch_v2", (FILLED, TOO_MUCH, 1, 4)),
        ("cuMemAllocAsync", (TOO_MUCH, None)),
        ("cuMemCreate", (TENANT_MEMORY * 2, In(PHYSICAL), 0)),
        ("cuArray3DCreate_v2", (In(box(TENANT_MEMORY * 2)),)),
    ],
)
def test_a_refused_call_leaves_0(caller: Caller, symbol: str, arguments: tuple[Argument, ...]) -> None:
    code, (written, *_) = caller.raw(symbol, FILLED, *arguments)
    assert (code, written) == (OUT_OF_MEMORY, bytes(8))


def test_a_refused_allocation_of_a_named_pool_leaves_0(caller: Caller) -> None:
    pool = caller.new("cuMemPoolCreate", In(pool_properties()))
    code, (written,) = caller.raw("cuMemAllocFromPoolAsync", FILLED, TOO_MUCH, pool, None)
    assert (code, written) == (OUT_OF_MEMORY, bytes(8))
    caller.ok("cuMemPoolDestroy", pool)


def test_a_refused_context_leaves_no_handle(tenant: Tenant) -> None:
    tenant.gpus = (terms(memory=1 << 20, context_kib=2048),)
    tenant.write_limits()
    tenant.agent()
    caller = Caller(tenant.environment())
    try:
        caller.ok("cuInit", 0)
        code, (written,) = caller.raw("cuCtxCreate_v2", FILLED, 0, 0)
        assert (code, written) == (OUT_OF_MEMORY, bytes(8))
    finally:
        caller.close()


@pytest.mark.parametrize(
    ("symbol", "arguments"),
    [
        ("cuMemAlloc_v2", (TOO_MUCH,)),
        ("cuMemAllocAsync", (TOO_MUCH, None)),
        ("cuMemCreate", (TENANT_MEMORY * 2, In(PHYSICAL), 0)),
    ],
)
def test_a_refusal_is_on_standard_error_once_a_minute(
    tenant: Tenant, capfd: pytest.CaptureFixture[str], symbol: str, arguments: tuple[Argument, ...]
) -> None:
    """The message has the requested bytes, the bytes in use, and the limit."""
    tenant.agent()
    caller = Caller(tenant.environment())
    try:
        caller.start()
        caller.new("cuMemAlloc_v2", 5 << 20)
        for _ in range(3):
            assert caller.code(symbol, FILLED, *arguments) == OUT_OF_MEMORY
    finally:
        caller.close()
    (line,) = capfd.readouterr().err.splitlines()
    asked = arguments[0]
    assert isinstance(asked, int)
    assert line == (
        f"sharepod: an allocation of {-(-asked // MIB)} MiB of GPU memory was refused: this pod holds 5 MiB of its "
        f"limit of {TENANT_MEMORY // MIB} MiB; free memory, or request more of it for the pod"
    )


FILE_AS_2 = """
import ctypes, os, sys
os.close(2)
assert os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT) == 2
os.set_inheritable(2, sys.argv[2] == "inherited")
cuda, context, address = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p(), ctypes.c_uint64()
cuda.cuInit(0)
cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0)
cuda.cuCtxSetCurrent(context)
print(cuda.cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(1 << 30)))
"""


@pytest.mark.parametrize("by_exec", ["closed", "inherited"])
def test_a_refusal_is_not_in_a_file_that_the_program_opened_before_its_first_call(
    tenant: Tenant, tmp_path: Path, by_exec: str
) -> None:
    """The program closes descriptor 2 and then opens the file, which so gets the number of standard error."""
    tenant.agent()
    command = [sys.executable, "-S", "-c", FILE_AS_2, str(tmp_path / "of the program"), by_exec]
    done = subprocess.run(command, env=tenant.environment(), capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == f"{OUT_OF_MEMORY}\n"
    assert (tmp_path / "of the program").read_text() == ""
