"""Allocated part of a cluster's GPU time: a trace replayed through the placement engine, BestFit and FGD.

- Default, only arrivals: pods arrive until the demand reaches `--ratio` of the capacity, and never leave. The result is
  the allocated part when 100, 120 and 130 % of the capacity have arrived.
- `--load`: pods arrive and leave. The result is the refused part of the GPU demand.
- `--draw-gpu-memory`: each kind of request has memory that does not depend on its time. The engine is compared with the
  same engine that ignores memory.
- `--policies Moving`: the engine, which may restart one pod elsewhere for each request without room.
- `--paired`: the difference between the refusals of the engine and of BestFit and FGD, with the standard error of the
  mean over the seeds.
- `--mixes`: artificial mixes of labels, models, memory and latencies instead of a trace (packing_mixes.py).
- `--models N`: N random mixes of GPU models and memory instead of a trace (packing_models.py).

The last part has SharePods with exclusion labels (packing_labels.py). Prints tables and a plot. Writes
`build/results/packing.json`, `packing-TRACE.svg` and the file of `--json`. With `--published`, the replay is validated:
the results of BestFit and FGD must agree with the published file within 0.3 points, otherwise it exits with 1.
"""

from __future__ import annotations

import argparse
import heapq
import random
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from csv import DictReader
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import fmean

import numpy as np
from packing_labels import label_rows
from packing_mixes import mix_rows
from packing_models import model_rows
from packing_moves import Moving
from packing_plot import svg_plot, text_plot
from packing_policies import BestFit, Fgd, MemoryBlind, Policy, SharePod
from packing_trace import (
    GIB,
    TraceError,
    TraceNode,
    TracePod,
    arrivals,
    generated,
    read_nodes,
    read_pods,
    visits,
    with_memory,
)
from results import RESULTS, ROOT, Row, paired_rows, print_table, write

MARKS = (1.0, 1.2, 1.3)
TOLERANCE = 0.3
WARM_UP, MEASURED = 2.0, 3.0
"""Durations in mean lifetimes of a pod: of the warm-up, before refusals are counted, and of the measurement."""

Make = Callable[[Sequence[TraceNode], Sequence[TracePod]], Policy]
BLIND = "MemoryBlind"
MOVING = "Moving"
POLICIES: dict[str, Make] = {
    "SharePod": SharePod,
    BLIND: MemoryBlind,
    MOVING: Moving,
    "BestFit": BestFit,
    "FGD": Fgd,
}


@dataclass
class Outcome:
    """Results of a policy, one for each seed: % of the capacity that is allocated, by % of the capacity that has
    arrived."""

    curves: list[dict[int, float]] = field(default_factory=list)
    decisions: list[float] = field(default_factory=list)

    def at(self, percent: int) -> float | None:
        values = [curve[percent] for curve in self.curves if percent in curve]
        return fmean(values) if values else None

    def mean(self) -> dict[int, float]:
        """Return the mean curve over all seeds, up to the last % that all seeds have reached."""
        reached = min((max(curve, default=0) for curve in self.curves), default=0)
        return {percent: fmean(curve[percent] for curve in self.curves) for percent in range(1, reached + 1)}


def fill(policy: Policy, order: Sequence[TracePod], capacity: int) -> dict[int, float]:
    """Return the allocated % of the capacity, by the % of the capacity that has arrived. The value of a whole % is
    taken when arrivals first reach it."""
    arrived = allocated = 0
    curve: dict[int, float] = {}
    reached = 0
    for pod in order:
        arrived += pod.demand
        if policy.place(pod) is not None:
            allocated += pod.demand
        percent = arrived * 100 // capacity
        if percent > reached:
            for passed in range(reached + 1, percent + 1):
                curve[passed] = allocated * 100 / capacity
            reached = percent
    return curve


def turned_away(policy: Policy, pods: Sequence[TracePod], capacity: int, seed: int, load: float) -> float:
    """Return the part of the arriving GPU demand that is refused, in per cent. `load`: average demand relative to the
    capacity."""
    leaving: list[tuple[float, int, object]] = []
    asked = refused = 0
    for number, visit in enumerate(visits(pods, capacity, seed, load, WARM_UP + MEASURED)):
        while leaving and leaving[0][0] <= visit.start:
            policy.leave(heapq.heappop(leaving)[2])
        placed = policy.place(visit.pod)
        if placed is not None:
            heapq.heappush(leaving, (visit.end, number, placed))
        if visit.start >= WARM_UP:
            asked += visit.pod.demand
            refused += visit.pod.demand if placed is None else 0
    return refused * 100 / asked if asked else 0.0


