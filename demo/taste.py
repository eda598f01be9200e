"""`make taste`: three programs share one simulated GPU, live in the terminal, in seconds and without a cluster.

The agent (standalone mode) and the hook are the product's own. The GPU is the tests' double: a libcuda whose kernels
occupy a simulated device for a stated time. The programs alpha and beta always have work. The program gamma leaves
gaps, which the others use. A YAML file lists the tenants. It may be edited while the bars move.

Guarantees:
- With a terminal it runs until `q` or Ctrl-C. Without a terminal it runs 8 s and prints a line a second. It exits 1 if
  a share of the last 5 s is more than 3 points below the request, or below a lesser need of the program.
- A key changes only the values in the file: edits and comments stay.
- It leaves nothing running: agent and programs are stopped by their pids, the directory is removed.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import select
import signal
import subprocess
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
from hook.world.agent_node import GI, PROGRAMS, Node, built, running, tenant
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

BUSY = ("alpha", "beta")
"""Programs that always have work. A key moves time from one of them to the other."""
NAMES = (*BUSY, "gamma")
ASKED = {"alpha": 500, "beta": 300, "gamma": 200}
"""Thousandths of the GPU's time that each program requests at the start."""
MEMORY = {"alpha": 3 * GI, "beta": 1 * GI, "gamma": 2 * GI}
"""Bytes that each program allocates. Each may allocate 4 GiB."""
KERNEL_US = 5000
"""Length of a kernel of each program, in microseconds. A small training step takes as long."""
GAP_US = 45_000
"""Microseconds for which gamma works on the host after each kernel."""
NEED = {"gamma": KERNEL_US / (KERNEL_US + GAP_US)}
"""For each program with gaps: fraction of the GPU's time that it uses when it has the GPU to itself."""
TICK_S = 0.2
WINDOW_S = 3.0
"""Seconds over which a bar shows the share: 30 turns of 100 ms."""
RUN_WITHOUT_TERMINAL_S = 8.0
JUDGED_S = 5.0
POINTS = 3.0
"""Largest allowed error of a share over `JUDGED_S`, in percentage points. One turn is 2 points."""
ENDS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals that end the program: Ctrl-C, a request to end, and a closed terminal."""
STEP = 100
"""Thousandths of the GPU's time that a key moves from one program to the other."""
BAR = 30
"""Characters of a bar. With it, a line has fewer than 80 characters."""
_HEADER = """\
# The tenants of one simulated GPU, as the operator writes them into a GPUNode.
# Edit requestMilli, limitMilli (thousandths of the GPU's time) or memory (bytes) and save: the agent follows at once.
"""


class TasteError(Exception):
    """Failure to keep a promise of the demo. The message names the promise."""


@dataclass
class Seen:
    """Request, limit and share of one program at the last read, as fractions of the GPU's time."""

    asked: float = 0.0
    limit: float = 1.0
    got: float = 0.0
    waiting: float = 0.0
    """Part of the last `WINDOW_S` in which the program wanted the GPU while another program held it."""
    memory: int = 0
    memory_limit: int = 1
    need: float = 1.0

    @property
    def due(self) -> float:
        """Return the smallest share that keeps the promise: the request, or the program's need if that is less."""
        return min(self.asked, self.need)


