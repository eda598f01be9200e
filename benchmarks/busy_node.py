"""Shares of a GPU on a node with fully loaded processors, by the CPU request of the agent's pod.

Two tenants with requests of 0.4 and 0.6 run next to programs that use all available processor time. Each tenant, each
program and the agent has its own cgroup, with the weight that a kubelet gives for its CPU request. So nice values have
no effect between them, and the agent's CPU request decides how soon the agent runs. `work` is the sum of both tenants'
GPU time. The table also has this sum without the programs. Needs root. Prints a table and writes
`build/results/busy_node.json`.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from hook.world.agent_node import built, running, tenant, wait_for
from results import Row, print_table, write

AGENT_MILLI = (100, 250, 500, 1000)
TENANT_MILLI, BUSY_MILLI = 500, 1000
BUSY_PER_PROCESSOR = 3
SETTLE_S = 3.0
ROOTS = (Path("/sys/fs/cgroup/cpu"), Path("/sys/fs/cgroup"))
"""Mount points of cgroups version 1 (controller cpu) and of version 2. The first that exists is used."""


class Pods:
    """Cgroups that stand for pods, below one common cgroup. A context manager: at its end the cgroups are removed."""

    def __init__(self) -> None:
        mounted = [root for root in ROOTS if (root / "cgroup.procs").exists()]
        if not mounted:
            raise OSError("no cgroups are mounted")
        self._root = mounted[0] / f"sharepod-bench-{os.getpid()}"
        self._pods: list[Path] = []

    def __enter__(self) -> Pods:
        self._root.mkdir()
        if not self._weigh(self._root, 8000):
            (self._root / "cgroup.subtree_control").write_text("+cpu")
        return self

    def __exit__(self, *raised: object) -> None:
        for pod in [*self._pods, self._root]:
            with contextlib.suppress(OSError):
                pod.rmdir()

    def add(self, name: str, milli: int, pid: int) -> None:
        """Move a process, with its threads, into the cgroup of a pod that requests `milli` thousandths of a
        processor."""
        pod = self._root / name
        pod.mkdir()
        self._pods.append(pod)
        self._weigh(pod, milli)
        (pod / "cgroup.procs").write_text(str(pid))

    def empty(self) -> bool:
        """Return True if no process is left in the cgroups."""
        return not any((pod / "cgroup.procs").read_text() for pod in self._pods)

    @staticmethod
    def _weigh(pod: Path, milli: int) -> bool:
        """Give a cgroup the weight that the kubelet gives a pod with this CPU request. Return True if it is a cgroup of
        version 1."""
        shares = max(2, milli * 1024 // 1000)
        if (pod / "cpu.shares").exists():
            (pod / "cpu.shares").write_text(str(shares))
            return True
        if (pod / "cpu.weight").exists():
            (pod / "cpu.weight").write_text(str(1 + (shares - 2) * 9999 // 262142))
        return False


@contextlib.contextmanager
def busy(pods: Pods, count: int) -> Iterator[None]:
    """Run `count` programs in a pod's cgroup, each of which uses a whole processor if it can."""
    programs = [subprocess.Popen(["/bin/sh", "-c", "while :; do :; done"]) for _ in range(count)]
    try:
        for number, program in enumerate(programs):
            pods.add(f"busy-{number}", BUSY_MILLI, program.pid)
        yield
    finally:
        for program in programs:
            program.kill()
            program.wait()


def measured(agent_milli: int, programs: int, seconds: float) -> list[Row]:
    """Measure the shares for this CPU request of the agent and number of busy programs."""
    case = f"agent requests {agent_milli}m, {programs} busy programs"
    with (
        Pods() as pods,
        tempfile.TemporaryDirectory(prefix="bn") as directory,
        running(Path(directory), tenant("a", 0.4), tenant("b", 0.6)) as node,
    ):
        pods.add("agent", agent_milli, node.agent_pid)
        for name, kernel_us in (("a", "2000"), ("b", "5000")):
            program = node.launch(name, "--kernel-us", kernel_us, "--sync-every", "16")
            pods.add(name, TENANT_MILLI, program.process.pid)
        wait_for(lambda: all(node.devices().busy_ns(name) > 0 for name in "ab"), "device time of both")
        with busy(pods, programs):
            time.sleep(SETTLE_S)
            shares = node.shares(seconds, "a", "b")
        node.close()
        wait_for(pods.empty, "empty cgroups")
    work = sum(shares.values())
    return [
        Row(case, "work", "fraction", round(work, 4)),
        Row(case, "share_error", "points", round(abs(shares["a"] / work - 0.4) * 100, 2)),
    ]


def main() -> int:
    """Run the benchmark. Return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=16.0, help="how long each case is measured (default 16)")
    arguments = parser.parse_args()
    if not built():
        print("hook or test double not built; run `make shim doubles`", file=sys.stderr)
        return 1
    programs = BUSY_PER_PROCESSOR * (os.cpu_count() or 1)
    rows: list[Row] = []
    try:
        for milli, count in [(AGENT_MILLI[0], 0), *((milli, programs) for milli in AGENT_MILLI)]:
            rows += measured(milli, count, arguments.seconds)
    except OSError as error:
        print(f"needs root and cgroups with the controller cpu: {error}", file=sys.stderr)
        return 1
    print_table(rows, title="a node with fully loaded processors")
    write("busy_node", rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
