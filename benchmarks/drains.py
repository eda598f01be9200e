"""Inference server drained from node to node under load: SharePods compared with a Deployment of plain Pods, in one
run.

    PYTHONPATH=tests:benchmarks python benchmarks/drains.py [--drains 10] [--rate 20] [--every 75]

A real control plane, operator, agents and hook; nodes without machines, whose pods are processes. The program is a
small HTTP server that runs a kernel of 5 ms for each request. Four cases, each on two nodes of its own:

- one SharePod, one Pod of a Deployment: the cost of a single replica;
- two SharePods, two Pods of a Deployment, behind a PodDisruptionBudget `minAvailable: 1`. (A budget with
  `maxUnavailable` does not count a SharePod while it has no Pod.)

The cases take turns: `kubectl drain` drains the node of a replica, which is uncordoned once all replicas are ready
again. A client sends requests at a fixed rate to the Pods that the API shows as ready, as a Service does. It sends a
request again to another Pod, or after 20 ms, until it gets an answer. A request without an answer after ten seconds is
lost. Each run lasts for more than a minute, so that no restart back-off is part of the figures.

`longest_gap`: longest time between two answers, over all drains. `gap`: median over the drains of the longest time in
each drain. For one SharePod the gap is divided into four parts (medians): `eviction_to_end` of its process,
`end_to_released` (until its row is removed from the ledger), `released_to_bound` (until the next Pod is bound), and
`bound_to_answer`. Prints a table and writes build/results/drains.json.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import statistics
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field

from harness.api import Object
from harness.cluster import Cluster, wait_until
from harness.installation import GROUP, Installation
from harness.process_nodes import ProcessNodes
from results import Row, write

KERNEL_US = 5000
PATIENCE_S = 10.0
"""Seconds from a request's arrival after which it counts as lost."""
TRY_S = 2.0
"""Timeout of one attempt, in seconds."""
RETRY_S = 0.02
"""Seconds until the next attempt if no other replica is ready."""
SETTLE_S = 1.0
"""Seconds for which the load runs before a drain and after it."""
_TIMEOUT = 90.0


@dataclass(slots=True)
class Sight:
    """Pod of a case, with the times at which the API showed its changes, in monotonic seconds."""

    name: str
    node: str | None = None
    ready: bool = False
    deleted_at: float | None = None
    bound_at: float | None = None
    deleted: bool = False


class Watched:
    """Watch of the objects of one collection, in a thread. Each event calls `take` with the object, and with True if
    the object was deleted."""

    def __init__(self, cluster: Cluster, path: str, take: Callable[[Object, bool], None]) -> None:
        self._cluster = cluster
        self._path = path
        self._take = take
        self._ended = threading.Event()
        listed = cluster.api.get(path)
        for each in listed["items"]:
            take(each, False)
        self._watch = cluster.api.watch(path, resourceVersion=listed["metadata"]["resourceVersion"], timeout=3600)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        for event in self._watch:
            self._take(event["object"], event["type"] == "DELETED")

    def close(self) -> None:
        self._watch.close()
        self._thread.join(timeout=10)


