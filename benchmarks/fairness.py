"""Fairness: a simulated month in which teams request more than the capacity, with budgets and without.

    make bench-fairness [TRACE=DIR] [FAIRNESS_ARGS=...]

`fairness_month.py` simulates the month with the operator's own decisions. Prints and writes for each seed:
- the GPU time of each team against its budget, without time that the team borrowed while no team within its budget
  waited;
- the reserved GPU time against the reserved GPU time of the same month without budgets;
- evictions per day, and waits.

It exits with 1 if the GPU time of a team differs by more than 2 % from its budget, or if budgets cost more than 1 % of
the GPU time, as the mean of the seeds.
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import structlog
from fairness_month import DAYS, ENTITLED, NODES, Month, MonthOfTeams, jobs_of_teams
from packing_trace import TraceError
from results import Row, write
from throughput.jobs import drawn, of_trace

MOST_OFF, LEAST_UTILISATION = 2.0, 0.99
"""Bounds of success: largest difference of a team's GPU time from its budget, in per cent; least GPU time reserved with
budgets, relative to the time reserved without."""
SEEDS = "42,43,44"
PROMISES = {"budgets-entitlement": ("max", "entitlement_error", "with budgets")}


def rows_of(month: Month, case: str, capacity_s: float, days: float) -> list[Row]:
    """Return the rows of one simulated month."""
    rows = [Row(case, f"gpu_time_{team}", "%", 100 * had / capacity_s) for team, had in month.gpu_s.items()]
    rows += [
        Row(case, f"from_budget_{team}", "%", month.beyond(team, capacity_s, contended=True)) for team in month.gpu_s
    ]
    waits = sorted(month.waits_s) or [0.0]
    return [
        *rows,
        Row(case, "entitlement_error", "%", error_of(month, capacity_s)),
        Row(case, "borrowed_alone", "%", 100 * sum(month.alone_s.values()) / capacity_s),
        Row(case, "utilisation", "%", 100 * sum(month.gpu_s.values()) / capacity_s),
        Row(case, "work_lost", "%", 100 * month.lost_s / capacity_s),
        Row(case, "evictions_per_day", "1/d", month.evicted / days),
        Row(case, "jobs_per_day", "1/d", month.placed / days),
        Row(case, "wait_p50", "h", waits[len(waits) // 2] / 3600),
        Row(case, "wait_longest", "h", waits[-1] / 3600),
        Row(case, "waiting_in_the_end", "jobs", month.waiting),
    ]


def error_of(month: Month, capacity_s: float) -> float:
    """Return the largest difference of a team's GPU time from its budget, in per cent of the budget."""
    return max(abs(month.beyond(team, capacity_s, contended=True)) for team in ENTITLED)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark. Return the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument(
        "--trace", type=Path, help="a folder with *node_list*.csv and *pod_list*.csv; otherwise drawn jobs"
    )
    parser.add_argument("--pods", default="default", help="name of the folder's trace")
    parser.add_argument("--days", type=float, default=DAYS)
    parser.add_argument("--nodes", type=int, default=NODES)
    parser.add_argument("--seeds", default=SEEDS, help="numbers, with commas between")
    options = parser.parse_args(arguments)
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    rows: list[Row] = []
    errors, parts = [], []
    for seed in map(int, options.seeds.split(",")):
        try:
            workload = (
                of_trace(options.trace, [options.pods], options.nodes)[0]
                if options.trace
                else drawn(options.nodes, seed)
            )
        except (TraceError, OSError) as error:
            print(error, file=sys.stderr)
            return 2
        jobs, capacity_s = jobs_of_teams(workload, options.days, seed), workload.gpus * options.days * 86_400
        months = {}
        for budgets in (False, True):
            began, case = time.monotonic(), f"{'with' if budgets else 'without'} budgets, seed {seed}"
            month = months[budgets] = MonthOfTeams(workload.nodes, options.days, budgets=budgets).run(jobs)
            print(f"{case}: {len(jobs)} jobs, {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
            rows += rows_of(month, case, capacity_s, options.days)
        errors.append(error_of(months[True], capacity_s))
        parts.append(sum(months[True].gpu_s.values()) / sum(months[False].gpu_s.values()))
        rows.append(Row(f"with budgets, seed {seed}", "utilisation_of_none", "x", parts[-1]))
    write("fairness", rows)
    return 1 if max(errors) > MOST_OFF or sum(parts) / len(parts) < LEAST_UTILISATION else 0


if __name__ == "__main__":
    sys.exit(main())
