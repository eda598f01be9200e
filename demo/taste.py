"""`make taste`: two programs share one simulated GPU, live in the terminal, in seconds and without a cluster.

The agent (standalone mode) and the hook are the product's own. The GPU is the tests' double: a libcuda whose kernels
occupy a simulated device for a stated time. The tenants stand in a YAML file that may be edited while the bars move.

Guarantees:
- With a terminal it runs until `q` or Ctrl-C; without one it runs 8 s, prints a line a second, and exits 1 if a share
  of the last 5 s is more than 3 points off what was asked.
- Nothing is left behind: agent and programs are stopped by their pids, the directory is removed.
"""

from __future__ import annotations

import argparse
import json
import os
import select
import signal
import sys
import tempfile
import termios
import time
import tty
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

import yaml
from hook.world.agent_node import GI, Node, built, running, tenant
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

NAMES = ("alpha", "beta")
ASKED = {"alpha": 600, "beta": 400}
"""Thousandths of the GPU's time, at the start."""
MEMORY = {"alpha": 3 * GI, "beta": 1 * GI}
"""Bytes that each program allocates, of 4 GiB allowed."""
KERNEL_US = 5000
"""Length of a kernel of either program: that of a small training step."""
TICK_S = 0.2
WINDOW_S = 3.0
"""Seconds that a bar looks back: 30 turns of 100 ms."""
RUN_WITHOUT_TERMINAL_S = 8.0
JUDGED_S = 5.0
POINTS = 3.0
"""Largest allowed error of a share over `JUDGED_S`, in percentage points: a turn is 2 points."""
ENDS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals that end it: Ctrl-C, a request to end, a terminal that was closed."""
STEP = 100
"""Thousandths that a key moves from one program to the other."""
_HEADER = """\
# The tenants of one simulated GPU, as the operator writes them into a GPUNode.
# Edit requestMilli, limitMilli (thousandths of the GPU's time) or memory (bytes) and save: the agent follows at once.
"""


class TasteError(Exception):
    """A promise of the demo does not hold; the message says which."""


@dataclass
class Seen:
    """Request and share of one program, as last read."""

    asked: float = 0.0
    limit: float = 1.0
    got: float = 0.0
    waiting: float = 0.0
    """Fraction of the last `WINDOW_S` in which the program wanted the GPU and another one had it."""
    memory: int = 0
    memory_limit: int = 1


@dataclass
class Meter:
    """Shares over a sliding window, from the simulated device's own books and the agent's metrics."""

    node: Node
    seen: dict[str, Seen] = field(default_factory=lambda: {name: Seen() for name in NAMES})
    _samples: deque[tuple[float, dict[str, tuple[int, float]]]] = field(default_factory=deque)

    def read(self) -> None:
        """Read the device and the agent once, and bring `seen` up to date."""
        waited = dict.fromkeys(NAMES, 0.0)
        for sample in self.node.metrics():
            seen = self.seen.get(sample.labels.get("pod", ""))
            if seen is None:
                continue
            match sample.name:
                case "sharepod_tenant_request_ratio":
                    seen.asked = sample.value
                case "sharepod_tenant_limit_ratio":
                    seen.limit = sample.value
                case "sharepod_tenant_memory_used_bytes":
                    seen.memory = int(sample.value)
                case "sharepod_tenant_memory_limit_bytes":
                    seen.memory_limit = int(sample.value)
                case "sharepod_tenant_waited_seconds_total":
                    waited[sample.labels["pod"]] = sample.value
        state = self.node.devices()
        self._samples.append((time.monotonic(), {name: (state.busy_ns(name), waited[name]) for name in NAMES}))
        while len(self._samples) > 2 and self._samples[1][0] <= self._samples[-1][0] - WINDOW_S:
            self._samples.popleft()
        (begin, before), (end, after) = self._samples[0], self._samples[-1]
        if end > begin:
            for name, seen in self.seen.items():
                seen.got = (after[name][0] - before[name][0]) / 1e9 / (end - begin)
                seen.waiting = max(0.0, min(1.0, (after[name][1] - before[name][1]) / (end - begin)))


class TenantsFile:
    """The YAML file that the agent follows and a person edits."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.write(ASKED)

    def write(self, milli: dict[str, int]) -> None:
        """Replace the file: these requests, everything else as at the start."""
        rows = [tenant(name, milli[name] / 1000) for name in NAMES]
        fresh = self.path.with_suffix(".new")
        fresh.write_text(_HEADER + yaml.safe_dump({"tenants": rows}, sort_keys=False), encoding="utf-8")
        fresh.rename(self.path)

    def move(self, to: str, seen: dict[str, Seen]) -> None:
        """Give one program 0.1 of the GPU that the other one asked for, as far as there is."""
        other = next(name for name in NAMES if name != to)
        milli = {name: round(seen[name].asked * 1000) for name in NAMES}
        step = min(STEP, milli[other])
        self.write({to: milli[to] + step, other: milli[other] - step})


