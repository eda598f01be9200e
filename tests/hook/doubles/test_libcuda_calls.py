"""The double of libcuda: its calls do what CUDA's documentation specifies for the driver's."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from doubles.gpus import create_state
from hook.conftest import BUILD, DEVICE_MEMORY, GPU_0, GPU_1
from hook.world.driver_script import PRELUDE, program
from hook.world.invalid_calls import ENDED, answers, invalid_calls


@pytest.fixture
def state(tmp_path: Path, double: Path) -> Path:
    return create_state(
        tmp_path / "gpus", [(GPU_0, "Simulated GPU", DEVICE_MEMORY), (GPU_1, "Simulated GPU", DEVICE_MEMORY)]
    )


def test_no_invalid_call_ends_the_process(state: Path, double: Path) -> None:
    listed = subprocess.run(
        ["nm", "-D", "--defined-only", double / "libcuda.so.1"], capture_output=True, text=True, check=True, timeout=30
    )
    exported = {line.split()[-1] for line in listed.stdout.splitlines()}
    calls = [call for call in invalid_calls(wrapped=False) if call.symbol in exported]
    assert len(calls) > 1000
    found = answers({"FAKE_CUDA_STATE": str(state), "LD_LIBRARY_PATH": str(double)}, calls)
    assert [call for call, answer in found.items() if answer == ENDED] == []


DEVICE_SIDE = [
    'ok("cuMemsetD8_v2", a, 0, MIB)',
    'ok("cuMemsetD8_v2_ptds", a, 0, MIB)',
    'ok("cuMemsetD16_v2", a, 0, MIB // 2)',
    'ok("cuMemsetD32_v2", a, 0, MIB // 4)',
    'ok("cuMemsetD2D8_v2", a, 1024, 0, 512, 1024)',
    'ok("cuMemsetD2D16_v2", a, 1024, 0, 512, 1024)',
    'ok("cuMemsetD2D32_v2", a, 1024, 0, 256, 1024)',
    'ok("cuMemsetD8Async", a, 0, MIB, stream)',
    'ok("cuMemsetD32Async_ptsz", a, 0, MIB // 4, None)',
    'ok("cuMemcpy", a, b, MIB)',
    'ok("cuMemcpyAsync", a, b, MIB, stream)',
    'ok("cuMemcpyDtoD_v2", a, b, MIB)',
    'ok("cuMemcpyDtoDAsync_v2_ptsz", a, b, MIB, None)',
    'ok("cuMemcpyPeer", a, context, b, context, MIB)',
    'ok("cuMemcpyPeerAsync", a, context, b, context, MIB, stream)',
    'ok("cuMemPrefetchAsync", m, MIB, 0, stream)',
]
HOST_SIDE = [
    'ok("cuMemcpyHtoD_v2", a, h, MIB)',
    'ok("cuMemcpyDtoH_v2", h, a, MIB)',
    'ok("cuMemcpyHtoDAsync_v2", a, h, MIB, stream)',
    'ok("cuMemcpyDtoHAsync_v2_ptsz", h, a, MIB, None)',
    'ok("cuMemcpy", a, ctypes.addressof(h), MIB)',
    'ok("cuMemPrefetchAsync", m, MIB, c_int(-1), stream)',
]
BUFFERS = """
a, b, h = alloc(MIB), alloc(MIB), ctypes.create_string_buffer(MIB)
m = new("cuMemAllocManaged", MIB, 1, kind=c_uint64).value
"""


@pytest.mark.parametrize("call", DEVICE_SIDE)
def test_what_stays_on_the_device_occupies_it(state: Path, call: str) -> None:
    usage = program(state, BUFFERS + call + '\nok("cuCtxSynchronize")').client("p").usage[GPU_0]
    assert (usage.submitted, usage.kernels, usage.copies) == (1, 1, 0)
    assert usage.busy_ns >= 500


@pytest.mark.parametrize("call", HOST_SIDE)
def test_what_goes_to_the_host_takes_time_beside_the_device(state: Path, call: str) -> None:
    usage = program(state, BUFFERS + call + '\nok("cuCtxSynchronize")').client("p").usage[GPU_0]
    assert (usage.submitted, usage.kernels, usage.copies, usage.busy_ns) == (0, 0, 1, 0)


def test_copies_of_boxes_go_by_the_kinds_of_their_sides(state: Path) -> None:
    usage = (
        program(
            state,
            BUFFERS
            + """
