"""What the hook costs a program: nanoseconds for each launch while the gate is open, microseconds for each exec.

    make bench-hook

Writes build/results/hook.json. The launches go to a libcuda that does nothing, so that the difference between with and
without the hook is the hook's own time; it is the least of several rounds, because a busy machine only adds. An exec is
timed with and without the hook in turns, and the medians are compared.
"""

from __future__ import annotations

import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from hook.scripted_daemon import ScriptedDaemon
from results import Row, write
from sharepod.protocol import GpuTerms

ROOT = Path(__file__).resolve().parent.parent

BUILD = ROOT / "build"
LAUNCHES = 1_000_000
METERED_LAUNCHES = 200_000
EXECS = 400
GPU = "10000000-0000-4000-8000-000000000000"


def launch_ns(threads: int, stream: str, environment: Mapping[str, str], launches: int = LAUNCHES) -> float:
    """Nanoseconds per launch, as seen by the launching threads."""
    program = [str(BUILD / "programs" / "launchcost"), str(threads), str(launches), stream]
    done = subprocess.run(program, env=dict(environment), capture_output=True, text=True, check=True, timeout=300)
    return float(done.stdout)


def exec_us(environment: Mapping[str, str]) -> float:
    """Microseconds from spawning a small program to its end."""
    program = str(BUILD / "programs" / "nothing")
    begun = time.perf_counter_ns()
    pid = os.posix_spawn(program, [program], dict(environment))
    os.waitpid(pid, 0)
    return (time.perf_counter_ns() - begun) / 1000


def launch_rows(daemon: ScriptedDaemon, bare: Mapping[str, str], hooked: Mapping[str, str]) -> list[Row]:
    """Per number of threads and kind of stream: without the hook, with it, and the difference."""
    rows = []
    for stream in ("stream", "default"):
        for threads in (1, 4):
            where = "a stream" if stream == "stream" else "default stream"
            case = f"{threads} thread{'s' if threads > 1 else ''}, {where}"
            daemon.on_want = lambda client: daemon.next_grant()
            without, having = launch_ns(threads, stream, bare), launch_ns(threads, stream, hooked)
            rows.append(Row(case, "launch_bare", "ns", round(without, 2)))
            rows.append(Row(case, "launch_hooked", "ns", round(having, 2)))
            rows.append(Row(case, "launch_overhead", "ns", round(having - without, 2)))
    daemon.on_want = lambda client: daemon.next_grant(metered=True)
    metered = launch_ns(1, "stream", hooked, METERED_LAUNCHES)
    rows.append(Row("1 thread, a stream, metered", "launch_hooked", "ns", round(metered, 2)))
    return rows


def exec_rows(bare: Mapping[str, str], hooked: Mapping[str, str]) -> list[Row]:
    """Both ways in turns, so that what else the machine does meets both."""
    without, having = [], []
    for _ in range(EXECS):
        without.append(exec_us(bare))
        having.append(exec_us(hooked))
    medians = statistics.median(without), statistics.median(having)
    return [
        Row("a small program", "exec_bare", "us", round(medians[0], 1)),
        Row("a small program", "exec_hooked", "us", round(medians[1], 1)),
        Row("a small program", "exec_overhead", "us", round(medians[1] - medians[0], 1)),
    ]


def main() -> int:
    """0 when all was measured."""
    subprocess.run(["make", "-sC", str(ROOT / "tests" / "hook"), f"PYTHON={sys.executable}"], check=True, timeout=300)
    with tempfile.TemporaryDirectory(prefix="sharepod-") as folder:
        tenant = Path(folder)
        hook = tenant / "libsharepod.so"
        build = [sys.executable, "setup.py", "--quiet", "build_hook", f"--target={BUILD / 'hook' / 'libsharepod.so'}"]
        subprocess.run(build, cwd=ROOT, check=True, stdout=subprocess.DEVNULL, timeout=300)
        shutil.copy2(BUILD / "hook" / "libsharepod.so", hook)
        (tenant / "limits").write_text(f"gpu GPU-{GPU} request 500 limit 1000 memory 1073741824 enforced 1\n")
        daemon = ScriptedDaemon(tenant, [GpuTerms(bytes.fromhex(GPU.replace("-", "")), 500, 1000, 1 << 30, True)])
        bare = {"PATH": os.environ["PATH"], "LD_LIBRARY_PATH": str(BUILD / "hollow")}
        try:
            rows = launch_rows(daemon, bare, {**bare, "LD_PRELOAD": str(hook)})
        finally:
            daemon.close()
        rows += exec_rows(bare, {**bare, "LD_PRELOAD": str(hook)})
    write("hook", rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
