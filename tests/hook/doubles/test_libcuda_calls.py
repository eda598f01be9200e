"""The double of libcuda: its calls do what CUDA's documentation specifies for the driver's."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from doubles.gpus import create_state
from hook.conftest import DEVICE_MEMORY, GPU_0, GPU_1
from hook.world.driver_script import program
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
