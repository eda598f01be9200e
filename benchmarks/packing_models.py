"""Random mixes of GPU models whose requests name memory, so that time or memory of a GPU runs out first.

A mix consists of 60 nodes with two to four GPU models of 16 to 80 GiB, and of 4 to 12 kinds of requests, all drawn at
random. The memory of a request does not depend on its time: a request of 0.3 of the time may take all memory. So a
policy can allocate more GPU time by refusing requests with much memory. Therefore the rows have three figures for
arrivals of 130 % of the capacity, and one figure for pods that arrive and leave:

- `allocated_130`: % of all GPU time.
- `occupied_130`: % of the GPUs, where a request counts with its part of the time or of the memory, whichever is larger.
- `placed_130`: % of the requests.
- `turned_away`: % of the arriving GPU time that is refused at the load.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean, stdev

from packing_policies import Policy
from packing_trace import GIB, TraceNode, TracePod, arrivals
from results import Row
from sharepod.api.units import WHOLE_GPU

_MODELS = (
    ("T4", 64_000, 16),
    ("A10", 96_000, 24),
    ("V100", 96_000, 32),
    ("A100", 96_000, 40),
    ("L40S", 128_000, 48),
    ("H100", 128_000, 80),
)
"""(name, thousandths of a core in a node with eight such GPUs, GiB of each GPU) of each GPU model."""
_NODES, _ARRIVED, _SEEDS = 60, 1.3, (1, 2)
_TIMES = (50, 100, 150, 200, 250, 300, 400, 500, 600, 700, 1000)
_MEMORY = (None, 1, 2, 4, 6, 8, 10, 12, 16, 20, 24, 30, 40, 60)
"""GiB of memory that a request may have on each GPU; None: in proportion to the time."""

Make = Callable[[Sequence[TraceNode], Sequence[TracePod]], Policy]
Away = Callable[[Policy, Sequence[TracePod], int, int, float], float]


def mix(number: int) -> tuple[list[TraceNode], list[TracePod]]:
    """Return the nodes of a random mix, and requests whose GPU time sums to the capacity of the nodes. `number`: seed
    of the mix."""
    chance = random.Random(number)
    models = chance.sample(_MODELS, chance.choice((2, 3, 4)))
    nodes = []
    for index in range(_NODES):
        model, cpu, memory = chance.choice(models)
        gpus = chance.choice((4, 8, 8, 8))
        nodes.append(TraceNode(f"node-{index:03}", cpu * gpus // 8, cpu * gpus // 2, gpus, model, memory * GIB))
    largest = max(memory for *_, memory in models)
    kinds: list[TracePod] = []
    for _ in range(chance.choice((4, 6, 8, 12))):
        gpus = chance.choices((1, 2, 4, 8), (85, 6, 5, 4))[0]
        gib = chance.choice([size for size in _MEMORY if size is None or size <= largest]) if gpus == 1 else None
        only = (chance.choice(models)[0],) if chance.random() < 0.2 else ()
        milli = chance.choice(_TIMES) if gpus == 1 else WHOLE_GPU
        kinds.append(TracePod(2000 * gpus, 6000 * gpus, gpus, milli, only, None if gib is None else gib * GIB))
    weights = [chance.random() for _ in kinds]
    capacity = capacity_of(nodes)
    pods: list[TracePod] = []
    while sum(pod.demand for pod in pods) < capacity:
        pods += chance.choices(kinds, weights, k=50)
    return nodes, pods


def capacity_of(nodes: Sequence[TraceNode]) -> int:
    """Return the capacity of these nodes, in thousandths of a GPU."""
    return sum(node.gpus for node in nodes) * WHOLE_GPU


def filled(policy: Policy, nodes: Sequence[TraceNode], order: Sequence[TracePod]) -> dict[str, float]:
    """Place pods in this order. Return the figures that the header lists for arrivals of 130 %."""
    memory = {node.name: node.gpu_memory for node in nodes}
    allocated = occupied = placed = 0
    for pod in order:
        place = policy.place(pod)
        if place is None:
            continue
        at = place[0]  # type: ignore[index]
        size = memory[at] if isinstance(at, str) else nodes[at].gpu_memory
        of_memory = pod.milli if pod.gpu_memory is None else -(-pod.gpu_memory * WHOLE_GPU // size)
        allocated += pod.demand
        occupied += pod.gpus * max(pod.milli, of_memory)
        placed += 1
    capacity = capacity_of(nodes)
    return {
        "allocated_130": allocated * 100 / capacity,
        "occupied_130": occupied * 100 / capacity,
        "placed_130": placed * 100 / len(order),
    }


def model_rows(makers: Mapping[str, Make], away: Away, mixes: int, load: float) -> list[Row]:
    """Return the rows of all policies: means over the mixes. For each policy but the first, add the mean lead of the
    first over it, with the standard error."""
    found: dict[str, list[dict[str, float]]] = {policy: [] for policy in makers}
    for number in range(mixes):
        nodes, pods = mix(number)
        capacity = capacity_of(nodes)
        for policy, make in makers.items():
            each = [
                filled(make(nodes, pods), nodes, arrivals(pods, capacity, seed, _ARRIVED))
                | {"turned_away": away(make(nodes, pods), pods, capacity, seed, load)}
                for seed in _SEEDS
            ]
            found[policy].append({metric: fmean(one[metric] for one in each) for metric in each[0]})
    rows = []
    first = next(iter(makers))
    for policy, figures in found.items():
        for metric in figures[0]:
            case = f"models, load {load:g} {policy}" if metric == "turned_away" else f"models {policy}"
            rows.append(Row(case, metric, "%", fmean(one[metric] for one in figures)))
            if policy != first:
                lead = [mine[metric] - one[metric] for mine, one in zip(found[first], figures, strict=True)]
                rows.append(Row(f"{case}: {first}'s lead", metric, "points", fmean(lead)))
                rows.append(Row(f"{case}: {first}'s lead", f"{metric}_error", "points", stdev(lead) / len(lead) ** 0.5))
    return rows
