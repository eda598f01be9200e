"""Measured beside requested shares of GPU time: the real agent and the real hook on a simulated GPU.

Every case runs its tenants' programs at once for a stated time, each launching without end. The device's own account
is read, not the program's: the time that a tenant's kernels occupied the GPU within the window over the window's
length. `work_ratio` is what all got together over what one of them gets alone. Waits are from asking for the token to
getting it, as the agent counts them. With kernels so long that one is more than a point of the window, measuring goes
on until every share is and stays within a point: `window`. The cases `service` are those of share_latency.py, the
cases `arrival` those of share_arrival.py, the cases `stopped` those of share_stops.py. In the cases `pausing` one
tenant works and thinks beside one with long kernels: `pausing_expected` is request x work / (work + pause),
`pausing_idle` the part of the time for which the GPU was kept idle for it. Prints tables and writes
`build/results/shares.json`; a run of some of the cases replaces only their rows there.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import socket
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from hook.world.agent_node import Node, built, running, tenant, wait_for
from results import RESULTS, Row, print_table, write
from share_arrival import ARRIVALS, measure_arrival
from share_latency import SERVICES, measure
from share_stops import STOPS, measure_stops
from sharepod import protocol
from sharepod.agent.shares.histogram import WAIT_BOUNDS_S

PROMISES = {"time-guarantee": ("max", "share_error")}
SETTLE_S = 1.5
LONG_WINDOWS = 6
"""Cases of long kernels are measured for at most so many times the length of the others."""
OVERTAKING = (("10:90", "50 ms"), ("10:90", "400 ms"), ("50:50", "400 ms"), ("20:30:50", "mixed"))
OVERTAKEN_AFTER_MS = (20, 1000)
"""Grace periods: after so long beyond its turn a tenant is overtaken, and the device divides its time between both."""
STEP_S = 1.0
SPAN_S = 10.0
"""Length of the spans of a window of which the worst is told beside the whole window."""


@dataclass(frozen=True)
class Work:
    """Work that a program launches without end. `us`: microseconds that one launch occupies the GPU."""

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
"""Mixes that a run of everything measures with `SMALL_WORK` only: with longer kernels one turn is a large part of what
they ask for."""
SMALL_WORK = "5 ms"
WORKS: dict[str, tuple[Work, ...]] = {
    "0.1 ms": (Work(100),),
    "5 ms": (Work(5_000),),
    "50 ms": (Work(50_000),),
    "400 ms": (Work(400_000),),
    "graphs": (Work(5_000, graph_nodes=10),),
    "mixed": (Work(100), Work(50_000), Work(5_000)),
}
"""By name; tenants take them in turn."""


@dataclass(frozen=True)
class Pauses:
    """A tenant that works and thinks, by its request, beside another that is always busy."""

    request: float
    neighbour: float
    work_ms: int
    pause_ms: int
    spread: str = "regular"
    """Lengths of the pauses, of the same mean: always alike, exponentially distributed, or bimodal (nine of ten half as
    long as the mean, the tenth 5.5 times)."""

    @property
    def expected(self) -> float:
        """Return the share that the pausing tenant should get."""
        return self.request * self.work_ms / (self.work_ms + self.pause_ms)


PAUSING = tuple(
    Pauses(request, neighbour, work_ms, pause_ms, spread)
    for spread in ("regular", "exponential", "bimodal")
    for request, neighbour, work_ms, pause_ms in ((0.7, 0.3, 20, 5), (0.9, 0.0, 5, 2))
)
PAUSING_KERNELS_MS = (1, 5, 40, 250, 900)
PAUSING_S = 8.0
PAUSING_KERNELS = 40
"""A case is measured for `PAUSING_S`, or for so many of the neighbour's kernels where that is longer."""
LEARN_S = 4.0
"""Seconds for which the agent learns the tenants' habits before anything is measured."""


@dataclass(frozen=True)
class Measured:
    """One tenant in one case."""

    name: str
    asked: float
    got: float
    wait_p50_s: float
    wait_p99_s: float
    span_error: float
    """Largest error in any `SPAN_S` of the window, in points."""

    @property
    def error(self) -> float:
        """In points."""
        return abs(self.got - self.asked) * 100


