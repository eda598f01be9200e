"""A process that is stopped (SIGSTOP) and goes on, again and again, as a CPU quota or a busy node holds one up."""

from __future__ import annotations

import contextlib
import itertools
import random
import signal
import subprocess
import threading
from collections.abc import Iterable, Iterator

AHEAD = {"FAKE_CUDA_AHEAD_MS": "50"}
"""For programs that are stopped: the simulated GPU goes on with what they have launched, as hardware does."""


def regular(stopped_ms: float, runs_ms: float) -> Iterator[tuple[float, float]]:
    """Yield the milliseconds of a stop and of the run after it, always the same."""
    return itertools.repeat((stopped_ms, runs_ms))


def drawn(stopped_ms: float, runs_ms: float, seed: int) -> Iterator[tuple[float, float]]:
    """Yield lengths of these means, evenly distributed from a tenth to nearly twice as much."""
    draws = random.Random(seed)
    while True:
        yield stopped_ms * draws.uniform(0.1, 1.9), runs_ms * draws.uniform(0.1, 1.9)


@contextlib.contextmanager
def stopping(process: subprocess.Popen[str], lengths: Iterable[tuple[float, float]]) -> Iterator[None]:
    """Stop a process and let it go on, for these lengths, until the end of the block."""
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
