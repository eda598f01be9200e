"""Small real run: twelve programs with think time, started together, on two simulated GPUs.

First the programs run one after the other, each with a GPU to itself, without hook and agent. Then all run together,
six on each GPU, under the real agent and the real hook. Every program runs the same steps both times. A step is one
kernel and a pause.

Guarantees:
- Work is counted by the simulated devices: a program's kernels that its device did not finish are lost.
- No process outlives the run.
"""

from __future__ import annotations

import subprocess
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from hook.world.agent_node import GPUS, PROGRAMS, Node, running, tenant
from hook.world.child import end
from results import Row

from throughput.rates import LONG_PLAYED_S, Tenancy, guaranteed, play

SECONDS = 4.0
"""Seconds that a program takes with a GPU to itself."""
LATEST_S = 120.0
"""Seconds after which a program that has not ended counts as hung. All programs together take half a minute."""
PROGRAMS_ON_A_GPU = (
    # request, kernel ms, pause ms
    (0.10, 8, 32),
    (0.10, 20, 80),
    (0.15, 12, 28),
    (0.15, 30, 70),
    (0.20, 16, 24),
    (0.20, 40, 60),
)
"""Programs on each of the two GPUs. Each program requests half of what it uses without neighbours. Together they
request 0.9 of a GPU, and have work for 1.8 GPUs."""


@dataclass(frozen=True, slots=True)
class Thinker:
    """Program that alternately runs one kernel and pauses."""

    name: str
    gpu: str
    request: float
    kernel_ms: int
    pause_ms: int

    @property
    def steps(self) -> int:
        """Number of steps of the program."""
        return round(SECONDS * 1000 / (self.kernel_ms + self.pause_ms))

    @property
    def command(self) -> list[str]:
        """Return the command that runs all steps."""
        return [
            str(PROGRAMS / "launchloop"),
            *("--kernel-us", str(self.kernel_ms * 1000), "--idle-us", str(self.pause_ms * 1000)),
            *("--sync-every", "1", "--launches", str(self.steps)),
        ]

    @property
    def tenancy(self) -> Tenancy:
        """Return the program as a job of the replay's model."""
        step = self.kernel_ms + self.pause_ms
        return (round(self.request * 1000), 1000, round(1000 * self.kernel_ms / step), step)


@dataclass(frozen=True, slots=True)
class Ended:
    """One program that has ended. Times are in seconds since the beginning of the run."""

    began_s: float
    ended_s: float
    lost: int
    """Kernels that the device did not finish."""


def thinkers() -> list[Thinker]:
    """Return the twelve programs, in the order in which they are started."""
    return [
        Thinker(f"t{gpu}{index}", GPUS[gpu], *shape)
        for index, shape in enumerate(PROGRAMS_ON_A_GPU)
        for gpu in range(2)
    ]


def play_through(node: Node, programs: Sequence[Thinker], *, at_a_time: int, hooked: bool) -> dict[Thinker, Ended]:
    """Run all programs in their order, `at_a_time` of them on a GPU at the same time. `hooked`: True if they run under
    the hooks of their tenants.

    Raises `AssertionError` if a program fails or hangs.
    """
    began = time.monotonic()
    before = _finished(node, programs)
    waiting, there = list(programs), dict[Thinker, tuple[subprocess.Popen[str], float]]()
    times: dict[Thinker, tuple[float, float]] = {}
    try:
        while waiting or there:
            now = time.monotonic() - began
            assert now < LATEST_S, f"not ended after {LATEST_S:g} s: {', '.join(program.name for program in there)}"
            for program in list(waiting):
                if sum(other.gpu == program.gpu for other in there) < at_a_time:
                    waiting.remove(program)
                    there[program] = (_start(node, program, hooked=hooked), now)
            for program, (process, started) in list(there.items()):
                if process.poll() is not None:
                    assert process.returncode == 0, f"{program.name} ended with {process.returncode}"
                    times[program] = (started, time.monotonic() - began)
                    end(process)
                    del there[program]
            time.sleep(0.002)
    finally:
        for process, _ in there.values():
            end(process)
    after = _finished(node, programs)
    return {program: Ended(*times[program], program.steps - after[program] + before[program]) for program in programs}


def _start(node: Node, program: Thinker, *, hooked: bool) -> subprocess.Popen[str]:
    environment = node.environment(program.name, gpus=(program.gpu,))
    if not hooked:
        del environment["LD_PRELOAD"]
    return subprocess.Popen(program.command, env=environment, stdout=subprocess.DEVNULL, text=True)


def _finished(node: Node, programs: Sequence[Thinker]) -> dict[Thinker, int]:
    """Return for each program the number of kernels that its device has finished, in all runs so far."""
    devices = node.devices()
    return {program: round(devices.busy_ns(program.name) / 1e6 / program.kernel_ms) for program in programs}


def predicted(programs: Sequence[Thinker]) -> dict[Thinker, float]:
    """Return the seconds after which each of these programs, all on one GPU, ends by the rates of the replay's
    model."""
    left = dict.fromkeys(programs, SECONDS)
    ends: dict[Thinker, float] = {}
    now = 0.0
    while left:
        there = sorted(left, key=lambda program: program.tenancy)
        played = play(tuple(program.tenancy for program in there), played_s=LONG_PLAYED_S)
        rates = dict(zip(there, played, strict=True))
        first = min(there, key=lambda program: left[program] / rates[program])
        step = left.pop(first) / rates[first]
        now += step
        ends[first] = now
        left = {program: rest - step * rates[program] for program, rest in left.items()}
    return ends


def run() -> tuple[list[Row], int]:
    """Run the programs both ways. Return the rows of results, and the number of lost kernels."""
    programs = thinkers()
    tenants = [tenant(program.name, program.request, gpus=(program.gpu,)) for program in programs]
    with tempfile.TemporaryDirectory(prefix="th") as directory, running(Path(directory), *tenants) as node:
        exclusive = play_through(node, programs, at_a_time=1, hooked=False)
        shared = play_through(node, programs, at_a_time=len(programs), hooked=True)
    model = predicted([program for program in programs if program.gpu == GPUS[0]])
    slowest = min(
        SECONDS / (one.ended_s - one.began_s) / guaranteed(program.tenancy) for program, one in shared.items()
    )
    rows: list[Row] = []
    for case, ended in (("one after the other", exclusive), ("SharePod", shared)):
        times = [one.ended_s for one in ended.values()]
        rows += [
            Row(f"real run, {case}", "makespan", "s", max(times)),
            Row(f"real run, {case}", "job_time_p50", "s", float(np.percentile(times, 50))),
            Row(f"real run, {case}", "job_time_p95", "s", float(np.percentile(times, 95))),
            Row(f"real run, {case}", "kernels_lost", "kernels", sum(one.lost for one in ended.values())),
        ]
    rows += [
        Row("real run, SharePod", "slowest_job", "of its guarantee", slowest),
        Row("real run, the model of the replay", "makespan", "s", max(model.values())),
        Row("real run, the model of the replay", "job_time_p50", "s", float(np.percentile([*model.values()], 50))),
    ]
    return rows, sum(one.lost for ended in (exclusive, shared) for one in ended.values())
