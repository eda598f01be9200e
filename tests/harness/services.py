"""Client of the supervisor: starts, queries and ends processes, which end with the supervisor in any case.

Guarantees: see `harness.supervisor`. A `Services` may be used from several threads.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.errors import HarnessError, StartError
from harness.supervisor import CONTROL, LOGS

_PACKAGES = Path(__file__).parent.parent
_START_TIMEOUT = 20.0
_REQUEST_TIMEOUT = 120.0


@dataclass(frozen=True)
class Service:
    """One process under the supervisor. `pid` is its pid in the supervisor's namespace (of a node: the node's
    namespace)."""

    services: Services
    name: str
    pid: int
    log: Path

    def status(self) -> int | None:
        """Return the exit status; negative: the signal that ended the process. None while it runs."""
        status: int | None = self.services.ask(do="poll", name=self.name)["status"]
        return status

    def running(self) -> bool:
        return self.status() is None

    def signal(self, number: signal.Signals) -> None:
        """Send a signal, such as SIGSTOP to pause the process. Raises HarnessError if it has ended."""
        self.services.ask(do="signal", name=self.name, number=int(number))

    def stop(self, grace: float | None = None) -> int | None:
        """Send SIGTERM, then SIGKILL after `grace` seconds (None: the value given at the start; 0: at once). Return the
        exit status."""
        status: int | None = self.services.ask(do="stop", name=self.name, grace=grace)["status"]
        return status

    def wait(self, timeout: float) -> int:
        """Wait for the end of the process; return its exit status. Raises StartError with the log's tail after
        `timeout` seconds."""
        deadline = time.monotonic() + timeout
        while (status := self.status()) is None:
            if time.monotonic() > deadline:
                raise StartError(f"{self.name} still runs after {timeout} s\n{self.log_tail()}")
            time.sleep(0.02)
        return status

    def log_tail(self, lines: int = 30) -> str:
        """Return the last lines of the process's output, under a heading that names the file."""
        try:
            text = self.log.read_text(errors="replace").splitlines()[-lines:]
        except OSError as error:
            text = [str(error)]
        return "\n".join([f"--- end of {self.log}", *text])


class Services:
    """Supervisor with the state directory `state`, which it removes when it ends.

    - `detached`: outlive this process.
    - `prefix`: command that runs the supervisor (`unshare ...`).
    - `lock_fd`: lock that is held until the supervisor has ended.
    """

    def __init__(
        self, state: Path, *, detached: bool = False, prefix: Sequence[str] = (), lock_fd: int | None = None
    ) -> None:
        self.state = state
        self.logs = state / LOGS
        self.logs.mkdir(exist_ok=True)
        self._control = str(state / CONTROL)
        if len(self._control) > 100:
            raise HarnessError(
                f"{state} is too long: a Unix socket's path ends at 107 bytes; set TMPDIR to a shorter one"
            )
        arguments = [*prefix, sys.executable, "-m", "harness.supervisor", str(state)]
        arguments += ["--detached"] if detached else []
        arguments += [] if lock_fd is None else ["--lock-fd", str(lock_fd)]
        with (self.logs / "supervisor.log").open("ab") as log:
            self._process = subprocess.Popen(
                arguments,
                stdin=subprocess.DEVNULL if detached else subprocess.PIPE,
                stdout=log,
                stderr=log,
                # so that Ctrl-C at the terminal reaches only the harness, whose end closes the lifeline and so ends the
                # supervisor
                start_new_session=True,
                pass_fds=() if lock_fd is None else (lock_fd,),
                env=dict(os.environ) | {"PYTHONPATH": str(_PACKAGES)},
                cwd="/",
            )
        self.pid = self._await_control()

    def _await_control(self) -> int:
        """Wait until the supervisor listens. Return its pid as this process sees it."""
        deadline = time.monotonic() + _START_TIMEOUT
        while True:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection, contextlib.suppress(OSError):
                connection.connect(self._control)
                credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
                return int(struct.unpack("3i", credentials)[0])
            if self._process.poll() is not None or time.monotonic() > deadline:
                self._process.kill()
                log = (self.logs / "supervisor.log").read_text(errors="replace")
                raise StartError(f"the supervisor of {self.state} did not start:\n{log[-3000:]}")
            time.sleep(0.01)

    def ask(self, **request: Any) -> dict[str, Any]:
        """Send one request to the supervisor; return the answer. Raises HarnessError if the supervisor refuses or has
        ended."""
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
                connection.settimeout(_REQUEST_TIMEOUT)
                connection.connect(self._control)
                connection.sendall(json.dumps(request).encode() + b"\n")
                with connection.makefile("rb") as replies:
                    reply: dict[str, Any] = json.loads(replies.readline() or b'{"error": "the supervisor hung up"}')
        except OSError as error:
            raise HarnessError(f"the supervisor of {self.state} does not answer: {error}") from error
        if "error" in reply:
            raise HarnessError(reply["error"])
        return reply

    def start(
        self,
        name: str,
        argv: Sequence[str | Path],
        *,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        grace: float = 2.0,
    ) -> Service:
        """Start a process; its output is appended to logs/NAME.log.

        `env`: its whole environment (None: this process's). `cwd`: None is the state directory. `grace`: seconds
        between SIGTERM and SIGKILL when it is ended. A name may be used again once its process has ended.
        """
        log = self.logs / f"{name}.log"
        reply = self.ask(
            do="start",
            name=name,
            argv=[str(argument) for argument in argv],
            env=dict(os.environ if env is None else env),
            cwd=str(cwd or self.state),
            log=str(log),
            grace=grace,
        )
        return Service(self, name, reply["pid"], log)

    def undo(self, *argv: str | Path) -> None:
        """Register a command that runs after all processes have ended; the last registered command runs first."""
        self.ask(do="undo", argv=[str(argument) for argument in argv])

    def end(self, *, keep_logs: bool = False) -> None:
        """End all processes, undo registered traces, and remove the state directory (with `keep_logs` except logs/)."""
        # the supervisor may be ending already, for example because its lifeline was closed
        with contextlib.suppress(HarnessError):
            self.ask(do="end", keep_logs=keep_logs)
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            self._process.wait(timeout=60.0)
        except subprocess.TimeoutExpired:
            os.kill(self.pid, signal.SIGKILL)
            self._process.wait(timeout=10.0)
            raise HarnessError(f"the supervisor of {self.state} did not end in 60 s and was killed") from None
        finally:
            # the supervisor was killed, so this process removes the state directory
            if self._process.returncode != 0 and not keep_logs:
                shutil.rmtree(self.state, ignore_errors=True)