def quantile(bounds_s: Sequence[float], counts: Sequence[float], part: float) -> float:
    """Return the duration in seconds that a `part` (0 to 1) of the counted ones does not exceed; 0 if there are none.

    Linear within a bucket; durations beyond the last bound count as that bound. `counts` as in the agent's `Histogram`.
    """
    wanted, below = part * sum(counts), 0.0
    for index, amount in enumerate(counts):
        if amount and below + amount >= wanted:
            if index == len(bounds_s):
                return bounds_s[-1]
            lower = bounds_s[index - 1] if index else 0.0
            return lower + (bounds_s[index] - lower) * (wanted - below) / amount
        below += amount
    return 0.0


@contextlib.contextmanager
def company(node: Node, name: str) -> Iterator[None]:
    """A process of that tenant that is connected and idle: whoever starts meanwhile keeps its queue short from its
    first launch on, as beside a real neighbour."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
        sock.connect(str(node.path(name) / "agent.sock"))
        sock.send(protocol.encode(protocol.Hello(1, 1)))
        sock.recv(protocol.FRAME_MAX)
        yield


def cpu_of(node: Node) -> float:
    """Processor time of the agent's processes so far, in seconds."""
    stats = [Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split() for pid in node.agent_pids]
    return sum(int(fields[11]) + int(fields[12]) for fields in stats) / 100


def waits_of(node: Node, name: str) -> list[float]:
    """Return the tenant's waits so far, as counts by the bounds of the histogram."""
    cumulative = [
        sample.value
        for sample in node.metrics()
        if sample.name == "sharepod_tenant_wait_seconds_bucket" and sample.labels["tenant"] == name
    ]
    return [amount - below for amount, below in zip(cumulative, [0.0, *cumulative], strict=False)]


def busy(node: Node, names: list[str]) -> tuple[float, list[float]]:
    """The moment, and the device time of each until then, in seconds."""
    devices, now = node.devices(), time.monotonic()
    return now, [devices.busy_ns(name) / 1e9 for name in names]


def alone(work: Work, seconds: float) -> float:
    """The part of the GPU's time that one program gets with nobody beside it."""
    with (
        tempfile.TemporaryDirectory(prefix="sh") as directory,
        running(Path(directory), tenant("a", 1.0)) as node,
    ):
        node.launch("a", *work.arguments)
        wait_for(lambda: node.devices().busy_ns("a") > 0, "device time")
        time.sleep(SETTLE_S)
        return node.shares(seconds, "a")["a"]


def together(mix: str, work: str, seconds: float, grace_ms: int = 1000) -> tuple[list[Measured], float, float]:
    """Run one case; return each tenant's share, the length of the window, and the agent's CPU in cores."""
    asked = MIXES[mix]
    works = [WORKS[work][index % len(WORKS[work])] for index in range(len(asked))]
    names = [f"t{index}" for index in range(len(asked))]
    long = max(one.us for one in works) > seconds * 1e6 / 100
    rows = [tenant(name, share) for name, share in zip(names, asked, strict=True)]
    with (
        tempfile.TemporaryDirectory(prefix="sh") as directory,
        running(Path(directory), *rows, tenant("company", 0.0), grace_ms=str(grace_ms)) as node,
    ):
        with company(node, "company"):
            for name, one in zip(names, works, strict=True):
                node.launch(name, *one.arguments)
            wait_for(lambda: all(node.devices().busy_ns(name) for name in names), "device time of every tenant", 60)
        time.sleep(SETTLE_S)
        waits = [waits_of(node, name) for name in names]
        cpu, (begin, before) = cpu_of(node), busy(node, names)
        samples = [(begin, before)]
        good_since: float | None = None
        while True:
            time.sleep(STEP_S)
            now, after = busy(node, names)
            samples.append((now, after))
            window = now - begin
            if not long and window < seconds:
                continue
            got = [(b - a) / window for a, b in zip(before, after, strict=True)]
            if not long:
                break
            good = all(abs(g - a) <= 0.01 for g, a in zip(got, asked, strict=True))
            good_since = (good_since or window) if good else None
            if window >= seconds and good_since is not None and window - good_since >= seconds / 4:
                window = good_since
                break
            if window >= LONG_WINDOWS * seconds:
                break
        cpu = (cpu_of(node) - cpu) / (now - begin)
        time.sleep(1.1)  # what the agent tells is up to a second old
        waited = [
            [late - early for early, late in zip(first, waits_of(node, name), strict=True)]
            for name, first in zip(names, waits, strict=True)
        ]
    measured = [
        Measured(
            name,
            share,
            part,
            quantile(WAIT_BOUNDS_S, counts, 0.5),
            quantile(WAIT_BOUNDS_S, counts, 0.99),
            span_error(samples, place, share),
        )
        for place, (name, share, part, counts) in enumerate(zip(names, asked, got, waited, strict=True))
    ]
    return measured, window, cpu


