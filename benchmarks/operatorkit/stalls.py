"""Stalls of a process, from outside: a probe in a separate process, which waits for no other interpreter.

    python -m operatorkit.stalls URL     prints the longest stall, in seconds, once its standard input ends

A probe in a thread of the benchmark would count the benchmark's own work: the client holds the interpreter most of the
time at a thousand events a second.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path
from types import TracebackType
from typing import Self

_PROBE_S = 0.02
"""Seconds between two probes."""
_KIT = Path(__file__).resolve().parent.parent


class Stalls:
    """Longest time in which the process at `url` did not answer a request that usually takes well below a millisecond.

    During that time its event loop was blocked, or other processes used both processors. Use it in a `with` block.
    """

    def __init__(self, url: str) -> None:
        self._url = url
        self._probe: subprocess.Popen[str] | None = None
        self.longest = 0.0
        """Longest stall in seconds. It is known after the block has ended."""

    def __enter__(self) -> Self:
        self._probe = subprocess.Popen(
            [sys.executable, "-m", "operatorkit.stalls", self._url],
            env={**os.environ, "PYTHONPATH": str(_KIT)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._probe is not None
        output, _ = self._probe.communicate(timeout=60)
        self.longest = float(output or 0.0)


def main() -> None:
    """Probe the URL until standard input ends."""
    ended = threading.Event()

    def until_closed() -> None:
        sys.stdin.read()
        ended.set()

    threading.Thread(target=until_closed, daemon=True).start()
    longest = 0.0
    while not ended.wait(_PROBE_S):
        begun = time.monotonic()
        try:
            with urllib.request.urlopen(sys.argv[1], timeout=30) as answer:
                answer.read()
        except OSError:
            continue
        longest = max(longest, time.monotonic() - begun)
    print(longest)


if __name__ == "__main__":
    main()
