"""Stops a process (SIGSTOP) and lets it continue, repeatedly, like a CPU quota or a busy node."""

from __future__ import annotations

import contextlib
import itertools
import random
import signal
import subprocess
import threading
from collections.abc import Iterable, Iterator

AHEAD = {"FAKE_CUDA_AHEAD_MS": "50"}
"""Environment for programs that are stopped: the simulated GPU continues with the work that they have launched, like
hardware.
"""


def regular(stopped_ms: float, runs_ms: float) -> Iterator[tuple[float, float]]:
    """Yield the milliseconds of a stop and of the following run, always the same."""
    return itertools.repeat((stopped_ms, runs_ms))


def drawn(stopped_ms: float, runs_ms: float, seed: int) -> Iterator[tuple[float, float]]:
    """Yield lengths with these means, uniformly distributed from a tenth of the mean to nearly twice the mean."""
    draws = random.Random(seed)
    while True:
        yield stopped_ms * draws.uniform(0.1, 1.9), runs_ms * draws.uniform(0.1, 1.9)


@contextlib.contextmanager
def stopping(process: subprocess.Popen[str], lengths: Iterable[tuple[float, float]]) -> Iterator[None]:
    """Stop a process and let it continue, for these lengths, until the end of the block."""
    done = threading.Event()

    def toggle() -> None:
        for stopped_ms, runs_ms in lengths:
            process.send_signal(signal.SIGSTOP)
            done.wait(stopped_ms / 1e3)
            process.send_signal(signal.SIGCONT)
            if done.wait(runs_ms / 1e3):
                return

    thread = threading.Thread(target=toggle, name="stopper")
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
