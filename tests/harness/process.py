"""Processes that end with their starter.

Guarantees: the kernel kills a child started with `die_with` when its parent *thread* ends, also by SIGKILL. So only
single-threaded parents (the supervisor) or the main thread use it. The start time distinguishes a process from a later
one with the same pid.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
# loaded here, because a forked child must not load libraries or allocate much memory
_libc = ctypes.CDLL(None, use_errno=True)


def _prctl(option: int, argument: int) -> None:
    if _libc.prctl(option, argument, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl")


def die_with(parent: int) -> None:
    """Make the kernel send this process SIGKILL when the thread that forked it ends. Called in a new child of
    `parent`."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # the parent ended before prctl was called
        os._exit(1)


def become_subreaper() -> None:
    """Adopt orphans among this process's descendants, so that none escapes by forking twice."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def _stat(pid: int) -> list[str] | None:
    """Return the fields of /proc/PID/stat from the third (state, parent, ...) on. None if there is no such process."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    # the field before, the program's name in brackets, may itself contain blanks and brackets
    return stat[stat.rindex(")") + 2 :].split()


def start_time(pid: int) -> int | None:
    """Return when `pid` started, in clock ticks since boot; None if there is no such process (or a zombie)."""
    fields = _stat(pid)
    return None if fields is None or fields[0] in "ZX" else int(fields[19])


def alive(pid: int, started: int) -> bool:
    """Return whether the process with this start time still runs."""
    found = start_time(pid)
    return found is not None and found == started


def descendants_of(pid: int) -> list[int]:
    """Return all live descendants of `pid`, parents before children."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():  # /proc/PID/task/TID/children is missing in many kernels
        if entry.name.isdigit() and (fields := _stat(int(entry.name))) and fields[0] not in "ZX":
            children.setdefault(int(fields[1]), []).append(int(entry.name))
    found: list[int] = []
    waiting = [pid]
    while waiting:
        below = children.get(waiting.pop(), [])
        found += below
        waiting += below
    return found


@contextmanager
def as_at_a_terminal(script: str, *, cwd: Path) -> Iterator[subprocess.Popen[str]]:
    """Run a Python script that Ctrl-C interrupts, even if this process was started with SIGINT ignored, as in the
    background of a shell. The script is killed if it still runs when the block ends."""
    heeding = f"import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n{script}"
    process = subprocess.Popen(
        [sys.executable, "-c", heeding], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, cwd=cwd
    )
    with process:
        try:
            yield process
        finally:
            process.kill()
