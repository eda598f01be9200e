"""Measures SharePod on this machine's GPU: hook and agent as shipped, without Kubernetes, network or root.

    python3 measure.py                       everything; each table takes at most 8 minutes
    python3 measure.py --table shares        one table: slices, checks, overhead, shares, gaps, pauses, memory,
                                             patterns
    python3 measure.py --show                results so far, without measuring
    python3 measure.py --fake                on the fake driver, to try the kit itself; its tables are marked so

A run that was killed, or whose time was up, continues when it is started again. Exit status: 0 all is measured, 3 cells
remain for the next run, 1 a measurement failed, 2 unsuitable machine or arguments.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

KIT = Path(__file__).resolve().parent
sys.path.insert(0, str(KIT))

from gpukit import checks, gaps, machine, memory, overhead, patterns, pauses, shares, slices  # noqa: E402
from gpukit.agent import Agent, AgentError  # noqa: E402
from gpukit.gpu import AnyGpu, FakeGpu, Gpu, GpuError  # noqa: E402
from gpukit.results import Budget, OutOfTime, Results, ResultsError  # noqa: E402
from gpukit.setting import Setting, note  # noqa: E402
from gpukit.wheels import WheelsError, unpack  # noqa: E402

PREFIX = "sharepod-"
"""Prefix of the names of the runs' directories."""

TABLE_S = 460.0
"""Seconds to measure one table. With the time in which its last programs end, a table takes less than 8 minutes."""


class Table(Protocol):
    """Interface of a table's module."""

    def measure(self, setting: Setting, budget: Budget) -> None: ...
    def show(self, setting: Setting) -> str: ...


TABLES: dict[str, Any] = {
    "slices": slices,
    "checks": checks,
    "overhead": overhead,
    "shares": shares,
    "gaps": gaps,
    "pauses": pauses,
    "memory": memory,
    "patterns": patterns,
}


def main() -> int:
    """Run the kit. Return the exit status."""
    arguments = _arguments()
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _interrupted)
    try:
        return _run(arguments)
    except KeyboardInterrupt:
        note("interrupted; start it again to continue")
        return 3
    except (GpuError, WheelsError, ResultsError, AgentError) as error:
        note(f"measure.py: {error}")
        return 2


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", choices=TABLES, action="append", help="only this table (may be repeated)")
    parser.add_argument("--results", type=Path, help="folder of the results; default: results or results-fake, here")
    parser.add_argument("--fresh", action="store_true", help="discard earlier results")
    parser.add_argument("--show", action="store_true", help="print the tables as far as they are measured, and end")
    parser.add_argument("--gpu", type=int, default=0, help="index of the GPU, as the driver counts; default: 0")
    parser.add_argument("--fake", action="store_true", help="use the kit's fake driver")
    parser.add_argument("--python", default=sys.executable, help="the Python that has PyTorch; default: this one")
    parser.add_argument("--seconds", type=float, default=10.0, help="length of a measurement of shares; default: 10")
    parser.add_argument("--rounds", type=int, default=3, help="rounds of each overhead; default: 3")
    arguments = parser.parse_args()
    if arguments.seconds <= 0 or arguments.rounds < 1:
        parser.error("--seconds has to be more than 0, and --rounds at least 1")
    return arguments


