"""Traces of GPU requests: read from files in the format of Alibaba's cluster-trace-gpu-v2023, whose columns are found
by their header, or generated.

The seed of a replay fixes its order: the trace's pods in random order, then random pods of the trace until the
requested GPU time reaches a multiple of the capacity.
"""

from __future__ import annotations

import csv
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path


@dataclass(frozen=True, slots=True)
class TraceNode:
    """Node of a trace. `memory` is in MiB. All its `gpus` GPUs have the same `model`. `gpu_memory`: bytes of
    each GPU."""

    name: str
    cpu: int
    memory: int
    gpus: int
    model: str
    gpu_memory: int


@dataclass(frozen=True, slots=True)
class TracePod:
    """Pod of a trace. It requests `milli` thousandths of each of `gpus` GPUs of one of `models` (empty: of any model).
    `gpu_memory`: bytes on each GPU; None: in proportion to the time."""

    cpu: int
    memory: int
    gpus: int
    milli: int
    models: tuple[str, ...]
    gpu_memory: int | None = None

    @property
    def demand(self) -> int:
        """Return the demand in thousandths of a GPU."""
        return self.gpus * self.milli


class TraceError(Exception):
    """Error in a trace file. The message names the file and the reason."""


GIB = 1 << 30
_DEFAULT_GPU_MEMORY = 16 * GIB


def read_nodes(path: Path, gpu_memory: dict[str, int]) -> list[TraceNode]:
    """Read the nodes of a trace. `gpu_memory`: bytes of each GPU, by model; GPUs of other models have 16 GiB."""
    nodes = []
    for line, row in _rows(path, ("cpu_milli", "memory_mib", "gpu", "model")):
        count, model = _number(path, line, row, "gpu"), row["model"]
        size = gpu_memory.get(model, _DEFAULT_GPU_MEMORY)
        name = row.get("sn") or f"node-{line:06}"
        cpu, memory = _number(path, line, row, "cpu_milli"), _number(path, line, row, "memory_mib")
        nodes.append(TraceNode(name, cpu, memory, count, model, size))
    return nodes


def read_pods(path: Path) -> list[TracePod]:
    """Read the pods of a trace.

    Without the column `gpu_spec`, a pod may use any model. The column `gpu_memory_mib`, which the published traces
    lack, is read if present.
    """
    pods = []
    for line, row in _rows(path, ("cpu_milli", "memory_mib", "num_gpu", "gpu_milli")):
        count = _number(path, line, row, "num_gpu")
        milli = 1000 if count > 1 else _number(path, line, row, "gpu_milli") if count else 0
        if count == 1 and not 0 < milli <= 1000:
            raise TraceError(f"{path}, line {line}: gpu_milli {milli} is not in 1..1000")
        models = tuple(model for model in (row.get("gpu_spec") or "").split("|") if model)
        memory = _number(path, line, row, "gpu_memory_mib") << 20 if row.get("gpu_memory_mib") else None
        cpu, ram = _number(path, line, row, "cpu_milli"), _number(path, line, row, "memory_mib")
        pods.append(TracePod(cpu, ram, count, milli, models, memory))
    return pods


def _rows(path: Path, columns: Sequence[str]) -> list[tuple[int, dict[str, str]]]:
    with path.open(newline="") as file:
        reader = csv.DictReader(file)
        missing = [column for column in columns if column not in (reader.fieldnames or ())]
        if missing:
            raise TraceError(f"{path}: no column {', '.join(missing)}; there are {', '.join(reader.fieldnames or ())}")
        return [(number, row) for number, row in enumerate(reader, start=2)]


def _number(path: Path, line: int, row: dict[str, str], column: str) -> int:
    try:
        return int(float(row[column] or ""))
    except (TypeError, ValueError, OverflowError):
        raise TraceError(f"{path}, line {line}: {column} {row[column]!r} is not a number") from None


def generated(count: int = 300, seed: int = 0) -> tuple[list[TraceNode], list[TracePod]]:
    """Generate a cluster and requests, for use without a trace. The nodes have three GPU models. Some pods request
    shares, some whole GPUs, some name a model, and some request no GPU."""
    chance = random.Random(seed)
    kinds = [(96_000, 8, "A", 40), (64_000, 4, "B", 24), (104_000, 2, "C", 16)]
    nodes = []
    for number in range(count):
        cpu, gpus, model, memory = chance.choices(kinds, (3, 2, 4))[0]
        nodes.append(TraceNode(f"node-{number:05}", cpu, cpu * 4, gpus, model, memory * GIB))
    total = sum(node.gpus for node in nodes) * 1000
    pods: list[TracePod] = []
    while sum(pod.demand for pod in pods) < total:
        gpus = chance.choices((0, 1, 2, 4, 8), (15, 75, 4, 3, 3))[0]
        milli = chance.choices((100, 200, 250, 300, 460, 500, 700, 1000), (8, 8, 8, 8, 12, 12, 8, 36))[0]
        cpu = chance.choice((2000, 4000, 6000, 8000, 12000)) * max(gpus, 1)
        models = chance.choices(((), ("A",), ("B", "C"), ("C",)), (70, 12, 10, 8))[0] if gpus and gpus <= 2 else ()
        pods.append(TracePod(cpu, cpu * 3, gpus, milli if gpus == 1 else 1000 if gpus else 0, models))
    return nodes, pods


def with_memory(pods: Sequence[TracePod], seed: int, largest: int) -> list[TracePod]:
    """Return the same pods, with GPU memory drawn independently of their time: from an eighth of `largest` bytes to all
    of them."""
    chance = random.Random(seed)
    steps = (1, 1, 2, 2, 3, 4, 6, 8)
    drawn = {pod: chance.choice(steps) * largest // 8 for pod in dict.fromkeys(pods) if pod.gpus == 1}
    return [replace(pod, gpu_memory=drawn[pod]) if pod.gpus == 1 else pod for pod in pods]


def arrivals(pods: Sequence[TracePod], capacity: int, seed: int, ratio: float) -> list[TracePod]:
    """Return the trace's pods in random order, followed by randomly drawn pods of the trace, until the demand reaches
    `ratio` of the capacity."""
    chance = random.Random(seed)
    order = list(pods)
    chance.shuffle(order)
    demand = sum(pod.demand for pod in order)
    while demand < ratio * capacity:
        pod = chance.choice(pods)
        demand += pod.demand
        order.append(pod)
    return order


@dataclass(frozen=True, slots=True)
class Visit:
    """Pod that arrives at `start` and, if it is admitted, leaves at `end`. Both are in mean lifetimes of a pod."""

    start: float
    end: float
    pod: TracePod


def visits(pods: Sequence[TracePod], capacity: int, seed: int, load: float, lifetimes: float) -> list[Visit]:
    """Return Poisson arrivals with exponential lifetimes of mean 1 and, without refusals, an average demand of `load`
    of the capacity."""
    chance = random.Random(seed)
    rate = load * capacity * len(pods) / sum(pod.demand for pod in pods)
    now = 0.0
    found: list[Visit] = []
    while True:
        now += chance.expovariate(rate)
        if now > lifetimes:
            return found
        found.append(Visit(now, now + chance.expovariate(1.0), chance.choice(pods)))
