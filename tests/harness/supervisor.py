"""Supervisor of a cluster or node: one small process that starts, watches and ends all its other processes.

Guarantees:
- When it ends, all processes that it started, with their children, have ended, in the reverse order of their start.
- Then registered traces are undone (each step with a timeout), and the state directory is removed.
- This happens on request, on SIGTERM and SIGINT, and when the lifeline closes. The lifeline is the supervisor's
  standard input, a pipe from the harness. However the harness ends, the operating system closes it.
- If the supervisor itself is killed, the kernel kills its children.

It is single-threaded on purpose: a child's parent-death signal follows the thread that forked it. Requests are one JSON
object per connection on the Unix socket `control.sock` in the state directory; `harness.services` is the client.
Run as: python -m harness.supervisor STATE_DIR [--detached] [--lock-fd N]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness.process import become_subreaper, descendants_of, die_with

CONTROL = "control.sock"
LOGS = "logs"
_UNDO_TIMEOUT = 20.0


@dataclass
class _Child:
    pid: int
    grace: float  # seconds from SIGTERM to SIGKILL; 0: SIGKILL at once
    status: int | None = None  # exit status; negative: the signal that ended the process


@dataclass
class _Supervisor:
    state: Path
    children: dict[str, _Child] = field(default_factory=dict)
    undo: list[list[str]] = field(default_factory=list)
    ending: bool = False
    keep_logs: bool = False

    def start(
        self, name: str, argv: list[str], env: dict[str, str], cwd: str, log: str, grace: float
    ) -> dict[str, Any]:
        if (old := self.children.get(name)) and old.status is None:
            return {"error": f"{name} runs already as process {old.pid}"}
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        reader, writer = os.pipe()  # a successful exec closes this pipe; a failed exec writes the reason into it
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            try:
                die_with(parent)
                nothing = os.open(os.devnull, os.O_RDONLY)
                for source, target in ((nothing, 0), (output, 1), (output, 2)):
                    os.dup2(source, target)
                signal.pthread_sigmask(signal.SIG_SETMASK, ())
                for number in (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD, signal.SIGPIPE):
                    signal.signal(number, signal.SIG_DFL)
                os.chdir(cwd)
                os.execvpe(argv[0], argv, env)
            except BaseException as error:
                os.write(writer, str(error).encode())
            os._exit(127)
        os.close(output)
        os.close(writer)
        with os.fdopen(reader) as pipe:
            reason = pipe.read()
        self.children[name] = _Child(pid, grace)
        return {"error": f"cannot run {argv[0]}: {reason}"} if reason else {"pid": pid}

    def reap(self) -> None:
        """Collect the exit statuses of all ended processes, including adopted orphans."""
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG)) != (0, 0):
                for child in self.children.values():
                    if child.pid == ended[0] and child.status is None:
                        child.status = os.waitstatus_to_exitcode(ended[1])

    def signal(self, name: str, number: int) -> dict[str, Any]:
        self.reap()
        child = self.children.get(name)
        if child is None or child.status is not None:
            return {"error": f"{name} does not run"}
        os.kill(child.pid, number)
        return {}

    def stop(self, name: str, grace: float | None) -> dict[str, Any]:
        """End one child and its descendants. SIGKILL follows after `grace` seconds (None: the value given at the
        start)."""
        self.reap()
        child = self.children.get(name)
        if child is None:
            return {"error": f"{name} was never started"}
        if child.status is None:
            below = descendants_of(child.pid)
            wait = child.grace if grace is None else grace
            if wait > 0:
                os.kill(child.pid, signal.SIGTERM)
                os.kill(child.pid, signal.SIGCONT)  # a stopped process does not handle SIGTERM
                self._wait(child, wait)
            if child.status is None:
                os.kill(child.pid, signal.SIGKILL)
                self._wait(child, 10.0)
                for orphan in {*below} & {*descendants_of(os.getpid())}:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(orphan, signal.SIGKILL)
        return {"status": child.status}

    def _wait(self, child: _Child, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while child.status is None and time.monotonic() < deadline:
            time.sleep(0.005)
            self.reap()

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        match request:
            case {"do": "start", **rest}:
                return self.start(**rest)
            case {"do": "stop", "name": name, "grace": grace}:
                return self.stop(name, grace)
            case {"do": "signal", "name": name, "number": number}:
                return self.signal(name, number)
            case {"do": "poll", "name": name}:
                self.reap()
                if child := self.children.get(name):
                    return {"pid": child.pid, "status": child.status}
                return {"error": f"{name} was never started"}
            case {"do": "undo", "argv": argv}:
                self.undo.append(argv)
                return {}
            case {"do": "end", "keep_logs": keep_logs}:
                self.keep_logs = keep_logs
                self.end()
                return {}
        return {"error": f"unknown request {request}"}

    def end(self) -> None:
        """End all processes, undo registered traces, and remove the state directory."""
        self.ending = True
        for name in reversed(self.children):
            with contextlib.suppress(ProcessLookupError):
                self.stop(name, None)
        deadline = time.monotonic() + 10.0
        while (left := descendants_of(os.getpid())) and time.monotonic() < deadline:
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.01)
            self.reap()
        for argv in reversed(self.undo):
            try:
                done = subprocess.run(
                    argv, timeout=_UNDO_TIMEOUT, stdin=subprocess.DEVNULL, capture_output=True, check=False
                )
                if done.returncode != 0:
                    print(f"undo {argv}: {done.returncode} {done.stderr.decode(errors='replace')}", flush=True)
            except (OSError, subprocess.TimeoutExpired) as error:
                print(f"undo {argv}: {error}", flush=True)
        for entry in self.state.iterdir():
            if not (self.keep_logs and entry.name == LOGS):
                shutil.rmtree(entry) if entry.is_dir() and not entry.is_symlink() else entry.unlink(missing_ok=True)
        if not self.keep_logs:
            self.state.rmdir()


def _serve(supervisor: _Supervisor, lifeline: int | None) -> None:
    """Answer requests until the end is requested: by a request, a signal, or the closed lifeline."""
    wake_reader, wake_writer = os.pipe()
    os.set_blocking(wake_reader, False)
    os.set_blocking(wake_writer, False)
    signal.set_wakeup_fd(wake_writer)
    asked: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda number, _frame: asked.append(number))
    signal.signal(signal.SIGCHLD, lambda _number, _frame: None)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(str(supervisor.state / CONTROL))
    listener.listen(64)
    sources: list[Any] = [listener, wake_reader, *([] if lifeline is None else [lifeline])]
    while not supervisor.ending:
        ready, _, _ = select.select(sources, [], [])
        if wake_reader in ready:
            os.read(wake_reader, 4096)
            supervisor.reap()
        if asked or (lifeline in ready and not os.read(lifeline or 0, 4096)):
            supervisor.end()
        elif listener in ready:
            connection, _ = listener.accept()
            with connection, contextlib.suppress(OSError, ValueError):
                connection.settimeout(5.0)
                with connection.makefile("rb") as requests:
                    reply = supervisor.answer(json.loads(requests.readline()))
                connection.sendall(json.dumps(reply).encode() + b"\n")


def main() -> None:
    parser = argparse.ArgumentParser(prog="harness.supervisor")
    parser.add_argument("state", type=Path)
    parser.add_argument(
        "--detached", action="store_true", help="no lifeline: outlive the process that started this one"
    )
    parser.add_argument("--lock-fd", type=int, help="a lock to hold until everything has ended")
    arguments = parser.parse_args()
    if arguments.lock_fd is not None:
        os.set_inheritable(arguments.lock_fd, False)
    become_subreaper()
    (arguments.state / LOGS).mkdir(exist_ok=True)
    _serve(_Supervisor(arguments.state), None if arguments.detached else sys.stdin.fileno())


if __name__ == "__main__":
    main()
