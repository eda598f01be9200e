"""Benefit of sharing: jobs replayed over simulated days on exclusive GPUs, on static fractions and on SharePods.

    make bench-throughput [TRACE=DIR] [THROUGHPUT_ARGS=...]

Prints the assumptions, a table for each workload and load, and the error of the approximation. Then makes a small real
run (`real.py`). Writes `build/results/throughput.json` and `throughput.svg`. Exits with 1 if a job got less than its
guarantee, or if work of the real run was lost.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from harness.cache import cache_dir
from hook.world.agent_node import built
from packing_trace import TraceError
from results import RESULTS, Row, write

from throughput import eager
from throughput.jobs import ASSUMPTIONS, Workload, drawn, of_trace, small_shares
from throughput.plot import draw
from throughput.rates import PLAYED_S, Mix, Rates, play
from throughput.real import run as real_run
from throughput.replay import Outcome, Replay, Sharing

LOADS = (0.8, 1.2, 2.0)
"""Loads to replay. A load is the GPU time of the arriving jobs if each had whole GPUs, as a multiple of the
capacity."""
TRACES = ("default", "gpushare100")
"""Traces in the folder TRACE. `default` is the production mix; in `gpushare100` every job requests a share."""
NODES = 24
"""Number of nodes of the trace that are used, spread over its kinds of hardware: a fiftieth of all, so that a simulated
day takes seconds."""
DAYS, WARM_UP_DAYS = 1.5, 0.5
"""Length of the simulation in days, and of its first part, in which nothing is counted. That part is longer than the
longest job."""
SAMPLED, SAMPLE_PLAYED_S = 30, 40
"""Number of mixes whose rates are compared with a longer simulation, and its simulated seconds."""

POLICIES = (Sharing.EXCLUSIVE, Sharing.STATIC, Sharing.LENDING)
"""Policies for jobs that pause between their steps."""

DRAWN = 2
"""Number of workloads that the picture shows in addition to the eager pairs."""

Outcomes = dict[float, dict[Sharing, Outcome]]
"""Outcomes of one workload, by load and policy."""


def replay(workload: Workload, rates: Rates, options: argparse.Namespace) -> Outcomes:
    """Replay one workload at all loads, under each of `POLICIES`."""
    outcomes: Outcomes = {}
    span = (WARM_UP_DAYS * 86400, options.days * 86400)
    for load in options.loads:
        began = time.monotonic()
        jobs = workload.draw(load, options.days, options.seed)
        outcomes[load] = {sharing: Replay(sharing, workload.nodes, rates).run(jobs, *span) for sharing in POLICIES}
        took = time.monotonic() - began
        print(f"{workload.name}, load {load:g}: {len(jobs)} jobs, {took:.0f} s", file=sys.stderr, flush=True)
    rates.keep()
    return outcomes


def replay_eager(workload: Workload, options: argparse.Namespace) -> Outcomes:
    """Replay jobs with gaps between their kernels, at all loads and under each policy."""
    outcomes: Outcomes = {load: {} for load in options.loads}
    span = (WARM_UP_DAYS * 86400, options.days * 86400)
    for sharing in Sharing:
        rates = eager.EagerRates(sharing)
        for load in options.loads:
            jobs = workload.draw(load, options.days, options.seed)
            outcomes[load][sharing] = Replay(sharing, workload.nodes, rates, eager.guaranteed).run(jobs, *span)
    return outcomes


def figures(outcome: Outcome) -> Iterator[tuple[str, str, float]]:
    """Yield the figures of an outcome, each as (metric, unit, value)."""
    wait_p95 = float(np.percentile(outcome.waits_s, 95)) if outcome.waits_s else 0.0
    slowdowns = np.percentile(outcome.slowdowns, [50, 95]) if outcome.slowdowns else np.ones(2)
    yield "jobs_per_day", "1/d", outcome.per_day
    yield "wait_p50", "min", outcome.median_wait_s / 60
    yield "wait_p95", "min", wait_p95 / 60
    yield "gpu_time_used", "%", 100 * outcome.used
    yield "slowdown_p50", "x", float(slowdowns[0])
    yield "slowdown_p95", "x", float(slowdowns[1])
    yield "below_guarantee", "jobs", float(outcome.below)
    yield "slowest_job", "of its guarantee", outcome.worst
    yield "worth", "GPUs per GPU", outcome.worth
    yield "whole_gpu_jobs", "%", 100 * outcome.counted_whole / max(1, outcome.counted)
    yield "waiting_in_the_end", "jobs", float(outcome.waiting)


HEADS = (
    "jobs/day", "wait p50 min", "p95", "GPU time used %", "slowdown p50", "p95", "below guarantee", "slowest", "worth",
    "whole-GPU jobs %", "still waiting",
)  # fmt: skip
"""Headings of the columns, in the order of `figures`."""
DECIMALS = (0, 1, 1, 1, 2, 2, 0, 2, 2, 0, 0)
"""Decimals of the columns."""


def print_outcomes(title: str, outcomes: dict[Sharing, Outcome]) -> None:
    """Print a line for each policy."""
    lines: list[tuple[str, ...]] = [("", *HEADS)]
    for sharing, outcome in outcomes.items():
        cells = zip(figures(outcome), DECIMALS, strict=True)
        lines.append((str(sharing), *(f"{value:.{decimals}f}" for (_, _, value), decimals in cells)))
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    print(f"\n{title}")
    for line in lines:
        print("  " + "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)))
    sys.stdout.flush()


def rows_of(workload: Workload, outcomes: Outcomes) -> list[Row]:
    """Return the figures of one workload as rows of the result file."""
    return [
        Row(workload.name, "bound", "x", workload.bound()),
        Row(workload.name, "whole_gpu_time", "%", 100 * workload.whole_part),
        *(
            Row(f"{workload.name} {load:g} {sharing}", *figure)
            for load, by_sharing in outcomes.items()
            for sharing, outcome in by_sharing.items()
            for figure in figures(outcome)
        ),
    ]


def print_workload(workload: Workload, outcomes: Outcomes) -> None:
    """Print a table for each load, and the largest possible gain by sharing."""
    for load, by_sharing in outcomes.items():
        print_outcomes(f"{workload.name}, load {load:g}, {workload.gpus} GPUs", by_sharing)
    print(
        f"\n  The requests of {workload.name} let sharing finish {workload.bound():.2f} times the jobs at most, with "
        "perfect packing and no job slowed down:\n  jobs with whole GPUs take "
        f"{100 * workload.whole_part:.0f} % of the GPU time, and of requests above a half no two fit on one GPU."
    )


def approximation(rates: Rates, seed: int) -> list[Row]:
    """Compare the rates of some mixes with the rates of a longer simulation. Return the errors, in percentage points of
    the speed without neighbours."""
    mixes: list[Mix] = sorted(mix for mix in rates.asked if len(mix) > 1)
    chosen = random.Random(seed).sample(mixes, min(SAMPLED, len(mixes)))
    errors = [
        100 * (short - long)
        for mix in chosen
        for short, long in zip(rates(mix), play(mix, played_s=SAMPLE_PLAYED_S), strict=True)
    ]
    return [
        Row("rates", "mixes", "mixes", len(rates.asked)),
        Row("rates", "error_mean", "points", float(np.mean(errors))),
        Row("rates", "error_absolute_mean", "points", float(np.mean(np.abs(errors)))),
        Row("rates", "error_absolute_p95", "points", float(np.percentile(np.abs(errors), 95))),
    ]


def options_of(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument(
        "--trace", type=Path, help="a folder with *node_list*.csv and *pod_list*.csv; otherwise drawn jobs"
    )
    parser.add_argument("--pods", nargs="+", default=list(TRACES), help="names of the folder's traces")
    parser.add_argument("--loads", nargs="+", type=float, default=list(LOADS))
    parser.add_argument("--days", type=float, default=DAYS, help=f"simulated days; {WARM_UP_DAYS:g} do not count")
    parser.add_argument("--nodes", type=int, default=NODES)
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--plot", type=Path, default=RESULTS / "throughput.svg", help="where the picture goes")
    parser.add_argument("--fresh", action="store_true", help="play every mix again, whatever an earlier run has kept")
    part = parser.add_mutually_exclusive_group()
    part.add_argument("--real", action="store_true", help="the real run alone")
    part.add_argument("--simulated", action="store_true", help="the replay alone")
    options = parser.parse_args(arguments)
    if options.days <= WARM_UP_DAYS:
        parser.error(f"--days has to be more than {WARM_UP_DAYS:g}, which do not count")
    if options.nodes < 1 or min(options.loads) <= 0:
        parser.error("--nodes and --loads have to be more than 0")
    if not options.simulated and not built():
        parser.error("hook or test double not built; run `make shim doubles`, or give --simulated")
    return options


def workloads_of(options: argparse.Namespace) -> list[Workload]:
    """Return the workloads to replay. Raises `TraceError` for files that are no trace."""
    if options.trace is None:
        return [drawn(options.nodes, options.seed), small_shares(options.nodes, options.seed)]
    return [*of_trace(options.trace, options.pods, options.nodes), small_shares(options.nodes, options.seed)]


def picture(results: Sequence[tuple[Workload, Outcomes]], path: Path) -> None:
    """Write the plot."""
    per_day = {
        workload.name: {load: {s: o.per_day for s, o in by.items()} for load, by in outcomes.items()}
        for workload, outcomes in results
    }
    waits_min = {
        workload.name: {load: {s: o.median_wait_s / 60 for s, o in by.items()} for load, by in outcomes.items()}
        for workload, outcomes in results
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    draw(per_day, waits_min, path)


def main(arguments: Sequence[str] | None = None) -> int:
    options = options_of(arguments)
    rows: list[Row] = []
    results: list[tuple[Workload, Outcomes]] = []
    lost = 0
    if not options.real:
        try:
            workloads = workloads_of(options)
        except (TraceError, OSError) as error:
            print(error, file=sys.stderr)
            return 2
        rates = Rates(kept_in=cache_dir() / "throughput", fresh=options.fresh)
        results = [(workload, replay(workload, rates, options)) for workload in workloads]
        rows += [row for workload, outcomes in results for row in rows_of(workload, outcomes)]
        rows += approximation(rates, options.seed)
        pairs = eager.eager_pairs(options.nodes, options.seed)
        results.append((pairs, replay_eager(pairs, options)))
        rows += rows_of(*results[-1])
        picture([results[-1], *results[:DRAWN]], options.plot)
    if not options.simulated:
        more, lost = real_run()
        rows += more
    write("throughput", rows)
    if results:
        print(f"\nassumptions; rates come from plays of {PLAYED_S} s, compared with {SAMPLE_PLAYED_S} s under `rates`")
        print("\n".join(f"  {name:20} {text}" for name, text in ASSUMPTIONS))
    for workload, outcomes in results:
        print_workload(workload, outcomes)
    below = sum(o.below for _, outcomes in results for by in outcomes.values() for o in by.values())
    for count, what in ((below, "jobs got less than their requests guarantee"), (lost, "kernels were lost")):
        if count:
            print(f"{count} {what}", file=sys.stderr)
    return 1 if below or lost else 0


if __name__ == "__main__":
    sys.exit(main())
