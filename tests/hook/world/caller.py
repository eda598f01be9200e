"""A process whose driver calls a test composes itself, structures included: for calls by the thousand and of any kind.

caller = Caller(environment)
code, address = caller.call("cuMemAlloc_v2", Out(8), 4096)
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

CHILD = Path(__file__).with_name("caller_child.py")


@dataclass(frozen=True)
class Out:
    """A pointer to so many bytes of zeros."""

    size: int = 8


@dataclass(frozen=True)
class In:
    """A pointer to a copy of these bytes, which comes back as the call left it."""

    content: bytes


@dataclass(frozen=True)
class By:
    """A structure by value."""

    content: bytes


Argument = int | None | Out | In | By


class DriverError(Exception):
    """A call that had to succeed did not."""

    def __init__(self, symbol: str, code: int) -> None:
        super().__init__(f"{symbol} returned {code}")
        self.symbol = symbol
        self.code = code


class Caller:
    """The process and its calls, one at a time. Ends with `close`."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-S", str(CHILD)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=dict(environment),
        )
        self.calls = 0

    @property
    def pid(self) -> int:
        return self._process.pid

    def post(self, symbol: str, *arguments: Argument) -> None:
        """Begins a call; `answer` is its end."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([symbol, *map(_written, arguments)]).encode() + b"\n")
        self._process.stdin.flush()
        self.calls += 1

    def answer(self) -> tuple[int, list[bytes]]:
        """The CUresult of the call that was posted, and what its pointers point to. EOFError if the process is gone."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise EOFError(f"the process has ended with {self._process.wait()}")
        code, *contents = json.loads(line)
        return code, [bytes.fromhex(content) for content in contents]

    def raw(self, symbol: str, *arguments: Argument) -> tuple[int, list[bytes]]:
        self.post(symbol, *arguments)
        return self.answer()

    def code(self, symbol: str, *arguments: Argument) -> int:
        """The CUresult."""
        return self.raw(symbol, *arguments)[0]

    def ok(self, symbol: str, *arguments: Argument) -> list[bytes]:
        """What the pointers of a call that has to succeed point to. Raises `DriverError`."""
        code, contents = self.raw(symbol, *arguments)
        if code != 0:
            raise DriverError(symbol, code)
        return contents

    def new(self, symbol: str, *arguments: Argument, size: int = 8) -> int:
        """What such a call puts behind its first parameter."""
        return int.from_bytes(self.ok(symbol, Out(size), *arguments)[0], "little")

    def start(self, device: int = 0) -> None:
        """cuInit and the device's primary context."""
        self.ok("cuInit", 0)
        self.ok("cuCtxSetCurrent", self.new("cuDevicePrimaryCtxRetain", device))

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def close(self) -> None:
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                with contextlib.suppress(BrokenPipeError):
                    stream.close()


def _written(argument: Argument) -> int | str | None:
    match argument:
        case Out(size):
            return f"out:{size}"
        case In(content):
            return f"in:{content.hex()}"
        case By(content):
            return f"by:{content.hex()}"
        case _:
            return argument
