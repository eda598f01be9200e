"""Programs that leave gaps between their kernels, directly through the driver.

    --kind eager      steps of 60 kernels of 61 us, each after 110 us of host work, then 1.5 ms of it: 0.45 of the GPU
    --kind rank       steps of 20 kernels of 0.5 ms and a collective, a kernel that spins until all ranks have come
    --kind notebook   only `infer`: cells of five kernels of 2 ms, each after 2 ms of host work

Steps are counted when the GPU has finished them. The ranks of a training name the same new `--meet FILE`, and each of
them serves one `run`.
"""

from __future__ import annotations

import argparse
import ctypes
import mmap
import os
import time
from dataclasses import dataclass

from conversation import Answer, by_hand, count, requests
from driver_calls import Driver

ALL_HAVE_COME = 1 << 60
"""Number that no collective waits for: it releases all waiting kernels at the end."""


@dataclass(frozen=True)
class Kind:
    """Shape of a program's step. Times are in microseconds."""

    kernels: int
    kernel_us: int
    host_us: float
    gap_us: float
    in_flight: int = 3


KINDS = {
    "eager": Kind(60, 61, 110, 1500),
    "rank": Kind(20, 500, 50, 0, in_flight=1),
    "notebook": Kind(5, 2000, 2000, 0),
}


def work_on_host(us: float) -> None:
    """Keep the processor busy for `us` microseconds."""
    end = time.perf_counter() + us / 1e6
    while time.perf_counter() < end:
        pass


class Gaps:
    """One program with gaps. `meet`: file in which the `ranks` ranks of a training count how often they have arrived at
    a collective."""

    def __init__(self, kind: Kind, meet: str | None, ranks: int) -> None:
        self._kind, self._ranks, self._come = kind, ranks, 0
        self._driver = Driver()
        self._stream = self._driver.stream()
        functions = self._driver.functions({kind.kernel_us}, meets=meet is not None)
        self._launch = self._driver.launcher(functions[kind.kernel_us], self._stream)
        self._events = [self._driver.event() for _ in range(kind.in_flight)]
        self._submitted = 0
        self._counter: ctypes.c_uint64 | None = None
        if meet is not None:
            self._meet = functions[self._driver.MEETS]
            self._counter = self._shared(meet)
        self._launch()
        self._driver.call("cuStreamSynchronize", self._stream)

    def run(self, *, settle: float, seconds: float, tail: float = 0.0) -> Answer:
        """Count the steps that the GPU finishes within the window."""
        answer = count(self._step, settle=settle, seconds=seconds, tail=tail)
        if self._counter is not None:
            self._counter.value = ALL_HAVE_COME
        self._driver.call("cuStreamSynchronize", self._stream)
        self._submitted = 0
        return answer | {"gpu_us": self._kind.kernels * self._kind.kernel_us}

    def infer(self, *, seconds: float, rate: float, seed: int) -> Answer:
        """Run notebook cells that arrive at random, one after the other."""
        return requests(self._cell, seconds=seconds, rate=rate, seed=seed)

    def _cell(self) -> None:
        self._kernels()
        self._driver.call("cuStreamSynchronize", self._stream)

    def _step(self) -> float:
        kind, finished = self._kind, 0.0
        event = self._events[self._submitted % kind.in_flight]
        if self._submitted >= kind.in_flight:
            self._driver.call("cuEventSynchronize", event)
            finished = 1.0
        self._kernels()
        if self._counter is not None:
            self._come += self._ranks
            self._driver.launch(self._meet, self._stream, ctypes.addressof(self._counter), self._come)
        self._driver.call("cuEventRecord", event, self._stream)
        work_on_host(kind.gap_us)
        self._submitted += 1
        return finished

    def _kernels(self) -> None:
        for _ in range(self._kind.kernels):
            work_on_host(self._kind.host_us)
            code = self._launch()
            if code:
                raise RuntimeError(f"a launch answered {code}")

    def _shared(self, path: str) -> ctypes.c_uint64:
        """Return the counter that all ranks share, in memory that the GPU can write."""
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        os.ftruncate(file, mmap.PAGESIZE)
        self._page = mmap.mmap(file, mmap.PAGESIZE)
        os.close(file)
        counter = ctypes.c_uint64.from_buffer(self._page)
        place = ctypes.c_void_p(ctypes.addressof(counter))
        self._driver.call("cuMemHostRegister_v2", place, ctypes.c_size_t(mmap.PAGESIZE), ctypes.c_uint(0))
        return counter


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kind", choices=KINDS, default="eager")
    parser.add_argument("--meet", help="of ranks: file of their counter")
    parser.add_argument("--ranks", type=int, default=1, help="of ranks: their number")
    parser.add_argument("--seconds", type=float, help="measure once and end")
    arguments = parser.parse_args()
    if (arguments.kind == "rank") != (arguments.meet is not None):
        parser.error("--meet belongs to --kind rank: name a new file, the same for all ranks")
    gaps = Gaps(KINDS[arguments.kind], arguments.meet, arguments.ranks)
    by_hand({"run": gaps.run, "infer": gaps.infer}, arguments.seconds)


if __name__ == "__main__":
    main()