class Box(ctypes.Structure):
    _fields_ = [(n, c_size_t) for n in ("sx", "sy")] + [("skind", c_uint), ("shost", c_void_p), ("sdev", c_uint64),
        ("sarray", c_void_p), ("spitch", c_size_t), ("dx", c_size_t), ("dy", c_size_t), ("dkind", c_uint),
        ("dhost", c_void_p), ("ddev", c_uint64), ("darray", c_void_p), ("dpitch", c_size_t), ("width", c_size_t),
        ("height", c_size_t)]

class Shape(ctypes.Structure):
    _fields_ = [("width", c_size_t), ("height", c_size_t), ("format", c_int), ("channels", c_uint)]

array = new("cuArrayCreate_v2", byref(Shape(64, 64, 0x20, 4)))
sides = dict(skind=2, sdev=a, spitch=1024, width=1024, height=64)
ok("cuMemcpy2D_v2", byref(Box(dkind=2, ddev=b, dpitch=1024, **sides)))
ok("cuMemcpy2DAsync_v2", byref(Box(dkind=3, darray=array, **sides)), stream)
ok("cuMemcpy2DUnaligned_v2", byref(Box(dkind=1, dhost=ctypes.addressof(h), **sides)))
ok("cuMemcpy2D_v2_ptds", byref(Box(dkind=4, ddev=b, dpitch=1024, **sides)))
ok("cuMemcpyDtoA_v2", array, 0, a, 64)
ok("cuMemcpyAtoA_v2", array, 0, array, 0, 64)
assert call("cuMemcpy2D_v2", byref(Box(dkind=2, ddev=64, **sides))) == 1
ok("cuCtxSynchronize")
""",
        )
        .client("p")
        .usage[GPU_0]
    )
    assert (usage.submitted, usage.copies) == (5, 1)


def test_a_batch_is_one_operation(state: Path) -> None:
    usage = (
        program(
            state,
            BUFFERS
            + """
pair = c_uint64 * 2
sizes, first = (c_size_t * 2)(512, 512), (c_size_t * 1)(0)
attributes = (c_uint64 * 16)()
for name in ("cuMemcpyBatchAsync_v2", "cuMemcpyBatchAsync_v2_ptsz"):
    ok(name, pair(a, a + 512), pair(b, b + 512), sizes, 2, attributes, first, 1, stream)
assert call("cuMemcpyBatchAsync_v2", pair(a, a), pair(b, b), sizes, 2, attributes, first, 1, None) == 1
ok("cuCtxSynchronize")
""",
        )
        .client("p")
        .usage[GPU_0]
    )
    assert (usage.submitted, usage.copies) == (2, 0)


@pytest.mark.parametrize("mode", [0, 1, 2])
def test_async_calls_are_captured_and_synchronous_ones_end_the_capture(state: Path, mode: int) -> None:
    usage = (
        program(
            state,
            BUFFERS
            + f"""
mode = {mode}
ok("cuStreamBeginCapture_v2", stream, mode)
ok("cuMemsetD8Async", a, 0, MIB, stream)
ok("cuMemcpyDtoDAsync_v2", a, b, MIB, stream)
ok("cuMemcpyHtoDAsync_v2", a, h, MIB, stream)
graph = c_void_p()
ok("cuStreamEndCapture", stream, byref(graph))
exe = new("cuGraphInstantiateWithFlags", graph, 0)
ok("cuGraphLaunch", exe, stream)
ok("cuStreamSynchronize", stream)
# A blocking stream: the legacy stream would wait for work that is only recorded.
blocking = new("cuStreamCreate", 0)
ok("cuStreamBeginCapture_v2", blocking, mode)
assert call("cuMemsetD8_v2", a, 0, MIB) == 906
assert call("cuStreamEndCapture", blocking, byref(graph)) == 901
# The thread's own default stream, in which a synchronous call cannot be captured.
own = c_void_p(2)
ok("cuStreamBeginCapture_v2", own, mode)
assert call("cuMemcpyDtoH_v2_ptds", h, a, MIB) == 900
assert call("cuStreamEndCapture", own, byref(graph)) == 901
""",
        )
        .client("p")
        .usage[GPU_0]
    )
    assert (usage.submitted, usage.copies) == (1, 1)


def test_a_recapture_calls_back_for_what_differs(state: Path) -> None:
    program(
        state,
        BUFFERS
        + """
