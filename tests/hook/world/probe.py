"""A process under the hook whose CUDA calls a test makes one by one, from as many threads as it likes."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CHILD = Path(__file__).with_name("probe_child.py")

SUCCESS = 0
OUT_OF_MEMORY = 2
NOT_INITIALIZED = 3
NO_DEVICE = 100
NOT_FOUND = 500
NOT_READY = 600
SYSTEM_NOT_READY = 802
CAPTURE_UNSUPPORTED = 900
CAPTURE_INVALIDATED = 901


@dataclass(frozen=True)
class Result:
    """`code`: the CUresult."""

    code: int
    value: Any


class Probe:
    """The process, and its calls. Ends with `close`."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-S", str(CHILD)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=dict(environment),
        )
        self._pending: dict[int, Future[Result]] = {}
        self._count = 0
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def post(self, op: str, *args: Any, thread: str = "main") -> Future[Result]:
        """Starts a call in a thread of the process, after the earlier ones of that thread."""
        assert self._process.stdin is not None
        future: Future[Result] = Future()
        self._count += 1
        self._pending[self._count] = future
        self._process.stdin.write(json.dumps({"id": self._count, "thread": thread, "op": op, "args": args}) + "\n")
        self._process.stdin.flush()
        return future

    def call(self, op: str, *args: Any, thread: str = "main", timeout: float = 20) -> Result:
        return self.post(op, *args, thread=thread).result(timeout)

    def ok(self, op: str, *args: Any, thread: str = "main", timeout: float = 20) -> Any:
        """The value of a call that has to succeed."""
        result = self.call(op, *args, thread=thread, timeout=timeout)
        assert result.code == SUCCESS, f"{op}{args} returned {result.code}"
        return result.value

    def start_cuda(self, thread: str = "main") -> None:
        """cuInit, a context and a module."""
        self.ok("init", thread=thread)
        self.ok("context_create", thread=thread)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def close(self) -> None:
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                stream.close()
        self._reader.join(5)

    def _read(self) -> None:
        assert self._process.stdout is not None
        try:
            for line in self._process.stdout:
                reply = json.loads(line)
                future = self._pending.pop(reply["id"])
                if "error" in reply:
                    future.set_exception(RuntimeError(reply["error"]))
                else:
                    future.set_result(Result(reply["code"], reply["value"]))
        except ValueError:
            pass  # closed while reading
        for future in list(self._pending.values()):
            if not future.done():
                future.set_exception(EOFError("the process has ended"))
