"""Another process stopped, or one of its threads held by a debugger while the others run on."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

_SEIZE, _INTERRUPT, _DETACH = 0x4206, 0x4207, 17
"""Requests of ptrace(2)."""
_ANY_CHILD = 0x40000000
"""Option of waitpid(2): threads count too."""


def hook_thread(pid: int) -> int:
    """Return the id of the hook's own thread in a process. LookupError if it has none."""
    for task in Path(f"/proc/{pid}/task").iterdir():
        if (task / "comm").read_text() == "sharepod\n":
            return int(task.name)
    raise LookupError(f"process {pid} has no thread of the hook")


def stop(process: subprocess.Popen[str], timeout: float = 20) -> None:
    """Stop a process (SIGSTOP), and return once each of its threads stands still: under load some run on for a while.

    TimeoutError if one still runs after `timeout` seconds.
    """
    process.send_signal(signal.SIGSTOP)
    deadline = time.monotonic() + timeout
    while not all(_stands_still(task) for task in Path(f"/proc/{process.pid}/task").iterdir()):
        if time.monotonic() > deadline:
            raise TimeoutError(f"process {process.pid} has a thread that still runs {timeout} s after SIGSTOP")
        time.sleep(0.001)


def _stands_still(task: Path) -> bool:
    try:
        state = (task / "stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return True
    return state in "TtZX"


@contextlib.contextmanager
def held(thread: int) -> Iterator[None]:
    """Hold a thread that runs, until the end of the block at the latest."""
    _ptrace(_SEIZE, thread)
    try:
        _ptrace(_INTERRUPT, thread)
        os.waitpid(thread, _ANY_CHILD)
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            _ptrace(_DETACH, thread)


def _ptrace(request: int, thread: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.ptrace.argtypes = [ctypes.c_long] * 4
    if libc.ptrace(request, thread, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), "ptrace")
