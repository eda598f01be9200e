"""The double of libcuda runs kernels of several processes in slices, and takes time to change to another process."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from doubles.gpus import Usage, create_state, read_state
from hook.conftest import BUILD, DEVICE_MEMORY, GPU_0
from hook.world.probe import NOT_READY, SUCCESS, Probe

MS = 1_000_000


@pytest.fixture
def state(tmp_path: Path, double: Path) -> Path:
    return create_state(tmp_path / "gpus", [(GPU_0, "Simulated GPU", DEVICE_MEMORY)])


@pytest.fixture
def client(state: Path) -> Iterator[Callable[..., Probe]]:
    """Function that starts a process which uses the device. Keywords become variables of its environment."""
    probes: list[Probe] = []

    def start(label: str, **more: int) -> Probe:
        environment = {
            "PATH": "/usr/bin:/bin",
            "LD_LIBRARY_PATH": str(BUILD / "doubles" / "libcuda"),
            "FAKE_CUDA_STATE": str(state),
            "FAKE_CUDA_LABEL": label,
            **{name: str(value) for name, value in more.items()},
        }
        probes.append(Probe(environment))
        probes[-1].start_cuda()
        return probes[-1]

    yield start
    for probe in probes:
        probe.close()


def usage(state: Path, label: str) -> Usage:
    return read_state(state).client(label).usage[GPU_0]


def run(probe: Probe, kernel: str, count: int = 1) -> int:
    """Run kernels and wait for their end. Return the time before the first launch."""
    begun = time.monotonic_ns()
    probe.ok("launch", kernel, "", count)
    probe.ok("stream_sync")
    return begun


def test_a_device_takes_time_to_change_to_another_process_which_is_no_process_s_use(
    state: Path, client: Callable[..., Probe]
) -> None:
    first, second = (client(label, FAKE_CUDA_SWITCH_US=400_000) for label in ("first", "second"))
    begun = run(first, "spin_us_1000", 3)
    assert read_state(state).devices[0].busy_until - begun < 400 * MS, "from the first process to itself"
    begun = run(second, "spin_us_1000")
    assert usage(state, "second").last_end - begun >= 401 * MS
    begun = run(first, "spin_us_1000")
    assert usage(state, "first").last_end - begun >= 401 * MS, "and back"
    assert (usage(state, "first").busy_ns, usage(state, "second").busy_ns) == (4 * MS, 1 * MS)


@pytest.mark.parametrize(("slice_us", "cut"), [(1_000, True), (2_000_000, False)])
def test_a_kernel_of_another_process_begins_after_a_slice(
    state: Path, client: Callable[..., Probe], slice_us: int, cut: bool
) -> None:
    long, short = (client(label, FAKE_CUDA_SLICE_US=slice_us) for label in ("long", "short"))
    long.ok("launch", "spin_us_1000000")
    run(short, "spin_us_1000")
    long.ok("stream_sync")
    assert (usage(state, "short").last_end < usage(state, "long").last_end) is cut
    assert usage(state, "long").busy_ns == 1000 * MS


def test_a_query_of_a_stream_says_that_it_is_idle_no_earlier_than_its_last_work_ends(
    state: Path, client: Callable[..., Probe]
) -> None:
    other, asker = (client(label, FAKE_CUDA_SWITCH_US=50_000, FAKE_CUDA_AHEAD_MS=500) for label in ("other", "asker"))
    asker.ok("stream", "s")
    assert asker.call("stream_query", "s").code == SUCCESS
    other.ok("launch", "spin_us_100000")
    asker.ok("launch", "spin_us_1000", "s")
    answers: list[int] = []
    while not answers or answers[-1] == NOT_READY:
        answers.append(asker.call("stream_query", "s").code)
    answered = time.monotonic_ns()
    assert answers[0] == NOT_READY
    assert answers[-1] == SUCCESS
    assert answered >= usage(state, "asker").last_end
