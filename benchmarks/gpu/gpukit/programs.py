"""Programs of the kit, and their commands.

A program reads commands on its standard input. It is ended if it does not answer a command in time. It runs in its own
session, all of which ends with it. When the kit is killed, each program's standard input ends, and so the program.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

MARK = b"@ "
_END_S = 10.0


class ProgramError(Exception):
    """Raised if a program ended, did not answer in time, or failed a command. The message contains its last output."""


class Program:
    """One program. `log`: file for its standard error and other output."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        self._log = log
        self._name = log.stem
        with log.open("ab") as errors:
            self._process = subprocess.Popen(
                list(command),
                env=dict(environment),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                start_new_session=True,
            )
        self._read = bytearray()

    @property
    def pid(self) -> int:
        """Return the process id."""
        return self._process.pid

    def ready(self, timeout_s: float) -> dict[str, Any]:
        """Wait until the program has started. Return its first answer. Raises `ProgramError`."""
        return self.answer(timeout_s)

    def send(self, do: str, **arguments: Any) -> None:
        """Send a command; `answer` then returns the program's answer. Raises `ProgramError`."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"do": do, **arguments}).encode() + b"\n")
            self._process.stdin.flush()
        except OSError:
            raise self._failed("has ended") from None

    def ask(self, do: str, *, timeout_s: float, **arguments: Any) -> dict[str, Any]:
        """Send a command and return its answer. Raises `ProgramError`."""
        self.send(do, **arguments)
        return self.answer(timeout_s)

    def answer(self, timeout_s: float) -> dict[str, Any]:
        """Return the next answer. Raises `ProgramError`, also if the answer reports a failure."""
        deadline = time.monotonic() + timeout_s
        while True:
            line = self._line(deadline, timeout_s)
            if not line.startswith(MARK):
                with self._log.open("ab") as log:
                    log.write(line + b"\n")
                continue
            answer: dict[str, Any] = json.loads(line[len(MARK) :])
            if "error" in answer:
                raise ProgramError(f"{self._name}: {answer['error']}")
            return answer

    def end(self) -> None:
        """End the program and all its children, even while they are busy."""
        with contextlib.suppress(OSError):
            if self._process.stdin is not None:
                self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(2.0)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_S)
        if self._process.stdout is not None:
            self._process.stdout.close()

    def _line(self, deadline: float, timeout_s: float) -> bytes:
        assert self._process.stdout is not None
        descriptor = self._process.stdout.fileno()
        while b"\n" not in self._read:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([descriptor], [], [], left)[0]:
                raise self._failed(f"has not answered within {timeout_s:.0f} s")
            piece = os.read(descriptor, 65536)
            if not piece:
                raise self._failed("has ended")
            self._read += piece
        line, _, rest = bytes(self._read).partition(b"\n")
        self._read = bytearray(rest)
        return line

    def _failed(self, what: str) -> ProgramError:
        with contextlib.suppress(OSError):
            words = self._log.read_text(errors="replace").strip().splitlines()
            if words:
                return ProgramError(f"{self._name} {what}; its last words: {words[-1][:300]}")
        return ProgramError(f"{self._name} {what}")
