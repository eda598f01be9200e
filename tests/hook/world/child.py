"""Child processes of a test, and their end.

Guarantees:
- After `end` the process is reaped and its pipes are closed, whatever its state was.
- `end` may be called more than once.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

REAP_S = 20.0
"""Seconds to wait for a process after SIGKILL. A process that a debugger or a full disk blocks needs the longest
time.
"""


def end(process: subprocess.Popen[Any]) -> None:
    """Kill the process unless it has ended, reap it and close its pipes. TimeoutExpired if it cannot be reaped."""
    if process.poll() is None:
        process.kill()
    process.wait(REAP_S)
    for stream in (process.stdin, process.stdout, process.stderr):
        if stream is not None:
            with contextlib.suppress(BrokenPipeError):  # data that the process has not read from standard input is lost
                stream.close()


class PythonChild:
    """Python program whose calls a test makes through its standard input and output. Ends with `close`.

    Args:
        program: File to run with the standard library only (`-S`), because it then starts in 20 ms.
        environment: Whole environment of the process.
    """

    def __init__(self, program: Path, environment: Mapping[str, str]) -> None:
        self._process: subprocess.Popen[bytes] = subprocess.Popen(
            [sys.executable, "-S", str(program)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=dict(environment),
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    def kill(self) -> None:
        """Send SIGKILL, and return when the process is reaped."""
        self._process.kill()
        self._process.wait()

    def close(self) -> None:
        """End the process, if it has not ended, and close its pipes."""
        end(self._process)

    def _send(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(line.encode() + b"\n")
        self._process.stdin.flush()
