"""Time from apply to Pod in one namespace while thousands of SharePods of another wait, on the API server double.

    PYTHONPATH=tests:benchmarks python benchmarks/queue_flood.py [--waiting 3000] [--cases same,different,limits,noise]

One namespace creates SharePods at a steady rate, and ends each one a while after it was bound. Another namespace has a
crowd of SharePods that wait: by anti-affinity only one of them fits on each node, and leaves most of every GPU free.
The time is measured without a crowd, while the crowd arrives, and while the crowd waits. Cases:

    same       all SharePods of the crowd have equal requests
    different  each SharePod of the crowd requests another amount of memory
    limits     like `different`, with names and labels of maximal length
    noise      no crowd: SharePods of another namespace run, fail and are restarted many times a second, with messages
               of maximal length, and dozens of Events are created a second
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import sys
import time

from operatorkit.client import PODS, SHAREPODS, Door, LoadClient, client, percentile
from operatorkit.planes import MemoryPlane
from operatorkit.process import cpu_of
from results import Row, write
from sharepod.kube import MERGE_PATCH, ApiError, Connection

_EVENTS = "/apis/events.k8s.io/v1/namespaces/{}/events"
_RATE = 20.0
"""SharePods per second that the measured namespace creates."""
_STAYS_S = 3.0
"""Seconds for which each of these SharePods runs. Its end frees room that the crowd could take."""
_CROWD_RATE = 50.0
"""SharePods of the crowd that arrive per second: a quarter of the API server double's rate."""
_WARM = 50


_LABELS = {f"{'p' * 249}.{each:03}/{'n' * 63}": "v" * 63 for each in range(20)}
"""Labels with the longest keys and values that the API server accepts: 7.5 KB in total."""
_NOISY = 60
"""Number of SharePods that run, fail and are restarted in the case `noise`."""
_NOISES = 50.0
"""Writes per second in the case `noise`: of Pod statuses, and of Events."""
_MESSAGE = 4096
"""Characters of a container's termination message: as many as the kubelet reads."""


class Crowd:
    """SharePods of one namespace, of which only one fits on each node.

    Args:
        api: Connection of the client that creates the SharePods.
        namespace: Their namespace.
        different: True if no two of them have the same request.
        longest: True if their names and labels have the maximal length.
    """

    def __init__(self, api: Connection, namespace: str, *, different: bool, longest: bool) -> None:
        self._api = api
        self._different = different
        self._longest = longest
        self._path = SHAREPODS.format(namespace)

    async def arrive(self, count: int, rate: float) -> None:
        """Create `count` SharePods, `rate` a second."""

        gpu = {"request": 0.3, "count": 8, "antiAffinity": "crowd"}
        containers = [{"name": "main", "image": "test"}]
        body = {"apiVersion": "sharepod.dev/v1alpha1", "kind": "SharePod"}
        began, creating = time.monotonic(), []
        for number in range(count):
            await asyncio.sleep(max(0.0, began + number / rate - time.monotonic()))
            asked = {**gpu, "memory": f"{1024 + number}Mi"} if self._different else gpu
            spec = {"gpu": asked, "containers": containers}
            name = f"crowd-{number}"
            metadata = {"name": name.ljust(63, "x"), "labels": _LABELS} if self._longest else {"name": name}
            made = {**body, "metadata": metadata, "spec": spec}
            creating.append(asyncio.create_task(self._api.create(self._path, made)))
        await asyncio.gather(*creating)


class Noise:
    """SharePods of one namespace whose Pods change often: containers end and are restarted, Pods fail, and Events are
    created."""

    def __init__(self, api: Connection, namespace: str) -> None:
        self._api = api
        self._namespace = namespace
        self._number = 0

    async def begin(self) -> None:
        """Create the SharePods."""
        containers = [{"name": "main", "image": "test"}]
        for number in range(_NOISY):
            spec = {"gpu": {"request": 0.01, "memory": "64Mi"}, "containers": containers}
            body = {"apiVersion": "sharepod.dev/v1alpha1", "kind": "SharePod", "metadata": {"name": f"noise-{number}"}}
            await self._api.create(SHAREPODS.format(self._namespace), body | {"spec": spec})

    async def go_on(self) -> None:
        """Write changes until cancelled."""
        began = time.monotonic()
        making: set[asyncio.Task[None]] = set()
        while True:
            self._number += 1
            await asyncio.sleep(max(0.0, began + self._number / _NOISES - time.monotonic()))
            task = asyncio.create_task(self._make(self._number))
            making.add(task)
            task.add_done_callback(making.discard)

    async def _make(self, number: int) -> None:
        """Write an Event, and the status of a Pod that shows an ended container. Every eighth status also shows that
        the Pod has failed."""
        name = f"noise-{number % _NOISY}"
        message = f"{number} ".ljust(_MESSAGE, "x")
        ended = {"terminated": {"exitCode": 1, "reason": "Error", "message": message}}
        fails = number // _NOISY % 8 == 7
        container = {
            "name": "main",
            "restartCount": number,
            "ready": False,
            "state": ended if fails else {"waiting": {"reason": "CrashLoopBackOff", "message": message}},
            "lastState": ended,
        }
        phase = "Failed" if fails else "Running"
        status = {"phase": phase, "message": message, "containerStatuses": [container]}
        event = {
            "metadata": {"name": f"{name}.{number}", "namespace": self._namespace},
            "regarding": {"kind": "Pod", "name": name, "namespace": self._namespace},
            "reason": "BackOff",
            "note": message[:1024],
        }
        path = f"{PODS.format(self._namespace)}/{name}/status"
        with contextlib.suppress(ApiError):  # the Pod does not exist while it is being replaced
            await self._api.create(_EVENTS.format(self._namespace), event)
            await self._api.patch(path, {"status": status}, MERGE_PATCH)


async def passing(load: LoadClient, seconds: float) -> list[float]:
    """Create SharePods at the measured rate for `seconds`, and end each after its stay. Return, for each, the seconds
    from its creation until its Pod was opened."""
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


_CASES = {
    "same": "",
    "different": ", each asking otherwise",
    "limits": ", each asking otherwise, names and labels at their limits",
}
"""Name of a crowd -> the text that describes it in the rows."""


async def measure(plane: MemoryPlane, options: argparse.Namespace, kind: str) -> list[Row]:
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
        await row(f"empty queue (before {kind})", options.seconds)
        api = await Connection.open(plane.kubeconfig, "crowd")
        if kind == "noise":
            noise = Noise(api, plane.namespace("noise"))
            await noise.begin()
            noisy = asyncio.create_task(noise.go_on())
            await row(
                f"{_NOISY} of another namespace fail, {_NOISES:.0f} messages and Events a second", options.seconds
            )
            noisy.cancel()
            await asyncio.gather(noisy, return_exceptions=True)
        else:
            how = _CASES[kind]
            crowd = Crowd(api, plane.namespace("crowd"), different=kind != "same", longest=kind == "limits")
            arriving = asyncio.create_task(crowd.arrive(options.waiting + options.nodes, options.crowd_rate))
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
    parser.add_argument("--crowd-rate", type=float, default=_CROWD_RATE, help="SharePods of the crowd a second")
    parser.add_argument("--cases", default="same,different,noise", help=f"{', '.join(_CASES)}, noise")
    options = parser.parse_args()
    rows: list[Row] = []
    for kind in options.cases.split(","):
        if kind not in (*_CASES, "noise"):
            parser.error(f"--cases {kind}: there are {', '.join(_CASES)}, noise")
        with MemoryPlane(options.nodes) as plane:
            rows += asyncio.run(measure(plane, options, kind))
    write("queue-flood", rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
