"""Duration of the token scheduler's decisions, compiled as shipped and interpreted from source.

    PYTHONPATH=tests:benchmarks python benchmarks/decisions.py [--seconds S] [--rounds N]

Every tenant always wants the token. A decision is the agent's work between DRAINED of a holder and the next GRANT: the
calls `drained`, `tick` and `next_deadline`. Each case runs in a separate process. Compiled and interpreted runs
alternate, so that other load affects both equally. A figure is the median over the rounds. `interpreted_ratio`: time of
the interpreted code relative to the compiled code. Needs `make compiled`. Prints a table and writes
`build/results/decisions.json`.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time

from results import ROOT, Row, write

COMPILED = ROOT / "build" / "compiled"
CASES = ((2, 1), (10, 1), (50, 1), (240, 8))
"""(number of tenants, number of GPUs) of each case."""
MS = 1_000_000
QUANTUM_FLOOR_NS = 1 * MS
_WARM = 2000
_TIMEOUT_S = 120


def play(tenants: int, gpus: int, seconds: float) -> list[float]:
    """Simulate tenants that always want the token, for `seconds` of real time. Return the duration of each decision, in
    seconds."""
    from sharepod.timeshare import Action, Scheduler, TokenGrant

    scheduler, now = Scheduler(), 0
    for index in range(tenants):
        name, gpu = f"t{index}", f"g{index % gpus}"
        scheduler.set_tenant(now, name, [gpu], request_milli=1000 * gpus // tenants, limit_milli=1000)
        scheduler.set_connected(now, name, connected=True)
        scheduler.want(now, name)
    ends: dict[str, int] = {}
    taken: list[float] = []

    def carry_out(actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, TokenGrant):
                ends[action.tenant] = now + max(QUANTUM_FLOOR_NS, action.quantum_ns)

    carry_out(scheduler.tick(now))
    until = time.perf_counter() + seconds
    while time.perf_counter() < until or len(taken) < _WARM:
        holder = min(ends, key=lambda name: ends[name])
        now = max(now, ends.pop(holder))
        scheduler.draining(now, holder, expected_ns=0)
        carry_out(scheduler.tick(now))
        began = time.perf_counter()
        scheduler.drained(now, holder, wanting=True)
        actions = scheduler.tick(now)
        scheduler.next_deadline()
        taken.append(time.perf_counter() - began)
        carry_out(actions)
        while not ends:
            now = max(now, scheduler.next_deadline() or now)
            carry_out(scheduler.tick(now))
    return taken[_WARM:] or taken


def measured(tenants: int, gpus: int, seconds: float, *, compiled: bool) -> tuple[float, float]:
    """Return (median, 99th percentile) of the decisions' durations in microseconds, measured in a separate process.
    `compiled`: use the compiled scheduler."""
    paths = [str(COMPILED)] if compiled else []
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([*paths, str(ROOT / "tests"), str(ROOT / "benchmarks")])}
    command = [sys.executable, __file__, "--play", f"{tenants},{gpus}", "--seconds", str(seconds)]
    done = subprocess.run(
        command, env=environment, cwd=ROOT, capture_output=True, text=True, check=True, timeout=seconds + _TIMEOUT_S
    )
    found = json.loads(done.stdout)
    if found["compiled"] != compiled:
        raise SystemExit(f"the token scheduler is {'not ' if compiled else ''}compiled here: run `make compiled`")
    return found["p50"], found["p99"]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--seconds", type=float, default=3.0, help="of each case, in each of its processes")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--play", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.play:
        tenants, gpus = (int(part) for part in options.play.split(","))
        from sharepod.timeshare import scheduler

        taken = sorted(play(tenants, gpus, options.seconds))
        p50, p99 = (taken[len(taken) * percent // 100] * 1e6 for percent in (50, 99))
        compiled = not str(scheduler.__file__).endswith(".py")
        print(json.dumps({"p50": p50, "p99": p99, "compiled": compiled}))
        return 0
    rows: list[Row] = []
    for tenants, gpus in CASES:
        found: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
        for _ in range(options.rounds):
            for compiled in (True, False):
                found[compiled].append(measured(tenants, gpus, options.seconds, compiled=compiled))
        case = f"{tenants} tenants on {gpus} GPU{'s' if gpus > 1 else ''}"
        medians = {
            compiled: [statistics.median(values) for values in zip(*runs, strict=True)]
            for compiled, runs in found.items()
        }
        for compiled, what in ((True, "compiled"), (False, "interpreted")):
            for metric, value in zip(("decision_p50", "decision_p99"), medians[compiled], strict=True):
                rows.append(Row(f"{case}, {what}", metric, "us", round(value, 1)))
        rows.append(Row(case, "interpreted_ratio", "ratio", round(medians[False][0] / medians[True][0], 2)))
    write("decisions", rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
