"""Shares by ResourceClaims on a real API server, scheduler and controller manager: latency, bursts, a killed operator.

    PYTHONPATH=tests:benchmarks python benchmarks/claims.py [--count 100] [--rounds 20] [--claims 300] [--kills 5]
        [--nodes 151] [--parts latency,bursts,kills] [--attach claims]

Three parts on nodes without machines, and one on a real node:

- latency: Pods created at a fixed rate until they are bound: bare, of SharePods attached by CSI and by claims, with a
  claim of a template, with an existing claim;
- bursts: 16 Pods with claims of half a GPU, all at once, on 8 GPUs of 4 nodes, repeatedly; then 8 such Pods and 8
  SharePods. Every version of every ledger is checked;
- kills: Pods with claims, and as many SharePods, while the operator is killed (SIGKILL) at moments drawn from a seed;
- running (only on request; needs root): from creation until a Pod runs, on a real kubelet (claims_running.py).

With `--attach claims` the SharePods of bursts and kills are attached by claims, too. At the end each Pod must be bound
and have exactly one row, and no GPU may have been over-committed at any time; otherwise the benchmark exits with 1.
Prints a table and writes build/results/claims.json.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from apply_latency import measure, percentile
from claims_running import running
from cluster.audit import Audit
from cluster.claims_world import claim_path, claim_spec, make_template, pod_body
from cluster.operator_world import GIB, TIMES, World, a_world, wait
from harness.api import Object
from results import Row, write

_TIMEOUT = 300.0
_GPUS, _PODS = 8, 16


def pods_path(namespace: str) -> str:
    return f"/api/v1/namespaces/{namespace}/pods"


def plain(name: str, on: str, **options: Any) -> Object:
    """Return a Pod without a share that runs only on nodes with the label `test=ON`."""
    return pod_body(name, nodeSelector={"test": on}, **options)


def sharepod(name: str, on: str, milli: int) -> Object:
    container = {"name": "main", "image": "test", "resources": {"requests": {"cpu": "100m"}}}
    return {
        "apiVersion": "sharepod.dev/v1alpha1",
        "kind": "SharePod",
        "metadata": {"name": name},
        "spec": {
            "restartPolicy": "Never",
            "gpu": {"request": milli / 1000, "memory": "1Gi"},
            "nodeSelector": {"test": on},
            "containers": [container],
        },
    }


def bound(world: World, namespace: str) -> int:
    return sum("nodeName" in pod["spec"] for pod in world.cluster.pods(namespace))


def operate(world: World, attach: str) -> None:
    """Restart the operator with the setting `attach`."""
    assert world.operator is not None
    world.operator.stop()
    world.start_operator(SHAREPOD_ATTACH=attach)


def latency(world: World, count: int, rate: float) -> list[Row]:
    """Measure the seconds from the creation of a Pod, or of a SharePod, until its Pod is bound to a node. The kinds
    that the header lists are measured one after the other, each on nodes of its own."""
    rows: list[Row] = []
    for case in ("bare pod", "SharePod", "SharePod by claim", "claim of a template", "claim that exists"):
        name = case.replace(" ", "-").lower()
        operate(world, "claims" if case == "SharePod by claim" else "csi")
        world.nodes(name, count // 16 + 1)
        namespace = world.cluster.namespace(name)
        make_template(world, namespace, "share", time_milli=100)
        if case == "claim that exists":
            for number in range(count):
                head = {"apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaim", "metadata": {"name": f"c{number}"}}
                world.api.create(claim_path(namespace), {**head, "spec": claim_spec(100)})
        time.sleep(2)  # the operator checks Leases each second
        path, bodies = pods_path(namespace), []
        for number in range(count):
            if case == "bare pod":
                bodies.append(plain(f"p{number}", name))
            elif case.startswith("SharePod"):
                path = world.path(namespace)
                bodies.append(sharepod(f"p{number}", name, 100))
            elif case == "claim of a template":
                bodies.append(plain(f"p{number}", name, template="share"))
            else:
                bodies.append(plain(f"p{number}", name, claims=(f"c{number}",)))
        _, took = measure(world.api, path, namespace, bodies, rate)
        rows += [Row(case, f"created_to_bound_p{percent}", "ms", percentile(took, percent)) for percent in (50, 99)]
    return rows


def at_once(writes: list[Callable[[], object]]) -> None:
    """Make these writes to the API server at the same moment."""
    start, failures = threading.Barrier(len(writes)), list[BaseException]()

    def run(write: Callable[[], object]) -> None:
        try:
            start.wait(30)
            write()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(write,)) for write in writes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures


def bursts(world: World, audit: Audit, rounds: int, *, sharepods: int) -> list[Row]:
    """Measure `rounds` rounds in each of which 16 shares of half a GPU are requested at once. `sharepods`: number of
    SharePods among them; the others are Pods with claims."""
    name = f"burst{sharepods}"
    nodes = world.nodes(name, _GPUS // 2)
    namespace = world.cluster.namespace(name)
    make_template(world, namespace, "half", time_milli=500)
    time.sleep(2)
    took: list[float] = []
    most = 0

    def rows() -> list[Object]:
        return [row for node, row in audit.rows() if node in nodes]

    def sharing(number: int) -> Callable[[], object]:
        body = sharepod(f"p{number}", name, 500)
        return lambda: world.api.create(world.path(namespace), body)

    def claiming(number: int) -> Callable[[], object]:
        body = plain(f"p{number}", name, template="half")
        return lambda: world.api.create(pods_path(namespace), body)

    for _ in range(rounds):
        audit.most.clear()
        begun = time.monotonic()
        at_once([sharing(number) if number < sharepods else claiming(number) for number in range(_PODS)])
        wait(lambda: bound(world, namespace) == _PODS, what=f"{_PODS} bound Pods", timeout=60)
        took.append(time.monotonic() - begun)
        wait(lambda: len(rows()) == _PODS, what=f"{_PODS} rows", timeout=60)
        most = max(most, *audit.most.values())
        for number in range(_PODS):
            if number < sharepods:
                world.delete(namespace, f"p{number}")
            else:
                world.api.delete(f"{pods_path(namespace)}/p{number}")
        wait(lambda: not rows() and not bound(world, namespace), what="empty ledgers", timeout=60)
    case = f"{_PODS - sharepods} claims and {sharepods} SharePods of 0.5 on {_GPUS} GPUs"
    return [
        Row(case, "rounds", "count", rounds),
        Row(case, "most_on_one_gpu", "count", most),
        Row(case, "all_bound_p50", "s", statistics.median(took)),
        Row(case, "all_bound_max", "s", max(took)),
    ]


def killed(
    world: World, audit: Audit, claims: int, kills: int, seed: int, *, on: int, attach: str
) -> tuple[list[Row], int]:
    """Create Pods with claims, and as many SharePods, while the operator is killed. Return (rows of figures, number of
    faults that were found)."""
    chance, name = random.Random(seed), "kills"
    nodes = world.nodes(name, on or claims // 2 + 1)
    namespace = world.cluster.namespace(name)
    sizes = (200, 300, 400, 500)
    for milli in sizes:
        make_template(world, namespace, f"t{milli}", time_milli=milli, memory="1Gi")
    time.sleep(2)
    moments = set(chance.sample(range(claims), kills))
    begun = time.monotonic()
    for number in range(claims):
        milli = chance.choice(sizes)
        world.api.create(pods_path(namespace), plain(f"c{number}", name, template=f"t{milli}"))
        world.api.create(world.path(namespace), sharepod(f"s{number}", name, milli))
        if number in moments:
            assert world.operator is not None
            world.operator.stop(grace=0)
            world.start_operator(SHAREPOD_ATTACH=attach)

    def rows() -> list[Object]:
        return [row for node, row in audit.rows() if node in nodes and row["state"] == "Reserved"]

    wait(lambda: bound(world, namespace) == 2 * claims, what="every Pod bound", timeout=_TIMEOUT)
    wait(lambda: len(rows()) == 2 * claims, what="a row each", timeout=_TIMEOUT)
    seconds = time.monotonic() - begun
    doubled = sum(count - 1 for count in Counter(row["id"] for row in rows()).values())
    lost = 2 * claims - bound(world, namespace)
    over = len(audit.over_committed)
    by = " by claims" if attach == "claims" else ""
    case = f"{claims} claims and {claims} SharePods{by} on {len(nodes)} nodes, seed {seed}"
    figures = [("lost", lost), ("doubled", doubled), ("gpus_over_committed", over), ("kills", kills)]
    return [
        *(Row(case, metric, "count", value) for metric, value in figures),
        Row(case, "until_all_run", "s", seconds),
    ], lost + doubled + over


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--count", type=int, default=100, help="Pods of each kind in the latency part")
    parser.add_argument("--rate", type=float, default=20.0, help="Pods a second")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--claims", type=int, default=300, help="claims, and as many SharePods, while it is killed")
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--nodes", type=int, default=0, help="nodes for these; 0: one for two of them")
    parser.add_argument("--attach", choices=["csi", "claims"], default="csi", help="how SharePods are attached")
    parser.add_argument("--parts", default="latency,bursts,kills", help="parts to run, comma-separated")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--times", type=int, default=15, help="Pods of each kind that are run on a real kubelet")
    options = parser.parse_args()
    if options.parts == "running":
        print(write("claims", running(options.times)))
        return 0
    times = {**TIMES, "SHAREPOD_LOG_LEVEL": "warning", "SHAREPOD_AGENT_DURATION": "120"}
    with a_world(times=times, agent_lease=120, agent_renew=20.0) as world, Audit(world.api, memory=16 * GIB) as audit:
        world.installation.install_claims()
        parts, rows, faults = options.parts.split(","), list[Row](), 0
        if "latency" in parts:
            rows += latency(world, options.count, options.rate)
        operate(world, options.attach)
        if "bursts" in parts:
            rows += bursts(world, audit, options.rounds, sharepods=0)
            rows += bursts(world, audit, options.rounds, sharepods=_PODS // 2)
        if "kills" in parts:
            on, attach = options.nodes, options.attach
            figures, faults = killed(world, audit, options.claims, options.kills, options.seed, on=on, attach=attach)
            rows += figures
        rows += [Row("all", "watch_gaps", "count", audit.gaps)]
    write("claims", rows)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
