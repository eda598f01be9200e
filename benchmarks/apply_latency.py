"""Time from apply until the Pod is created and until it is bound: SharePods compared with bare pods, from one client in
one run.

    PYTHONPATH=tests:benchmarks python benchmarks/apply_latency.py [--count 200] [--rate 20] [--nodes 50]

A real control plane with nodes without machines; one process plays all agents. The operator runs as a process under its
own ServiceAccount, with its default settings. One client creates the objects at a fixed rate, first bare pods, then
SharePods, and sees the Pods by its own watch. Both times start when the client sends the object.

`operator_cpu`: processor time of the operator per SharePod until all are bound; it depends little on other load.
Fractions are drawn by a fixed seed from 0.1 to 0.5, so that Binpack has choices and all fit. Prints a table and writes
build/results/apply_latency.json.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from cluster.fake_agents import FakeAgents
from harness.api import Api, Object
from harness.cluster import Cluster, wait_until
from harness.installation import Installation
from results import Row, write

_TIMEOUT = 120.0
_CONTAINER = {"name": "main", "image": "test", "resources": {"requests": {"cpu": "100m", "memory": "64Mi"}}}


@dataclass(slots=True)
class Seen:
    """For each Pod of one namespace, by name: monotonic seconds at which the client saw it created, and bound."""

    made: dict[str, float] = field(default_factory=dict)
    bound: dict[str, float] = field(default_factory=dict)


def follow(api: Api, namespace: str, seen: Seen) -> Callable[[], None]:
    """Record in `seen` when the namespace's Pods are created and bound. Return the function that ends the watch."""
    path = f"/api/v1/namespaces/{namespace}/pods"
    watch = api.watch(path, resourceVersion=api.get(path)["metadata"]["resourceVersion"], timeout=600)

    def run() -> None:
        for event in watch:
            now = time.monotonic()
            pod = event["object"]
            seen.made.setdefault(pod["metadata"]["name"], now)
            if pod["spec"].get("nodeName"):
                seen.bound.setdefault(pod["metadata"]["name"], now)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()

    def end() -> None:
        watch.close()
        thread.join(timeout=10)

    return end


def measure(api: Api, path: str, namespace: str, bodies: list[Object], rate: float) -> tuple[list[float], list[float]]:
    """Create the objects at `rate` a second. Return for each object the seconds from its request until its Pod was
    created, and until its Pod was bound."""
    seen, sent = Seen(), dict[str, float]()
    end = follow(api, namespace, seen)
    try:
        begin = time.monotonic() + 0.2
        for number, body in enumerate(bodies):
            time.sleep(max(0.0, begin + number / rate - time.monotonic()))
            sent[body["metadata"]["name"]] = time.monotonic()
            api.create(path, body)
        wait_until(lambda: len(seen.bound) == len(bodies), what=f"all pods of {namespace} bound", timeout=_TIMEOUT)
    finally:
        end()
    return (
        [seen.made[name] - at for name, at in sent.items()],
        [seen.bound[name] - at for name, at in sent.items()],
    )


def cpu_of(pid: int) -> float:
    """Return the processor time of a process so far, in seconds."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def percentile(values: list[float], percent: int) -> float:
    """Return a percentile of durations in seconds, converted to milliseconds."""
    return statistics.quantiles(values, n=100, method="inclusive")[percent - 1] * 1000


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--count", type=int, default=200, help="objects of each kind")
    parser.add_argument("--rate", type=float, default=20.0, help="objects a second")
    parser.add_argument("--nodes", type=int, default=50)
    options = parser.parse_args()
    chance = random.Random(1)
    with Cluster() as cluster, FakeAgents(cluster.api, gpus=8, memory=80 << 30, renew=5.0, pace=1.0) as agents:
        installation = Installation(cluster)
        runtime = {"apiVersion": "node.k8s.io/v1", "kind": "RuntimeClass", "handler": "nvidia"}
        cluster.api.create("/apis/node.k8s.io/v1/runtimeclasses", {**runtime, "metadata": {"name": "nvidia"}})
        nodes = cluster.add_fake_nodes(options.nodes, labels={"sharepod.dev/pool": "dedicated"})
        operator = installation.start_operator()
        ledgers = "/apis/sharepod.dev/v1alpha1/gpunodes"
        wait_until(lambda: len(cluster.api.get(ledgers)["items"]) == len(nodes), what="all GPUNodes", timeout=60)
        agents.start(*nodes)
        time.sleep(3)  # the operator checks Leases each second

        rows: list[Row] = []
        for case in ("bare pod", "SharePod"):
            namespace = cluster.namespace(case.replace(" ", "-").lower())
            bare = case == "bare pod"
            path = (
                f"/api/v1/namespaces/{namespace}/pods"
                if bare
                else f"/apis/sharepod.dev/v1alpha1/namespaces/{namespace}/sharepods"
            )
            bodies: list[Object] = []
            for number in range(options.count):
                gpu = {} if bare else {"gpu": {"request": chance.randrange(100, 501, 50) / 1000}}
                head = (
                    {"apiVersion": "v1", "kind": "Pod"}
                    if bare
                    else {"apiVersion": "sharepod.dev/v1alpha1", "kind": "SharePod"}
                )
                bodies.append({**head, "metadata": {"name": f"p{number}"}, "spec": {"containers": [_CONTAINER], **gpu}})
            before = cpu_of(operator.pid)
            made, bound = measure(cluster.api, path, namespace, bodies, options.rate)
            if not bare:
                cpu = (cpu_of(operator.pid) - before) / options.count * 1000
                rows.append(Row(case, "operator_cpu", "ms per SharePod", cpu))
            for metric, values in (("apply_to_created", made), ("apply_to_bound", bound)):
                rows += [Row(case, f"{metric}_p{percent}", "ms", percentile(values, percent)) for percent in (50, 99)]
        rows.append(Row("all", "objects", "count", options.count))
        rows.append(Row("all", "rate", "1/s", options.rate))
        rows.append(Row("all", "nodes", "count", options.nodes))
        write("apply_latency", rows)


if __name__ == "__main__":
    main()
