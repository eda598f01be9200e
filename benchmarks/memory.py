"""Cost of the hook per allocation and free, cost of allocations to the agent and the neighbours, and delay until a
sibling's idle credits are recalled.

    make bench-memory

Writes build/results/memory.json. Allocations go to an empty libcuda, so the difference between a call with and without
the hook is the time of the hook. The state is steady: a program that repeatedly allocates as much as it frees sends the
agent one request. The table also has the time of a bare request to the agent over the same socket. The agent has its
default settings. Rounds with and without the hook alternate, and a figure is the median of the rounds.

With a neighbour: two tenants have half of a simulated GPU each, and both launch. A second program of one tenant
allocates and frees in a loop. The benchmark measures the GPU time of the other tenant and the processor time of the
agent.

Recall: a process has unused credits, and a sibling process requests so much memory that it needs them. The benchmark
measures the whole call of the sibling on the fake driver. The measuring process sees it over a pipe, which adds the
time of two messages.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from hook.world.agent_node import FAKE_CUDA, GPUS, PROGRAMS, Node, Program, built, running, tenant
from hook.world.caller import Caller
from results import Row, write
from share_window import cpu_of

ROOT = Path(__file__).resolve().parent.parent
HOLLOW = ROOT / "build" / "doubles" / "hollow"
MIB = 1 << 20
LIMIT = 1024 * MIB
TURNS = 7
CALLED_BACK = 300
IN_CREDIT = (512 << 10, 32, 2000)
"""(bytes of an allocation, allocations at once, repetitions). They fit into a process's idle credits, so the agent is
not asked."""
LARGE = (64 * MIB, 1, 1000)
"""(bytes of an allocation, allocations at once, repetitions). Each exceeds the idle credits, so the agent is asked."""
PAIRS = {"pool, 1 MiB": (1, 1), "pool, 34 MiB": (34, 1), "pool, 128 MiB in four threads": (128, 4)}
"""For each case: (MiB of each allocation from a memory pool, number of threads). Each allocation is freed at once."""
PAIR_ROUNDS = 20_000
NEIGHBOUR_S = 10.0


def ran(arguments: list[str], environment: Mapping[str, str]) -> dict[str, float]:
    """Run the program `alloccost` and return its measurements."""
    done = subprocess.run(
        [str(PROGRAMS / "alloccost"), *arguments],
        env=dict(environment),
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    if done.returncode != 0:
        raise RuntimeError(f"alloccost {' '.join(arguments)} ended with {done.returncode}: {done.stderr.strip()}")
    measured: dict[str, float] = json.loads(done.stdout)
    return measured


def calls(case: str, shape: tuple[int, int, int], bare: Mapping[str, str], hooked: Mapping[str, str]) -> list[Row]:
    """Measure allocations without the hook and with it; the rows also have the difference."""
    arguments = ["calls", *map(str, shape)]
    without, having = [], []
    for _ in range(TURNS):
        without.append(ran(arguments, bare))
        having.append(ran(arguments, hooked))
    rows = []
    for call in ("alloc", "free"):
        medians = [statistics.median(turn[f"{call}_ns"] for turn in turns) for turns in (without, having)]
        rows.append(Row(case, f"{call}_bare", "ns", round(medians[0], 1)))
        rows.append(Row(case, f"{call}_hooked", "ns", round(medians[1], 1)))
        rows.append(Row(case, f"{call}_overhead", "ns", round(medians[1] - medians[0], 1)))
    return rows


def pairs(bare: Mapping[str, str], hooked: Mapping[str, str]) -> list[Row]:
    """Measure pairs of an allocation from a memory pool and its free, without the hook and with it; the rows also have
    the difference."""
    rows = []
    for case, (mib, threads) in PAIRS.items():
        arguments = ["pairs", str(mib * MIB), str(threads), str(PAIR_ROUNDS)]
        turns = [(ran(arguments, bare)["pair_ns"], ran(arguments, hooked)["pair_ns"]) for _ in range(TURNS)]
        without, having = (statistics.median(column) for column in zip(*turns, strict=True))
        rows.append(Row(case, "pair_bare", "ns", round(without, 1)))
        rows.append(Row(case, "pair_hooked", "ns", round(having, 1)))
        rows.append(Row(case, "pair_overhead", "ns", round(having - without, 1)))
    return rows


def beside_a_neighbour(node: Node, seconds: float) -> list[Row]:
    """Measure the neighbour's share of the GPU and the agent's processor time, with and without a program that
    allocates."""
    rows = []
    for program in ("a", "b"):
        node.launch(program, "--kernel-us", "1000")
    loops = {"nothing": None, **PAIRS}
    for case, loop in loops.items():
        allocating = None
        if loop is not None:
            size, threads = loop
            arguments = ["pairs", str(size * MIB), str(threads), "0"]
            allocating = Program([str(PROGRAMS / "alloccost"), *arguments], node.environment("a", label="loop"))
        try:
            time.sleep(1)
            before, begin = cpu_of(node), time.monotonic()
            share = node.shares(seconds, "b")["b"]
            used = (cpu_of(node) - before) / (time.monotonic() - begin)
        finally:
            if allocating is not None:
                allocating.close()
        case = f"the neighbour allocates {case}"
        rows.append(Row(case, "share", "of the GPU, of 0.5", round(share, 3)))
        rows.append(Row(case, "agent_cpu", "fraction of a core", round(used, 4)))
    return rows


def called_back(node: Node) -> list[Row]:
    """Measure an allocation that succeeds only after a sibling process has returned its idle credits."""
    environment = dict(os.environ) | {
        "LD_LIBRARY_PATH": str(FAKE_CUDA),
        "LD_PRELOAD": str(node.path("a") / "libsharepod.so"),
        "FAKE_CUDA_STATE": str(node.state),
        "FAKE_CUDA_VISIBLE": GPUS[0],
    }
    idle, asking = Caller(environment), Caller(environment)
    took = []
    try:
        for caller in (idle, asking):
            caller.start()
        for _ in range(CALLED_BACK):
            idle.ok("cuMemFree_v2", idle.new("cuMemAlloc_v2", 24 * MIB))
            begun = time.perf_counter_ns()
            address = asking.new("cuMemAlloc_v2", LIMIT)
            took.append((time.perf_counter_ns() - begun) / 1e6)
            asking.ok("cuMemFree_v2", address)
    finally:
        idle.close()
        asking.close()
    took.sort()
    case = "needs a sibling's idle credits"
    return [
        Row(case, "called_back_p50", "ms", round(took[len(took) // 2], 3)),
        Row(case, "called_back_p99", "ms", round(took[int(0.99 * (len(took) - 1))], 3)),
        Row(case, "called_back_max", "ms", round(took[-1], 3)),
    ]


def main() -> int:
    """Run the benchmark. Return 0 if everything was measured."""
    if not built():
        sys.exit("hook or double not built: run `make shim doubles`")
    with (
        tempfile.TemporaryDirectory(prefix="bm") as directory,
        running(Path(directory), tenant("a", 0.5, memory=LIMIT)) as node,
    ):
        bare = {
            "PATH": os.environ["PATH"],
            "LD_LIBRARY_PATH": str(HOLLOW),
            "HOLLOW_GPU": GPUS[0].removeprefix("GPU-").replace("-", ""),
        }
        hooked = bare | {"LD_PRELOAD": str(node.path("a") / "libsharepod.so")}
        rows = calls("in credit", IN_CREDIT, bare, hooked)
        rows += calls("64 MiB at once", LARGE, bare, hooked)
        rows += pairs(bare, hooked)
        trip = ran(["trip", str(node.path("a") / "agent.sock"), "5000"], bare)
        rows.append(Row("a question to the agent", "round_trip_p50", "ns", trip["trip_ns"]))
        rows.append(Row("a question to the agent", "round_trip_p99", "ns", trip["trip_p99_ns"]))
        rows += called_back(node)
    with (
        tempfile.TemporaryDirectory(prefix="bm") as directory,
        running(Path(directory), tenant("a", 0.5, memory=4 * LIMIT), tenant("b", 0.5)) as node,
    ):
        rows += beside_a_neighbour(node, NEIGHBOUR_S)
    write("memory", rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