def _run(arguments: argparse.Namespace) -> int:
    folder = (arguments.results or Path("results-fake" if arguments.fake else "results")).resolve()
    built = json.loads((KIT / "kit.json").read_text())
    with ExitStack() as stack:
        # the path must be short, because the name of a Unix socket has at most 107 bytes
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix=PREFIX, dir=_short())))
        directory.chmod(0o755)
        _alone(stack, folder, directory)
        site = unpack(KIT / "wheels", directory / "site")
        gpu: AnyGpu = FakeGpu(KIT / "fake", directory / "devices") if arguments.fake else Gpu(KIT, site, arguments.gpu)
        about = {
            "kit": built["commit"],
            "gpu": gpu.uuid,
            "driver": gpu.driver,
            "seconds": arguments.seconds,
            "rounds": arguments.rounds,
        }
        if arguments.fresh:
            (folder / "results.json").unlink(missing_ok=True)
        results = Results(folder, about)
        logs = folder / "logs"
        logs.mkdir(exist_ok=True)
        agent = Agent(kit=KIT, site=site, gpu=gpu, directory=directory, log=logs / "agent.log")
        stack.callback(agent.close)
        setting = Setting(
            kit=KIT,
            gpu=gpu,
            agent=agent,
            results=results,
            logs=logs,
            python=arguments.python,
            torch=not gpu.fake and _has_torch(arguments.python),
            seconds=arguments.seconds,
            rounds=arguments.rounds,
        )
        head = _head(built, gpu)
        print(head, flush=True)
        chosen = arguments.table or list(TABLES)
        left = False if arguments.show else _measure(setting, chosen)
        shown = "\n".join(TABLES[name].show(setting) for name in chosen)
        print(shown)
        everything = [head, *(TABLES[name].show(setting) for name in TABLES)]
        (folder / "tables.md").write_text("\n".join(everything))
        failed = any("failed" in cell for name in chosen for cell in _cells(results, name))
        note(f"results: {folder}/results.json, tables: {folder}/tables.md, logs: {logs}")
        if left:
            note("the time for a table was up before all of it was measured: start it again to continue")
        return 3 if left else 1 if failed else 0


def _alone(stack: ExitStack, folder: Path, directory: Path) -> None:
    """Lock a folder of results, so that only one run uses it at a time. Remove the working directory that an earlier,
    killed run left behind."""
    folder.mkdir(parents=True, exist_ok=True)
    held = stack.enter_context((folder / "run").open("a+"))
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        raise ResultsError(f"another run measures into {folder}; use another --results") from None
    held.seek(0)
    left = held.read().strip()
    if left and Path(left).name.startswith(PREFIX):
        shutil.rmtree(left, ignore_errors=True)
    held.truncate(0)
    held.write(str(directory))
    held.flush()


def _measure(setting: Setting, chosen: list[str]) -> bool:
    """Measure until every cell has a result or the time is up. Return True if cells have no result."""
    left = False
    for name in chosen:
        begin = time.monotonic()
        try:
            TABLES[name].measure(setting, Budget(TABLE_S))
        except OutOfTime:
            left = True
        note(f"{name}: {time.monotonic() - begin:.0f} s")
    return left


def _cells(results: Results, name: str) -> list[dict[str, Any]]:
    several = {
        "shares": (shares.KEY, shares.NOISY),
        "gaps": (gaps.KEY, gaps.LATENCIES),
        "pauses": (pauses.KEY, pauses.SEEN),
    }
    prefixes = several.get(name, (TABLES[name].KEY,))
    return [cell for prefix in prefixes for cell in results.under(prefix).values()]


def _head(built: dict[str, str], gpu: AnyGpu) -> str:
    marked = (
        "**Measured on the fake driver: this shows that the kit works, and no figure of a GPU.**\n\n"
        if gpu.fake
        else ""
    )
    lines = [
        ("kit", f"{built['commit']}, hook {built['hook'][:16]}"),
        ("GPU", f"{gpu.model}, {gpu.memory / (1 << 30):.1f} GiB, {gpu.uuid}"),
        ("driver", gpu.driver),
        ("NVML", f"NO: {gpu.trouble}; the agent takes the GPU as the driver API shows it" if gpu.trouble else "yes"),
        *machine.found(),
    ]
    width = max(len(name) for name, _ in lines)
    date = time.strftime("%Y-%m-%d", time.gmtime())
    found = "\n".join(f"    {name.ljust(width)}  {what}" for name, what in lines)
    return f"## SharePod's GPU kit, {date}\n\n{marked}{found}\n"


def _has_torch(python: str) -> bool:
    if python == sys.executable:
        return find_spec("torch") is not None
    look = "import importlib.util, sys; sys.exit(importlib.util.find_spec('torch') is None)"
    return subprocess.run([python, "-c", look], timeout=60, check=False).returncode == 0


def _short() -> str:
    """Return a directory with a short path, from which libraries can be loaded. `/tmp` is unsuitable if it is mounted
    noexec."""
    for place in (os.environ.get("TMPDIR", ""), "/tmp", "/var/tmp", "/dev/shm"):
        if place and len(place) < 40 and os.access(place, os.W_OK) and not os.statvfs(place).f_flag & os.ST_NOEXEC:
            return place
    return "/tmp"


def _interrupted(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