@dataclass
class Meter:
    """Shares over a sliding window. They come from the accounts of the simulated device and from the agent's
    metrics."""

    node: Node
    seen: dict[str, Seen] = field(default_factory=lambda: {name: Seen(need=NEED.get(name, 1.0)) for name in NAMES})
    _samples: deque[tuple[float, dict[str, tuple[int, float]]]] = field(default_factory=deque)

    def read(self) -> None:
        """Read the device and the agent once, and update `seen`."""
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
    """YAML file of the tenants. A person may edit it, and the agent follows it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        rows = [tenant(name, ASKED[name] / 1000) for name in NAMES]
        self._replace(_HEADER + yaml.safe_dump({"tenants": rows}, sort_keys=False))

    def move(self, to: str) -> str:
        """Move up to 0.1 of the GPU from the other busy program's request to the request of `to`. The rest of the file
        does not change. Return the reason if the file cannot be changed, else an empty text."""
        text = self.path.read_text(encoding="utf-8", errors="replace")
        found = {
            name: re.search(rf"\bid: {name}$.*?\brequestMilli: (\d+)$", text, re.DOTALL | re.MULTILINE) for name in BUSY
        }
        missing = [name for name, match in found.items() if match is None]
        if missing:
            return f"the file has no whole requestMilli of {' and '.join(missing)}: correct it first"
        milli = {name: int(match[1]) for name, match in found.items() if match is not None}
        other = next(name for name in BUSY if name != to)
        step = max(0, min(STEP, milli[other], 1000 - milli[to]))
        milli |= {to: milli[to] + step, other: milli[other] - step}
        places = [(match.span(1), milli[name]) for name, match in found.items() if match is not None]
        for (begin, end), value in sorted(places, reverse=True):
            text = f"{text[:begin]}{value}{text[end:]}"
        self._replace(text)
        return ""

    def _replace(self, text: str) -> None:
        fresh = self.path.with_suffix(".new")
        fresh.write_text(text, encoding="utf-8")
        fresh.rename(self.path)


class Refusals:
    """Rows of the tenants file that the agent refuses, by its log."""

    def __init__(self, node: Node, path: Path) -> None:
        self._node = node
        self._path = path
        self._read = 0
        self._stamp = 0
        self._by_tenant: dict[str, str] = {}
        """Reason of the refusal by tenant. The reason for the whole file has an empty name."""

    def read(self) -> list[str]:
        """Return the reasons of refusals in the present version of the file."""
        stamp = self._path.stat().st_mtime_ns
        if stamp != self._stamp:
            self._by_tenant.clear()
            self._stamp = stamp
        log = self._node.log()
        fresh, self._read = log[self._read :], len(log)
        for line in fresh.splitlines():
            try:
                entry = json.loads(line)
            except ValueError:
                continue
            tenant_id = str(entry.get("tenant", ""))
            match entry.get("event"):
                case "keeping the tenants as they were":
                    self._by_tenant[""] = str(entry.get("error", "")).split(" is not valid: ")[-1]
                case "cannot serve this row of the ledger":
                    self._by_tenant[tenant_id] = f"{tenant_id}: {entry.get('reason', '')}"
                case "tenant changed":
                    self._by_tenant.pop(tenant_id, None)
        return [f"not followed: {' '.join(reason.split())}" for reason in self._by_tenant.values()]


class MemoryRefusal:
    """A second process of alpha. It requests all memory of its tenant, of which the first process already has most."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._process: subprocess.Popen[str] | None = None
        self.result = ""
        """The last outcome."""

    def ask(self) -> None:
        """Start the process if it does not run."""
        if self._process is None:
            command = [str(PROGRAMS / "launchloop"), "--memory", str(4 * GI), "--seconds", "0.1"]
            self._process = subprocess.Popen(
                command,
                env=self._node.environment("alpha", label="second"),
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
            )

    def read(self) -> str:
        """Return the outcome of the last request. Empty before the first one has ended."""
        if self._process is not None and self._process.poll() is not None:
            start = json.loads(self._process.communicate()[0].splitlines()[0])
            left, refused = start["memory_free"] / GI, start["refused_allocations"]
            outcome = "out of memory" if refused else "allocated"
            self.result = f"a second process of alpha requested 4.0 GiB, {left:.1f} GiB were free: {outcome}"
            self._process = None
        return self.result

    def close(self) -> None:
        """End the process if it runs."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()


def main() -> int:
    parser = argparse.ArgumentParser(description="three programs share one simulated GPU")
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
        with _programs(console) as (node, tenants_file):
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
    """End the run once. Further signals are ignored, so that they do not interrupt the cleanup."""
    for number in ENDS:
        signal.signal(number, signal.SIG_IGN)
    raise KeyboardInterrupt


@contextmanager
def _programs(console: Console) -> Iterator[tuple[Node, TenantsFile]]:
    console.print("simulated GPU, real agent and hook", style="bold")
    with (
        tempfile.TemporaryDirectory(prefix="taste-") as directory,
        running(Path(directory), *(tenant(name, ASKED[name] / 1000) for name in NAMES)) as node,
    ):
        tenants_file = TenantsFile(Path(directory) / "tenants.yaml")
        for name in NAMES:
            gaps = ("--sync-every", "1", "--idle-us", str(GAP_US)) if name in NEED else ()
            node.launch(name, "--kernel-us", str(KERNEL_US), *gaps, "--memory", str(MEMORY[name]), "--report", "3600")
        yield node, tenants_file


def _watch(console: Console, node: Node, tenants_file: TenantsFile, began: float, seconds: float | None) -> None:
    """Draw the bars until the user presses `q` or Ctrl-C, or `seconds` have passed."""
    meter, refusals, memory = Meter(node), Refusals(node, tenants_file.path), MemoryRefusal(node)
    unchanged = ""
    try:
        with _keys() as pressed, Live(console=console, auto_refresh=False, screen=True) as screen:
            while seconds is None or time.monotonic() < began + seconds:
                meter.read()
                notes = [note for note in (*refusals.read(), unchanged, memory.read()) if note]
                screen.update(_picture(meter, tenants_file.path, notes), refresh=True)
                for key in pressed(TICK_S):
                    if key == "q":
                        return
                    if key == "m":
                        memory.ask()
                    to = next((name for name in BUSY if name.startswith(key)), None)
                    if to is not None:
                        unchanged = tenants_file.move(to)
    finally:
        memory.close()


def _judge(node: Node, began: float, seconds: float) -> None:
    """Print a line a second, then compare the shares of the last seconds with the requests.

    Raises `TasteError` if a share is wrong.
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
        need = f", needs {seen.need:.1%}" if name in NEED else ""
        print(f"{name}: asked {seen.asked:.1%}{need}, got {got:.1%} of the last {last - first:.0f} s")
        if (seen.due - got) * 100 > POINTS:
            raise TasteError(f"{name} got {got:.1%}, more than {POINTS:g} points below the {seen.due:.1%} due to it")


