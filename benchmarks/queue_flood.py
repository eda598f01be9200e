"""Time from apply to Pod in one namespace while SharePods of another wait by the thousand, on the API server double.

    PYTHONPATH=tests:benchmarks python benchmarks/queue_flood.py [--waiting 3000] [--nodes 100] [--seconds 20]

A namespace creates SharePods at a steady rate, and ends each a while after it was bound. That is measured alone, while
a crowd of another namespace arrives, and while that crowd waits. Of the crowd one fits on each node, by anti-affinity,
and leaves most of every GPU to others. All of a crowd ask the same, or each asks for another amount of memory.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time

from operatorkit.client import SHAREPODS, Door, LoadClient, client, percentile
from operatorkit.planes import MemoryPlane
from operatorkit.process import cpu_of
from results import Row, write
from sharepod.kube import Connection

_RATE = 20.0
"""SharePods a second of the namespace that is measured."""
_STAYS_S = 3.0
"""Seconds that each of them stays: its end is room that the crowd could use."""
_CROWD_RATE = 50.0
"""SharePods of the crowd that arrive a second: a quarter of what the double of the API server takes."""
_WARM = 50


class Crowd:
    """SharePods of one namespace of which one fits on each node. `different`: no two of them ask the same."""

    def __init__(self, api: Connection, namespace: str, *, different: bool) -> None:
        self._api = api
        self._different = different
        self._path = SHAREPODS.format(namespace)

    async def arrive(self, count: int) -> None:
        """Create so many."""

        gpu = {"request": 0.3, "count": 8, "antiAffinity": "crowd"}
        containers = [{"name": "main", "image": "test"}]
        body = {"apiVersion": "sharepod.dev/v1alpha1", "kind": "SharePod"}
        began, creating = time.monotonic(), []
        for number in range(count):
            await asyncio.sleep(max(0.0, began + number / _CROWD_RATE - time.monotonic()))
            asked = {**gpu, "memory": f"{1024 + number}Mi"} if self._different else gpu
            spec = {"gpu": asked, "containers": containers}
            made = {**body, "metadata": {"name": f"crowd-{number}"}, "spec": spec}
            creating.append(asyncio.create_task(self._api.create(self._path, made)))
        await asyncio.gather(*creating)


async def passing(load: LoadClient, seconds: float) -> list[float]:
    """Create at the rate for so many seconds, each ending after its stay; return the seconds from sent to opened."""
    before = set(load.seen.sent)
    ending = asyncio.create_task(_end_each(load, before))
    await load.at_rate(_RATE, round(seconds * _RATE))
    delays = [load.seen.opened[name] - at for name, at in load.seen.sent.items() if name not in before]
    await asyncio.sleep(_STAYS_S + 1.0)
    ending.cancel()
    await asyncio.gather(ending, return_exceptions=True)
    return delays


async def _end_each(load: LoadClient, before: set[str]) -> None:
    ended = set(before)
    while True:
        await asyncio.sleep(0.1)
        due = [n for n, at in list(load.seen.bound.items()) if n not in ended and time.monotonic() > at + _STAYS_S]
        ended.update(due)
        await load.delete(due)


async def measure(plane: MemoryPlane, options: argparse.Namespace, *, different: bool) -> list[Row]:
    rows: list[Row] = []

    async def row(case: str, work: float) -> None:
        processes = {"operator": plane.pid, "server": plane.server.pid}
        cpu, began = {name: cpu_of(pid) for name, pid in processes.items()}, time.monotonic()
        delays = await passing(load, work)
        took = time.monotonic() - began
        for percent in (50, 99):
            rows.append(Row(case, f"opened_p{percent}", "ms", percentile(delays, percent)))
        for name, pid in processes.items():
            rows.append(Row(case, f"core_used_by_{name}", "%", (cpu_of(pid) - cpu[name]) / took * 100))
        print(case, *(f"{each.metric} {each.value:.4g} {each.unit}" for each in rows[-4:]), flush=True)

    plane.start_operator()
    async with client(plane.kubeconfig, plane.namespace("passer"), Door.SHAREPODS) as load:
        for _ in range(_WARM):
            await load.create()
            await load.all_bound()
        if not different:
            await row("nobody waits", options.seconds)
        api = await Connection.open(plane.kubeconfig, "crowd")
        crowd = Crowd(api, plane.namespace("crowd"), different=different)
        how = ", each asking otherwise" if different else ""
        arriving = asyncio.create_task(crowd.arrive(options.waiting + options.nodes))
        await row(f"{options.waiting} of another namespace arrive{how}", options.seconds)
        await arriving
        await asyncio.sleep(options.settle)
        await row(f"{options.waiting} of another namespace wait{how}", options.seconds)
        await api.close()
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--waiting", type=int, default=3000)
    parser.add_argument("--nodes", type=int, default=100)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--settle", type=float, default=20.0, help="seconds between the arrival and the last case")
    parser.add_argument("--crowd", choices=("same", "different", "both"), default="both", help="what a crowd asks for")
    options = parser.parse_args()
    rows: list[Row] = []
    for different in (False, True) if options.crowd == "both" else (options.crowd == "different",):
        with MemoryPlane(options.nodes) as plane:
            rows += asyncio.run(measure(plane, options, different=different))
    write("queue-flood", rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
