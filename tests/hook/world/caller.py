"""Process whose driver calls a test composes byte by byte, including structures: for calls of any kind, in large
numbers.

caller = Caller(environment)
address = caller.new("cuMemAlloc_v2", 4096)
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from hook.world.child import PythonChild

CHILD = Path(__file__).with_name("caller_child.py")


@dataclass(frozen=True)
class Out:
    """A pointer to `size` bytes of zeros."""

    size: int = 8


@dataclass(frozen=True)
class In:
    """A pointer to a copy of these bytes. The answer contains the bytes after the call."""

    content: bytes


@dataclass(frozen=True)
class By:
    """A structure by value."""

    content: bytes


Argument = int | None | Out | In | By


class DriverError(Exception):
    """Failure of a call that had to succeed."""

    def __init__(self, symbol: str, code: int) -> None:
        super().__init__(f"{symbol} returned {code}")
        self.symbol = symbol
        self.code = code


class Caller(PythonChild):
    """The process and its calls, one at a time. Ends with `close`."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        super().__init__(CHILD, environment)
        self.calls = 0
        """Number of calls begun so far."""

    def post(self, symbol: str, *arguments: Argument) -> None:
        """Begin a call. `answer` waits for its end."""
        self._send(json.dumps([symbol, *map(_written, arguments)]))
        self.calls += 1

    def answer(self) -> tuple[int, list[bytes]]:
        """Return the posted call's CUresult and the bytes behind its pointers. EOFError if the process has ended."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise EOFError(f"the process has ended with {self._process.wait()}")
        code, *contents = json.loads(line)
        return code, [bytes.fromhex(content) for content in contents]

    def raw(self, symbol: str, *arguments: Argument) -> tuple[int, list[bytes]]:
        """Make a call. Return its CUresult, and the bytes behind its pointers."""
        self.post(symbol, *arguments)
        return self.answer()

    def code(self, symbol: str, *arguments: Argument) -> int:
        """Make a call. Return only its CUresult."""
        return self.raw(symbol, *arguments)[0]

    def ok(self, symbol: str, *arguments: Argument) -> list[bytes]:
        """Make a call that must succeed. Return the bytes behind its pointers. DriverError if it fails."""
        code, contents = self.raw(symbol, *arguments)
        if code != 0:
            raise DriverError(symbol, code)
        return contents

    def new(self, symbol: str, *arguments: Argument, size: int = 8) -> int:
        """Make a call that must succeed. Return the number that it writes through its first parameter."""
        return int.from_bytes(self.ok(symbol, Out(size), *arguments)[0], "little")

    def start(self, device: int = 0) -> None:
        """Call cuInit, and make the primary context of the device current."""
        self.ok("cuInit", 0)
        self.ok("cuCtxSetCurrent", self.new("cuDevicePrimaryCtxRetain", device))


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
