"""Process under the hook whose CUDA calls a test makes by name, one by one, from as many threads as it needs."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hook.world.child import PythonChild

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
    """Answer to a call."""

    code: int
    """CUresult."""
    value: Any


class Probe(PythonChild):
    """The process, and its calls. Ends with `close`."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        super().__init__(CHILD, environment)
        self._pending: dict[int, Future[Result]] = {}
        self._count = 0
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def post(self, op: str, *args: Any, thread: str = "main") -> Future[Result]:
        """Begin a call in a thread of the process. It follows the earlier calls of that thread."""
        future: Future[Result] = Future()
        self._count += 1
        self._pending[self._count] = future
        self._send(json.dumps({"id": self._count, "thread": thread, "op": op, "args": args}))
        return future

    def call(self, op: str, *args: Any, thread: str = "main", timeout: float = 20) -> Result:
        """Make a call and wait for its answer. TimeoutError after `timeout` s; EOFError if the process has ended."""
        return self.post(op, *args, thread=thread).result(timeout)

    def ok(self, op: str, *args: Any, thread: str = "main", timeout: float = 20) -> Any:
        """Make a call that must succeed. Return its value."""
        result = self.call(op, *args, thread=thread, timeout=timeout)
        assert result.code == SUCCESS, f"{op}{args} returned {result.code}"
        return result.value

    def start_cuda(self, thread: str = "main") -> None:
        """Call cuInit, create a context and load a module."""
        self.ok("init", thread=thread)
        self.ok("context_create", thread=thread)

    def close(self) -> None:
        super().close()
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
            pass  # `close` has closed the pipe while this thread reads
        for future in list(self._pending.values()):
            if not future.done():
                future.set_exception(EOFError("the process has ended"))