def latency_rows(case: str, decisions: Sequence[float]) -> Iterator[Row]:
    p50, p99 = np.percentile(np.array(decisions) * 1e6, [50, 99])
    yield Row(case, "decision_p50", "us", float(p50))
    yield Row(case, "decision_p99", "us", float(p99))


def plot(name: str, outcomes: dict[str, Outcome]) -> None:
    curves = {policy: outcome.mean() for policy, outcome in outcomes.items()}
    print(f"\n{text_plot(curves, name)}")
    RESULTS.mkdir(parents=True, exist_ok=True)
    path = RESULTS / f"packing-{name}.svg"
    path.write_text(svg_plot(curves, f"{name}: {len(next(iter(outcomes.values())).curves)} seeds"))
    print(f"     {path.relative_to(ROOT)}", flush=True)


def in_fixed_order(nodes: Sequence[TraceNode]) -> list[TraceNode]:
    """Return the nodes in a random order that is the same for each run. The policies of the paper choose the first of
    equally good nodes, so the order matters: in a file, nodes of one purchase are adjacent, which costs FGD up to two
    points."""
    order = list(nodes)
    random.Random(1).shuffle(order)
    return order


def published(path: Path) -> dict[tuple[str, str], tuple[float, ...]]:
    with path.open(newline="") as file:
        return {
            (row["trace"], row["policy"]): tuple(float(row[f"arrived{int(mark * 100)}"]) for mark in MARKS)
            for row in DictReader(file)
        }


