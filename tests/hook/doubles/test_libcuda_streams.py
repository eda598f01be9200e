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
