"""Latency of a hand-off of a GPU's token by the agent, compared with two bare sockets.

One program plays the processes of all tenants against a real agent at its default settings. As root, the agent consists
of two processes as in its DaemonSet (`--one-process`: of one). The program sends DRAINED for one tenant and waits for
the GRANT of the next tenant. A hand-off is the time between these two frames. `echo` is a process that only sends the
same frame back. The agent's CPU is measured while every tenant holds the token for its whole quantum of 30 ms, as
programs with endless work do.

`answer` is the time of a memory request by one more process, which sends a thousand requests a second while 240 tenants
hand off every 30 ms. It shows how long the agent's event loop is busy with other work: once undisturbed, and once while
the agent reads NVML, writes checkpoints and is scraped each second. Prints a table and writes
`build/results/handoff.json`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hook.world.agent_node import GPUS, PROGRAMS, Node, built, running, tenant
from results import Row, write
from share_window import cpu_of
from sharepod import protocol

HOLD_US = 2_000
QUANTUM_MS = 30
APART = os.geteuid() == 0 and "--one-process" not in sys.argv
"""True if the agent consists of two processes, as in its DaemonSet."""
MOST_TENANTS = 240
"""Number of tenants in the cases with many: nearly as many as a ledger may have (256)."""


def play(arguments: list[str], seconds: float, hold_us: int) -> dict[str, Any]:
    """Run the program that plays the tenants' processes. Return the figures that it prints."""
    command = [str(PROGRAMS / "handoff"), "--seconds", str(seconds), "--hold-us", str(hold_us), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=seconds + 60)
    if done.returncode != 0:
        raise RuntimeError(f"handoff ended with {done.returncode}: {done.stderr.strip()}")
    counted: dict[str, Any] = json.loads(done.stdout)
    return counted


