"""SharePods with exclusion labels: how many GPUs they occupy, and how many SharePods without a label still fit.

There are 64 GPUs. First come, in random order, two SharePods of 0.4 for each of 16 labels. Then come as many SharePods
of 0.5 without a label as fit. BestFit chooses the GPU with the least free time among the allowed GPUs. Without waste,
the labelled SharePods occupy 16 GPUs, and 96 SharePods without a label fit on the other 48.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from statistics import fmean

from results import Row
from sharepod.api.gpunode import SchedulingLabels
from sharepod.api.sharepod import GpuRequest
from sharepod.api.units import WHOLE_GPU, Bytes, GpuUuid, Milli, TenantId
from sharepod.placement.engine import Engine
from sharepod.placement.state.cluster import Cluster
from sharepod.placement.state.types import GpuState, NodeState, PlacementRequest, Resources

NODES, WIDTH, LABELS, EACH = 8, 8, 16, 2
LABELLED, OTHER = 400, 500
LEARNED = 512
"""Arrivals from which the engine has learned the demand before: four of five without a label."""

Wanted = tuple[int, str | None]
"""(thousandths of a GPU, exclusion label or None) of a request."""
Place = Callable[[Wanted], bool]


def _orders(seeds: Sequence[int]) -> list[list[Wanted]]:
    labelled: list[Wanted] = [(LABELLED, f"label-{number}") for number in range(LABELS) for _ in range(EACH)]
    return [random.Random(seed).sample(labelled, len(labelled)) for seed in seeds]


class _SharePod:
    """Policy: the placement engine after it has learned a demand with these labels."""

    def __init__(self) -> None:
        self.cluster = Cluster()
        self._engine = Engine(self.cluster)
        self._number = 0
        for node in range(NODES):
            gpus = tuple(
                GpuState(uuid=GpuUuid(f"GPU-{node}-{index}"), index=index, model="A100", memory=Bytes(80 << 30))
                for index in range(WIDTH)
            )
            name = f"node-{node}"
            self.cluster.upsert_node(NodeState(name=name, allocatable=Resources(128_000, 1 << 40), pods=500, gpus=gpus))
        for number in range(LEARNED):
            label = f"label-{number // 5 % LABELS}" if number % 5 == 0 else None
            self._engine.packing.arrived(self._request((LABELLED if label else OTHER, label)))
        self._engine.packing.renew()

    def _request(self, wanted: Wanted) -> PlacementRequest:
        self._number += 1
        name = f"sharepod-{self._number}"
        gpu = GpuRequest(
            request_milli=Milli(wanted[0]),
            limit_milli=WHOLE_GPU,
            memory=None,
            labels=SchedulingLabels(exclusion=wanted[1]),
        )
        return PlacementRequest(tenant=TenantId(name), namespace="team", name=name, gpu=gpu)

    def place(self, wanted: Wanted) -> bool:
        request = self._request(wanted)
        answer = self._engine.find(request)
        if answer is not None:
            self._engine.reserve(request, answer)
        return answer is not None

    def bound(self) -> int:
        return sum(bool(gpu.tenants) for node in self.cluster.nodes() for gpu in node.gpus)


class _BestFit:
    """Policy: the GPU with the least free time among the GPUs that the labels allow."""

    def __init__(self) -> None:
        self._free: list[int] = [WHOLE_GPU] * (NODES * WIDTH)
        self._label: list[str | None] = [None] * len(self._free)

    def place(self, wanted: Wanted) -> bool:
        milli, label = wanted
        fit = [
            gpu
            for gpu, free in enumerate(self._free)
            if free >= milli and (free == WHOLE_GPU or self._label[gpu] == label)
        ]
        if not fit:
            return False
        gpu = min(fit, key=lambda gpu: (self._free[gpu], gpu))
        self._free[gpu] -= milli
        self._label[gpu] = label
        return True

    def bound(self) -> int:
        return sum(free < WHOLE_GPU for free in self._free)


def label_rows(seeds: Sequence[int]) -> list[Row]:
    """Return the rows of both policies: means over the seeds."""
    rows = []
    for policy in (_SharePod, _BestFit):
        bound, others = [], []
        for order in _orders(seeds):
            made = policy()
            if not all(made.place(wanted) for wanted in order):
                raise RuntimeError(f"{policy.__name__.strip('_')} found no place for a SharePod on a cluster with room")
            bound.append(made.bound())
            others.append(sum(made.place((OTHER, None)) for _ in range(2 * NODES * WIDTH)))
        case = f"labels {policy.__name__.strip('_')}"
        rows += [Row(case, "gpus_bound", "count", fmean(bound)), Row(case, "others_fit", "count", fmean(others))]
    return rows
