"""The programs with gaps do the work that they report, and a collective operation waits for all ranks."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from doubles.gpus import Usage, create_state, read_state
from hook.conftest import BUILD, DEVICE_MEMORY, GPU_0, GPU_1
from hook.world.agent_node import wait_for
from hook.world.child import end

US = 1_000


@pytest.fixture
def state(tmp_path: Path, double: Path) -> Path:
    return create_state(
        tmp_path / "gpus", [(GPU_0, "Simulated GPU", DEVICE_MEMORY), (GPU_1, "Simulated GPU", DEVICE_MEMORY)]
    )


@pytest.fixture
def gaps(state: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    started: list[subprocess.Popen[str]] = []

    def start(label: str, *arguments: str) -> subprocess.Popen[str]:
        environment = {
            "LD_LIBRARY_PATH": str(BUILD / "doubles" / "libcuda"),
            "FAKE_CUDA_STATE": str(state),
            "FAKE_CUDA_LABEL": label,
        }
        program = [str(BUILD / "programs" / "gaps"), *arguments]
        started.append(subprocess.Popen(program, stdout=subprocess.PIPE, text=True, env=environment))
        return started[-1]

    yield start
    for process in started:
        end(process)


def outcome(process: subprocess.Popen[str]) -> tuple[dict[str, Any], list[float]]:
    """Return the last line that a program printed before it ended, and the latencies from all its lines."""
    output, _ = process.communicate(timeout=30)
    assert process.returncode == 0, output
    lines: list[dict[str, Any]] = [json.loads(line) for line in output.splitlines()]
    return lines[-1], [latency for line in lines[1:] for latency in line["latencies_ms"]]


def usage(state: Path, label: str, gpu: str = GPU_0) -> Usage:
    return read_state(state).client(label).usage[gpu]


@pytest.mark.parametrize(
    ("kind", "kernels", "kernel_us", "in_flight"),
    [("e22", 128, 22, 3), ("decode", 90, 14, 2), ("busy", 1, 1000, 3)],
)
@pytest.mark.parametrize("slept", ["0", "0.5"])
def test_a_step_is_so_many_kernels_of_that_length(
    gaps: Callable[..., subprocess.Popen[str]],
    state: Path,
    kind: str,
    kernels: int,
    kernel_us: int,
    in_flight: int,
    slept: str,
) -> None:
    last, _ = outcome(gaps("steps", kind, "--units", "4", "--slept", slept))
    launched = (4 + in_flight - 1) * kernels
    assert last["units"] == 4
    assert usage(state, "steps").submitted == launched
    assert usage(state, "steps").busy_ns <= launched * kernel_us * US
    assert usage(state, "steps").busy_ns >= 4 * kernels * kernel_us * US


@pytest.mark.parametrize(("kind", "busy_us"), [("service", 300), ("requests", 3_000), ("notebook", 100_000)])
def test_requests_are_waited_for_one_by_one(
    gaps: Callable[..., subprocess.Popen[str]], state: Path, kind: str, busy_us: int
) -> None:
    last, latencies = outcome(gaps("requests", kind, "--units", "3", "--rate", "100"))
    assert last["units"] == len(latencies) == 3
    assert usage(state, "requests").busy_ns == 3 * busy_us * US
    assert min(latencies) >= busy_us / US


def test_ranks_occupy_their_gpus_until_all_have_come_to_the_collective(
    gaps: Callable[..., subprocess.Popen[str]], state: Path, tmp_path: Path
) -> None:
    options = ("rank", "--meet", str(tmp_path / "meet"), "--ranks", "2", "--units", "5", "--report", "0.05")
    first = gaps("first", *options)
    alone_ns = 20 * 2_000 * US + 50_000 * US
    wait_for(
        lambda: usage(state, "first").busy_ns > alone_ns if read_state(state).clients else False, "a spinning rank"
    )
    assert usage(state, "first").submitted == 21, "it is in the collective of its first step"
    second = gaps("second", *options, "--device", "1")
    assert outcome(first)[0]["units"] == outcome(second)[0]["units"] == 5
    assert usage(state, "second", GPU_1).submitted == 5 * 21