def _picture(meter: Meter, path: Path, notes: list[str]) -> RenderableType:
    table = Table(box=None, padding=(0, 2, 0, 0))
    for column in ("program", "asked", "got", "", "waiting", "memory"):
        table.add_column(column, style="bold" if column == "program" else "")
    for name, seen in meter.seen.items():
        style = "green" if (seen.due - seen.got) * 100 <= POINTS else "yellow"
        bar = ProgressBar(total=1.0, completed=min(1.0, seen.got), width=BAR, complete_style=style)
        memory = f"{seen.memory / GI:.1f} of {seen.memory_limit / GI:.1f} GiB"
        table.add_row(name, f"{seen.asked:.0%}", f"{seen.got:5.1%}", bar, f"{seen.waiting:.0%}", memory)
    gaps = f"gamma computes {KERNEL_US // 1000} ms, then pauses {GAP_US // 1000} ms: alpha and beta use its pauses"
    keys = "a, b: alpha, beta gets 0.1 more   m: ask for too much memory   q: quit"
    edit = Text("or edit ", style="dim") + Text(str(path), style="cyan")
    shown = [Text(gaps, style="dim"), Text(keys, style="dim"), edit, *(Text(note, style="red") for note in notes)]
    return Group(table, *shown)


@contextmanager
def _keys() -> Iterator[Callable[[float], str]]:
    """Yield a function that waits for some seconds and returns the keys that were pressed during that time."""
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