def span_error(samples: Sequence[tuple[float, list[float]]], place: int, asked: float) -> float:
    """Return the largest error of one tenant, in points, over all spans of `SPAN_S` between two samples; over the whole
    window if that is shorter."""
    worst = 0.0
    for begin, before in samples:
        later = [sample for sample in samples if sample[0] - begin >= SPAN_S - STEP_S / 2] or samples[-1:]
        end, after = later[0]
        if end > begin and (end - begin >= SPAN_S - STEP_S / 2 or begin == samples[0][0]):
            worst = max(worst, abs((after[place] - before[place]) / (end - begin) - asked) * 100)
    return worst


def sample(node: Node, name: str, tenant_id: str) -> float:
    """Return one of the tenant's counters."""
    return sum(s.value for s in node.metrics() if s.name == name and s.labels["tenant"] == tenant_id)


def with_pauses(pauses: Pauses, kernel_ms: int, seconds: float) -> list[Row]:
    """Measure a tenant with pauses beside one that launches kernels without end."""
    case = (
        f"pausing {pauses.request:g}:{pauses.neighbour:g}, works {pauses.work_ms} ms, pauses {pauses.pause_ms} ms "
        f"{pauses.spread}, {kernel_ms} ms"
    )
    names, idle_metric = ("pausing", "neighbour"), "sharepod_tenant_anticipated_seconds_total"
    rows = [tenant("pausing", pauses.request), tenant("neighbour", pauses.neighbour)]
    with tempfile.TemporaryDirectory(prefix="sh") as directory, running(Path(directory), *rows) as node:
        work, pause = f"{pauses.work_ms}000", f"{pauses.pause_ms}000"
        node.launch("pausing", "--kernel-us", work, "--sync-every", "1", "--idle-us", pause, "--spread", pauses.spread)
        node.launch("neighbour", "--kernel-us", f"{kernel_ms}000")
        wait_for(lambda: all(node.devices().busy_ns(name) for name in names), "device time of both", 60)
        time.sleep(LEARN_S)
        waits, idle = waits_of(node, "pausing"), sample(node, idle_metric, "pausing")
        shares = node.shares(seconds, *names)
        time.sleep(1.1)  # what the agent tells is up to a second old
        waited = [late - early for early, late in zip(waits, waits_of(node, "pausing"), strict=True)]
        idle = (sample(node, idle_metric, "pausing") - idle) / (seconds + 1.1)
    return [
        Row(case, "pausing_share", "fraction", round(shares["pausing"], 4)),
        Row(case, "pausing_expected", "fraction", round(pauses.expected, 4)),
        Row(case, "pausing_idle", "fraction", round(idle, 4)),
        Row(case, "neighbour_share", "fraction", round(shares["neighbour"], 4)),
        *(
            Row(case, f"wait_p{part * 100:g}", "ms", round(quantile(WAIT_BOUNDS_S, waited, part) * 1e3, 2))
            for part in (0.5, 0.99)
        ),
    ]


