"""How the driver divides a GPU between processes, as a program sees it by its own kernels. Uses only the driver API.

    busy    Kernels of 20 us are always queued. `run_us`: length of a span in which they end one after the other, which
            is a time slice. `away_us`: length of a span in which none ends, which is the slices of other processes and
            the switches.
    brief   One kernel of 20 us is launched at random moments. `wait_us`: time from the launch to the kernel's end.

Results are the 10th, 50th, 90th and 99th percentile, in microseconds.
"""

from __future__ import annotations

import argparse
import itertools
import random
import time

from conversation import Answer, by_hand
from driver_calls import NOT_READY, SUCCESS, Driver

KERNEL_US = 20
QUEUED = 256
"""Number of kernels in flight. They are 5 ms of work, which is longer than a time slice."""
AWAY_US = 5 * KERNEL_US
"""Time without an ended kernel, in us, after which the GPU counts as given to another process."""
PAUSE_S = 0.003
"""Longest pause between two short kernels, in seconds."""


def percentiles(values: list[float]) -> list[float]:
    """Return the 10th, 50th, 90th and 99th percentile. Empty if there are no values."""
    ordered = sorted(values)
    return [ordered[min(len(ordered) - 1, len(ordered) * part // 100)] for part in (10, 50, 90, 99)] if ordered else []


class Slices:
    """Measurements of the driver's time slices by one process on the GPU."""

    def __init__(self) -> None:
        self._driver = Driver()
        self._stream = self._driver.stream()
        self._launch = self._driver.launcher(self._driver.functions({KERNEL_US})[KERNEL_US], self._stream)
        self._events = [self._driver.event() for _ in range(QUEUED)]
        self._launch()
        self._driver.call("cuStreamSynchronize", self._stream)

    def busy(self, *, settle: float, seconds: float, tail: float = 0.0) -> Answer:
        """Keep kernels queued, and record when each of them ends."""
        query, record, stream = self._driver.library.cuEventQuery, self._driver.library.cuEventRecord, self._stream
        begin = time.perf_counter() + settle
        end, events, launched, finished = begin + seconds, self._events, 0, 0
        ends: list[float] = []
        while True:
            while launched - finished < QUEUED:
                self._launch()
                record(events[launched % QUEUED], stream)
                launched += 1
            while (code := query(events[finished % QUEUED])) == NOT_READY:
                pass
            if code != SUCCESS:
                raise RuntimeError(f"cuEventQuery answered {code}")
            finished += 1
            now = time.perf_counter()
            if begin < now <= end:
                ends.append(now)
            elif now > end + tail:
                break
        self._driver.call("cuStreamSynchronize", stream)
        runs, gaps, since = [], [], None
        for before, after in itertools.pairwise(ends):
            if (after - before) * 1e6 < AWAY_US:
                continue
            gaps.append((after - before) * 1e6 - KERNEL_US)
            if since is not None:
                runs.append((before - since) * 1e6 + KERNEL_US)
            since = after
        return {"rate": len(ends) / seconds, "run_us": percentiles(runs), "away_us": percentiles(gaps)}

    def brief(self, *, seconds: float) -> Answer:
        """Launch one kernel at a time, at random moments, and measure the time until its end."""
        waits: list[float] = []
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            time.sleep(random.random() * PAUSE_S)
            begun = time.perf_counter()
            self._launch()
            self._driver.call("cuStreamSynchronize", self._stream)
            waits.append((time.perf_counter() - begun) * 1e6)
        return {"kernels": len(waits), "wait_us": percentiles(waits)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, help="measure `busy` once and end")
    slices = Slices()
    by_hand({"run": slices.busy, "brief": slices.brief}, parser.parse_args().seconds)


if __name__ == "__main__":
    main()
