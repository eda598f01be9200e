"""Noise: processes that take the processors from all others for milliseconds, as on a busy host."""

from __future__ import annotations

import contextlib
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

_PRIORITY = 50


@contextlib.contextmanager
def noise(part: float, mean_ms: float) -> Iterator[None]:
    """Take each processor for a part of the time, in intervals of exponentially distributed length. Skips the test if
    this is not permitted.

    Args:
        part: Part of the time, between 0 and 1.
        mean_ms: Mean length of an interval in milliseconds.
    """
    processors = sorted(os.sched_getaffinity(0))
    command = [sys.executable, __file__, str(part), str(mean_ms)]
    takers = [subprocess.Popen([*command, str(each)], stdout=subprocess.PIPE, text=True) for each in processors]
    try:
        for taker in takers:
            assert taker.stdout is not None
            if not taker.stdout.readline():
                pytest.skip("no process may have real-time priority here: that takes root")
        yield
    finally:
        for taker in takers:
            taker.kill()
            taker.communicate()


def _take(part: float, mean_s: float, processor: int) -> None:
    os.sched_setaffinity(0, {processor})
    try:
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(_PRIORITY))
    except PermissionError:
        return
    print("ready", flush=True)
    stretches = random.Random(processor)
    while True:
        until = time.monotonic() + stretches.expovariate(1 / mean_s)
        while time.monotonic() < until:
            pass
        time.sleep(stretches.expovariate(part / (mean_s * (1 - part))))


if __name__ == "__main__":
    _take(float(sys.argv[1]), float(sys.argv[2]) / 1e3, int(sys.argv[3]))