def replay(
    name: str, nodes: Sequence[TraceNode], pods: Sequence[TracePod], options: argparse.Namespace
) -> tuple[list[Row], dict[str, Outcome]]:
    capacity = sum(node.gpus for node in nodes) * 1000
    rows: list[Row] = []
    outcomes: dict[str, Outcome] = {policy: Outcome() for policy in options.policies}
    shuffled = in_fixed_order(nodes)
    turned: dict[float, dict[str, list[float]]] = {load: {} for load in options.load}
    makers = POLICIES | {MOVING: partial(Moving, part=options.movable)}
    for policy, outcome in outcomes.items():
        began = time.monotonic()
        moves: list[int] = []
        on = nodes if policy in ("SharePod", BLIND, MOVING) else shuffled
        for seed in options.seeds if not options.load else ():
            made = makers[policy](on, pods)
            outcome.curves.append(fill(made, arrivals(pods, capacity, seed, options.ratio), capacity))
            outcome.decisions += made.decisions
            moves += [made.moves] if isinstance(made, Moving) else []
        case = f"{name} {policy}" + (f" {options.movable:.0%} movable" if policy == MOVING else "")
        if moves:
            rows.append(Row(case, "moves", "count", fmean(moves)))
        for mark in MARKS:
            value = outcome.at(int(mark * 100))
            if value is not None:
                rows.append(Row(case, f"allocated_{int(mark * 100)}", "%", value))
        for load in options.load:
            away, moves = [], []
            for seed in options.seeds:
                made = makers[policy](on, pods)
                away.append(turned_away(made, pods, capacity, seed, load))
                outcome.decisions += made.decisions
                moves += [made.moves] if isinstance(made, Moving) else []
            turned[load][policy] = away
            rows.append(Row(f"{case} load {load:g}", "turned_away", "%", fmean(away)))
            if moves:
                rows.append(Row(f"{case} load {load:g}", "moves", "count", fmean(moves)))
        rows += latency_rows(case, outcome.decisions)
        print(f"{case}: {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
    for load, away_of in turned.items() if options.paired else ():
        rows += paired_rows(f"{name} load {load:g}", away_of, against="SharePod")
    return rows, outcomes


def seeds_of(text: str) -> list[int]:
    found: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        found += range(int(first), int(last or first) + 1)
    return found


def sizes_of(text: str) -> dict[str, int]:
    pairs = (part.partition("=") for part in text.split(",") if part)
    return {model: int(float(size) * GIB) for model, _, size in pairs}


def loads_of(text: str) -> list[float]:
    return [float(part) for part in text.split(",")]


def policies_of(text: str) -> list[str]:
    names = text.split(",")
    unknown = [name for name in names if name not in POLICIES]
    if unknown:
        raise argparse.ArgumentTypeError(f"{unknown[0]!r} is none of {', '.join(POLICIES)}")
    return names


def options_of(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--nodes", type=Path, help="nodes: cpu_milli, memory_mib, gpu, model")
    parser.add_argument(
        "--pods", type=Path, nargs="+", default=[], help="pods: cpu_milli, memory_mib, num_gpu, gpu_milli"
    )
    parser.add_argument("--trace", type=Path, help="a folder with *node_list*.csv, *pod_list*.csv and published.csv")
    parser.add_argument("--seeds", type=seeds_of, default=seeds_of("42-51"))
    parser.add_argument("--ratio", type=float, default=1.3, help="arrivals stop at this multiple of the capacity")
    parser.add_argument("--load", type=loads_of, default=[], help="with departures, at these loads: 0.9,0.95,1.1")
    parser.add_argument("--paired", action="store_true", help="differences to SharePod, seed by seed, and their error")
    parser.add_argument(
        "--mixes", nargs="?", const="", help="made-up mixes, at --load (0.9, 1.1): all whose name begins so"
    )
    parser.add_argument("--models", type=int, default=0, metavar="N", help="random mixes of models, at --load (0.8)")
    parser.add_argument("--published", type=Path, help="what BestFit and FGD have to come out at")
    parser.add_argument("--gpu-memory", type=sizes_of, default={}, metavar="MODEL=GiB,...")
    parser.add_argument("--draw-gpu-memory", action="store_true", help="draw each request's memory, whatever its time")
    parser.add_argument(
        "--policies",
        type=policies_of,
        help=f"of {', '.join(POLICIES)}; all but {MOVING}, {BLIND} with --draw-gpu-memory alone",
    )
    parser.add_argument(
        "--movable", type=float, default=1.0, help=f"part of the pods that {MOVING} may restart elsewhere, 0 to 1"
    )
    parser.add_argument("--json", type=Path, help="where to write the results, besides build/results/packing.json")
    options = parser.parse_args(arguments)
    if options.policies is None:
        options.policies = [
            policy for policy in POLICIES if policy != MOVING and (policy != BLIND or options.draw_gpu_memory)
        ]
    if options.trace is not None:
        # Of two published lists of nodes, prefer the one with only the nodes that have GPUs.
        found = sorted(options.trace.glob("*node_list*.csv"), key=lambda path: ("gpu_node" not in path.name, path))
        options.pods = options.pods or sorted(options.trace.glob("*pod_list*.csv"))
        options.nodes = options.nodes or (found[0] if found else None)
        published_csv = options.trace / "published.csv"
        options.published = options.published or (published_csv if published_csv.exists() else None)
        if options.nodes is None or not options.pods:
            parser.error(f"{options.trace} has no *node_list*.csv or no *pod_list*.csv")
    if bool(options.nodes) != bool(options.pods):
        parser.error("--nodes and --pods go together")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    options = options_of(arguments)
    rows: list[Row] = []
    wrong: list[str] = []
    expected = (
        published(options.published) if options.published and not options.load and not options.draw_gpu_memory else {}
    )
    try:
        traces = {path.stem.rpartition("pod_list_")[2]: read_pods(path) for path in options.pods}
        nodes = read_nodes(options.nodes, options.gpu_memory) if options.nodes else []
        for path, pods in zip(options.pods, traces.values(), strict=True):
            if not any(pod.demand for pod in pods):
                raise TraceError(f"{path}: no pod asks for a GPU")
        if options.nodes and not any(node.gpus for node in nodes):
            raise TraceError(f"{options.nodes}: no node has a GPU")
    except (TraceError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    if options.mixes is not None:
        rows += mix_rows(options.seeds, options.load or (0.9, 1.1), options.mixes)
        print_table(rows, title="mixes")
    elif options.models:
        makers = {name: POLICIES[name] for name in ("SharePod", BLIND, "BestFit")}
        for load in options.load or (0.8,):
            rows += model_rows(makers, turned_away, options.models, load)
        print_table(rows, title="models")
    elif not traces:
        nodes, pods = generated()
        traces = {"generated": pods}
    for name, pods in traces.items():
        if options.draw_gpu_memory:
            pods = with_memory(pods, 0, min(node.gpu_memory for node in nodes))
        made, outcomes = replay(name, nodes, pods, options)
        rows += made
        print_table(made, title=name)
        if not options.load:
            plot(name, outcomes)
        for policy, outcome in outcomes.items():
            for mark, value in zip(MARKS, expected.get((name, policy), ()), strict=False):
                replayed = outcome.at(int(mark * 100))
                if replayed is not None:
                    print(f"{name} {policy} at {mark:.0%}: {replayed:.2f}, published {value:.2f}")
                    if abs(replayed - value) > TOLERANCE:
                        wrong.append(f"{name} {policy} at {mark:.0%}")
    rows += (of_labels := label_rows(options.seeds))
    print_table(of_labels, title="labels")
    path = write("packing", rows)
    if options.json is not None:
        shutil.copyfile(path, options.json)
    if wrong:
        print(f"further than {TOLERANCE} points from the published figures: {', '.join(wrong)}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
