"""16 SharePods of half a GPU, all at once, on 8 GPUs of 4 nodes, repeatedly, on a real API server.

    PYTHONPATH=tests:benchmarks python benchmarks/burst.py [--rounds 100] [--thirds]

Each round must place all 16 SharePods, two on each GPU, and no GPU may have three at any time. Every version of every
ledger is checked, not only the last version. Otherwise the benchmark exits with 1. Prints a table and writes
build/results/burst.json.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time

from cluster.audit import Audit
from cluster.burst import SHAREPODS, Burst
from cluster.operator_world import GIB, a_world
from cluster.plain_world import install_plain
from results import Row, write


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument(
        "--thirds", action="store_true", help="a third each SharePods, plain Pods with claims and with a resource line"
    )
    options = parser.parse_args()
    rounds, took = [], []
    with a_world() as world, Audit(world.api, memory=16 * GIB) as audit:
        if options.thirds:
            install_plain(world.cluster)
        burst = Burst(world, audit, doors=options.thirds)
        for number in range(options.rounds):
            begun = time.monotonic()
            rounds.append(burst.round())
            took.append(time.monotonic() - begun)
            if number % 10 == 9:
                print(f"{number + 1} of {options.rounds} rounds", flush=True)
        gaps, doubled = audit.gaps, len(audit.doubled)
    case = f"{SHAREPODS} of 0.5 on 8 GPUs" + (", by three doors" if options.thirds else "")
    short = sum(one.placed != SHAREPODS for one in rounds)
    most = max(one.most_on_a_gpu for one in rounds)
    over = rounds[-1].over_committed
    write(
        "burst",
        [
            Row(case, "rounds", "count", len(rounds)),
            Row(case, "rounds_not_all_placed", "count", short),
            Row(case, "most_on_one_gpu", "count", most),
            Row(case, "gpus_over_committed", "count", over),
            Row(case, "sharepods_doubled", "count", doubled),
            Row(case, "watch_gaps", "count", gaps),
            Row(case, "round_p50", "s", statistics.median(took)),
            Row(case, "round_max", "s", max(took)),
        ],
    )
    return 1 if short or most != 2 or over or doubled else 0


if __name__ == "__main__":
    sys.exit(main())
