"""Kernels of known length, directly through the driver: a framework's launches without the framework.

    --kind micro    empty kernels: bound by the launch rate
    --kind small    kernels of 100 us
    --kind long     kernels of 20 ms, like large matrix products
    --kind graph    graphs of 50 kernels of 40 us
    --kind pausing  steps of --work-ms kernels of 1 ms, each waited for, with --pause-ms of no work after each

`--kernel-us` sets another length for the kernels of small and long. Work is kernels (graphs, steps) that the GPU has
finished.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

from conversation import Answer, by_hand, count, requests
from driver_calls import Driver

# by kind: length of a kernel in us, and number of kernels or graphs in a batch; an event is recorded after each batch
KINDS = {"micro": (0, 200), "small": (100, 20), "long": (20_000, 1), "graph": (40, 2), "pausing": (1000, 1)}
GRAPH_KERNELS = 50
BATCHES_IN_FLIGHT = 3
REQUEST_US = 2000
REQUEST_KERNELS = 4


class Kernels:
    """Endless work: keeps a bounded number of batches in the stream, and counts the finished ones."""

    def __init__(self, kind: str, *, kernel_us: int | None = None, work_ms: int = 20, pause_ms: float = 5.0) -> None:
        length, self._batch = KINDS[kind]
        if kernel_us is not None and kind in ("small", "long"):
            length = kernel_us
        self._kernels_of_a_step = work_ms if kind == "pausing" else 0
        self._pause_s = pause_ms / 1e3
        self._driver = Driver()
        self._stream = self._driver.stream()
        functions = self._driver.functions({length, REQUEST_US // REQUEST_KERNELS})
        if kind == "graph":
            graph = self._driver.graph(functions[length], self._stream, GRAPH_KERNELS)
            launch = self._driver.library.cuGraphLaunch
            self._launch: Any = lambda: launch(graph, self._stream)
        else:
            self._launch = self._driver.launcher(functions[length], self._stream)
        self._request = self._driver.launcher(functions[REQUEST_US // REQUEST_KERNELS], self._stream)
        self._events = [self._driver.event() for _ in range(BATCHES_IN_FLIGHT)]
        self._submitted = 0

    def run(self, *, settle: float, seconds: float, tail: float = 0.0) -> Answer:
        """Return the work that the GPU finishes within the measurement."""
        step = self._work_and_pause if self._kernels_of_a_step else self._step
        answer = count(step, settle=settle, seconds=seconds, tail=tail)
        self._driver.call("cuStreamSynchronize", self._stream)
        self._submitted = 0
        return answer

    def infer(self, *, seconds: float, rate: float, seed: int) -> Answer:
        """Serve requests that take 2 ms of GPU time each, and wait for each request."""
        return requests(self._serve_one, seconds=seconds, rate=rate, seed=seed)

    def _serve_one(self) -> None:
        for _ in range(REQUEST_KERNELS):
            self._check(self._request())
        self._driver.call("cuStreamSynchronize", self._stream)

    def _work_and_pause(self) -> float:
        for _ in range(self._kernels_of_a_step):
            self._check(self._launch())
        self._driver.call("cuStreamSynchronize", self._stream)
        time.sleep(self._pause_s)
        return 1.0

    def _step(self) -> float:
        event = self._events[self._submitted % BATCHES_IN_FLIGHT]
        finished = 0.0
        if self._submitted >= BATCHES_IN_FLIGHT:
            self._driver.call("cuEventSynchronize", event)
            finished = float(self._batch)
        for _ in range(self._batch):
            self._check(self._launch())
        self._driver.call("cuEventRecord", event, self._stream)
        self._submitted += 1
        return finished

    def _check(self, code: int) -> None:
        if code:
            self._driver.call("cuStreamSynchronize", self._stream)
            raise RuntimeError(f"a launch answered {code}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kind", choices=KINDS, default="micro")
    parser.add_argument("--seconds", type=float, help="measure once and end")
    parser.add_argument("--kernel-us", type=int, help="length of a kernel of the kinds small and long")
    parser.add_argument("--work-ms", type=int, default=20, help="of the kind pausing: kernels of 1 ms in a step")
    parser.add_argument("--pause-ms", type=float, default=5.0, help="of the kind pausing: pause after a step")
    arguments = parser.parse_args()
    kernels = Kernels(
        arguments.kind,
        kernel_us=arguments.kernel_us,
        work_ms=arguments.work_ms,
        pause_ms=arguments.pause_ms,
    )
    by_hand({"run": kernels.run, "infer": kernels.infer}, arguments.seconds)


if __name__ == "__main__":
    main()
