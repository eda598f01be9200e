"""Measured and requested shares of GPU time: the real agent and the real hook on a simulated GPU.

Every case runs the programs of its tenants at the same time. Each program launches without end.
- `share`: time of a tenant's kernels, as a part of a window of `--seconds`. `share_error`: its difference from the
  request. `work_ratio`: sum of the shares of all tenants, relative to the share of one of them without neighbours.
- `window`: length of the window. If one kernel is more than a point of the window, measuring continues until the share
  of every tenant stays within a point.
- `share_error_10s`, `share_error_60s`: the largest errors in any span of that length, while the tenants are watched for
  `--watched` seconds in all. `wait_p50`, `wait_p99`: time from requesting the token to getting it, by the agent's
  count.

Other modules have these cases: `service` in share_latency.py, `arrival` in share_arrival.py, `stopped` in
share_stops.py, `gang` in share_gangs.py, `gaps` in share_gaps.py. In the cases `pausing`, one tenant works and pauses
next to a neighbour with long kernels:
- `pausing_expected` is request x work / (work + pause).
- `pausing_alone` is the GPU time of the same program on a GPU of its own on this machine. `of_request_alone` is its
  share, relative to the request times `pausing_alone`.
- `pausing_idle` is the part of the time for which the GPU was kept idle for the pausing tenant. `work_lost` is the part
  in which no kernel ran for another reason.

Prints tables and writes `build/results/shares.json`. If only some cases are measured, only their rows are replaced
there.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from hook.world.agent_node import built, running, tenant, wait_for
from results import RESULTS, Row, print_table, write
from share_arrival import ARRIVALS, measure_arrival
from share_gangs import GANG_KERNEL_US, GANGS, measure_gang
from share_gaps import GapsBenchmark, chosen
from share_latency import SERVICES, measure
from share_stops import STOPS, measure_stops
from share_window import SETTLE_S, TOLD_S, Asked, Window, anticipated_s, wait_rows, waits_of, waits_since, watch

PROMISES = {"time-guarantee": ("max", "share_error")}
WATCHED_S = 60.0
OVERTAKING = (("10:90", "50 ms"), ("10:90", "400 ms"), ("50:50", "400 ms"), ("20:30:50", "mixed"))
OVERTAKEN_AFTER_MS = (20, 1000)
"""Grace periods in milliseconds, of the cases in which a tenant exceeds its turn. A tenant that exceeds it by longer is
preempted, and the device then divides its time between both tenants."""


@dataclass(frozen=True)
class Work:
    """Endless work of a program. `us`: microseconds that one launch occupies the GPU."""

    us: int
    graph_nodes: int = 0

    @property
    def arguments(self) -> tuple[str, ...]:
        """Return the arguments of launchloop."""
        if self.graph_nodes:
            kernel = self.us // self.graph_nodes
            return ("--call", "graph", "--graph-nodes", str(self.graph_nodes), "--kernel-us", str(kernel))
        return ("--kernel-us", str(self.us))


MIXES: dict[str, tuple[float, ...]] = {
    "10:90": (0.1, 0.9),
    "30:70": (0.3, 0.7),
    "50:50": (0.5, 0.5),
    "20:30:50": (0.2, 0.3, 0.5),
    "ten at 0.1": (0.1,) * 10,
    "2:98": (0.02, 0.98),
    "fifty at 0.02": (0.02,) * 50,
}
SMALL = {"2:98", "fifty at 0.02"}
"""Mixes that a complete run measures only with `SMALL_WORK`. With longer kernels, a single turn would exceed a large
part of these tenants' shares."""
SMALL_WORK = "5 ms"
WORKS: dict[str, tuple[Work, ...]] = {
    "0.1 ms": (Work(100),),
    "5 ms": (Work(5_000),),
    "50 ms": (Work(50_000),),
    "400 ms": (Work(400_000),),
    "graphs": (Work(5_000, graph_nodes=10),),
    "mixed": (Work(100), Work(50_000), Work(5_000)),
}
"""Kinds of work, by name. The tenants of a case get the entries of a kind in turn."""


