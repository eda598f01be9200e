"""Whole nodes: how long requests for all GPUs of a node wait behind small ones, in a simulated week at a load of 0.9.

One team has jobs of one priority on nodes of eight GPUs. Jobs of eight GPUs request a seventh of the GPU time. The
operator's own code, with its defaults, places jobs, orders the queue, reserves GPUs for the head of the queue and
learns run times (`fairness_month.py`). `head`: the time for which a job waited as the oldest one. Prints a table and
writes build/results/whole-nodes.json. The exit status is 1 if the 95th percentile of `head` is more than
`LONGEST_HEAD_H`, or if less than `LEAST_UTILISATION` of the GPU time is used.
"""

from __future__ import annotations

import argparse
import logging
import random
import sys
from collections.abc import Iterator, Sequence

import structlog
from fairness_month import MonthOfTeams
from packing_trace import GIB, TraceNode, TracePod
from results import Row, write
from throughput.jobs import Job

LOAD, DAYS, GPUS = 0.9, 7.0, 8
LONGEST_S, SHORTEST_S = 12 * 3600.0, 30.0
"""Longest and shortest run time in seconds. Drawn times outside are set to the nearer bound."""
KINDS = (
    (1, 200, 0.08, 0.5, 1.0),
    (1, 300, 0.08, 1.0, 1.0),
    (1, 500, 0.12, 0.3, 1.2),
    (1, 1000, 0.30, 0.7, 1.2),
    (2, 1000, 0.14, 1.0, 1.0),
    (4, 1000, 0.14, 1.5, 0.8),
    (8, 1000, 0.14, 1.7, 0.6),
)
"""Kinds of jobs: number of GPUs, thousandths of each GPU, part of the total GPU time, and median (hours) and sigma of
the log-normal run time."""
LONGEST_HEAD_H, LEAST_UTILISATION = 6.0, 0.86
NODES, SEEDS = (8, 16), (1, 2, 3)


def jobs_of(nodes: int, seed: int, days: float = DAYS) -> list[Job]:
    """Draw the jobs of some days, in the order of their arrival."""
    chance, drawn = random.Random(seed), []
    for count, milli, part, median_h, sigma in KINDS:
        sample = random.Random(1)
        mean_s = sum(_run_s(sample, median_h, sigma) for _ in range(20_000)) / 20_000
        per_s = LOAD * nodes * GPUS * part / (count * milli / 1000 * mean_s)
        cpu, memory = (4000 * count, 32_768 * count) if milli == 1000 else (2000, 8192)
        pod, at = TracePod(cpu, memory, count, milli, ()), chance.expovariate(per_s)
        while at < days * 86_400:
            drawn.append((at, pod, _run_s(chance, median_h, sigma)))
            at += chance.expovariate(per_s)
    drawn.sort(key=lambda job: job[0])
    return [Job(number, at, pod, run_s, 1000) for number, (at, pod, run_s) in enumerate(drawn)]


def _run_s(chance: random.Random, median_h: float, sigma: float) -> float:
    return min(LONGEST_S, max(SHORTEST_S, median_h * 3600 * chance.lognormvariate(0.0, sigma)))


def week(nodes: int, jobs: Sequence[Job], days: float = DAYS) -> tuple[float, dict[int, float]]:
    """Simulate the jobs. Return the used part of the GPU time, and the wait of each job in seconds."""
    of_eight = tuple(TraceNode(f"node-{number:03}", 128_000, 1_048_576, GPUS, "A", 80 * GIB) for number in range(nodes))
    month = MonthOfTeams(of_eight, days, budgets=False).run([("a", job) for job in jobs])
    return sum(month.gpu_s.values()) / (nodes * GPUS * days * 86_400), month.wait_of


def heads(jobs: Sequence[Job], waits: dict[int, float], days: float = DAYS) -> Iterator[tuple[int, float]]:
    """Yield for each job, in the order of arrival, its number of GPUs and the seconds for which it waited as the oldest
    job."""
    until = 0.0
    for job in jobs:
        placed = min(job.arrives_s + waits[job.number], days * 86_400)
        yield job.pod.gpus, max(0.0, placed - max(until, job.arrives_s))
        until = max(until, placed)


def part_of(values: Sequence[float], part: float) -> float:
    """Return a quantile of durations in seconds, in hours."""
    return sorted(values)[min(int(part * len(values)), len(values) - 1)] / 3600 if values else 0.0


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    rows: list[Row] = []
    late = unused = False
    for nodes in NODES:
        at_head: list[float] = []
        for seed in SEEDS:
            jobs, case = jobs_of(nodes, seed), f"{nodes} nodes, seed {seed}"
            used, waits = week(nodes, jobs)
            offered = sum(job.pod.demand / 1000 * job.service_s for job in jobs) / (nodes * GPUS * DAYS * 86_400)
            whole = [waits[job.number] for job in jobs if job.pod.gpus == GPUS]
            small = [waits[job.number] for job in jobs if job.pod.milli < 1000]
            left = [job for job in jobs if job.arrives_s + waits[job.number] >= DAYS * 86_400]
            of_head = [wait for count, wait in heads(jobs, waits) if count == GPUS and wait]
            at_head += of_head
            rows += [
                Row(case, "whole_nodes_asked", "jobs", len(whole)),
                Row(case, "whole_nodes_waiting_in_the_end", "jobs", sum(job.pod.gpus == GPUS for job in left)),
                Row(case, "whole_nodes_wait_p95", "h", part_of(whole, 0.95)),
                Row(case, "whole_nodes_wait_longest", "h", part_of(whole, 1.0)),
                Row(case, "head_wait_p50", "h", part_of(of_head, 0.5)),
                Row(case, "head_wait_p95", "h", part_of(of_head, 0.95)),
                Row(case, "head_wait_longest", "h", part_of(of_head, 1.0)),
                Row(case, "small_wait_p95", "h", part_of(small, 0.95)),
                Row(case, "offered", "%", 100 * offered),
                Row(case, "utilisation", "%", 100 * used),
            ]
            unused |= used < LEAST_UTILISATION
            print(case, file=sys.stderr, flush=True)
        late |= part_of(at_head, 0.95) > LONGEST_HEAD_H
    write("whole-nodes", rows)
    return int(late or unused)


if __name__ == "__main__":
    sys.exit(main())
