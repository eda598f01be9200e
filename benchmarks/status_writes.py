"""Status of a SharePod by merge patch, compared with server-side apply, on a real API server.

    PYTHONPATH=tests:benchmarks python benchmarks/status_writes.py [--sharepods 300] [--rounds 4]

Each round creates SharePods and writes two statuses of each, Placed and Running. One way is merge patches, which
contain the changes. The other way is server-side apply, which sends the whole status and lets the API server find the
changes. Rounds of both ways alternate. Both have uid and resourceVersion as preconditions. `latency`: time of a write.
`server_cpu`: processor time of the API server per write (by its own metric, in steps of 10 ms). `sent`: bytes of the
request bodies. Prints a table and writes build/results/status_writes.json.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time

from harness.cluster import Cluster
from harness.installation import Installation
from operatorkit.process import server_cpu
from results import Row, write
from sharepod.api.sharepod import Phase, SharePodStatus
from sharepod.controller.decisions.status import difference
from sharepod.kube import APPLY_PATCH, MERGE_PATCH, Connection, Json

_PATH = "/apis/sharepod.dev/v1alpha1/namespaces/{}/sharepods"
_CONTAINER = {"name": "main", "image": "test"}
_TIMES = "2026-01-01T00:00:00Z"


def statuses() -> tuple[Json, Json, Json]:
    """Return three statuses of a SharePod: before the first write, after it, and after the second write."""
    conditions = [
        {"type": "Placed", "status": "True", "reason": "Reserved", "message": "GPU 0 of node-a: request 0.4, limit 1"},
        {"type": "PodReady", "status": "False", "reason": "NotScheduled", "message": "not bound yet"},
    ]
    dated = [{**item, "lastTransitionTime": _TIMES, "observedGeneration": 1} for item in conditions]
    placed = {
        "phase": Phase.PLACED.value,
        "node": "node-a",
        "gpus": [{"uuid": "GPU-0b1c2d3e-0000-0000-0000-000000000000", "index": 0, "model": "NVIDIA H100 80GB HBM3"}],
        "gpuIndexes": "0",
        "podName": "one",
        "podUID": "0b1c2d3e-1111-1111-1111-000000000000",
        "granted": {"requestMilli": 400, "limitMilli": 1000, "memory": 34359738368},
        "share": {"request": "0.4", "limit": "1", "memory": "32Gi"},
        "conditions": dated,
        "observedGeneration": 1,
    }
    ready = {**dated[1], "status": "True", "reason": "Ready", "message": ""}
    enforced = {**dated[1], "type": "Enforced", "status": "Unknown", "reason": "NoCudaCall", "message": "no CUDA yet"}
    running = {**placed, "phase": Phase.RUNNING.value, "conditions": [dated[0], ready, enforced]}
    for status in (placed, running):
        SharePodStatus.model_validate(status)
    return {}, placed, running


class Writer:
    """Writer of statuses in one namespace."""

    def __init__(self, api: Connection, cluster: Cluster, namespace: str) -> None:
        self._api = api
        self._cluster = cluster
        self._path = _PATH.format(namespace)
        self.latencies: dict[str, list[float]] = {"merge patch": [], "apply": []}
        self.server_cpu: dict[str, float] = dict.fromkeys(self.latencies, 0.0)
        self.sent: dict[str, int] = dict.fromkeys(self.latencies, 0)

    async def round(self, way: str, count: int, first: int) -> None:
        """Create `count` SharePods, and write both statuses of each. `way`: by merge patch or by server-side apply."""
        made = []
        for number in range(first, first + count):
            spec = {"gpu": {"request": 0.4}, "containers": [_CONTAINER]}
            names = {"apiVersion": "sharepod.dev/v1alpha1", "kind": "SharePod", "metadata": {"name": f"p{number}"}}
            made.append(await self._api.create(self._path, {**names, "spec": spec}))
        before = server_cpu(self._cluster)
        for was, wanted in zip(statuses(), statuses()[1:], strict=False):
            made = [await self._write(way, item, was, wanted) for item in made]
        self.server_cpu[way] += server_cpu(self._cluster) - before
        for item in made:
            assert item["status"] == statuses()[2]

    async def _write(self, way: str, item: Json, was: Json, wanted: Json) -> Json:
        metadata = {key: item["metadata"][key] for key in ("name", "uid", "resourceVersion")}
        path = f"{self._path}/{metadata['name']}/status"
        if way == "apply":
            body: Json = {
                "apiVersion": item["apiVersion"],
                "kind": item["kind"],
                "metadata": metadata,
                "status": wanted,
            }
            path, content = f"{path}?fieldManager=sharepod-operator&force=true", APPLY_PATCH
        else:
            body, content = {"metadata": metadata, "status": difference(was, wanted)}, MERGE_PATCH
        self.sent[way] += len(json.dumps(body))
        begun = time.monotonic()
        answer = await self._api.patch(path, body, content)
        self.latencies[way].append(time.monotonic() - begun)
        return answer


async def measure(cluster: Cluster, count: int, rounds: int) -> list[Row]:
    """Measure both ways alternately. Return the rows."""
    api = await Connection.open(cluster.kubeconfig, "benchmark")
    writer = Writer(api, cluster, cluster.namespace("statuses"))
    try:
        for number in range(rounds):
            for place, way in enumerate(writer.latencies):
                await writer.round(way, count, (2 * number + place) * count)
    finally:
        await api.close()
    rows = []
    for way, latencies in writer.latencies.items():
        rows += [
            Row(way, "latency_p50", "ms", statistics.median(latencies) * 1000),
            Row(way, "server_cpu", "ms per write", writer.server_cpu[way] / len(latencies) * 1000),
            Row(way, "sent", "bytes per write", writer.sent[way] / len(latencies)),
        ]
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--sharepods", type=int, default=300)
    parser.add_argument("--rounds", type=int, default=4)
    options = parser.parse_args()
    with Cluster() as cluster:
        Installation(cluster)
        write("status_writes", asyncio.run(measure(cluster, options.sharepods, options.rounds)))


if __name__ == "__main__":
    main()
