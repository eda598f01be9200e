"""What tenants get of a GPU's time beside what they asked for: the real agent and the real hook on simulated GPUs.

The device's own account is read, not the program's: the time that its kernels occupied the GPU within the window.
Prints a table and writes `build/results/timeshare.json`.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from hook.agent_node import GPUS, Node, built, running, tenant, wait_for
from results import Row, write

SETTLE_S = 8.0
"""A program that launches without end has seconds of work in its queue by the time that the second one starts."""


@dataclass(frozen=True)
class Busy:
    """A tenant that launches all the time, and the share that it should get."""

    name: str
    request: float
    limit: float
    expected: float
    kernel_us: int = 2000
    gpus: tuple[str, ...] = GPUS[:1]


CASES: dict[str, tuple[Busy, ...]] = {
    "two at 0.4 and 0.6": (Busy("a", 0.4, 1, 0.4), Busy("b", 0.6, 1, 0.6)),
    "two at 0.4 and 0.6, kernels of 20 and 2 ms": (Busy("a", 0.4, 1, 0.4, 20_000), Busy("b", 0.6, 1, 0.6)),
    "three at 0.2, 0.3 and 0.5": (Busy("a", 0.2, 1, 0.2), Busy("b", 0.3, 1, 0.3), Busy("c", 0.5, 1, 0.5)),
    "alone at 0.4, limit 0.7": (Busy("a", 0.4, 0.7, 0.7),),
    "alone at 0.4, limit 1": (Busy("a", 0.4, 1, 1.0),),
}


def measure(case: str, tenants: tuple[Busy, ...], seconds: float) -> list[Row]:
    """Runs one case; its rows."""
    with (
        tempfile.TemporaryDirectory(prefix="ts") as directory,
        running(Path(directory), *(tenant(t.name, t.request, t.limit, gpus=t.gpus) for t in tenants)) as node,
    ):
        for busy in sorted(tenants, key=lambda busy: busy.kernel_us):
            node.launch(busy.name, "--kernel-us", str(busy.kernel_us), gpus=busy.gpus)
        wait_for(lambda: all(node.devices().busy_ns(t.name) for t in tenants), "device time of every tenant")
        time.sleep(SETTLE_S)
        cpu_before, begin = cpu_of(node), time.monotonic()
        shares = node.shares(seconds, *(t.name for t in tenants))
        cpu = (cpu_of(node) - cpu_before) / (time.monotonic() - begin)
    rows = []
    for busy in tenants:
        share = shares[busy.name]
        rows.append(Row(f"{case}: {busy.name}", "share", "fraction", round(share, 4)))
        rows.append(Row(f"{case}: {busy.name}", "share_error", "points", round(abs(share - busy.expected) * 100, 2)))
    rows.append(Row(case, "agent_cpu", "fraction of a core", round(cpu, 4)))
    return rows


def cpu_of(node: Node) -> float:
    """Processor time of the agent so far, in seconds."""
    fields = Path(f"/proc/{node.agent_pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / 100


def main() -> int:
    """The program."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=20.0, help="how long each case is measured (default 20)")
    arguments = parser.parse_args()
    if not built():
        print("hook or test double not built; run `make shim doubles`", file=sys.stderr)
        return 1
    rows = [row for case, tenants in CASES.items() for row in measure(case, tenants, arguments.seconds)]
    write("timeshare", rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