@dataclass(frozen=True)
class Pauses:
    """Tenant that works and pauses, with its request, next to an always busy neighbour."""

    request: float
    neighbour: float
    work_ms: int
    pause_ms: int
    spread: str = "regular"
    """Distribution of the lengths of the pauses. Each has the same mean: `regular`: all equal; exponential; bimodal:
    nine of ten pauses are half as long as the mean, and the tenth is 5.5 times as long."""

    @property
    def expected(self) -> float:
        """Return the share that the pausing tenant should get."""
        return self.request * self.work_ms / (self.work_ms + self.pause_ms)

    @property
    def arguments(self) -> tuple[str, ...]:
        """Return the arguments of launchloop for the pausing tenant."""
        work, pause = f"{self.work_ms}000", f"{self.pause_ms}000"
        return ("--kernel-us", work, "--sync-every", "1", "--idle-us", pause, "--spread", self.spread)


PAUSING = tuple(
    Pauses(request, neighbour, work_ms, pause_ms, spread)
    for spread in ("regular", "exponential", "bimodal")
    for request, neighbour, work_ms, pause_ms in ((0.7, 0.3, 20, 5), (0.9, 0.0, 5, 2))
)
PAUSING_KERNELS_MS = (1, 5, 40, 250, 900)
PAUSING_S = 8.0
PAUSING_KERNELS = 40
"""Least length of the measurement, in kernels of the neighbour. A case is measured for `PAUSING_S`, or longer if so
many kernels take longer."""
LEARN_S = 4.0
"""Seconds before the measurement in which the agent learns the lengths of the tenants' work and pauses."""


def alone(arguments: Sequence[str], seconds: float) -> float:
    """Return the part of the GPU's time that one program gets without neighbours."""
    with (
        tempfile.TemporaryDirectory(prefix="sh") as directory,
        running(Path(directory), tenant("a", 1.0)) as node,
    ):
        node.launch("a", *arguments)
        wait_for(lambda: node.devices().busy_ns("a") > 0, "device time")
        time.sleep(SETTLE_S)
        return node.shares(seconds, "a")["a"]


def together(mix: str, work: str, seconds: float, watched_s: float, grace_ms: int = 1000) -> Window:
    """Run the tenants of the shares `mix` with the kernels `work` on one GPU. Return their measured shares. Other
    arguments as for `share_window.watch`."""
    works = [WORKS[work][index % len(WORKS[work])] for index in range(len(MIXES[mix]))]
    tenants = [Asked(f"t{index}", share) for index, share in enumerate(MIXES[mix])]
    long = max(one.us for one in works) > seconds * 1e6 / 100
    rows = [tenant(one.name, one.share) for one in tenants]
    with (
        tempfile.TemporaryDirectory(prefix="sh") as directory,
        running(Path(directory), *rows, grace_ms=str(grace_ms)) as node,
    ):
        for one, kernels in zip(tenants, works, strict=True):
            node.launch(one.name, *kernels.arguments)
        return watch(node, tenants, seconds, watched_s, long=long)


def with_pauses(pauses: Pauses, kernel_ms: int, seconds: float, single: float) -> list[Row]:
    """Measure a tenant with pauses next to a neighbour that launches without end. `single`: part of the GPU's time that
    the tenant gets without neighbours."""
    case = (
        f"pausing {pauses.request:g}:{pauses.neighbour:g}, works {pauses.work_ms} ms, pauses {pauses.pause_ms} ms "
        f"{pauses.spread}, {kernel_ms} ms"
    )
    names = ("pausing", "neighbour")
    rows = [tenant("pausing", pauses.request), tenant("neighbour", pauses.neighbour)]
    with tempfile.TemporaryDirectory(prefix="sh") as directory, running(Path(directory), *rows) as node:
        node.launch("pausing", *pauses.arguments)
        node.launch("neighbour", "--kernel-us", f"{kernel_ms}000")
        wait_for(lambda: all(node.devices().busy_ns(name) for name in names), "device time of both", 60)
        time.sleep(LEARN_S)
        waits, idle = waits_of(node, "pausing"), anticipated_s(node)
        shares = node.shares(seconds, *names)
        time.sleep(TOLD_S)
        waited = waits_since(node, "pausing", waits)
        idle = (anticipated_s(node) - idle) / (seconds + TOLD_S)
    return [
        Row(case, "pausing_share", "fraction", round(shares["pausing"], 4)),
        Row(case, "pausing_expected", "fraction", round(pauses.expected, 4)),
        Row(case, "pausing_alone", "fraction", round(single, 4)),
        Row(case, "of_request_alone", "ratio", round(shares["pausing"] / pauses.request / single, 4)),
        Row(case, "pausing_idle", "fraction", round(idle, 4)),
        Row(case, "neighbour_share", "fraction", round(shares["neighbour"], 4)),
        Row(case, "work_lost", "fraction", round(1 - sum(shares.values()) - idle, 4)),
        *wait_rows(case, waited),
    ]


