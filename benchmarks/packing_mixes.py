"""Small artificial mixes of requests that arrive and leave: the refused part of their GPU demand.

The traces have no labels, no memory and no tenants that exclude others. These mixes have them, on clusters that are
small enough to show each mistake. All policies get the same arrivals (Poisson, with exponential lifetimes) and use the
same filters. The engine learns the mix from its arrivals. BestFit is the engine without learning. FGD knows the mix
before the first request arrives.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

import numpy as np
from reference.usable_capacity import Definition
from results import Row, paired_rows
from sharepod.api.gpunode import Latency, Mode, SchedulingLabels
from sharepod.api.sharepod import GpuRequest
from sharepod.api.units import WHOLE_GPU, Bytes, GpuUuid, Milli, TenantId
from sharepod.placement.binpack.demand import class_of
from sharepod.placement.binpack.usable_capacity import UsableCapacity
from sharepod.placement.engine import Engine
from sharepod.placement.filters.candidates import candidates
from sharepod.placement.state.cluster import Cluster
from sharepod.placement.state.types import Assignment, GpuState, NodeState, PlacementRequest, PodNeeds, Resources

GIB = 1 << 30
ARRIVALS = 3_000
WARM_UP = 2.0
"""Mean lifetimes of a pod after which refusals begin to count."""


@dataclass(frozen=True, slots=True)
class Kind:
    """Kind of requests in a mix. `weight`: its part of the arrivals. `labels`: number of different labels of each sort.
    `cpu`: thousandths of a core. `memory`: GiB; None: in proportion to the time. `since`, `until`: when its arrivals
    begin and end, as parts of the simulated time."""

    weight: float
    milli: int
    count: int = 1
    cpu: int = 0
    memory: int | None = None
    models: tuple[str, ...] = ()
    exclusion: int = 0
    anti_affinity: int = 0
    interactive: bool = False
    whole: bool = False
    since: float = 0.0
    until: float = 1.0

    @property
    def demand(self) -> int:
        return self.count * self.milli


@dataclass(frozen=True, slots=True)
class Mix:
    """Mix: kinds of requests, and kinds of nodes. Each kind of nodes is (number of nodes, GPUs of each, cores of each,
    GPU model, GiB of each GPU)."""

    kinds: tuple[Kind, ...]
    nodes: tuple[tuple[int, int, int, str, int], ...] = ((16, 8, 96, "A", 80),)
    reversed: bool = False

    @property
    def capacity(self) -> int:
        return sum(number * gpus for number, gpus, *_ in self.nodes) * WHOLE_GPU


_MODELS = ((6, 8, 96, "A", 80), (6, 8, 64, "B", 40), (8, 4, 48, "C", 16))
MIXES: dict[str, Mix] = {
    "tenths of 20 labels": Mix((Kind(0.5, 100, exclusion=20), Kind(0.25, 500), Kind(0.15, 1000), Kind(0.1, 1000, 4))),
    "0.4 of two, 8 labels": Mix((Kind(0.4, 400, 2, exclusion=8), Kind(0.4, 500), Kind(0.2, 1000, 4))),
    "whole nodes, 64 of 96 cores": Mix((Kind(0.1, 1000, 8, cpu=64_000), Kind(0.9, 500, cpu=6_000))),
    "labels that keep each other off": Mix(
        (
            Kind(0.3, 300, exclusion=8, anti_affinity=4),
            Kind(0.3, 300, anti_affinity=4),
            Kind(0.3, 500),
            Kind(0.1, 1000, 2),
        )
    ),
    "all rules at once": Mix(
        (
            Kind(0.2, 300, exclusion=6),
            Kind(0.2, 500, models=("A",)),
            Kind(0.2, 250, interactive=True),
            Kind(0.2, 50, memory=12),
            Kind(0.1, 400, models=("B", "C"), anti_affinity=5),
            Kind(0.1, 1000, 2),
        ),
        _MODELS,
    ),
    "memory of all sizes": Mix(
        (Kind(0.3, 200, memory=20), Kind(0.3, 500, memory=8), Kind(0.2, 300, memory=36), Kind(0.2, 700)), _MODELS
    ),
    "labels on three GPUs": Mix((Kind(0.4, 200, exclusion=2), Kind(0.6, 500)), ((1, 3, 32, "A", 80),)),
    "labels on four nodes of one": Mix((Kind(0.4, 300, exclusion=3), Kind(0.6, 400)), ((4, 1, 16, "A", 80),)),
    "a label that appears late": Mix(
        (Kind(0.4, 300, exclusion=12, since=0.6), Kind(0.5, 500), Kind(0.2, 1000, 2), Kind(0.4, 300, until=0.6))
    ),
    "exclusive nodes with much CPU": Mix(
        (Kind(0.06, 1000, 8, cpu=88_000, whole=True), Kind(0.5, 300, cpu=8_000), Kind(0.3, 500, cpu=2_000))
    ),
    "wholes and 0.3": Mix((Kind(0.5, 1000), Kind(0.5, 300)), ((13, 8, 96, "A", 80),)),
    "fours of Interactive and halves": Mix(
        (Kind(0.3, 300, interactive=True), Kind(0.4, 500), Kind(0.2, 700), Kind(0.1, 1000, 4))
    ),
}
MIXES |= {
    f"{name}, reversed": replace(MIXES[name], reversed=True) for name in ("tenths of 20 labels", "0.4 of two, 8 labels")
}


@dataclass(frozen=True, slots=True)
class _Visit:
    start: float
    end: float
    request: PlacementRequest
    demand: int


def _request(kind: Kind, number: int, chance: random.Random) -> PlacementRequest:
    labels = SchedulingLabels(
        exclusion=f"x{chance.randrange(kind.exclusion)}" if kind.exclusion else None,
        anti_affinity=f"a{chance.randrange(kind.anti_affinity)}" if kind.anti_affinity else None,
    )
    gpu = GpuRequest(
        request_milli=Milli(kind.milli),
        limit_milli=WHOLE_GPU,
        memory=None if kind.memory is None else Bytes(kind.memory * GIB),
        count=kind.count,
        models=kind.models,
        labels=labels,
        mode=Mode.EXCLUSIVE if kind.whole else Mode.SHARED,
        latency=Latency.INTERACTIVE if kind.interactive else Latency.NORMAL,
    )
    name = f"pod-{number}"
    needs = PodNeeds(resources=Resources(kind.cpu, 0))
    return PlacementRequest(tenant=TenantId(name), namespace="team", name=name, gpu=gpu, pod=needs)


def visits(mix: Mix, seed: int, load: float, arrivals: int) -> list[_Visit]:
    """Draw Poisson arrivals of a mix. `load`: average demand without refusals, relative to the capacity."""
    chance = random.Random(seed)
    now, found = 0.0, []
    for number in range(arrivals):
        kinds = [kind for kind in mix.kinds if kind.since <= number / arrivals < kind.until]
        weights = [kind.weight for kind in kinds]
        mean = sum(kind.weight * kind.demand for kind in kinds) / sum(weights)
        now += chance.expovariate(load * mix.capacity / mean)
        kind = chance.choices(kinds, weights)[0]
        found.append(_Visit(now, now + chance.expovariate(1.0), _request(kind, number, chance), kind.demand))
    if mix.reversed:
        found = [
            replace(item, start=now - item.start, end=now - item.start + item.end - item.start) for item in found[::-1]
        ]
    return found


class Learning:
    """The placement engine, which learns from arriving requests."""

    def __init__(self, mix: Mix, _: Sequence[_Visit]) -> None:
        self.cluster = Cluster()
        self.engine = Engine(self.cluster)
        for size, (number, gpus, cores, model, memory) in enumerate(mix.nodes):
            for each in range(number):
                name = f"node-{size}-{each:03}"
                states = tuple(
                    GpuState(uuid=GpuUuid(f"GPU-{name}-{index}"), index=index, model=model, memory=Bytes(memory * GIB))
                    for index in range(gpus)
                )
                allocatable = Resources(cores * 1000, 1 << 40)
                self.cluster.upsert_node(NodeState(name=name, allocatable=allocatable, pods=500, gpus=states))

    def place(self, request: PlacementRequest) -> Assignment | None:
        self.engine.packing.arrived(request)
        if self.engine.packing.due:
            self.engine.packing.renew()
        return self._taken(request, self.engine.find(request))

    def _taken(self, request: PlacementRequest, found: Assignment | None) -> Assignment | None:
        if found is not None:
            self.engine.reserve(request, found)
        return found

    def leave(self, request: PlacementRequest, place: Assignment) -> None:
        self.cluster.release(place.node, request.tenant)
        self.engine.packing.settle()


class Unlearned(Learning):
    """Policy: the placement engine before it has learned a demand. It then places by best fit."""

    def place(self, request: PlacementRequest) -> Assignment | None:
        return self._taken(request, self.engine.find(request))


class Fgd(Learning):
    """Policy: FGD, behind the engine's filters. It knows the mix from the start."""

    def __init__(self, mix: Mix, coming: Sequence[_Visit]) -> None:
        super().__init__(mix, coming)
        counts: dict[object, float] = {}
        for visit in coming:
            if (known := class_of(visit.request)) is not None:
                counts[known] = counts.get(known, 0.0) + 1 / len(coming)
        self._models = sorted({node[3] for node in mix.nodes})
        self._sizes = sorted({node[4] * GIB for node in mix.nodes})
        usable = UsableCapacity(counts, models=self._models, sizes=self._sizes, mix=1.0)  # type: ignore[arg-type]
        self._definition = Definition(usable)

    def place(self, request: PlacementRequest) -> Assignment | None:
        best: tuple[float, str, list[GpuUuid]] | None = None
        asked = request.gpu
        for node, passing in candidates(self.cluster.nodes(), request):
            gpus = list(node.gpus)
            time = np.array([0 if gpu.exclusive else gpu.free_milli for gpu in gpus])
            memory = np.array([gpu.free_memory * WHOLE_GPU // gpu.state.memory for gpu in gpus])
            size = np.array([self._sizes.index(gpu.state.memory) for gpu in gpus])
            model = np.array([self._models.index(gpus[0].state.model)])
            free = node.taken().free.cpu_milli
            before = self._unusable(time, memory, size, free, model)
            options = [[gpu] for gpu in passing] if asked.count == 1 else [list(passing[: asked.count])]
            for option in options:
                at = [gpu.index for gpu in option]
                left, left_memory = time.copy(), memory.copy()
                left[at] -= asked.request_milli
                takes = [asked.memory_on(gpu.state.memory) * WHOLE_GPU // gpu.state.memory for gpu in option]
                left_memory[at] -= np.array(takes)
                grows = self._unusable(left, left_memory, size, free - request.pod.resources.cpu_milli, model) - before
                if best is None or (round(grows), node.name) < (round(best[0]), best[1]):
                    best = grows, node.name, [gpu.state.uuid for gpu in option]
        if best is None:
            return None
        named = replace(request, gpu=replace(asked, uuids=tuple(best[2])))
        return self._taken(request, self.engine.find(named))

    def _unusable(self, time: object, memory: object, size: object, cpu: int, model: object) -> float:
        floor, at = np.maximum(time, 0), np.maximum(memory, 0)  # type: ignore[call-overload]
        sums = self._definition.gpus(floor, at, size).sum(axis=0)[None, :]  # type: ignore[arg-type]
        return float(floor.sum() - self._definition.value(sums, np.array([cpu], dtype=np.float32), model)[0])  # type: ignore[arg-type]


Make = Callable[[Mix, Sequence[_Visit]], Learning]
POLICIES: dict[str, Make] = {"SharePod": Learning, "BestFit": Unlearned, "FGD": Fgd}


def turned_away(make: Make, mix: Mix, seed: int, load: float, arrivals: int = ARRIVALS) -> float:
    """Return the part of the arriving GPU demand that a policy refuses, in per cent."""
    coming = visits(mix, seed, load, arrivals)
    policy = make(mix, coming)
    leaving: list[tuple[float, int, PlacementRequest, Assignment]] = []
    asked = refused = 0
    for number, visit in enumerate(coming):
        while leaving and leaving[0][0] <= visit.start:
            policy.leave(*heapq.heappop(leaving)[2:])
        place = policy.place(visit.request)
        if place is not None:
            heapq.heappush(leaving, (visit.end, number, visit.request, place))
        if visit.start >= WARM_UP:
            asked += visit.demand
            refused += 0 if place is not None else visit.demand
    return refused * 100 / asked if asked else 0.0


def mix_rows(seeds: Sequence[int], loads: Sequence[float], begins: str = "") -> list[Row]:
    """Return the rows of all policies: means over the seeds, and paired differences. `begins`: only mixes whose names
    begin with it."""
    rows = []
    for name, mix in MIXES.items():
        for load in loads if name.startswith(begins) else ():
            away = {policy: [turned_away(make, mix, seed, load) for seed in seeds] for policy, make in POLICIES.items()}
            case = f"{name}, load {load:g}"
            rows += [Row(f"{case} {policy}", "turned_away", "%", fmean(values)) for policy, values in away.items()]
            rows += paired_rows(case, away, against="SharePod")
    return rows
