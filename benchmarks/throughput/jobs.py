"""Jobs of a replay: the requests of a trace, each with a service time, a duty (part of the time that is GPU work) and a
step.

`ASSUMPTIONS`, which the benchmark prints, lists all assumptions about them.
"""

from __future__ import annotations

import csv
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from packing_trace import GIB, TraceError, TraceNode, TracePod, generated, read_nodes, read_pods

LONGEST_S = 6 * 3600.0
"""Longest service time of a job in seconds. Longer jobs (5 % of the default trace) are shortened to it: otherwise the
result of a few days would depend on a few jobs."""
SHORTEST_S = 10.0
"""Shortest service time of a job in seconds. Shorter jobs (mostly pods that failed at their start) are lengthened to
it: they would only add changes of holders."""
MEDIAN_S, SIGMA = 655.0, 1.8
"""Median in seconds and shape of the log-normal distribution of service times, for a trace without times. The values
come from the default trace."""
NEEDS = (0.5, 1.0, 1.5)
"""GPU work of a job with a share, as a multiple of its request. Each value is equally likely: on average users request
what they need, and requests above the need are as frequent as requests below it."""
WHOLE_DUTIES = (0.6, 0.8, 1.0)
"""GPU work of a job with whole GPUs, as a part of the time. Each value is equally likely. The work counts as used GPU
time and changes nothing else."""
SHORT_STEP_MS, LONG_STEP_MS = 40, 160
"""Length of a step without neighbours in ms, with its work and its pause: a batch of inference, and a step of
training."""
TRAINS_FROM = 400
"""Least request of a training, in thousandths of a GPU. A job with a smaller request serves inference."""
SMALL_SHARES = (100, 200, 300, 400, 500)
"""Requests of the workload `small shares`, in thousandths of a GPU. Each is equally likely: the mean is 0.3 of a
GPU."""

ASSUMPTIONS = (
    ("service time", "of the trace (scheduled to deleted), 10 s to 6 h; else log-normal, median 655 s, sigma 1.8"),
    ("", "it is taken for the job's time with its GPUs to itself"),
    ("duty", "part of a step that is GPU work, alone: 0.5, 1 or 1.5 times the request, at most 1, each as likely"),
    ("duty, whole GPUs", "0.6, 0.8 or 1, each as likely; jobs that ask for whole GPUs do not share them"),
    ("step", "40 ms below a request of 0.4, else 160 ms; the pause varies by half; kernels of 2 ms"),
    ("hand-off", "0.7 ms from one tenant's last kernel to the next one's first"),
    ("GPU memory", "in proportion to the request"),
    ("arrivals", "Poisson; each the pod and the time of a random line of the trace"),
    ("load", "GPU time that the arrivals would take with whole GPUs each, by the GPU time there is"),
    ("queue", "the operator's: oldest first, a job that fits may overtake, GPUs kept for the oldest after 10 min"),
    ("static", "the request is also the limit: the same scheduler, which lends nothing"),
    ("not modelled", "interference in caches, PCIe and memory bandwidth; memory that does not fit; start-up times"),
)
"""Assumptions as (name, value). A line with an empty name continues the previous one."""


@dataclass(frozen=True, slots=True)
class Job:
    """One job of a replay."""

    number: int
    arrives_s: float
    pod: TracePod
    service_s: float
    """Seconds for which the job runs if it has its GPUs to itself."""
    duty: int
    """Part of a step without neighbours that is GPU work, in thousandths."""

    @property
    def step_ms(self) -> int:
        """Length of a step without neighbours, in ms."""
        return LONG_STEP_MS if self.pod.milli >= TRAINS_FROM else SHORT_STEP_MS


@dataclass(frozen=True, slots=True)
class Workload:
    """Nodes, and the pods from which each arriving job is drawn at random."""

    name: str
    nodes: tuple[TraceNode, ...]
    lines: tuple[tuple[TracePod, float], ...]
    """Pods, each with its service time in seconds."""

    @property
    def gpus(self) -> int:
        """Number of GPUs."""
        return sum(node.gpus for node in self.nodes)

    @property
    def whole_part(self) -> float:
        """Part of the GPU time that jobs with whole GPUs would take if every job had whole GPUs."""
        of_all = sum(pod.gpus * seconds for pod, seconds in self.lines)
        return sum(pod.gpus * seconds for pod, seconds in self.lines if pod.milli >= 1000) / of_all

    def bound(self) -> float:
        """Return the largest factor by which sharing can increase the number of finished jobs, with perfect packing and
        no slowdown.

        The result comes from the least GPU time that the requests need (bound L2 of Martello and Toth for bin packing,
        weighted by time): no two requests above a half fit on one GPU, and the rest of such a GPU takes only requests
        down to a size `least`.
        """
        weights: dict[int, float] = {}
        for pod, seconds in self.lines:
            weights[pod.milli] = weights.get(pod.milli, 0.0) + pod.gpus * seconds
        needed = 0.0
        for least in (0, *(milli for milli in weights if milli <= 500)):
            own = sum(weight for milli, weight in weights.items() if milli > 1000 - least)
            halves = {milli: weight for milli, weight in weights.items() if 500 < milli <= 1000 - least}
            room = sum(weight * (1000 - milli) for milli, weight in halves.items())
            small = sum(weight * milli for milli, weight in weights.items() if least <= milli <= 500)
            needed = max(needed, own + sum(halves.values()) + max(0.0, small - room) / 1000)
        return sum(weights.values()) / needed

    def draw(self, load: float, days: float, seed: int) -> list[Job]:
        """Draw the jobs that arrive within `days`. If each had whole GPUs, they would need `load` times the GPU time of
        the nodes."""
        chance = random.Random(seed)
        mean_gpu_s = sum(pod.gpus * seconds for pod, seconds in self.lines) / len(self.lines)
        per_s = load * self.gpus / mean_gpu_s
        jobs: list[Job] = []
        now = chance.expovariate(per_s)
        while now < days * 86400:
            pod, seconds = self.lines[chance.randrange(len(self.lines))]
            if pod.milli < 1000:
                duty = min(1000, round(pod.milli * chance.choice(NEEDS)))
            else:
                duty = round(1000 * chance.choice(WHOLE_DUTIES))
            jobs.append(Job(len(jobs), now, pod, seconds, duty))
            now += chance.expovariate(per_s)
        return jobs


