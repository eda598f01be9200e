"""2,000 SharePods on 1,000 fake nodes while the operator is killed ten times (SIGKILL), on a real API server.

    PYTHONPATH=tests:benchmarks python benchmarks/chaos.py [--sharepods 2000] [--nodes 1000] [--kills 10] [--seed N]

When each kill comes is drawn from the seed, which is printed first; SEED=N in the environment repeats a run. A tenth of
the SharePods is deleted while the others are placed. The operator has its default settings but for the agents' Leases:
one process plays all agents. None may be lost, doubled or over-committed, at any moment; ends with status 1 if not.
Prints a table and writes build/results/chaos.json.
"""

from __future__ import annotations

import argparse
import os
import random
import sys

from cluster.audit import Audit
from cluster.chaos import Asked, run
from cluster.operator_world import GIB, a_world
from results import Row, write

_AGENT_LEASE = 120  # seconds; a thousand agents' Leases are renewed one after the other


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--sharepods", type=int, default=2000)
    parser.add_argument("--nodes", type=int, default=1000)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument(
        "--seed", type=int, default=int(os.environ.get("SEED") or random.SystemRandom().randrange(1 << 31))
    )
    options = parser.parse_args()
    if options.sharepods > 2 * options.nodes:
        parser.error(
            f"--sharepods {options.sharepods} is more than the {2 * options.nodes} GPUs of --nodes: they must fit"
        )
    print(f"chaos: seed {options.seed}", flush=True)
    asked = Asked(
        sharepods=options.sharepods,
        nodes=options.nodes,
        kills=options.kills,
        seed=options.seed,
        deleted=options.sharepods // 10,
        timeout=900.0,
    )
    times = {"SHAREPOD_AGENT_DURATION": str(_AGENT_LEASE)}
    with (
        a_world(times=times, agent_lease=_AGENT_LEASE, agent_renew=20.0, pace=1.0) as world,
        Audit(world.api, memory=16 * GIB) as audit,
    ):
        outcome = run(world, audit, asked)
    case = f"{asked.sharepods} SharePods, {asked.nodes} nodes, {outcome.kills} kills, seed {asked.seed}"
    write(
        "chaos",
        [
            Row(case, "deleted_meanwhile", "count", asked.deleted),
            Row(case, "running", "count", outcome.running),
            Row(case, "lost", "count", outcome.lost),
            Row(case, "doubled", "count", outcome.doubled),
            Row(case, "gpus_over_committed", "count", outcome.over_committed),
            Row(case, "left_of_deleted", "count", outcome.left),
            Row(case, "watch_gaps", "count", outcome.watch_gaps),
            Row(case, "longest_without_a_reservation", "s", outcome.longest_silence),
            Row(case, "until_all_run", "s", outcome.seconds),
        ],
    )
    return 1 if outcome.lost or outcome.doubled or outcome.over_committed or outcome.left else 0


if __name__ == "__main__":
    sys.exit(main())
