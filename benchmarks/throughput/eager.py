"""Jobs with gaps between their kernels: two to a GPU, in exclusive turns and co-running.

Each job keeps the GPU busy for a part of the time (its duty), like an eager training. Exclusive turns cannot use the
gaps between its kernels, because the gaps are shorter than the time after which a hook returns the token. The rates
come from the time scheduler, simulated on a GPU with time slices.
"""

from __future__ import annotations

import random

from packing_trace import GIB, TraceNode, TracePod
from property.time_sliced_gpu import MS, US, Program, S, TimeSlicedGpu, alone
from sharepod.timeshare import Sharing as TurnSharing

from throughput.jobs import Workload, service_s
from throughput.rates import Mix, Tenancy
from throughput.replay import Sharing

KERNEL_US = 120
"""Length of a kernel in microseconds. It keeps the gaps below 0.5 ms, after which a hook returns the token."""
REQUEST = 500
"""Request of each job, in thousandths of a GPU: two jobs fit on a GPU."""
WARM_UP_S, PLAYED_S = 1, 4
"""Simulated seconds of a play before counting starts, and seconds that are counted."""
TURNS = {
    Sharing.EXCLUSIVE: TurnSharing.EXCLUSIVE,
    Sharing.STATIC: TurnSharing.EXCLUSIVE,
    Sharing.LENDING: TurnSharing.EXCLUSIVE,
    Sharing.CO_RUNNING: TurnSharing.CONCURRENT,
}
"""How tenants of one GPU take turns under each policy."""


class EagerRates:
    """Rates of the jobs of a mix. Each mix is played only once."""

    def __init__(self, sharing: Sharing) -> None:
        self._sharing = TURNS[sharing]
        self._known: dict[Mix, tuple[float, ...]] = {}

    def __call__(self, mix: Mix) -> tuple[float, ...]:
        """Return the rate of each job of a sorted mix, in its order."""
        if mix not in self._known:
            self._known[mix] = self._play(mix)
        return self._known[mix]

    def _play(self, mix: Mix) -> tuple[float, ...]:
        programs = [_program(f"job-{place}", tenancy, place) for place, tenancy in enumerate(mix)]
        gpu = TimeSlicedGpu(programs, sharing=self._sharing)
        begin, end = WARM_UP_S * S, (WARM_UP_S + PLAYED_S) * S
        gpu.run(begin)
        before = [program.finished for program in programs]
        gpu.run(end)
        return tuple(
            min(1.0, (program.finished - done) / (alone(program, end) - alone(program, begin)))
            for program, done in zip(programs, before, strict=True)
        )


def _program(name: str, tenancy: Tenancy, place: int) -> Program:
    request, limit, duty, _ = tenancy
    host_us = KERNEL_US * 1000 // duty
    return Program(
        name,
        request=request,
        limit=limit,
        gpu_ns=KERNEL_US * US,
        host_ns=host_us * US,
        kernels=12,
        starts_ns=place * MS,
    )


def guaranteed(tenancy: Tenancy) -> float:
    """Return the guaranteed rate of a job: its request, because in its turn it holds the GPU during its gaps, too."""
    return tenancy[0] / 1000


def eager_pairs(node_count: int, seed: int) -> Workload:
    """Make a workload of jobs that request half a GPU each, on nodes of eight GPUs."""
    chance = random.Random(seed)
    nodes = tuple(
        TraceNode(f"node-{number:03}", 128_000, 786_432, 8, "A", 40 * GIB) for number in range(node_count * 5 // 8)
    )
    lines = tuple((TracePod(2000, 8192, 1, REQUEST, ()), service_s(None, chance)) for _ in range(5000))
    return Workload("eager pairs", nodes, lines)
