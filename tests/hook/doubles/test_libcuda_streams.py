"""The double of libcuda runs streams in parallel, as a device does."""

from __future__ import annotations

from pathlib import Path

import pytest
from doubles.gpus import create_state
from hook.conftest import DEVICE_MEMORY, GPU_0
from hook.world.driver_script import program


@pytest.fixture
def state(tmp_path: Path, double: Path) -> Path:
    return create_state(tmp_path / "gpus", [(GPU_0, "Simulated GPU", DEVICE_MEMORY)])


STREAMS = """
NOT_READY = 600

def launch(name, stream):
    kernel = new("cuModuleGetFunction", new("cuModuleLoadData", b"x"), name)
    ok("cuLaunchKernel", kernel, *[c_uint(1)] * 6, c_uint(0), stream, None, None)

def record(stream):
    event = new("cuEventCreate", 0)
    ok("cuEventRecord", event, stream)
    return event

def ends(*events):
    'Return when the events passed, ms after `begun`.'
    ok("cuCtxSynchronize")
    answer = []
    for event in events:
        value = c_float()
        ok("cuEventElapsedTime", byref(value), begun, event)
        answer.append(value.value)
    return answer

one, other = new("cuStreamCreate", 1), new("cuStreamCreate", 1)
begun = record(one)
"""
"""Names for the scripts: two streams, an event `begun`, and functions `launch`, `record` and `ends`."""

TWO_KERNELS = """
launch(b"spin_us_40000", one)
launch(b"spin_us_40000", other)
first, second = ends(record(one), record(other))
"""


def test_kernels_of_several_streams_share_the_time_equally(state: Path) -> None:
    program(state, STREAMS + TWO_KERNELS + "assert 0 <= second - first < 5 and second > 75, (first, second)")


def test_the_handle_of_a_destroyed_stream_comes_again_once_its_work_is_over(state: Path) -> None:
    script = """
first = stream.value
number, other = c_uint64(), c_uint64()
ok("cuStreamGetId", stream, byref(number))
launch(b"spin_us_50000", stream)
ok("cuStreamDestroy_v2", stream)
busy = new("cuStreamCreate", 1).value
ok("cuCtxSynchronize")
again = new("cuStreamCreate", 1)
assert busy != first and again.value == first, "not while it has work"
ok("cuStreamGetId", again, byref(other))
assert other.value != number.value
"""
    program(state, STREAMS + script)


def test_in_strict_order_a_device_does_one_thing_at_a_time(state: Path) -> None:
    after = "assert 39.5 < second - first < 41, (first, second)"
    program(state, STREAMS + TWO_KERNELS + after, FAKE_CUDA_ORDER="strict")


def test_a_stream_of_higher_priority_goes_first(state: Path) -> None:
    program(
        state,
        STREAMS
        + """
least, greatest = c_int(), c_int()
ok("cuCtxGetStreamPriorityRange", byref(least), byref(greatest))
assert greatest.value < least.value == 0
urgent = new("cuStreamCreateWithPriority", 1, greatest)
launch(b"spin_us_60000", one)
launch(b"spin_us_30000", urgent)
first, second = ends(record(urgent), record(one))
assert first < 45 < 85 < second, (first, second)
""",
    )


def test_a_host_copy_runs_beside_kernels_and_in_its_stream(state: Path) -> None:
    program(
        state,
        STREAMS
        + """
memory, host = alloc(400 * MIB), ctypes.create_string_buffer(8)
ok("cuMemcpyHtoDAsync_v2", memory, host, 400 * MIB, one)
launch(b"spin_us_1000", other)
launch(b"spin_us_1000", one)
first, second = ends(record(other), record(one))
assert first < 400 / 20 < second, "at 20 bytes a ns: ms"
""",
    )


def test_an_event_of_the_context_waits_for_copies_functions_and_values(state: Path) -> None:
    program(
        state,
        STREAMS
        + """
flag, called = c_uint(0), []
function = ctypes.CFUNCTYPE(None, c_void_p)(lambda _: called.append(1))
ok("cuStreamWaitValue32_v2", one, ctypes.addressof(flag), c_uint(7), c_uint(1))
ok("cuLaunchHostFunc", one, function, None)
launch(b"noop", other)
behind, beside = new("cuEventCreate", 0), record(other)
ok("cuCtxRecordEvent", context, behind)
ok("cuStreamSynchronize", other)
ok("cuEventQuery", beside)
assert call("cuEventQuery", behind) == NOT_READY and not called
flag.value = 7
ok("cuEventSynchronize", behind)
assert called
""",
    )


def test_a_value_that_a_stream_writes_lets_another_go_on(state: Path) -> None:
    program(
        state,
        STREAMS
        + """
word = alloc(8)
ok("cuStreamWaitValue64_v2", one, word, 3, c_uint(0))
waiting = record(one)
assert call("cuEventQuery", waiting) == NOT_READY
ok("cuStreamWriteValue64_v2", other, word, 5, c_uint(0))
ok("cuEventSynchronize", waiting)
""",
    )


def test_events_and_streams_die_with_their_context(state: Path) -> None:
    after = program(
        state,
        STREAMS
        + """
ok("cuDevicePrimaryCtxReset_v2", 0)
again = new("cuDevicePrimaryCtxRetain", 0)
assert call("cuEventQuery", begun) != 0 and call("cuStreamQuery", one) != 0
""",
    )
    assert after.client("p").usage[GPU_0].misused == 2


def test_a_kernel_of_any_name_runs_and_tells_its_attributes(state: Path) -> None:
    after = program(
        state,
        STREAMS
        + """
kernel = new("cuModuleGetFunction", new("cuModuleLoadData", b"x"), b"_Z15ampere_sgemm_nnPfS_")
registers, blocks, grid, threads = c_int(), c_int(), c_int(), c_int()
ok("cuFuncGetAttribute", byref(registers), c_int(4), kernel)
ok("cuFuncSetAttribute", kernel, c_int(8), c_int(100 << 10))
shared = c_int()
ok("cuFuncGetAttribute", byref(shared), c_int(8), kernel)
assert registers.value > 0 and shared.value == 100 << 10
assert call("cuFuncSetAttribute", kernel, c_int(8), c_int(1 << 20)) != 0
ok("cuOccupancyMaxActiveBlocksPerMultiprocessor", byref(blocks), kernel, c_int(256), 100 << 10)
assert blocks.value == 2
ok("cuOccupancyMaxPotentialBlockSize", byref(grid), byref(threads), kernel, None, 0, c_int(0))
assert threads.value == 1024 and grid.value > 1
launch(b"_Z15ampere_sgemm_nnPfS_", one)
ok("cuCtxSynchronize")
""",
    )
    usage = after.client("p").usage[GPU_0]
    assert usage.kernels == 1
    assert usage.busy_ns == 10_000