def main() -> int:
    parser = argparse.ArgumentParser(description="two programs share one simulated GPU")
    parser.add_argument("--seconds", type=float, help="stop after so many seconds")
    arguments = parser.parse_args()
    began = time.monotonic()
    console = Console()
    if not built():
        print("taste: the hook and the doubles are not built; run `make taste`", file=sys.stderr)
        return 1
    for number in ENDS:
        signal.signal(number, _interrupt)
    live = sys.stdin is not None and sys.stdin.isatty() and console.is_terminal
    try:
        with _two_programs(console) as (node, tenants_file):
            if live:
                _watch(console, node, tenants_file, began, arguments.seconds)
            else:
                _judge(node, began, arguments.seconds or RUN_WITHOUT_TERMINAL_S)
    except TasteError as error:
        print(f"taste failed: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        pass
    print("everything is stopped, nothing is left behind")
    return 0


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    """End the run once: what comes while it ends must not cut its cleaning up short."""
    for number in ENDS:
        signal.signal(number, signal.SIG_IGN)
    raise KeyboardInterrupt


@contextmanager
def _two_programs(console: Console) -> Iterator[tuple[Node, TenantsFile]]:
    console.print("simulated GPU, real agent and hook", style="bold")
    with (
        tempfile.TemporaryDirectory(prefix="taste-") as directory,
        running(Path(directory), *(tenant(name, ASKED[name] / 1000) for name in NAMES)) as node,
    ):
        tenants_file = TenantsFile(Path(directory) / "tenants.yaml")
        for name in NAMES:
            node.launch(name, "--kernel-us", str(KERNEL_US), "--memory", str(MEMORY[name]), "--report", "3600")
        yield node, tenants_file


def _watch(console: Console, node: Node, tenants_file: TenantsFile, began: float, seconds: float | None) -> None:
    """Draw the bars until `q`, Ctrl-C or the end of `seconds`."""
    meter = Meter(node)
    with _keys() as pressed, Live(console=console, auto_refresh=False) as screen:
        while seconds is None or time.monotonic() < began + seconds:
            meter.read()
            screen.update(_picture(meter, node, tenants_file.path), refresh=True)
            for key in pressed(TICK_S):
                if key == "q":
                    return
                to = next((name for name in NAMES if name.startswith(key)), None)
                if to is not None:
                    tenants_file.move(to, meter.seen)


def _judge(node: Node, began: float, seconds: float) -> None:
    """Print a line a second, then compare the shares of the last seconds with what was asked.

    Raises `TasteError` if one is off.
    """
    meter = Meter(node)
    begin = end = time.monotonic()
    marks: list[tuple[float, dict[str, int]]] = []
    while end < begin + seconds:
        time.sleep(1.0)
        meter.read()
        end = time.monotonic()
        state = node.devices()
        marks.append((end, {name: state.busy_ns(name) for name in NAMES}))
        parts = (f"{name} asked {seen.asked:.0%} got {seen.got:.0%}" for name, seen in meter.seen.items())
        print(f"[{end - began:4.1f} s] " + ", ".join(parts), flush=True)
    first, before = next(mark for mark in marks if mark[0] > end - JUDGED_S - 0.5)
    last, after = marks[-1]
    for name, seen in meter.seen.items():
        got = (after[name] - before[name]) / 1e9 / (last - first)
        print(f"{name}: asked {seen.asked:.1%}, got {got:.1%} of the last {last - first:.0f} s")
        if abs(got - seen.asked) * 100 > POINTS:
            raise TasteError(
                f"{name} got {got:.1%}, more than {POINTS:g} points from the {seen.asked:.1%} it asked for"
            )


def _picture(meter: Meter, node: Node, path: Path) -> RenderableType:
    table = Table(box=None, padding=(0, 2, 0, 0))
    for column in ("program", "asked", "got", "", "waiting", "memory"):
        table.add_column(column, style="bold" if column == "program" else "")
    for name, seen in meter.seen.items():
        style = "green" if (seen.asked - seen.got) * 100 <= POINTS else "yellow"
        bar = ProgressBar(total=1.0, completed=min(1.0, seen.got), width=40, complete_style=style)
        memory = f"{seen.memory / GI:.1f} of {seen.memory_limit / GI:.1f} GiB"
        table.add_row(name, f"{seen.asked:.0%}", f"{seen.got:5.1%}", bar, f"{seen.waiting:.0%}", memory)
    help_ = Text("a: alpha gets 0.1 more   b: beta gets 0.1 more   q: quit   or edit the file: ", style="dim")
    lines: list[RenderableType] = [table, help_ + Text(str(path), style="cyan")]
    refused = _refused(node.log())
    if refused:
        lines.append(Text(refused, style="red"))
    return Group(*lines)


def _refused(log: str) -> str:
    """The agent's reason for not following the file's last version; empty if it follows."""
    for line in reversed(log.splitlines()[-20:]):
        try:
            said = json.loads(line)
        except ValueError:
            continue
        if said.get("event") == "keeping the tenants as they were":
            return "not followed: " + " ".join(str(said.get("error", "")).split(" is not valid: ")[-1].split())
        if said.get("event") == "cannot serve this row of the ledger":
            return f"not followed: {said.get('reason', '')}"
        if said.get("event") == "tenant changed":
            return ""
    return ""


@contextmanager
def _keys() -> Iterator[Callable[[float], str]]:
    """Give a function that waits so many seconds and returns the keys pressed meanwhile."""
    before = termios.tcgetattr(sys.stdin)
    tty.setcbreak(sys.stdin)

    def pressed(seconds: float) -> str:
        ready, _, _ = select.select([sys.stdin], [], [], seconds)
        return os.read(sys.stdin.fileno(), 64).decode(errors="ignore") if ready else ""

    try:
        yield pressed
    finally:
        with suppress(OSError, termios.error):  # the terminal was closed
            termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)


if __name__ == "__main__":
    sys.exit(main())
