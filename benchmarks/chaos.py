"""2,000 SharePods on 1,010 fake nodes while the operator is killed and the weather is bad, on a real API server.

    PYTHONPATH=tests:benchmarks python benchmarks/chaos.py [--sharepods 2000] [--nodes 1010] [--kills 10] [--faults 36]
        [--preempted 40] [--seed N] [--limit SECONDS] [--thirds] [--attach claims]

The seed, printed first, draws ten kills (SIGKILL) and 36 faults between the operator and the API server (silence,
errors, late and lost answers, outages, restarts of the API server: `tests/cluster/weather/storm.py`). SEED=N in the
environment repeats a run. A tenth of the SharePods is deleted while others are placed; the names of some Pods are
taken. Twenty GPUs have processes of no tenant, and must take no tenant. 40 further SharePods, on nodes of their own,
are preempted by three waves and return.

Halfway etcd is copied, and at the end it is restored from the copy. No stored SharePod may be lost, doubled or
over-committed at any moment; otherwise the benchmark exits with 1. SharePods that are not at rest after `--limit`
seconds in total are reported, and counted in their present state. The operator has its default settings except for the
agents' Leases, because one process plays all agents. Prints a table and writes build/results/chaos.json.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import time
from dataclasses import replace

from cluster.audit import Audit
from cluster.chaos import Asked, Outcome, restored, run
from cluster.operator_world import GIB
from cluster.plain_world import install_plain
from cluster.weather.storm import Storm
from cluster.weather.world import bad_weather
from results import Row, write

PROMISES = {
    "operator-no-over-commit": ("max", "gpus_over_committed"),
    "operator-no-second-run": ("max", "doubled"),
}

_SECONDS_A_FAULT = 6.0
"""Approximate seconds that one fault with the following pause takes. SharePods arrive during this time."""
_RESTORED = 1 / 8
"""Part of the time limit that is left for the cluster to settle after etcd was restored."""
_AGENT_LEASE = 120  # seconds; long, because one process renews a thousand Leases one after the other


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--sharepods", type=int, default=2000)
    parser.add_argument("--nodes", type=int, default=1010)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--faults", type=int, default=36)
    parser.add_argument("--preempted", type=int, default=40)
    parser.add_argument(
        "--seed", type=int, default=int(os.environ.get("SEED") or random.SystemRandom().randrange(1 << 31))
    )
    parser.add_argument("--limit", type=float, default=600.0, help="seconds within which there is a result")
    parser.add_argument(
        "--thirds", action="store_true", help="a third each SharePods, plain Pods with claims and with a resource line"
    )
    parser.add_argument("--attach", choices=["csi", "claims"], default="csi", help="how SharePods are attached")
    options = parser.parse_args()
    ends = time.monotonic() + options.limit
    strangers = options.nodes // 50
    if options.sharepods > 2 * options.nodes - strangers:
        parser.error(
            f"--sharepods {options.sharepods} is more than the {2 * options.nodes - strangers} GPUs of --nodes without "
            "a stranger's process: they must fit"
        )
    print(f"chaos: seed {options.seed}", flush=True)
    asked = Asked(
        sharepods=options.sharepods,
        nodes=options.nodes,
        kills=options.kills,
        seed=options.seed,
        deleted=options.sharepods // 10,
        timeout=0.0,
        strangers=strangers,
        taken=options.sharepods // 100,
        preempted=options.preempted,
        thirds=options.thirds,
        spread=_SECONDS_A_FAULT * options.faults,
    )
    times = {"SHAREPOD_AGENT_DURATION": str(_AGENT_LEASE), "SHAREPOD_ATTACH": options.attach}
    with (
        bad_weather(times=times, agent_lease=_AGENT_LEASE, agent_renew=20.0, pace=1.0) as weather,
        Audit(weather.world.api, memory=16 * GIB) as audit,
    ):
        if options.attach == "claims":
            weather.world.installation.install_claims()
        if options.thirds:
            install_plain(weather.world.cluster)
        storm = Storm(weather, seed=options.seed, faults=options.faults, backup=True)
        asked = replace(asked, timeout=ends - _RESTORED * options.limit - time.monotonic())
        outcomes = {"killed, in bad weather": run(weather.world, audit, asked, storm=storm)}
        if storm.backup is not None:
            outcomes["store put back"] = restored(
                weather.world, audit, storm.backup, ends - time.monotonic(), preempted=options.preempted
            )
    what = "shares by three doors" if asked.thirds else "SharePods"
    by = " by claims" if options.attach == "claims" else ""
    about = f"{asked.sharepods} {what}{by}, {asked.nodes} nodes, seed {asked.seed}"
    rows = [row for name, outcome in outcomes.items() for row in _rows(f"{about}: {name}", outcome)]
    rows += [Row(f"{about}: faults", kind, "count", count) for kind, count in sorted(storm.played.items())]
    write("chaos", rows)
    bad = (one.lost or one.doubled or one.over_committed or one.left or one.failed for one in outcomes.values())
    return 1 if any(bad) else 0


def _rows(case: str, outcome: Outcome) -> list[Row]:
    return [
        Row(case, "running", "count", outcome.running),
        Row(case, "lost", "count", outcome.lost),
        Row(case, "doubled", "count", outcome.doubled),
        Row(case, "gpus_over_committed", "count", outcome.over_committed),
        Row(case, "left_of_deleted", "count", outcome.left),
        Row(case, "kills", "count", outcome.kills),
        Row(case, "ran_by_preemption", "count", outcome.preempted),
        Row(case, "operators_ended_themselves", "count", outcome.ended),
        Row(case, "not_done_in_time", "count", len(outcome.failed)),
        Row(case, "watch_gaps", "count", outcome.watch_gaps),
        Row(case, "longest_blindness", "s", outcome.longest_silence),
        Row(case, "until_all_run", "s", outcome.seconds),
    ]


if __name__ == "__main__":
    sys.exit(main())
