"""Speed of the operator compared with a bare client: latency, sustained rate, processor time, calls, restart, memory.

    PYTHONPATH=tests:benchmarks python benchmarks/operator_speed.py [--planes memory,real] [--cases latency,rate,...]
        [--doors SharePods,claims,lines]

There are two control planes: the real one, and the API server double in a separate process. The bare client creates
Pods with the same library and connections as the operator, and the same scheduler binds them. Cases:

    latency   Time from sending an object until its Pod is opened (it has no gate and is pinned to a node), and until it
              is bound. Objects are sent at 20 a second, and at half of the bare client's rate. `..._added`: percentile
              of the SharePods minus the percentile of bare Pods.
    rate      Rate that is held for 60 s with 256 objects in flight, with processor time and calls per SharePod.
    rest      Processor time with --sharepods present: at rest (usage changes by less than a point), and with changing
              usage. Also the memory.
    restart   Time from the start of the operator's process until it has placed one more SharePod. There are --foreign
              other Pods.
    handover  Only on the double, with 2,500 SharePods and a standby: time from SIGTERM, and from SIGKILL, of the leader
              until the standby has placed one more SharePod.
    delete    500 SharePods are deleted at once: calls per SharePod.
    ablation  Parts of the processor time per SharePod: each part is timed, and each part is left out once.

On the real control plane, latency and rate are measured for each of `--doors`: SharePods, plain Pods with a claim of a
template each, and plain Pods with a resource line. The Pods of the last two have no gate, so they are never opened.

`calls` counts the operator's calls: from the audit log of the real control plane, and by user agent on the double.
`server_cpu` is the processor time of the real API server for all clients. Prints a table and writes
build/results/operator.json.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
import time
from collections import Counter
from contextlib import AbstractAsyncContextManager, ExitStack

from harness.errors import HarnessError
from harness.fakes import FakeKubelets
from operatorkit import accounting
from operatorkit.client import MEAN_REQUEST, Door, LoadClient, client, percentile
from operatorkit.planes import GPUS, MemoryPlane, Plane, RealPlane
from operatorkit.process import cpu_of, rss_of
from operatorkit.stalls import Stalls
from results import Row, write

CASES = ("latency", "rate", "rest", "restart", "handover", "delete", "ablation")
SLOW_RATE = 20.0
"""SharePods created per second in the calm case: as many as a large cluster creates on a busy day."""
IN_FLIGHT = 256
"""Objects that are created and not yet bound, in the case `rate`: eight for each of the operator's concurrent
writes."""
_WARM = 20
"""SharePods that are created one after the other before the measurement, to warm up."""
_LATENCY_S = 8.0
_LATENCY_MOST = 2000
"""Most SharePods of one latency case. At half of a fast bare client's rate, the SharePods of 8 s would fill the
nodes."""
_FULL = 0.8
"""Largest part of the GPUs that the shares of all latency cases may occupy. A latency case is measured at two rates for
each of `--doors`."""
_BARE_S = 8.0
_REST_S = 20.0
_QUIET_S = 3.0
"""Seconds without a call of the operator after which it counts as settled."""
_SETTLE_S = 60.0
"""Seconds within which the operator must have settled. Otherwise the benchmark reports the failure."""
_WATCHING = ("watch ", "list ")
_BY_CLOCK = (" leases", " validatingadmissionpolicies", " validatingadmissionpolicybindings")
"""Kinds of objects that the operator reads or writes at fixed intervals. They do not count: they do not depend on the
number of SharePods."""
_DELETED = 500
_HANDED_OVER = 2_500
"""Number of SharePods in the cluster when the standby takes over."""
_MOVING = 200
"""Thousandths of a GPU by which the usage changes at each report of the agents in the case with changing usage. A
change of this size is always reported."""
_STILL = 10


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--planes", default="memory,real", help="memory, real")
    parser.add_argument("--cases", default="latency,rate", help=", ".join(CASES))
    doors = [door.value for door in Door if door is not Door.BARE]
    parser.add_argument("--doors", default=",".join(doors), help=f"on the real control plane: {', '.join(doors)}")
    parser.add_argument("--seconds", type=float, default=60.0, help="of the case rate")
    parser.add_argument("--sharepods", type=int, default=10_000, help="of the cases rest and restart")
    parser.add_argument("--foreign", type=int, default=30_000, help="foreign Pods of the case restart")
    parser.add_argument(
        "--nodes", type=int, default=1_000, help="with room for the shares that are placed in --seconds"
    )
    options = parser.parse_args()
    cases = options.cases.split(",")
    if unknown := set(cases) - set(CASES):
        parser.error(f"--cases {', '.join(sorted(unknown))}: no such case; there are {', '.join(CASES)}")
    if unknown := set(options.doors.split(",")) - set(doors):
        parser.error(f"--doors {', '.join(sorted(unknown))}: no such door; there are {', '.join(doors)}")
    rows: list[Row] = []
    if "ablation" in cases:
        rows += accounting.ablation(options.nodes)
    measured = [case for case in cases if case != "ablation"]
    for name in options.planes.split(",") if measured else ():
        if name not in ("memory", "real"):
            parser.error(f"--planes {name}: there are memory, real")
        asked = [Door(door) for door in options.doors.split(",")] if name == "real" else [Door.SHAREPODS]
        by_claims = any(door is not Door.SHAREPODS for door in asked)
        try:
            with MemoryPlane(options.nodes) if name == "memory" else RealPlane(options.nodes, doors=by_claims) as plane:
                asyncio.run(Measurement(plane, options, asked, rows).run(measured))
        except (HarnessError, TimeoutError) as error:
            print(f"{name}: {error!r}", file=sys.stderr)
            write("operator", rows)
            return 1
    write("operator", rows)
    return 0


class Measurement:
    """Measurement of one control plane."""

    def __init__(self, plane: Plane, options: argparse.Namespace, doors: list[Door], rows: list[Row]) -> None:
        self._plane = plane
        self._doors = doors
        self._options = options
        self._rows = rows
        self._bare_rate = 0.0

    def _row(self, case: str, metric: str, unit: str, value: float) -> None:
        self._rows.append(Row(f"{self._plane.name}, {case}", metric, unit, value))
        print(f"{self._plane.name}, {case}: {metric} {value:.5g} {unit}", flush=True)

    async def run(self, cases: list[str]) -> None:
        """Run these cases. If one fails, the results of the earlier ones are kept."""
        if isinstance(self._plane, MemoryPlane):
            self._plane.start_operator()
        for door in self._doors:
            async with self._client(f"warm-{door.value.lower()}", door) as load:
                for _ in range(_WARM):
                    await load.create()
                    await load.all_bound()
        await self._bare()
        if "latency" in cases:
            with ExitStack() as stack:
                if isinstance(self._plane, RealPlane):
                    stack.enter_context(FakeKubelets(self._plane.cluster.api))
                await self._latency(SLOW_RATE)
            await self._latency(self._bare_rate / 2)
        async with self._client("sharepods", Door.SHAREPODS) as load:
            if "rate" in cases and Door.SHAREPODS in self._doors:
                await self._rate(load, "sustained")
            if "rest" in cases:
                await self._rest(load)
            if "restart" in cases:
                await self._restart(load)
            if "handover" in cases:
                await self._hand_over(load)
            if "delete" in cases:
                await self._delete(load)
        for door in self._doors if "rate" in cases else ():
            if door is not Door.SHAREPODS:
                async with self._client(door.value, door) as load:
                    await self._rate(load, f"sustained, {door.value}")

    def _client(self, namespace: str, door: Door) -> AbstractAsyncContextManager[LoadClient]:
        return client(self._plane.kubeconfig, self._plane.namespace(namespace), door)

    async def _settle(self) -> None:
        """Wait until the operator makes no more calls of the kinds that SharePods cause."""
        last, since = Counter[str](), time.monotonic()
        deadline = since + _SETTLE_S
        while time.monotonic() < since + _QUIET_S:
            await asyncio.sleep(0.5)
            now = await asyncio.to_thread(self._calls)
            if now == last:
                continue
            if time.monotonic() > deadline:
                raise TimeoutError(f"after {_SETTLE_S:.0f} s the operator still calls: {dict(now - last)}")
            last, since = now, time.monotonic()

    def _calls(self) -> Counter[str]:
        """Return the operator's calls so far, except watches and periodic calls."""
        calls = self._plane.calls()
        return Counter(
            {
                key: count
                for key, count in calls.items()
                if not key.startswith(_WATCHING) and not key.endswith(_BY_CLOCK)
            }
        )

    async def _bare(self) -> None:
        async with self._client("bare", Door.BARE) as load:
            before = self._server_cpu()
            self._bare_rate = await load.in_flight(IN_FLIGHT, seconds=_BARE_S)
            await load.all_bound()
            self._server_row("bare client", before, len(load.seen.sent))
        self._row("bare client", "sustained_rate", "1/s", self._bare_rate)

    def _server_cpu(self) -> float:
        return self._plane.server_cpu() if isinstance(self._plane, RealPlane) else 0.0

    def _server_row(self, case: str, before: float, count: int) -> None:
        """Add a row with the API server's processor time for each object created since `before`."""
        if isinstance(self._plane, RealPlane):
            self._row(case, "server_cpu", "ms per object", (self._server_cpu() - before) / count * 1000)

    async def _latency(self, rate: float) -> None:
        room = round(_FULL * self._options.nodes * GPUS / MEAN_REQUEST) // (2 * len(self._doors))
        count = min(_LATENCY_MOST, room, max(200, round(rate * _LATENCY_S)))
        bare = await self._delays(Door.BARE, rate, count)
        for door in self._doors:
            case = f"{rate:.0f}/s" if door is Door.SHAREPODS else f"{rate:.0f}/s, {door.value}"
            before, cpu = self._calls(), cpu_of(self._plane.pid)
            with Stalls(self._plane.probe) as stalls:
                found = await self._delays(door, rate, count)
            await self._settle()
            self._costs(case, before, cpu, count)
            self._row(case, "longest_stall", "ms", stalls.longest * 1000)
            for (moment, percent), delay in found.items():
                if moment == "bound" or door is Door.SHAREPODS:
                    self._row(case, f"{moment}_p{percent}", "ms", delay)
                    self._row(case, f"{moment}_added_p{percent}", "ms", delay - bare[moment, percent])

    async def _delays(self, door: Door, rate: float, count: int) -> dict[tuple[str, int], float]:
        """Create `count` objects at this rate. Return the percentiles of their delays in milliseconds, by (moment,
        percentile)."""
        async with self._client(f"{door.value.lower()}-{rate:.0f}", door) as load:
            await load.at_rate(rate, count)
        return {
            (moment, percent): percentile(load.seen.delays(moment), percent)
            for moment in ("opened", "bound")
            for percent in (50, 99)
        }

    def _costs(self, case: str, before: Counter[str], cpu: float, count: int) -> None:
        """Add rows with the operator's processor time and calls for each SharePod since `before`."""
        self._row(case, "operator_cpu", "ms per SharePod", (cpu_of(self._plane.pid) - cpu) / count * 1000)
        made = self._calls() - before
        reads = sum(number for key, number in made.items() if key.startswith("get "))
        self._row(case, "calls", "writes per SharePod", (made.total() - reads) / count)
        self._row(case, "calls", "reads per SharePod", reads / count)
        for key, number in sorted(made.items()):
            self._row(f"{case}, {key}", "calls", "per SharePod", number / count)

    async def _rate(self, load: LoadClient, case: str) -> None:
        before, cpu, server = self._calls(), cpu_of(self._plane.pid), self._server_cpu()
        with Stalls(self._plane.probe) as stalls:
            rate = await load.in_flight(IN_FLIGHT, seconds=self._options.seconds)
            used, bound = cpu_of(self._plane.pid) - cpu, len(load.seen.bound)
        self._row(case, "sustained_rate", "1/s", rate)
        self._row(case, "of_bare", "%", rate / self._bare_rate * 100)
        self._row(case, "core_used", "%", used / self._options.seconds * 100)
        self._row(case, "cpu_until_bound", "ms per SharePod", used / bound * 1000)
        self._row(case, "longest_stall", "ms", stalls.longest * 1000)
        await load.all_bound()
        self._server_row(case, server, len(load.seen.sent))
        await self._settle()
        self._costs(case, before, cpu, len(load.seen.sent))
        self._row(case, "rss", "MB", rss_of(self._plane.pid))

    async def _rest(self, load: LoadClient) -> None:
        missing = self._options.sharepods - len(load.seen.sent)
        if missing > 0:
            await load.in_flight(IN_FLIGHT, count=missing)
            await load.all_bound()
            await self._settle()
        case = f"{len(load.seen.sent)} SharePods at rest"
        for swing, what in ((_STILL, ""), (_MOVING, ", usage moves")):
            if swing and isinstance(self._plane, MemoryPlane):
                self._plane.ask(f"swing?milli={swing}")
                await asyncio.sleep(_REST_S / 2)
            elif what:
                continue
            before, cpu, begun = self._calls(), cpu_of(self._plane.pid), time.monotonic()
            with Stalls(self._plane.probe) as stalls:
                await asyncio.sleep(_REST_S)
            took = time.monotonic() - begun
            self._row(case + what, "core_used", "%", (cpu_of(self._plane.pid) - cpu) / took * 100)
            self._row(case + what, "calls", "1/s", (self._calls() - before).total() / took)
            self._row(case + what, "longest_stall", "ms", stalls.longest * 1000)
        if isinstance(self._plane, MemoryPlane):
            self._plane.ask("swing?milli=0")
        self._row(case, "rss", "MB", rss_of(self._plane.pid))
        await self._settle()

    async def _restart(self, load: LoadClient) -> None:
        self._plane.stop_operator()
        case = f"restart with {len(load.seen.sent)} SharePods"
        if isinstance(self._plane, MemoryPlane):
            case += f", {self._options.foreign} foreign Pods"
            self._plane.ask(f"foreign?count={self._options.foreign}")
        before, begun = self._calls(), time.monotonic()
        self._plane.start_operator()
        sent = set(load.seen.sent)
        await load.create()
        (name,) = load.seen.sent.keys() - sent
        await load.all_bound()
        self._row(case, "restart_to_decision", "s", load.seen.opened[name] - begun)
        await self._settle()
        self._row(case, "operator_cpu", "s", cpu_of(self._plane.pid))
        self._row(case, "rss", "MB", rss_of(self._plane.pid))
        self._row(case, "rss_most", "MB", rss_of(self._plane.pid, "VmHWM"))
        for key, number in sorted((self._calls() - before).items()):
            self._row(f"{case}, {key}", "calls", "count", number)

    async def _hand_over(self, load: LoadClient) -> None:
        if not isinstance(self._plane, MemoryPlane):
            return
        if (missing := _HANDED_OVER - len(load.seen.sent)) > 0:
            await load.in_flight(IN_FLIGHT, count=missing)
            await load.all_bound()
        case = f"hand-over with {len(load.seen.sent)} SharePods"
        for number in (signal.SIGTERM, signal.SIGKILL):
            with self._plane.standby():
                await self._settle()
                begun = time.monotonic()
                self._plane.signal(number)
                sent = set(load.seen.sent)
                await load.create()
                (name,) = load.seen.sent.keys() - sent
                await load.all_bound()
                self._row(case, f"{number.name.lower()}_to_decision", "s", load.seen.opened[name] - begun)

    async def _delete(self, load: LoadClient) -> None:
        before, cpu = self._calls(), cpu_of(self._plane.pid)
        names = list(load.seen.sent)[:_DELETED]
        await load.delete(names)
        await self._settle()
        self._costs(f"{len(names)} deleted at once", before, cpu, len(names))


if __name__ == "__main__":
    sys.exit(main())
