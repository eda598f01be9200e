"""Child processes of a test: how each of them ends.

Guarantees:
- After `end` the process is reaped and its pipes are closed, whatever state it was in.
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
"""Seconds to wait for a process after SIGKILL; a process that a debugger or a full disk holds up needs the longest."""


def end(process: subprocess.Popen[Any]) -> None:
    """Kill the process unless it has ended, reap it and close its pipes. TimeoutExpired if it cannot be reaped."""
    if process.poll() is None:
        process.kill()
    process.wait(REAP_S)
    for stream in (process.stdin, process.stdout, process.stderr):
        if stream is not None:
            with contextlib.suppress(BrokenPipeError):  # what was not read of its standard input is lost
                stream.close()


class PythonChild:
    """A Python program whose calls a test makes through its standard input and output. Ends with `close`.

    Args:
        program: The file to run, with the standard library alone (`-S`): it starts in 20 ms.
        environment: The whole environment of the process.
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
        """SIGKILL; returns when the process is reaped."""
        self._process.kill()
        self._process.wait()

    def close(self) -> None:
        """End the process, if it has not ended, and close its pipes."""
        end(self._process)

    def _send(self, line: str) -> None:
        """Write one line to the process's standard input."""
        assert self._process.stdin is not None
        self._process.stdin.write(line.encode() + b"\n")
        self._process.stdin.flush()