def kept(cases: set[str]) -> list[Row]:
    """Return the rows of the last results for cases that this run does not measure."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        listed = json.loads((RESULTS / "shares.json").read_text())["rows"]
        return [Row(**row) for row in listed if row["case"].split(": ")[0] not in cases]
    return []


def special_cases(arguments: argparse.Namespace, *, everything: bool) -> Iterator[list[Row]]:
    """Measure the requested cases other than mixes; yield the rows of each."""
    seconds: float = arguments.seconds
    if arguments.service or everything:
        yield from (measure(service, seconds) for service in SERVICES)
    if arguments.arrivals or everything:
        yield from map(measure_arrival, ARRIVALS)
    if arguments.stops or everything:
        yield from (measure_stops(stops, seconds) for stops in STOPS)
    if arguments.pauses or everything:
        for pauses in PAUSING:
            single = alone(pauses.arguments, PAUSING_S)
            for kernel_ms in PAUSING_KERNELS_MS:
                yield with_pauses(pauses, kernel_ms, max(PAUSING_S, PAUSING_KERNELS * kernel_ms / 1e3), single)
    if arguments.gangs or everything:
        single = alone(Work(GANG_KERNEL_US).arguments, min(5.0, seconds))
        yield from (measure_gang(gang, single, seconds, arguments.watched) for gang in GANGS)
    if arguments.gaps is not None or everything:
        yield from map(GapsBenchmark(seconds).rows, chosen(arguments.gaps or []))
    if arguments.overtaking or everything:
        for mix, work in OVERTAKING:
            for grace_ms in OVERTAKEN_AFTER_MS:
                case = f"{mix}, {work}, overtaken after {grace_ms} ms"
                yield together(mix, work, seconds, 0, grace_ms).rows(case, 1.0)


def mixes(arguments: argparse.Namespace, *, everything: bool) -> Iterator[list[Row]]:
    """Measure the requested mixes; yield the rows of each."""
    singles: dict[Work, float] = {}
    for work in arguments.work or (WORKS if everything or arguments.mix else ()):
        for one in WORKS[work]:
            if one not in singles:
                singles[one] = alone(one.arguments, min(5.0, arguments.seconds))
        single = sum(singles[one] for one in WORKS[work]) / len(WORKS[work])
        for mix in arguments.mix or MIXES:
            if not everything or mix not in SMALL or work == SMALL_WORK:
                yield together(mix, work, arguments.seconds, arguments.watched).rows(f"{mix}, {work}", single)


def main() -> int:
    """Run the benchmark. Return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=20.0, help="how long each case is measured (default 20)")
    parser.add_argument(
        "--watched", type=float, default=WATCHED_S, help="mixes and gangs are watched for so long (default 60)"
    )
    parser.add_argument("--mix", action="append", choices=MIXES, help="only these shares; may be repeated")
    parser.add_argument("--work", action="append", choices=WORKS, help="only these kernels; may be repeated")
    parser.add_argument("--service", action="store_true", help="only a service next to a busy program")
    parser.add_argument("--pauses", action="store_true", help="only the tenants that pause")
    parser.add_argument("--arrivals", action="store_true", help="only arrivals during a backlog")
    parser.add_argument("--gangs", action="store_true", help="only gangs next to singles")
    parser.add_argument("--overtaking", action="store_true", help="only long kernels by when they are overtaken")
    parser.add_argument("--stops", action="store_true", help="only tenants that are stopped again and again")
    parser.add_argument(
        "--gaps", nargs="*", metavar="TEXT", help="only programs with gaps; with texts the cases that have one of them"
    )
    arguments = parser.parse_args()
    parts = (arguments.service, arguments.pauses, arguments.arrivals, arguments.gangs, arguments.overtaking)
    everything = not (any(parts) or arguments.gaps is not None or arguments.stops or arguments.work or arguments.mix)
    if not built():
        print("hook or test double not built; run `make shim doubles`", file=sys.stderr)
        return 1
    rows: list[Row] = []
    measured = (special_cases(arguments, everything=everything), mixes(arguments, everything=everything))
    for fresh in itertools.chain(*measured):
        print_table(fresh, title=fresh[0].case.split(": ")[0])
        rows += fresh
    write("shares", kept({row.case.split(": ")[0] for row in rows}) + rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