def of_trace(folder: Path, names: Sequence[str], node_count: int) -> list[Workload]:
    """Read the traces of these names. Raises `TraceError` if a file is missing or is no trace."""
    # If a trace was published with two lists of nodes, one of them contains only the nodes with GPUs.
    node_files = sorted(folder.glob("*node_list*.csv"), key=lambda path: ("gpu_node" not in path.name, path))
    files = {path.stem.rpartition("pod_list_")[2]: path for path in sorted(folder.glob("*pod_list*.csv"))}
    if not node_files or not files:
        raise TraceError(f"{folder} has no *node_list*.csv or no *pod_list*.csv")
    missing = [name for name in names if name not in files]
    if missing:
        raise TraceError(f"{folder} has no trace {', '.join(missing)}; there are {', '.join(files)}")
    nodes = sample(read_nodes(node_files[0], {}), node_count)
    return [Workload(name, nodes, _lines(files[name], nodes)) for name in names]


def drawn(node_count: int, seed: int) -> Workload:
    """Make a mixed workload without a trace: the Pods with GPUs of a generated large cluster that fit one of
    `node_count` of its nodes."""
    all_nodes, pods = generated()
    nodes, chance = sample(all_nodes, node_count), random.Random(seed)
    lines = [(pod, service_s(None, chance)) for pod in pods if pod.gpus and any(_takes(node, pod) for node in nodes)]
    return Workload("generated", nodes, tuple(lines))


def small_shares(node_count: int, seed: int) -> Workload:
    """Make a workload of small shares only, on nodes of eight GPUs."""
    chance = random.Random(seed)
    nodes = tuple(
        TraceNode(f"node-{number:03}", 128_000, 786_432, 8, "A", 40 * GIB) for number in range(node_count * 5 // 8)
    )
    lines = tuple(
        (TracePod(2000, 8192, 1, chance.choice(SMALL_SHARES), ()), service_s(None, chance)) for _ in range(5000)
    )
    return Workload("small shares", nodes, lines)


def sample(nodes: Sequence[TraceNode], count: int) -> tuple[TraceNode, ...]:
    """Return `count` nodes with the trace's mix of hardware: they are spread evenly over the list of nodes, sorted by
    hardware."""
    order = sorted(nodes, key=lambda node: (node.model, node.gpus, node.cpu, node.name))
    return tuple(order[index * len(order) // count] for index in range(min(count, len(order))))


def _lines(path: Path, nodes: Sequence[TraceNode]) -> tuple[tuple[TracePod, float], ...]:
    """Read the pods with GPUs that fit one of these nodes."""
    chance = random.Random(0)
    pods = read_pods(path)
    with path.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    lines = [
        (pod, service_s(_ran_s(row), chance))
        for pod, row in zip(pods, rows, strict=True)
        if pod.gpus and any(_takes(node, pod) for node in nodes)
    ]
    if not lines:
        raise TraceError(f"{path}: no pod asks for a GPU that one of the nodes has")
    return tuple(lines)


def _takes(node: TraceNode, pod: TracePod) -> bool:
    fits = node.gpus >= pod.gpus and node.cpu >= pod.cpu and node.memory >= pod.memory
    return fits and (not pod.models or node.model in pod.models)


def _ran_s(row: dict[str, str]) -> float | None:
    """Return the seconds for which a pod of the trace ran. None if its line has no times."""
    try:
        return float(row["deletion_time"]) - float(row["scheduled_time"])
    except (KeyError, ValueError):
        return None


def service_s(ran_s: float | None, chance: random.Random) -> float:
    """Return the service time of a job in seconds: from the trace, or drawn if `ran_s` is None; within the bounds of
    all jobs."""
    seconds = chance.lognormvariate(0.0, SIGMA) * MEDIAN_S if ran_s is None else ran_s
    return min(LONGEST_S, max(SHORTEST_S, seconds))
