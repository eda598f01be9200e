"""Stops another process, or holds one of its threads by ptrace while the other threads run."""

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
"""Option of waitpid(2) by which it also reports threads."""


def hook_thread(pid: int) -> int:
    """Return the id of the hook thread in a process. LookupError if there is none."""
    for task in Path(f"/proc/{pid}/task").iterdir():
        if (task / "comm").read_text() == "sharepod\n":
            return int(task.name)
    raise LookupError(f"process {pid} has no thread of the hook")


def stop(process: subprocess.Popen[str], timeout: float = 20) -> None:
    """Stop a process (SIGSTOP), and return after all of its threads have stopped. On a busy machine some threads
    continue for a while.

    TimeoutError if a thread still runs after `timeout` seconds.
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
    """Hold a running thread, until the end of the block at the latest."""
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


class Hold:
    """One thread of a process, held by ptrace until `release`. Only `stopped` waits.

    One thread of this process must make all calls. The main thread of a process must not be held, because its parent
    must be notified of its end.
    """

    def __init__(self, thread: int) -> None:
        """Raises OSError if there is no such thread."""
        self._thread = thread
        self._stopped = False
        _ptrace(_SEIZE, thread)
        with contextlib.suppress(OSError):
            _ptrace(_INTERRUPT, thread)

    def stopped(self) -> bool:
        """Wait until the thread has stopped. Return False if it has ended."""
        with contextlib.suppress(ChildProcessError):
            _, status = os.waitpid(self._thread, _ANY_CHILD)
            self._stopped = os.WIFSTOPPED(status)
        return self._stopped

    def look(self) -> bool:
        """Return whether the thread still exists. Must be called at intervals, because its process can end only after
        this call has seen the thread's end.
        """
        try:
            seen, status = os.waitpid(self._thread, _ANY_CHILD | os.WNOHANG)
        except ChildProcessError:
            return False
        self._stopped |= bool(seen) and os.WIFSTOPPED(status)
        return not seen or os.WIFSTOPPED(status)

    def release(self) -> bool:
        """Let the thread continue. Return True if it continues or has ended, False if it has not stopped yet: then try
        again.
        """
        if not self.look():
            return True
        if not self._stopped:
            return False
        try:
            _ptrace(_DETACH, self._thread)
        except OSError:  # the thread was killed: `look` sees its end
            return False
        return True
