"""The examples of plain Pods on a real node: each workload of examples/plain, with one resource line added, gets the
shares of its line, is scaled, survives a drain within its disruption budget, and ends.

API server, its policies, scheduler, controllers, kubelet, containerd, operator, agent and hook are real; the GPUs are
simulated (plain_workloads.py).
"""

from __future__ import annotations

import pytest
from harness.api import Object
from harness.cluster import wait_until
from node.claim_system import ClaimSystem
from node.plain_workloads import (
    await_complete,
    await_running,
    await_sharing,
    example,
    kubectl,
    rows_by_pod,
    share_as_asked,
    with_line,
)

SYSTEM = {"gpus": 8, "plain": True}
"""Options of the file's system (conftest.py)."""


@pytest.mark.promise("operator-line-examples")
@pytest.mark.timeout(420)  # longer than the usual timeout, because other work on the machine slows the test
@pytest.mark.alone
def test_workloads_with_one_line_more_share_scale_drain_and_end(system: ClaimSystem) -> None:
    # 1. All services and a Job run, and each Pod gets its due share. The Job's Pods work for longer than the
    #    measurement takes.
    for number in ("01", "02", "04", "05", "06", "07"):
        system.apply(*example(number))
    rows = await_sharing(system, 13)
    assert sorted(row["requestMilli"] for row in rows) == [200] * 2 + [250] * 4 + [300] * 3 + [500] * 4
    assert {row["limitMilli"] for row in rows if row["requestMilli"] == 300} == {800}
    store = {row["gpus"][0] for row in rows if row["podName"].startswith("line-store-")}
    assert len(store) == 2, "anti-affinity"
    share_as_asked(system, rows)

    # 2. A Job completes although the kubelet restarts. An indexed Job with two GPUs per Pod runs next to the other
    #    workloads.
    kubectl(system, "delete", "job/line-batch")
    await_sharing(system, 11)
    running = set(with_line(system))
    system.apply(*example("02", seconds=10))
    await_running(system, "line-batch", 2)
    system.machine.real.restart_kubelet()
    wait_until(lambda: ready(system), what="the node is ready again", timeout=60)
    system.apply(*example("03", seconds=3))
    wide = one_of_sweep(system)
    assert (wide["requestMilli"], len(wide["gpus"])) == (400, 2)
    await_complete(system, "line-batch", 4)
    await_complete(system, "line-sweep", 3)
    assert running == with_line(system).keys()
    assert system.restarts() == 0

    # 3. A Deployment is scaled up and down.
    kubectl(system, "scale", "deployment/line-scaled", "--replicas=4")
    await_sharing(system, 13)
    kubectl(system, "scale", "deployment/line-scaled", "--replicas=2")
    await_sharing(system, 11)

    # 4. The other workloads are deleted. A drain evicts one of the two remaining Pods; its replacement starts once the
    #    node can be used again.
    kubectl(system, "delete", "deployment/line-inference", "deployment/line-cluster-workers", "statefulset/line-store")
    kubectl(system, "delete", "pod", "-l", "app=line-jupyterhub")
    await_sharing(system, 2)
    kept = drained(system)
    assert len(kept) == 1, "the budget keeps one"
    rows = await_sharing(system, 2)
    assert kept < {row["podName"] for row in rows}
    share_as_asked(system, rows)
    kubectl(system, "delete", "deployment/line-scaled")
    wait_until(lambda: not system.rows(), what="the shares released", timeout=60)


def one_of_sweep(system: ClaimSystem) -> Object:
    """Return the row of a Pod of the indexed Job."""

    def found() -> list[Object]:
        return [row for row in rows_by_pod(system) if row["podName"].startswith("line-sweep")]

    seen: list[Object] = []

    def came() -> bool:
        seen.extend(found())
        return bool(seen)

    wait_until(came, what="a row of the indexed Job", timeout=60, interval=0.2)
    return seen[0]


def drained(system: ClaimSystem) -> set[str]:
    """Drain the node as far as the disruption budget allows, then uncordon it. Return the Deployment's Pods
    that stayed."""
    before = set(with_line(system))
    options = ("--ignore-daemonsets", "--force", "--pod-selector=app=line-scaled", "--timeout=8s")
    drained = system.cluster.kubectl("drain", system.machine.node, *options, check=False, timeout=60)
    assert drained.returncode != 0
    assert "disruption budget" in drained.stderr
    stay = before & set(with_line(system))
    system.cluster.kubectl("uncordon", system.machine.node)
    return stay


def ready(system: ClaimSystem) -> bool:
    conditions = system.cluster.api.get(f"/api/v1/nodes/{system.machine.node}")["status"]["conditions"]
    return any(one["type"] == "Ready" and one["status"] == "True" for one in conditions)