def rows_of(case: str, measured: list[Measured], single: float, window: float, cpu: float) -> list[Row]:
    """Return the rows as they are written."""
    rows = []
    for one in measured:
        name = f"{case}: {one.name}"
        rows += [
            Row(name, "asked", "fraction", one.asked),
            Row(name, "share", "fraction", round(one.got, 4)),
            Row(name, "share_error", "points", round(one.error, 2)),
            Row(name, "share_error_10s", "points", round(one.span_error, 2)),
            Row(name, "wait_p50", "ms", round(one.wait_p50_s * 1e3, 2)),
            Row(name, "wait_p99", "ms", round(one.wait_p99_s * 1e3, 2)),
        ]
    rows += [
        Row(case, "share_error", "points", round(max(one.error for one in measured), 2)),
        Row(case, "share_error_10s", "points", round(max(one.span_error for one in measured), 2)),
        Row(case, "work_ratio", "ratio", round(sum(one.got for one in measured) / single, 4)),
        Row(case, "wait_p99", "ms", round(max(one.wait_p99_s for one in measured) * 1e3, 2)),
        Row(case, "window", "s", round(window, 1)),
        Row(case, "agent_cpu", "fraction of a core", round(cpu, 4)),
    ]
    return rows


def kept(cases: set[str]) -> list[Row]:
    """The rows of earlier runs of other cases."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        listed = json.loads((RESULTS / "shares.json").read_text())["rows"]
        return [Row(**row) for row in listed if row["case"].split(": ")[0] not in cases]
    return []


def main() -> int:
    """The program."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=20.0, help="how long each case is measured (default 20)")
    parser.add_argument("--mix", action="append", choices=MIXES, help="only these shares; may be repeated")
    parser.add_argument("--work", action="append", choices=WORKS, help="only these kernels; may be repeated")
    parser.add_argument("--service", action="store_true", help="only a service beside a busy program")
    parser.add_argument("--pauses", action="store_true", help="only the tenants that pause")
    parser.add_argument("--arrivals", action="store_true", help="only arrivals beside a backlog")
    parser.add_argument("--overtaking", action="store_true", help="only long kernels by when they are overtaken")
    parser.add_argument("--stops", action="store_true", help="only tenants that are stopped again and again")
    arguments = parser.parse_args()
    some = arguments.service or arguments.pauses or arguments.arrivals or arguments.overtaking or arguments.stops
    everything = not (some or arguments.work or arguments.mix)
    if not built():
        print("hook or test double not built; run `make shim doubles`", file=sys.stderr)
        return 1
    singles: dict[Work, float] = {}
    rows: list[Row] = []
    if arguments.service or everything:
        for service in SERVICES:
            fresh = measure(service, arguments.seconds)
            print_table(fresh, title=service.name)
            rows += fresh
    if arguments.arrivals or everything:
        for arrival in ARRIVALS:
            fresh = measure_arrival(arrival)
            print_table(fresh, title=arrival.name)
            rows += fresh
    if arguments.stops or everything:
        for stops in STOPS:
            fresh = measure_stops(stops, arguments.seconds)
            print_table(fresh, title=stops.name)
            rows += fresh
    if arguments.pauses or everything:
        for pauses in PAUSING:
            for kernel_ms in PAUSING_KERNELS_MS:
                fresh = with_pauses(pauses, kernel_ms, max(PAUSING_S, PAUSING_KERNELS * kernel_ms / 1e3))
                print_table(fresh, title=fresh[0].case)
                rows += fresh
    for mix, work in OVERTAKING if arguments.overtaking or everything else ():
        for grace_ms in OVERTAKEN_AFTER_MS:
            measured, window, cpu = together(mix, work, arguments.seconds, grace_ms)
            case = f"{mix}, {work}, overtaken after {grace_ms} ms"
            fresh = rows_of(case, measured, 1.0, window, cpu)
            print_table(fresh, title=case)
            rows += fresh
    for work in arguments.work or (WORKS if everything or arguments.mix else ()):
        for one in WORKS[work]:
            if one not in singles:
                singles[one] = alone(one, min(5.0, arguments.seconds))
        single = sum(singles[one] for one in WORKS[work]) / len(WORKS[work])
        for mix in arguments.mix or MIXES:
            if everything and mix in SMALL and work != SMALL_WORK:
                continue
            case = f"{mix}, {work}"
            measured, window, cpu = together(mix, work, arguments.seconds)
            fresh = rows_of(case, measured, single, window, cpu)
            print_table(fresh, title=case)
            rows += fresh
    write("shares", kept({row.case.split(": ")[0] for row in rows}) + rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
