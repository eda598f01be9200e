"""One thread of another process held by a debugger, while the others of its process run on."""

from __future__ import annotations

import contextlib
import ctypes
import os
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
