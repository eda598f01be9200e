"""A resource line on a real node: plain Pods of a Deployment share a simulated GPU with a SharePod as they asked.

API server, its policies, scheduler, controllers, kubelet, containerd, operator, agent and hook are real; the GPU is the
double.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from cluster.plain_world import MEMORY, MILLI
from harness.api import Object
from harness.cluster import Cluster, wait_until
from harness.shares import measured
from node.claim_node import container
from node.claim_system import NAMESPACE, ClaimSystem, system_with_claims


@pytest.fixture(scope="module")
def system(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClaimSystem]:
    with system_with_claims(cluster, tmp_path_factory.mktemp("gpus"), gpus=1, plain=True) as running:
        yield running


def deployment(name: str, replicas: int, milli: str) -> Object:
    """A Deployment of Pods with one line."""
    main = container(claim=None, resources={"limits": {MILLI: milli, MEMORY: "1024"}})
    labels = {"app": name}
    pod = {"containers": [main], "terminationGracePeriodSeconds": 2}
    template = {"metadata": {"labels": labels}, "spec": pod}
    spec = {"replicas": replicas, "selector": {"matchLabels": labels}, "template": template}
    return {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": name}, "spec": spec}


def allocatable(system: ClaimSystem) -> Object:
    found: Object = system.cluster.api.get(f"/api/v1/nodes/{system.machine.node}")["status"]["allocatable"]
    return found


@pytest.mark.promise("operator-line-shares")
@pytest.mark.alone
def test_plain_pods_share_a_gpu_with_a_sharepod_and_outlive_a_restart_of_the_kubelet(system: ClaimSystem) -> None:
    system.apply(system.sharepod("left", 0.4), deployment("plain", 2, "300"))
    names = system.await_running("plain", 2)
    wait_until(
        lambda: any(pod["metadata"]["name"] == "left" and pod["status"]["phase"] == "Running" for pod in system.pods()),
        what="the SharePod's Pod",
        timeout=40,
    )
    wait_until(lambda: all(tenant["connected"] for tenant in tenants(system)), what="three tenants", timeout=30)
    measured(system.machine.busy_ns).expect(left=40, **dict.fromkeys(names, 30.0))
    assert allocatable(system)[MILLI] == "1k"
    system.machine.real.restart_kubelet()
    wait_until(lambda: ready(system), what="the node is ready again", timeout=60)
    assert system.await_running("plain", 2) == names
    assert system.restarts() == 0
    assert allocatable(system)[MILLI] == "1k"
    system.cluster.kubectl("delete", "deployment/plain", "sharepod/left", "-n", NAMESPACE, timeout=90)
    wait_until(lambda: not system.rows(), what="the shares given back", timeout=60)


def tenants(system: ClaimSystem) -> list[Object]:
    found: list[Object] = system.cluster.api.get(system.gpunode)["status"].get("tenants", [])
    return found if len(found) == 3 else [{"connected": False}]


def ready(system: ClaimSystem) -> bool:
    conditions = system.cluster.api.get(f"/api/v1/nodes/{system.machine.node}")["status"]["conditions"]
    return any(one["type"] == "Ready" and one["status"] == "True" for one in conditions)