@dataclass
class Load:
    """Client of one case, in a thread with its own event loop. It sends `rate` requests a second until `stop`."""

    rate: float
    endpoints: Callable[[], list[str]]
    answered: list[float] = field(default_factory=list)
    """Times of the answers."""
    sent: int = 0
    lost: int = 0
    retried: int = 0
    """Number of requests that needed more than one attempt."""

    def __post_init__(self) -> None:
        self._stopping = threading.Event()
        self._turn = itertools.count()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop sending requests, and wait until pending requests have been answered."""
        self._stopping.set()
        self._thread.join(timeout=PATIENCE_S + 10)

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        begin, running = loop.time(), set[asyncio.Task[None]]()
        while not self._stopping.is_set():
            await asyncio.sleep(max(0.0, begin + self.sent / self.rate - loop.time()))
            self.sent += 1
            task = asyncio.create_task(self._request())
            running.add(task)
            task.add_done_callback(running.discard)
        await asyncio.gather(*running)

    async def _request(self) -> None:
        until = time.monotonic() + PATIENCE_S
        tries = 0
        while time.monotonic() < until:
            endpoints = self.endpoints()
            if endpoints:
                tries += 1
                try:
                    async with asyncio.timeout(TRY_S):
                        await _ask(endpoints[next(self._turn) % len(endpoints)])
                except (OSError, TimeoutError, EOFError, ValueError):
                    pass
                else:
                    self.answered.append(time.monotonic())
                    self.retried += tries > 1
                    return
            if tries == 0 or len(endpoints) < 2:
                tries = max(tries, 1)
                await asyncio.sleep(RETRY_S)
        self.lost += 1


async def _ask(address: str) -> None:
    host, _, port = address.partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        writer.write(b"GET / HTTP/1.0\r\n\r\n")
        answer = await reader.read()
        if not answer.startswith(b"HTTP/1.0 200 ") or not answer.rstrip()[-1:].isdigit():
            raise ValueError(answer)
    finally:
        writer.close()


class Case:
    """Workload of one kind, with its nodes, its client, and the times at which its Pods changed."""

    def __init__(self, cluster: Cluster, nodes: ProcessNodes, name: str, *, shared: bool, replicas: int) -> None:
        self.name = f"{replicas} {'SharePod' if shared else 'plain Pod'}{'s' if replicas > 1 else ''}"
        self._cluster = cluster
        self._nodes = nodes
        self._shared = shared
        self._replicas = replicas
        self._namespace = cluster.namespace(name)
        self._pods: dict[str, Sight] = {}
        self._rows: dict[str, set[str]] = {}
        self._released: list[float] = []
        self.gaps: list[float] = []
        self.parts: dict[str, list[float]] = {}
        self._watches = [
            Watched(cluster, f"/api/v1/namespaces/{self._namespace}/pods", self._see_pod),
            Watched(cluster, f"{GROUP}/gpunodes", self._see_ledger),
        ]
        self._apply()
        wait_until(lambda: len(self._ready()) == replicas, what=f"{self.name} ready", timeout=_TIMEOUT)

    def start(self, rate: float) -> None:
        self.load = Load(rate, self._addresses)

    def failures(self) -> list[str]:
        return self._nodes.kubelets.failures

    def close(self) -> None:
        for each in self._watches:
            each.close()

    def _apply(self) -> None:
        container = {"name": "main", "image": "test", "args": [str(KERNEL_US)]}
        spec = {"containers": [container], "nodeSelector": {"kubernetes.io/os": "linux", "test": self._nodes.name}}
        labels = {"app": "server"}
        if self._shared:
            for number in range(self._replicas):
                body: Object = {
                    "apiVersion": "sharepod.dev/v1alpha1",
                    "kind": "SharePod",
                    "metadata": {"name": f"server-{number}", "labels": labels},
                    "spec": {**spec, "gpu": {"request": 0.4, "memory": "4Gi"}},
                }
                self._cluster.api.create(f"{GROUP}/namespaces/{self._namespace}/sharepods", body)
        else:
            template = {"metadata": {"labels": labels}, "spec": spec}
            body = {
                "apiVersion": "apps/v1",
                "kind": "Deployment",
                "metadata": {"name": "server"},
                "spec": {"replicas": self._replicas, "selector": {"matchLabels": labels}, "template": template},
            }
            self._cluster.api.create(f"/apis/apps/v1/namespaces/{self._namespace}/deployments", body)
        if self._replicas > 1:
            budget: Object = {
                "apiVersion": "policy/v1",
                "kind": "PodDisruptionBudget",
                "metadata": {"name": "server"},
                "spec": {"selector": {"matchLabels": labels}, "minAvailable": 1},
            }
            self._cluster.api.create(f"/apis/policy/v1/namespaces/{self._namespace}/poddisruptionbudgets", budget)

    # Observation

    def _see_pod(self, pod: Object, deleted: bool) -> None:
        now, metadata = time.monotonic(), pod["metadata"]
        sight = self._pods.setdefault(metadata["uid"], Sight(metadata["name"]))
        sight.deleted = sight.deleted or deleted
        if "deletionTimestamp" in metadata and sight.deleted_at is None:
            sight.deleted_at = now
        if pod["spec"].get("nodeName") and sight.bound_at is None:
            sight.node, sight.bound_at = pod["spec"]["nodeName"], now
        conditions = pod.get("status", {}).get("conditions") or []
        sight.ready = any(each["type"] == "Ready" and each["status"] == "True" for each in conditions)

    def _see_ledger(self, gpunode: Object, deleted: bool) -> None:
        rows = (
            set() if deleted else {row["podUID"] for row in gpunode["spec"].get("tenants") or [] if row.get("podUID")}
        )
        name = gpunode["metadata"]["name"]
        left = self._rows.get(name, set()) - rows
        self._rows[name] = rows
        if left & self._pods.keys():
            self._released.append(time.monotonic())

    def _ready(self) -> dict[str, Sight]:
        return {
            uid: sight
            for uid, sight in list(self._pods.items())
            if sight.ready and sight.deleted_at is None and not sight.deleted
        }

    def _addresses(self) -> list[str]:
        processes = self._nodes.kubelets.processes
        return [address for uid in self._ready() if (address := processes[uid].address) is not None]

    # Actions

    def drain(self) -> None:
        """Drain the node of the first replica, and uncordon the node once all replicas are ready again."""
        uid, former = min(self._ready().items(), key=lambda item: item[1].name)
        assert former.node is not None
        others = set(self._pods)
        time.sleep(SETTLE_S)
        begin = time.monotonic()
        self._cluster.kubectl("drain", former.node, "--ignore-daemonsets", f"--timeout={_TIMEOUT:.0f}s", timeout=120)
        wait_until(lambda: len(self._ready()) == self._replicas, what=f"{self.name} ready again", timeout=_TIMEOUT)
        time.sleep(SETTLE_S)
        self._cluster.kubectl("uncordon", former.node)
        answers = [at for at in self.load.answered if at >= begin - SETTLE_S]
        self.gaps.append(max(after - before for before, after in itertools.pairwise(sorted(answers))))
        if self._shared and self._replicas == 1:
            ended = self._nodes.kubelets.processes[uid].ended_at
            bound = min(sight.bound_at or 0.0 for each, sight in self._pods.items() if each not in others)
            assert former.deleted_at is not None
            assert ended is not None
            steps = [former.deleted_at, ended, self._released[-1], bound, min(at for at in answers if at > bound)]
            names = ("eviction_to_end", "end_to_released", "released_to_bound", "bound_to_answer")
            for name, (before, after) in zip(names, itertools.pairwise(steps), strict=True):
                self.parts.setdefault(name, []).append(after - before)

    def rows(self) -> list[Row]:
        load = self.load
        most = max(self._nodes.kubelets.most_at_once.values()) if self._shared else None
        return [
            Row(self.name, "longest_gap", "ms", max(self.gaps) * 1000),
            Row(self.name, "gap", "ms", statistics.median(self.gaps) * 1000),
            *(Row(self.name, name, "ms", statistics.median(each) * 1000) for name, each in self.parts.items()),
            Row(self.name, "requests", "count", load.sent),
            Row(self.name, "requests_tried_again", "count", load.retried),
            Row(self.name, "requests_lost", "count", load.lost),
            *([] if most is None else [Row(self.name, "processes_at_once", "count", most)]),
        ]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--drains", type=int, default=10, help="drains of each case")
    parser.add_argument("--rate", type=float, default=20.0, help="requests a second to each case")
    parser.add_argument("--every", type=float, default=75.0, help="seconds from one drain of a case to its next")
    options = parser.parse_args()
    with ExitStack() as stack:
        cluster = stack.enter_context(Cluster())
        installation = Installation(cluster)
        cluster.runtime_class()
        installation.start_operator()
        cases: list[Case] = []
        for name, shared, replicas in (
            ("one-sharepod", True, 1),
            ("one-plain", False, 1),
            ("two-sharepods", True, 2),
            ("two-plain", False, 2),
        ):
            nodes = stack.enter_context(ProcessNodes(cluster, installation, 2, name, agents=shared))
            case = Case(cluster, nodes, name, shared=shared, replicas=replicas)
            stack.callback(case.close)
            cases.append(case)
        for case in cases:
            case.start(options.rate)
        begin = time.monotonic()
        for number in range(options.drains):
            for place, case in enumerate(cases):
                due = begin + (number + 1) * options.every + place * options.every / len(cases)
                time.sleep(max(0.0, due - time.monotonic()))
                case.drain()
                print(f"{case.name}: drain {number + 1}: gap {case.gaps[-1] * 1000:.0f} ms", flush=True)
        for case in cases:
            case.load.stop()
        failures = [failure for case in cases for failure in case.failures()]
        if failures:
            raise SystemExit(f"not measured: {failures[:3]}")
        rows = [row for case in cases for row in case.rows()]
        rows.append(Row("all", "drains", "count", options.drains))
        rows.append(Row("all", "rate", "1/s", options.rate))
        write("drains", rows)


if __name__ == "__main__":
    main()
