"""Each fault between the operator and a real API server, played once: the operator's blind or late time.

    PYTHONPATH=tests:benchmarks python benchmarks/weather.py [--only WORD] [--list]

The operator's connection passes through a proxy that makes the faults. The operator has its default settings, except
`bind_timeout` (30 s) and `resync_interval` (10 min, so that no full list hides a fault). `must`: the promised time on
an idle machine. Prints each result when it is known, writes build/results/weather.json, and exits with 1 if the
operator does not survive a fault. Takes about ten minutes.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

from cluster.weather import objects, server, watches
from cluster.weather.world import KINDS, TIMES, Weather, bad_weather
from harness.errors import HarnessError
from results import Row, write


@dataclass(frozen=True, slots=True)
class Case:
    """One fault. `must`: promised limit, in `unit`. `own`: True if it needs a cluster of its own. `start`: True if an
    operator runs when the fault begins. `bind_timeout`: setting of the operator in seconds, for faults that must come
    before a watch is silent."""

    name: str
    play: Callable[[Weather], float]
    must: float
    unit: str = "s"
    own: bool = False
    start: bool = True
    bind_timeout: str = TIMES["SHAREPOD_BIND_TIMEOUT"]


CASES = (
    Case("half-open watches: until a SharePod runs", watches.half_open, 30),
    Case("silent Nodes and ledgers: from their return to a start", watches.stale_belief, 5),
    *(Case(f"ERROR event in the watch of {kind}", partial(watches.error_event, kind=kind), 5) for kind in KINDS),
    Case("watches expired, nothing left: until shares are free", watches.expired_and_empty, 5),
    Case("malformed watch events: until a SharePod runs", watches.odd_words, 10),
    Case("all watches, then all lists, expired: until a SharePod runs", watches.expired_together, 30),
    Case("503 for 60 s: after its end", server.outage, 5),
    Case("429: later than Retry-After", server.too_many_requests, 2),
    Case("answers of writes lost: until a SharePod runs", server.lost_answers, 5),
    Case("permanent 401: until the process ends", server.unauthorized, 75),
    Case("answer of a GET after the Pod's end", objects.old_answer, 5, own=True, bind_timeout="10"),
    Case("namespace being deleted: until the next runs", objects.terminating_namespace, 5),
    Case("Node deleted, back unlabelled: until reported", objects.deleted_node, 1),
    Case("Pod's name taken: until the next runs", objects.taken_name, 5),
    Case("CRDs after the operator", server.late_crds, 5, own=True, start=False),
    Case("etcd restored from a backup", server.restored_backup, 10, own=True),
    Case("70 Pods of 1.4 MB: most memory", objects.large_pods, 1024, "MiB", own=True),
)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--only", default="", help="faults whose name contains this")
    parser.add_argument("--list", action="store_true", help="print the names of the faults")
    options = parser.parse_args()
    chosen = [case for case in CASES if options.only in case.name]
    if options.list:
        print("\n".join(case.name for case in chosen))
        return 0
    if not chosen:
        parser.error(f"no fault's name contains {options.only!r}; --list prints them")
    width = max(len(case.name) for case in chosen)
    print(f"{'fault':<{width}}  {'measured':>12}  {'must':>10}", flush=True)
    rows: list[Row] = []
    with ExitStack() as shared:
        common = shared.enter_context(bad_weather()) if any(not case.own for case in chosen) else None
        for case in chosen:
            measured = _play(case, common)
            shown = "not survived" if measured is None else f"{measured:.1f} {case.unit}"
            print(f"{case.name:<{width}}  {shown:>12}  {f'{case.must:g} {case.unit}':>10}", flush=True)
            rows.append(Row(case.name, "survived", "bool", float(measured is not None)))
            if measured is not None:
                rows.append(Row(case.name, "measured", case.unit, measured))
            rows.append(Row(case.name, "must", case.unit, case.must))
    write("weather", rows)
    return 0 if all(row.value for row in rows if row.metric == "survived") else 1


def _play(case: Case, common: Weather | None) -> float | None:
    """Play a fault. Return the time; None if the operator did not survive, with the reason on standard error."""
    with ExitStack() as own:
        if case.own or common is None:
            weather = own.enter_context(
                bad_weather(start=case.start, times={**TIMES, "SHAREPOD_BIND_TIMEOUT": case.bind_timeout})
            )
        else:
            weather = common
            weather.clear()
        try:
            return case.play(weather)
        except (AssertionError, HarnessError) as error:
            print(f"{case.name}: {str(error).splitlines()[0] if str(error) else repr(error)}", file=sys.stderr)
            return None


if __name__ == "__main__":
    sys.exit(main())
