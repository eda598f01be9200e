"""Reads of the API server through `kubectl proxy`, on a socket that only this user can open. One proxy serves all reads
of a command, because each further start of kubectl takes a tenth of a second of a processor.

Guarantees:
- Each read ends within its timeout.
- A proxy that failed is replaced before the next read.
- The proxy ends with this process, also if this process is killed. A shell waits for the end of its input, which this
  process holds open; then it kills the proxy and deletes the socket.
"""

from __future__ import annotations

import os
import select
import shutil
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Sequence
from errno import ENOENT
from pathlib import Path

_SHELL = '"$@" 2>"$0/errors" & exec >/dev/null 2>&1; read -r _; kill "$!"; rm -rf -- "$0"'
"""Script of the shell. $0: folder of the socket."""
_END_S = 5.0


class ProxyError(Exception):
    """Failure of the proxy, with its last output."""


class Proxy:
    """Proxy that one process reads through. `command`: kubectl with the flags of its connection."""

    def __init__(self, command: Sequence[str]) -> None:
        self._command = tuple(command)
        self._lock, self._awaiting = threading.Lock(), threading.Lock()
        self._shell: subprocess.Popen[bytes] | None = None
        self._folder = Path()
        self._serves = False
        self._failed = False

    def start(self) -> None:
        """Start the proxy, unless one runs and has not failed. Raise `FileNotFoundError` without kubectl."""
        with self._lock:
            if self._shell is not None and not self._failed:
                return
            self._end()
            if shutil.which(self._command[0]) is None:
                raise FileNotFoundError(ENOENT, os.strerror(ENOENT))
            self._folder = Path(tempfile.mkdtemp(prefix="sharepod-"))
            command = [*self._command, "proxy", f"--unix-socket={self._folder / 'socket'}"]
            self._shell = subprocess.Popen(
                ["/bin/sh", "-c", _SHELL, str(self._folder), *command],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True,
            )  # fmt: skip

    def get(self, path: str, timeout_s: float) -> tuple[int, bytes]:
        """Return the HTTP status and the body of the answer to GET. The proxy must have been started. Raise
        `ProxyError`."""
        ends = time.monotonic() + timeout_s
        self._await_start(timeout_s, ends)
        request = f"GET {path} HTTP/1.0\r\nHost: localhost\r\nAccept: application/json\r\n\r\n"
        parts: list[bytes] = []
        try:
            with socket.socket(socket.AF_UNIX) as link:
                link.connect(str(self._folder / "socket"))
                link.sendall(request.encode())
                while not parts or parts[-1]:
                    link.settimeout(max(0.001, ends - time.monotonic()))
                    parts.append(link.recv(1 << 20))
        except TimeoutError:
            raise ProxyError(self._with_output(f"did not answer within {timeout_s} s")) from None
        except OSError as error:
            self._failed = True
            raise ProxyError(self._with_output(f"failed: {error}")) from None
        head, _, body = b"".join(parts).partition(b"\r\n\r\n")
        words = head.split(None, 2)
        if len(words) < 2 or not words[1].isdigit():
            raise ProxyError(self._with_output("closed the connection"))
        return int(words[1]), body

    def close(self) -> None:
        """End the proxy."""
        with self._lock:
            self._end()

    def _end(self) -> None:
        shell, self._shell, self._serves, self._failed = self._shell, None, False, False
        if shell is None:
            return
        assert shell.stdin is not None and shell.stdout is not None  # noqa: PT018
        shell.stdin.close()
        shell.wait(_END_S)
        shell.stdout.close()

    def _await_start(self, timeout_s: float, ends: float) -> None:
        """Wait until the proxy serves, at most until the monotonic time `ends`. Its only line of output announces
        this. A read that waits for the lock loses that time, so that all end together."""
        with self._awaiting:
            if self._serves or self._shell is None:
                return
            output = self._shell.stdout
            assert output is not None
            if not select.select([output], [], [], max(0.0, ends - time.monotonic()))[0]:
                raise ProxyError(self._with_output(f"did not answer within {timeout_s} s"))
            self._serves = bool(output.readline())
            if not self._serves:
                self._failed = True
                raise ProxyError(self._with_output(""))

    def _with_output(self, problem: str) -> str:
        """Return a problem, with the proxy's last output."""
        try:
            output = (self._folder / "errors").read_text(encoding="utf-8", errors="replace").strip()
        except OSError:
            output = ""
        if not problem:
            return output or "kubectl proxy ended"
        return f"kubectl {problem}; its last output: {output}" if output else f"kubectl {problem}"