graph = c_void_p()
ok("cuStreamBeginCapture_v2", stream, 0)
ok("cuMemsetD8Async", a, 0, MIB, stream)
ok("cuStreamEndCapture", stream, byref(graph))
seen = []
@ctypes.CFUNCTYPE(c_int, c_void_p, c_void_p, c_void_p, c_void_p, c_int)
def mismatch(data, node, before, now, status):
    seen.append(node)
    return 0
for size, calls in ((MIB, 0), (64, 1)):
    ok("cuStreamBeginRecaptureToGraph", stream, 0, graph, mismatch, None)
    ok("cuMemsetD8Async", a, 0, size, stream)
    ok("cuStreamEndCapture", stream, byref(graph))
    assert len(seen) == calls, (size, seen)
""",
    )


def test_pointer_attributes_tell_host_from_device(state: Path) -> None:
    program(
        state,
        BUFFERS
        + """
def memory_type(address):
    value = c_uint()
    code = call("cuPointerGetAttribute", byref(value), 2, address)
    return value.value if code == 0 else -code
pinned = new("cuMemHostAlloc", 4096, 0).value
assert [memory_type(x) for x in (a, a + 100, m, pinned, ctypes.addressof(h))] == [2, 2, 2, 1, -1]
ok("cuMemHostRegister_v2", c_uint64(ctypes.addressof(h)), MIB, 0)
assert memory_type(ctypes.addressof(h) + 5) == 1
ok("cuMemHostUnregister", c_uint64(ctypes.addressof(h)))
assert memory_type(ctypes.addressof(h)) == -1
ok("cuMemFreeHost", c_uint64(pinned))
""",
    )


def test_host_functions_run_in_stream_order(state: Path) -> None:
    program(
        state,
        """
import time
module = new("cuModuleLoadData", b"")
kernel = new("cuModuleGetFunction", module, b"spin_us_20000")
ran = []
called = ctypes.CFUNCTYPE(None, c_void_p)(lambda data: ran.append(time.monotonic()))
begun = time.monotonic()
ok("cuLaunchKernel", kernel, 1, 1, 1, 1, 1, 1, 0, stream, None, None)
ok("cuLaunchHostFunc", stream, called, None)
ok("cuStreamSynchronize", stream)
assert len(ran) == 1 and ran[0] - begun >= 0.02
""",
    )


def test_an_address_comes_by_name_version_and_stream(state: Path) -> None:
    program(
        state,
        """
def found(name, version, flags=0):
    out, status = c_void_p(), c_int(-1)
    code = call("cuGetProcAddress_v2", name, byref(out), c_int(version), flags, byref(status))
    return code, status.value, out.value

def symbol(name):
    return ctypes.cast(getattr(cuda, name), c_void_p).value

assert found(b"cuMemAlloc", 11080) == (0, 0, symbol("cuMemAlloc_v2"))
assert found(b"cuMemAlloc", 2000) == (0, 0, symbol("cuMemAlloc"))
assert found(b"cuMemcpyHtoD", 12000, 2) == (0, 0, symbol("cuMemcpyHtoD_v2_ptds"))
assert found(b"cuLaunchKernel", 12000, 1) == (0, 0, symbol("cuLaunchKernel"))
assert found(b"cuCtxRecordEvent", 12040) == (0, 2, None), "a later version has it"
assert found(b"cuNeverThere", 12040) == (0, 1, None)
assert found(b"cuMemAlloc", 12040, 3)[0] == 1, "both streams at once"
out = c_void_p()
assert call("cuGetProcAddress", b"cuNeverThere", byref(out), c_int(12040), 0) == 500
table = c_void_p(1)
assert call("cuGetExportTable", byref(table), (ctypes.c_ubyte * 16)()) == 500 and table.value is None
""",
    )


def test_what_has_no_behaviour_says_so(state: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-S", "-c", PRELUDE + 'for _ in range(2): assert call("cuTexObjectCreate") == 801'],
        env={
            "LD_LIBRARY_PATH": str(BUILD / "doubles" / "libcuda"),
            "FAKE_CUDA_STATE": str(state),
            "FAKE_CUDA_VERBOSE": "1",
        },
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert done.stderr.count("cuTexObjectCreate") == 1
