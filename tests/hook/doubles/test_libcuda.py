"""The double of libcuda: devices, time, processes and streams behave as tests/doubles/README.md promises."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
from doubles.gpus import create_state, read_state, release_hung_kernels
from hook.conftest import BUILD, DEVICE_MEMORY, GPU_0, GPU_1, MIB, last_report
from hook.world.agent_node import wait_for
from hook.world.held_thread import stop
from hook.world.probe import NOT_READY, OUT_OF_MEMORY, SUCCESS, Probe

CU_STREAM_DEFAULT, CU_STREAM_NON_BLOCKING = 0, 1


@pytest.fixture
def state(tmp_path: Path, double: Path) -> Path:
    return create_state(
        tmp_path / "gpus", [(GPU_0, "Simulated GPU", DEVICE_MEMORY), (GPU_1, "Simulated GPU", DEVICE_MEMORY)]
    )


def environment(state: Path, label: str, **more: str) -> dict[str, str]:
    return {
        "LD_LIBRARY_PATH": str(BUILD / "doubles" / "libcuda"),
        "FAKE_CUDA_STATE": str(state),
        "FAKE_CUDA_LABEL": label,
        **more,
    }


def loop(state: Path, label: str, *arguments: str, **more: str) -> subprocess.Popen[str]:
    program = [str(BUILD / "programs" / "launchloop"), *arguments]
    return subprocess.Popen(program, stdout=subprocess.PIPE, text=True, env=environment(state, label, **more))


@pytest.mark.parametrize("kernel_us", [50, 2000, 30000])
def test_a_program_alone_gets_all_of_the_time(state: Path, kernel_us: int) -> None:
    report = last_report(loop(state, "alone", "--seconds", "1", "--kernel-us", str(kernel_us)))
    assert report["share"] > 0.93
    assert report["gpu_seconds"] <= report["elapsed"]


def test_a_device_hands_out_no_more_time_than_passes(state: Path) -> None:
    """The device time handed out never exceeds the time that passed, for any mix of processes, kernels and streams."""
    begun = time.monotonic_ns()
    loops = [
        loop(state, f"p{n}", "--seconds", "1", "--kernel-us", str(300 * 3**n), "--streams", str(n + 1))
        for n in range(3)
    ]
    for process in loops:
        last_report(process)
    read = read_state(state)
    assert sum(read.busy_ns(f"p{n}", GPU_0) for n in range(3)) <= read.devices[0].busy_until - begun
    assert all(read.busy_ns(f"p{n}") > 100e6 for n in range(3)), "each had turns"
    assert read.devices[1].busy_until == 0


def test_device_time_sleeps(state: Path) -> None:
    """The double must sleep while a kernel runs. A busy loop would measure the CPU instead of the device."""
    process = loop(state, "sleeper", "--report", "1", "--kernel-us", "5000", "--sync-every", "1")
    assert process.stdout is not None
    for _ in range(2):
        process.stdout.readline()
    fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
    process.kill()
    process.communicate()
    busy_ns = read_state(state).client("sleeper").usage[GPU_0].busy_ns
    processor_ns = (int(fields[11]) + int(fields[12])) * 1_000_000_000 / os.sysconf("SC_CLK_TCK")
    assert processor_ns < busy_ns / 4


def test_memory_of_a_killed_process_comes_back(state: Path) -> None:
    process = loop(state, "killed", "--memory", "900M")
    assert process.stdout is not None
    process.stdout.readline()
    probe = Probe(environment(state, "next", PATH="/usr/bin:/bin"))
    try:
        probe.start_cuda()
        assert probe.call("alloc", 500 * MIB).code == OUT_OF_MEMORY
        process.send_signal(signal.SIGKILL)
        process.communicate()
        assert probe.call("alloc", 500 * MIB).code == SUCCESS
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
        probe.close()
    assert not read_state(state).client("killed").alive


@pytest.mark.parametrize("ahead_ms", [0, 10_000])
def test_a_stopped_process_has_run_what_its_timeline_is_filled_ahead(state: Path, ahead_ms: int) -> None:
    """Work that the double has already scheduled when the process stops still runs. By default the double schedules
    almost nothing ahead, so a process that ends takes its queue with it. With `FAKE_CUDA_AHEAD_MS` the whole queue
    runs, as on hardware.
    """
    more = {"FAKE_CUDA_AHEAD_MS": str(ahead_ms)} if ahead_ms else {}
    process = loop(state, "stopped", "--kernel-us", "100000", **more)
    try:
        wait_for(lambda: any(c.usage and c.usage[GPU_0].submitted > 100 for c in read_state(state).clients), "launches")
        stop(process)
        usage = read_state(state).client("stopped").usage[GPU_0]
        assert (usage.kernels >= 100) == (ahead_ms > 0), usage
    finally:
        process.kill()
        process.communicate()


def test_a_killed_process_takes_its_queue_along(state: Path) -> None:
    process = loop(state, "killed", "--kernel-us", "1000")
    assert process.stdout is not None
    while read_state(state).devices[0].busy_until == 0:
        time.sleep(0.005)
    time.sleep(0.1)
    process.kill()
    process.communicate()
    assert read_state(state).devices[0].busy_until - time.monotonic_ns() < 20e6, "of hundreds of queued kernels"


def test_only_visible_devices_are_there(state: Path) -> None:
    report = last_report(loop(state, "second", "--seconds", "0.1", FAKE_CUDA_VISIBLE=GPU_1))
    assert report["launches"] > 0
    usage = read_state(state).client("second").usage
    assert usage[GPU_0].busy_ns == 0 < usage[GPU_1].busy_ns
    none = loop(state, "none", "--seconds", "0.1", FAKE_CUDA_VISIBLE="void")
    output, _ = none.communicate(timeout=20)
    assert none.returncode == 1
    assert "CUDA_ERROR_NO_DEVICE" in output


def test_a_launch_into_a_full_queue_waits(state: Path) -> None:
    probe = Probe(environment(state, "full", PATH="/usr/bin:/bin"))
    try:
        probe.start_cuda()
        probe.ok("stream", "s")
        waiting = probe.post("launch", "hang", "s", 1500)
        while sum(usage.submitted for usage in read_state(state).client("full").usage.values()) < 1025:
            time.sleep(0.005)
        time.sleep(0.1)
        assert not waiting.done()
        assert read_state(state).client("full").usage[GPU_0].submitted == 1025, "1024 queued, one waiting"
    finally:
        probe.close()


def test_an_event_waits_for_no_more_than_its_stream_and_the_legacy_stream_say(state: Path) -> None:
    probe = Probe(environment(state, "events", PATH="/usr/bin:/bin"))
    try:
        probe.start_cuda()
        for name, flags in (
            ("busy", CU_STREAM_DEFAULT),
            ("other", CU_STREAM_DEFAULT),
            ("apart", CU_STREAM_NON_BLOCKING),
        ):
            probe.ok("stream", name, flags)
        probe.ok("launch", "hang", "busy")
        answers = {}
        # The legacy stream is last, because it waits for all streams except `apart`, which is non-blocking.
        for stream in ("busy", "other", "apart", ""):
            probe.ok("event", f"on {stream}")
            probe.ok("event_record", f"on {stream}", stream)
            answers[stream] = probe.call("event_query", f"on {stream}").code
        assert answers == {"busy": NOT_READY, "other": SUCCESS, "apart": SUCCESS, "": NOT_READY}
        probe.ok("event_record", "on other", "other")
        assert probe.call("event_query", "on other").code == NOT_READY, "behind the legacy stream"
        probe.ok("launch", "noop", "apart")
        probe.ok("stream_sync", "apart")
        probe.ok("event_record", "on apart", "apart")
        probe.ok("event_query", "on apart")
        release_hung_kernels(state)
        for stream in answers:
            probe.ok("stream_sync", stream)
            probe.ok("event_query", f"on {stream}")
    finally:
        probe.close()