def groups(tenants: int, gpus: int, *, gang: bool) -> list[tuple[int, tuple[str, ...]]]:
    """Return the tenants of a case, each as (number of a group, its GPUs). Tenants of one group hand the token on to
    each other."""
    if gang:
        return [(0, GPUS[:gpus])] * tenants
    each = min(tenants, MOST_TENANTS // gpus)
    return [(gpu, GPUS[gpu : gpu + 1]) for gpu in range(gpus) for _ in range(each)]


def sockets(node: Node, members: list[tuple[int, tuple[str, ...]]]) -> list[str]:
    """Return the tenants' sockets, as arguments of the program that plays the tenants."""
    return [f"{group}:{node.path(f't{index}') / 'agent.sock'}" for index, (group, _) in enumerate(members)]


def measure(case: str, members: list[tuple[int, tuple[str, ...]]], seconds: float) -> list[Row]:
    """Measure the hand-offs of one case."""
    count = max(sum(1 for group, _ in members if group == wanted) for wanted, _ in members)
    rows = [tenant(f"t{index}", 1 / count, gpus=gpus) for index, (_, gpus) in enumerate(members)]
    with tempfile.TemporaryDirectory(prefix="ho") as directory, running(Path(directory), *rows, apart=APART) as node:
        counted = play(sockets(node, members), seconds, HOLD_US)
    return [
        Row(case, "count", "hand-offs", counted["count"]),
        *(Row(case, name, "us", counted[f"{name}_us"]) for name in ("p50", "p99", "max")),
    ]


def cpu(case: str, tenants: int, gpus: int, seconds: float) -> list[Row]:
    """Measure the agent's CPU while tenants hold the token for whole quanta of 30 ms. The number of tenants per GPU is
    chosen so that the target latency gives this quantum."""
    members = groups(tenants, gpus, gang=False)
    rows = [tenant(f"t{index}", 1 / tenants, gpus=on) for index, (_, on) in enumerate(members)]
    with tempfile.TemporaryDirectory(prefix="ho") as directory, running(Path(directory), *rows, apart=APART) as node:
        before, begin = cpu_of(node), time.monotonic()
        counted = play(sockets(node, members), seconds, 0)
        used = (cpu_of(node) - before) / (time.monotonic() - begin)
    return [
        Row(case, "hand_offs", "per second", round(counted["count"] / seconds, 1)),
        Row(case, "agent_cpu", "fraction of a core per GPU", round(used / gpus, 4)),
        *(Row(case, name, "us", counted[f"{name}_us"]) for name in ("p50", "p99")),
    ]


def ask(path: Path, seconds: float) -> list[float]:
    """Request the memory figures repeatedly. Return the time until each answer, in us."""
    took: list[float] = []
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
        sock.settimeout(20)
        sock.connect(str(path))
        sock.send(protocol.encode(protocol.Hello(1, 1, observes=True)))
        sock.recv(protocol.FRAME_MAX)
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            begun = time.perf_counter()
            sock.send(protocol.encode(protocol.MemInfo(len(took), 0)))
            sock.recv(protocol.FRAME_MAX)
            took.append((time.perf_counter() - begun) * 1e6)
            time.sleep(0.001)
    return took


@contextlib.contextmanager
def scraped(node: Node) -> Iterator[None]:
    """Scrape the agent's metrics each second, until the end of the block."""
    port, done = re.findall(r'"port": (\d+)', node.log())[-1], threading.Event()

    def scrape() -> None:
        while not done.wait(1.0):
            urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=20).read()

    thread = threading.Thread(target=scrape, name="scraper")
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def answers(case: str, seconds: float, *, disturbed: bool) -> list[Row]:
    """Measure the time until the agent answers, with 240 tenants on eight GPUs. `disturbed` true: NVML is read and the
    agent is scraped at the same time."""
    members = groups(MOST_TENANTS, 8, gang=False)
    rows = [tenant(f"t{index}", 8 / MOST_TENANTS, gpus=on) for index, (_, on) in enumerate(members)]
    interval_s = "1" if disturbed else "60"
    with tempfile.TemporaryDirectory(prefix="ho") as directory, contextlib.ExitStack() as stack:
        node = stack.enter_context(
            running(Path(directory), *rows, apart=APART, nvml=True, inventory_interval_s=interval_s)
        )
        if disturbed:
            stack.enter_context(scraped(node))
        player = threading.Thread(target=play, args=(sockets(node, members), seconds + 2, 0))
        player.start()
        stack.callback(player.join)
        time.sleep(1)
        took = sorted(ask(node.path("t0") / "agent.sock", seconds))
    p99 = statistics.quantiles(took, n=100)[-1]
    figures = {"answer_p50": statistics.median(took), "answer_p99": p99, "answer_max": took[-1]}
    return [Row(case, name, "us", round(value)) for name, value in figures.items()]


def main() -> int:
    """Run the benchmark. Return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=8.0, help="how long each case is measured (default 8)")
    parser.add_argument("--one-process", action="store_true", help="the agent in one process, as it is without root")
    arguments = parser.parse_args()
    if not built():
        print("hook or test double not built; run `make shim doubles`", file=sys.stderr)
        return 1
    seconds = arguments.seconds
    echo = play(["--echo"], seconds, HOLD_US)
    rows = [Row("echo", name, "us", echo[f"{name}_us"]) for name in ("p50", "p99", "max")]
    for tenants in (2, 10, 50):
        rows += measure(f"{tenants} tenants, 1 GPU", groups(tenants, 1, gang=False), seconds)
        rows += measure(f"{tenants} tenants, each on all of 8 GPUs", groups(tenants, 8, gang=True), seconds)
        spread = groups(tenants, 8, gang=False)
        rows += measure(f"{len(spread) // 8} tenants on each of 8 GPUs", spread, seconds)
    count = 300 // QUANTUM_MS
    rows += cpu(f"{count} tenants, quanta of {QUANTUM_MS} ms, 1 GPU", count, 1, seconds)
    rows += cpu(f"{count} tenants on each of 8 GPUs, quanta of {QUANTUM_MS} ms", count, 8, seconds)
    for case, disturbed in (("undisturbed", False), ("with readings, checkpoints and scrapes", True)):
        rows += answers(f"30 tenants on each of 8 GPUs, {case}", seconds, disturbed=disturbed)
    write("handoff", rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
