"""Cost of the hook: nanoseconds per launch and copy, microseconds per exec.

    make bench-hook

Writes build/results/hook.json. Launches go to an empty libcuda. So the difference between a call through the hook and
the same call without it is the time of the hook itself: processor time of the launching threads. In each round, the
ways of calling follow each other in one process: directly to the driver, through the hook, directly with one shared
atomic counter, and directly under one mutex. `launch_overhead` is the median over the rounds of what a way adds to the
direct call of its round. Cases:

alone           There is one grant without end, not metered. The gate is open, and each 512th launch has a fence. For a
                launch into the default stream the hook queries the driver for the current context, unless the process
                can only have the primary context of one device.
cold caches     The thread writes 4 MiB before each launch. The figure is the median of single launches by the wall
                clock.
instructions    Processor instructions of a launch with its loop, directly and as in `alone`: the mean over launches
                that program `launchsteps` single-steps.
in turn         Each thread launches into this number of streams, one after the other. `a counter for each stream` is
                what a counter adds to the direct call if each stream has a counter in a cache line of its own.
ceiling-bound   The tenant has the token for 70 ms of each 100 ms, and the grants are metered.
contended       A neighbour wants the GPU. The tenant has metered grants of 50 ms, with pauses of 50 ms.
calls           Number of driver calls in one round of a program's own calls, on the driver double. The median over the
                rounds is given without the hook (`own`), alone, and metered (program `drivercalls`).
driver's lock   Median time of such a round, and of a launch in a second thread. On this double, each call holds one
                lock for five microseconds.
samples         An eager training runs on the double: 128 kernels of 22 us, with 86 us of host work before each, half of
                which is sleep. Grants that require samples of the progress alternate with grants that do not. All
                grants are metered, and a neighbour wants the GPU. `step_overhead`: part of its steps that the training
                loses by samples, as the median over pairs. `sample_cpu`: processor time of the hook thread per sample.

An exec is timed as the spawn of a program that ends at once: without the hook, with the hook, and with an empty
library, alternately. The figures do not contain the driver's own work for metering, which is to record an event after
each 64 launches.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from doubles.gpus import create_state
from hook.world.scripted_agent import Client, ScriptedAgent
from results import Row, write
from sharepod.protocol import GpuTerms, Grant

ROOT = Path(__file__).resolve().parent.parent

BUILD = ROOT / "build"
PROMISES = {
    "program-no-shared-write": ("max", "launch_overhead", "alone, 16 threads"),
    "program-silent": ("max", "exec_overhead", "a program without CUDA"),
}
THREADS = (1, 4, 16)
CALLS = 400_000
ROUNDS = 60
EXECS = 3_000
STEPPED = 1_024
TRAININGS = 16
TRAINING_S = 3
GPU = "10000000-0000-4000-8000-000000000000"
SITUATIONS: tuple[tuple[str, str, str, dict[str, str], tuple[int, ...]], ...] = (
    ("alone", "launch", "stream", {}, THREADS),
    ("alone, cold caches", "launch-cold", "stream", {}, (1,)),
    ("alone, graphs", "graph", "stream", {}, (1,)),
    ("alone, default stream", "launch", "default", {}, THREADS),
    ("alone, default stream, 2 devices", "launch", "default", {"HOLLOW_DEVICES": "2"}, THREADS),
    ("alone, default stream, 8 devices", "launch", "default", {"HOLLOW_DEVICES": "8"}, (1,)),
    ("alone, 4 streams in turn", "launch", "4", {}, (1,)),
    ("alone, 10 streams in turn", "launch", "10", {}, (1,)),
    ("alone, 40 streams in turn", "launch", "40", {}, (1,)),
    ("alone, next to 10 threads", "launch", "stream", {"LAUNCHCOST_ALIVE": "10"}, (1,)),
    ("alone, next to 5000 threads", "launch", "stream", {"LAUNCHCOST_ALIVE": "5000"}, (1,)),
    (
        "alone, 10 streams in turn, 10000 more known",
        "launch",
        "10",
        {"LAUNCHCOST_ALIVE": "1", "LAUNCHCOST_STREAMS": "10000"},
        (1,),
    ),
    (
        "alone, 4000 streams in turn, 10000 more known",
        "launch",
        "4000",
        {"LAUNCHCOST_ALIVE": "1", "LAUNCHCOST_STREAMS": "10000"},
        (1,),
    ),
    ("ceiling-bound", "launch", "stream", {}, THREADS),
    ("contended", "launch", "stream", {}, THREADS),
    ("contended, graphs", "graph", "stream", {}, (1,)),
    ("contended, 4 streams in turn", "launch", "4", {}, (1,)),
    ("contended, 40 streams in turn", "launch", "40", {}, (1,)),
)
"""(name, call, streams, environment, numbers of threads) of each situation; see launchcost.c for the arguments."""
PATTERNS = {
    "1,000 copies from pageable memory in one batch": "batch-pageable",
    "1,000 copies from pinned memory in one batch": "batch-pinned",
    "cuMemcpyAsync from the host": "copy-unsaid",
    "cuMemcpyAsync between device memories": "copy-between",
    "a launch and cuMemcpyHtoDAsync": "launch-copy-async",
    "a launch and cuMemcpyHtoD": "launch-copy",
    "launches into 4 streams and cuMemcpyHtoD": "launches-4-copy",
    "a launch and cuStreamWaitEvent": "launch-wait-event",
    "cuMemAllocAsync and cuMemFreeAsync": "pool-pair",
    "cuMemAlloc and cuMemFree": "linear-pair",
}
"""Description of a round of calls -> name of the pattern in the program `drivercalls`."""
LOCKING = ("1,000 copies from pageable memory in one batch", "cuMemAllocAsync and cuMemFreeAsync")
CALL_ROUNDS = 1_000
LOCK_NS = 5_000
WAYS = {"counter": "a shared counter", "mutex": "a mutex"}
LINES = "a counter for each stream"


def cost(
    threads: int, call: str, stream: str, environment: Mapping[str, str], rounds: int = ROUNDS
) -> dict[str, tuple[float, float]]:
    """Return, for each way of calling: (nanoseconds of a call, nanoseconds that it takes more than the direct call of
    the same round)."""
    program = [str(BUILD / "programs" / "launchcost"), str(threads), str(CALLS), str(rounds), call, stream]
    done = subprocess.run(program, env=dict(environment), capture_output=True, text=True, check=True, timeout=300)
    lines = (line.split() for line in done.stdout.splitlines())
    return {way: (float(whole), float(added)) for way, whole, added in lines}


def in_turns(agent: ScriptedAgent, quantum_ms: float, pause_ms: float) -> Callable[[Client], Grant | None]:
    """Return a policy of the agent double. It grants `quantum_ms` each time, `pause_ms` after the request. The first
    grant comes without a pause."""
    asked = [False]

    def grant(client: Client) -> None:
        if not client.closed:
            agent.grant(client, quantum_ms, metered=True)

    def on_want(client: Client) -> Grant | None:
        if not asked[0]:
            asked[0] = True
            return agent.next_grant(quantum_ms, metered=True)
        timer = threading.Timer(pause_ms / 1000, grant, (client,))
        timer.daemon = True
        timer.start()
        return None

    return on_want


def launch_rows(agent: ScriptedAgent, hooked: Mapping[str, str]) -> list[Row]:
    """Measure launches in each situation, for each number of threads. For `alone`, the rows also have the direct call
    and the other ways of calling."""
    rows = []
    for situation, call, stream, more, numbers in SITUATIONS:
        for threads in numbers:
            agent.hints.contended = situation.startswith("contended")
            if situation == "ceiling-bound":
                agent.on_want = in_turns(agent, 70, 30)
            elif agent.hints.contended:
                agent.on_want = in_turns(agent, 50, 50)
            else:
                agent.on_want = lambda client: agent.next_grant()
            took = cost(threads, call, stream, {**hooked, **more})
            case = f"{threads} thread{'s' if threads > 1 else ''}"
            if situation in ("alone", "alone, cold caches"):
                case = case if situation == "alone" else f"{case}, cold caches"
                rows.append(Row(f"straight, {case}", "launch_bare", "ns", round(took["bare"][0], 2)))
                rows += [
                    Row(f"{name}, {case}", "launch_overhead", "ns", round(took[way][1], 2))
                    for way, name in WAYS.items()
                ]
            if situation.startswith("alone") and "in turn" in situation:
                rows.append(Row(f"{LINES}, {situation}", "launch_overhead", "ns", round(took["lines"][1], 2)))
            case = case.removesuffix(", cold caches")
            rows.append(Row(f"{situation}, {case}", "launch_overhead", "ns", round(took["hooked"][1], 2)))
    return rows


def instruction_rows(agent: ScriptedAgent, hooked: Mapping[str, str]) -> list[Row]:
    """Count the processor instructions of a launch, by single-stepping."""
    agent.hints.contended = False
    agent.on_want = lambda client: agent.next_grant()
    program = [str(BUILD / "programs" / "launchsteps"), str(STEPPED)]
    done = subprocess.run(program, env=dict(hooked), capture_output=True, text=True, check=True, timeout=300)
    took = {way: float(count) for way, count in (line.split() for line in done.stdout.splitlines())}
    return [
        Row(f"{name}, 1 thread", "launch_instructions", "instructions", took[way])
        for way, name in (("bare", "straight"), ("hooked", "alone"))
    ]


def copy_rows(agent: ScriptedAgent, hooked: Mapping[str, str]) -> list[Row]:
    """Measure two copies: one whose call shows that it copies device memory, and one for which the hook must query the
    driver."""
    agent.hints.contended = False
    agent.on_want = lambda client: agent.next_grant()
    rows = []
    for call, name in (("copy", "cuMemcpyDtoDAsync"), ("copy-unsaid", "cuMemcpyAsync")):
        added = cost(1, call, "stream", hooked, ROUNDS // 2)["hooked"][1]
        rows.append(Row(f"alone, 1 thread, {name}", "copy_overhead", "ns", round(added, 2)))
    return rows


def counted(agent: ScriptedAgent, environment: Mapping[str, str], pattern: str, metered: bool, *more: str) -> list[int]:
    """Run a pattern of `drivercalls` under one grant without end. Return the numbers that the program prints."""
    agent.hints.contended = metered
    agent.on_want = lambda client: agent.next_grant(metered=metered)
    program = [str(BUILD / "programs" / "drivercalls"), pattern, str(CALL_ROUNDS), *more]
    done = subprocess.run(program, env=dict(environment), capture_output=True, text=True, check=True, timeout=300)
    return [int(word) for word in done.stdout.split()]


def call_rows(agent: ScriptedAgent, hooked: Mapping[str, str], folder: Path) -> list[Row]:
    """Measure the driver calls that the hook adds to a program's own calls, and the time of launches on a driver whose
    calls hold a lock.
    """
    state = create_state(folder / "one-gpu", [(f"GPU-{GPU}", "Simulated GPU", 4 << 30)])
    environment = {
        **hooked,
        "LD_LIBRARY_PATH": str(BUILD / "doubles" / "libcuda"),
        "FAKE_CUDA_STATE": str(state),
    }
    bare = {name: value for name, value in environment.items() if name != "LD_PRELOAD"}
    ways = {"own": (bare, False), "alone": (environment, False), "metered": (environment, True)}
    rows = []
    for what, pattern in PATTERNS.items():
        for way, (variables, metered) in ways.items():
            rows.append(Row(what, f"calls_{way}", "calls", counted(agent, variables, pattern, metered)[0]))
    for what in LOCKING:
        for way, (variables, metered) in ways.items():
            locking = {**variables, "FAKE_CUDA_LOCK_NS": str(LOCK_NS)}
            _, _, took, launch = counted(agent, locking, PATTERNS[what], metered, "launch")
            rows.append(Row(f"with a driver's lock, {what}", f"round_{way}", "us", round(took / 1000, 1)))
            rows.append(
                Row(f"with a driver's lock, a launch next to {what}", f"launch_{way}", "us", round(launch / 1000, 1))
            )
    return rows


def training(agent: ScriptedAgent, environment: Mapping[str, str], concurrent: bool) -> tuple[int, float, int]:
    """Run an eager training. Return its number of steps, the processor seconds of its hook thread, and the number of
    progress samples."""
    agent.hints.contended = True
    agent.on_want = lambda client: agent.next_grant(metered=True, concurrent=concurrent)
    program = [str(BUILD / "programs" / "gaps"), "e22", "--slept", "0.5", "--seconds", str(TRAINING_S)]
    known = len(agent.clients)
    process = subprocess.Popen(program, env=dict(environment), stdout=subprocess.PIPE, text=True)
    client, spent_s = agent.client(known), 0.0
    while not client.closed:
        time.sleep(0.02)
        for task in Path(f"/proc/{process.pid}/task").glob("*"):
            with contextlib.suppress(OSError):  # the thread has ended
                if (task / "comm").read_text() == "sharepod\n":
                    spent_s = int((task / "schedstat").read_text().split()[0]) / 1e9
    output, _ = process.communicate(timeout=30)
    return int(json.loads(output.splitlines()[-1])["units"]), spent_s, client.pulse().samples


def sample_rows(agent: ScriptedAgent, hooked: Mapping[str, str], folder: Path) -> list[Row]:
    """Measure trainings under grants with and without progress samples, alternately."""
    state = create_state(folder / "gpus", [(f"GPU-{GPU}", "Simulated GPU", 1 << 30)])
    environment = {
        **hooked,
        "LD_LIBRARY_PATH": str(BUILD / "doubles" / "libcuda"),
        "FAKE_CUDA_STATE": str(state),
    }
    lost, spent_us = [], []
    for turn in range(TRAININGS):
        took = {}
        for concurrent in (True, False) if turn % 2 else (False, True):
            took[concurrent] = training(agent, environment, concurrent)
        (steps, spent_s, samples), (steps_without, spent_without_s, _) = took[True], took[False]
        lost.append(100 * (1 - steps / steps_without))
        spent_us.append(1e6 * (spent_s - spent_without_s) / samples)
    return [
        Row("eager training with samples", "step_overhead", "%", round(statistics.median(lost), 2)),
        Row("eager training with samples", "sample_cpu", "us", round(statistics.median(spent_us), 2)),
    ]


def spawn_us(environment: Mapping[str, str]) -> float:
    """Return the microseconds from the spawn of a small program to its end."""
    program = str(BUILD / "programs" / "nothing")
    begun = time.perf_counter_ns()
    pid = os.posix_spawn(program, [program], dict(environment))
    os.waitpid(pid, 0)
    return (time.perf_counter_ns() - begun) / 1000


def exec_rows(hook: Path, empty: Path) -> list[Row]:
    """Measure execs without the hook, with the hook and with an empty library, alternately, so that other load affects
    each of them equally."""
    plain = {"PATH": os.environ["PATH"]}
    ways = {"bare": plain, "hooked": {**plain, "LD_PRELOAD": str(hook)}, "empty": {**plain, "LD_PRELOAD": str(empty)}}
    took: dict[str, list[float]] = {way: [] for way in ways}
    for turn in range(EXECS):
        order = list(ways)[turn % len(ways) :] + list(ways)[: turn % len(ways)]
        for way in order:
            took[way].append(spawn_us(ways[way]))
    medians = {way: statistics.median(values) for way, values in took.items()}
    return [
        Row("a program without CUDA", "exec_bare", "us", round(medians["bare"], 1)),
        Row("a program without CUDA", "exec_overhead", "us", round(medians["hooked"] - medians["bare"], 1)),
        Row("an empty library instead", "exec_overhead", "us", round(medians["empty"] - medians["bare"], 1)),
    ]


def main() -> int:
    """Run the benchmark. Return 0 if everything was measured."""
    subprocess.run(
        ["make", "-sC", str(ROOT / "tests" / "doubles"), f"PYTHON={sys.executable}"], check=True, timeout=300
    )
    with tempfile.TemporaryDirectory(prefix="sharepod-") as folder:
        tenant = Path(folder)
        hook, empty = tenant / "libsharepod.so", tenant / "empty.so"
        build = [sys.executable, "setup.py", "--quiet", "build_hook", f"--target={BUILD / 'hook' / 'libsharepod.so'}"]
        subprocess.run(build, cwd=ROOT, check=True, stdout=subprocess.DEVNULL, timeout=300)
        shutil.copy2(BUILD / "hook" / "libsharepod.so", hook)
        (tenant / "empty.c").write_text("")
        subprocess.run(["cc", "-shared", "-nostdlib", "-o", empty, tenant / "empty.c"], check=True, timeout=60)
        (tenant / "limits").write_text(f"gpu GPU-{GPU} request 500 limit 1000 memory 1073741824 enforced 1\n")
        agent = ScriptedAgent(tenant, [GpuTerms(bytes.fromhex(GPU.replace("-", "")), 500, 1000, 1 << 30, True)])
        hooked = {
            "PATH": os.environ["PATH"],
            "LD_LIBRARY_PATH": str(BUILD / "doubles" / "hollow"),
            "LD_PRELOAD": str(hook),
        }
        try:
            rows = sample_rows(agent, hooked, tenant) + instruction_rows(agent, hooked)
            rows += launch_rows(agent, hooked) + copy_rows(agent, hooked)
            rows += call_rows(agent, hooked, tenant)
        finally:
            agent.close()
        rows += exec_rows(hook, empty)
    write("hook", rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
