"""Duration of a decision on 100 to 50,000 GPUs, half full and 95 % full, under mixed rules.

`decisions_per_s` counts all work: deciding, reserving, releasing as many tenants as arrive, learning and renewing the
weights. p50 and p99 are of the decision only. `growth`: p50 and p99 relative to the previous size. The same run also
measures the direct way: for each decision, the model is built from its objects, and every node and GPU is checked. Each
size runs in a separate process. `memory`: memory of that process after building the model. `model`: increase by
building it. The last case has SharePods that each have a label of their own: it measures the processor time of the
longest slice in which the weights are renewed, without garbage collections. Prints a table and writes
`build/results/placement.json`.
"""

from __future__ import annotations

import argparse
import gc
import os
import random
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import pairwise
from multiprocessing import get_context
from pathlib import Path

import numpy as np
from results import Row, write
from sharepod.api.gpunode import Mode, SchedulingLabels
from sharepod.api.sharepod import GpuRequest, PlacementPolicy
from sharepod.api.units import WHOLE_GPU, Bytes, GpuUuid, Milli, TenantId
from sharepod.placement.engine import Engine
from sharepod.placement.filters import gpu as gpu_filters
from sharepod.placement.filters import node as node_filters
from sharepod.placement.policies import policy_for
from sharepod.placement.state.cluster import Cluster
from sharepod.placement.state.types import (
    GpuState,
    NodeState,
    PlacementRequest,
    PodNeeds,
    Reservation,
    Resources,
    Toleration,
)

PROMISES = {"placement-bounded": ("max", "p99")}
GIB = 1 << 30
SIZES = (100, 1_000, 10_000, 50_000)
FILLS = {"half full": 0.5, "95 % full": 0.95}
LABELS = (10_000, 12_000)
"""(number of GPUs, number of SharePods) in the case in which each SharePod has a label of its own."""
MODELS = (("A100", 80), ("L4", 24), ("T4", 16))
SHARES = (100, 200, 250, 300, 400, 500, 700, 1000)
KINDS = {
    "share": 60,
    "memory": 8,
    "model": 8,
    "two": 4,
    "exclusion": 5,
    "anti-affinity": 4,
    "affinity": 3,
    "spread": 3,
    "best effort": 3,
    "exclusive": 2,
}


def node_states(gpus: int) -> list[NodeState]:
    """Return the nodes for this number of GPUs: eight on each, and the rest on the last one."""
    states = []
    for number, first in enumerate(range(0, gpus, 8)):
        name = f"node-{number:05}"
        model, memory = MODELS[number % len(MODELS)]
        states.append(
            NodeState(
                name=name,
                labels={"zone": f"z{number % 3}"},
                allocatable=Resources(128_000, 1024 * GIB),
                pods=500,
                gpus=tuple(
                    GpuState(uuid=GpuUuid(f"GPU-{name}-{index}"), index=index, model=model, memory=Bytes(memory * GIB))
                    for index in range(min(8, gpus - first))
                ),
            )
        )
    return states


def requests(seed: int) -> Iterator[PlacementRequest]:
    """Yield requests of all kinds without end."""
    chance = random.Random(seed)
    number = 0
    while True:
        number += 1
        kind = chance.choices(list(KINDS), list(KINDS.values()))[0]
        share = Milli(chance.choice(SHARES))
        group = f"g{chance.randrange(50)}"
        whole = kind == "exclusive"
        memory = Bytes(chance.choice((1, 2, 4, 8)) * GIB) if kind in ("memory", "best effort") else None
        gpu = GpuRequest(
            request_milli=WHOLE_GPU if whole else Milli(0) if kind == "best effort" else share,
            limit_milli=WHOLE_GPU,
            memory=memory,
            count=2 if kind == "two" else 1,
            mode=Mode.EXCLUSIVE if whole else Mode.SHARED,
            labels=SchedulingLabels(
                affinity=f"{group}-{number // 400}" if kind == "affinity" else None,
                anti_affinity=group if kind == "anti-affinity" else None,
                exclusion=f"x{chance.randrange(3)}" if kind == "exclusion" else None,
            ),
            placement=PlacementPolicy.SPREAD if kind == "spread" else PlacementPolicy.BINPACK,
            models=chance.choice((("A100",), ("L4", "T4"))) if kind == "model" else (),
        )
        cores = chance.choice((1000, 2000, 4000, 8000))
        tolerations = (Toleration(key="gpu", operator="Exists"),) if chance.random() < 0.2 else ()
        yield PlacementRequest(
            tenant=TenantId(f"tenant-{seed}-{number}"),
            namespace=f"team-{chance.randrange(5)}",
            name=f"pod-{number}",
            gpu=gpu,
            pod=PodNeeds(resources=Resources(cores, 4 * GIB), tolerations=tolerations),
            owner=group if kind == "spread" else None,
        )


def filled(states: Sequence[NodeState], fill: float, seed: int) -> tuple[Cluster, list[tuple[str, TenantId]]]:
    """Return a cluster whose GPUs are filled to the part `fill`, and its tenants, each with its node."""
    chance = random.Random(seed)
    cluster = Cluster()
    held = []
    for state in states:
        cluster.upsert_node(state)
    for state in states:
        rows = []
        for gpu in state.gpus:
            used, goal = 0, min(1000, round(1000 * chance.triangular(0.0, 1.0, fill) if fill < 0.9 else 950))
            while used < goal:
                share = min(chance.choice(SHARES[:6]), 1000 - used)
                used += share
                tenant = TenantId(f"old-{gpu.uuid}-{used}")
                rows.append(
                    Reservation(
                        tenant=tenant,
                        namespace="team-0",
                        pod_name=str(tenant),
                        gpus=(gpu.uuid,),
                        request_milli=Milli(share),
                        limit_milli=WHOLE_GPU,
                        memory=Bytes(gpu.memory * share // 1000),
                        needs=Resources(2000, 4 * GIB),
                    )
                )
                held.append((state.name, tenant))
        cluster.load(state.name, rows, 1)
    chance.shuffle(held)
    if fill >= 0.9:
        for _ in range(len(held) // 20):
            node, tenant = held.pop()
            cluster.release(node, tenant)
    return cluster, held


def scan(cluster: Cluster, request: PlacementRequest) -> str | None:
    """Decide the direct way: apply every filter to every node and GPU, and score the GPUs that pass."""
    node_checks = [check.passes for check in node_filters.STATIC + node_filters.DYNAMIC]
    checks = [check.passes for check in gpu_filters.static(request) + gpu_filters.dynamic(request)]
    policy = policy_for(request, first_of_group=False)
    best = None
    for node in cluster.nodes():
        if not all(passes(node, request) for passes in node_checks):
            continue
        passing = [gpu for gpu in node.gpus if all(passes(gpu) for passes in checks)]
        if len(passing) >= request.gpu.count:
            passing.sort(key=lambda gpu: policy.gpu(gpu, request))
            cost = (policy.node(node, passing[: request.gpu.count], request), node.name)
            best = cost if best is None or cost < best else best
    return None if best is None else best[1]


def rebuilt(states: Sequence[NodeState], cluster: Cluster) -> Cluster:
    fresh = Cluster()
    for state in states:
        fresh.upsert_node(state)
        fresh.load(state.name, cluster.reservations(state.name), 1)
    return fresh


def resident() -> float:
    """Return the resident memory of this process, in MiB."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / (1 << 20)


def measure(gpus: int, label: str, fill: float, count: int) -> list[Row]:
    return list(_measured(gpus, label, fill, count))


def _measured(gpus: int, label: str, fill: float, count: int) -> Iterator[Row]:
    before = resident()
    states = node_states(gpus)
    cluster, held = filled(states, fill, gpus)
    engine = Engine(cluster)
    arriving = requests(1)
    for _ in range(1000):
        engine.packing.arrived(next(arriving))
    engine.packing.renew()
    memory = resident()
    _settle_garbage()
    times: list[float] = []
    placed = 0
    for number in range(count + count // 4):
        if number == count // 4:
            times.clear()
            placed = 0
            started = time.perf_counter()
        request = next(arriving)
        engine.packing.arrived(request)
        if engine.packing.due:
            engine.packing.renew()
        began = time.perf_counter()
        answer = engine.find(request)
        times.append(time.perf_counter() - began)
        if answer is not None:
            placed += 1
            engine.reserve(request, answer)
            held.append((answer.node, request.tenant))
            cluster.release(*held.pop(random.Random(number).randrange(len(held))))
            engine.packing.settle()
    wall = time.perf_counter() - started
    case = f"{gpus} GPUs, {label}"
    p50, p99 = np.percentile(np.array(times) * 1e6, [50, 99])
    yield Row(case, "decisions_per_s", "1/s", count / wall)
    yield Row(case, "placed", "%", placed * 100 / count)
    yield Row(case, "p50", "us", float(p50))
    yield Row(case, "p99", "us", float(p99))
    yield Row(case, "memory", "MiB", memory)
    yield Row(case, "model", "MiB", memory - before)
    scans: list[float] = []
    while len(scans) < 20 and sum(scans) < 3.0:
        request = next(arriving)
        began = time.perf_counter()
        scan(rebuilt(states, cluster), request)
        scans.append(time.perf_counter() - began)
    yield Row(f"{case}, rebuild and scan", "p50", "us", float(np.median(scans) * 1e6))
    yield Row(f"{case}, rebuild and scan", "decisions_per_s", "1/s", len(scans) / sum(scans))


def _settle_garbage() -> None:
    """Set Python's garbage collector as the operator sets it after it has listed all objects."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000)


def label_rows(gpus: int, labels: int) -> Iterator[Row]:
    """Yield the longest slice of a renewal while SharePods arrive, each with its own label."""
    cluster = Cluster()
    engine = Engine(cluster)
    for state in node_states(gpus):
        cluster.upsert_node(state)
    _settle_garbage()
    slices: list[float] = []
    for number in range(labels):
        name = f"labelled-{number}"
        labels_of = (SchedulingLabels(exclusion=name), SchedulingLabels(anti_affinity=name), SchedulingLabels())
        gpu = GpuRequest(
            request_milli=Milli(300), limit_milli=WHOLE_GPU, memory=None, count=1, labels=labels_of[number % 3]
        )
        request = PlacementRequest(tenant=TenantId(name), namespace="team", name=name, gpu=gpu)
        engine.packing.arrived(request)
        if engine.packing.due:
            gc.disable()  # a collection would come after 20,000 new objects of any origin, and take about 5 ms
            began = time.thread_time()
            for _ in engine.packing.renewal():
                slices.append(time.thread_time() - began)
                began = time.thread_time()
            slices.append(time.thread_time() - began)
            gc.enable()
        answer = engine.find(request)
        if answer is not None:
            engine.reserve(request, answer)
    yield Row(f"{gpus} GPUs, {labels} SharePods, two of three with a label", "slice_max", "ms", max(slices) * 1e3)


def growth(rows: Sequence[Row], sizes: Sequence[int]) -> Iterator[Row]:
    """Yield p50 and p99 of each size, relative to the previous size."""
    values = {(row.case, row.metric): row.value for row in rows}
    for smaller, larger in pairwise(sizes):
        for label in FILLS:
            for metric in ("p50", "p99"):
                ratio = values[f"{larger} GPUs, {label}", metric] / values[f"{smaller} GPUs, {label}", metric]
                yield Row(f"{smaller} to {larger} GPUs, {label}", f"{metric}_growth", "x", ratio)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--sizes", type=lambda text: [int(part) for part in text.split(",")], default=list(SIZES))
    parser.add_argument("--decisions", type=int, default=4000)
    options = parser.parse_args(arguments)
    rows: list[Row] = []
    for gpus in options.sizes:
        for label, fill in FILLS.items():
            with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as alone:
                rows += alone.submit(measure, gpus, label, fill, options.decisions).result()
            print(f"{gpus} GPUs, {label}: done", file=sys.stderr, flush=True)
    write("placement", [*rows, *growth(rows, options.sizes), *label_rows(*LABELS)])
    return 0


if __name__ == "__main__":
    sys.exit(main())
