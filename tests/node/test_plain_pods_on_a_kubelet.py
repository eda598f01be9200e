"""A resource line on a real node: plain Pods of a Deployment share a simulated GPU with a SharePod as requested.

API server, its policies, scheduler, controllers, kubelet, containerd, operator, agent and hook are real; the GPU is
simulated.
"""

from __future__ import annotations

import pytest
from cluster.plain_world import MEMORY, MILLI
from harness.api import ApiError, Object
from harness.cluster import wait_until
from harness.shares import right
from node.claim_node import container
from node.claim_system import NAMESPACE, ClaimSystem

SYSTEM = {"gpus": 1, "plain": True}
"""Options of the file's system (conftest.py)."""


def deployment(name: str, replicas: int, milli: str) -> Object:
    """Return a Deployment whose Pods have one line each."""
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
    system.machine.shares().expect(left=40, **dict.fromkeys(names, 30.0))
    assert allocatable(system)[MILLI] == "1k"
    system.machine.real.restart_kubelet()
    wait_until(lambda: ready(system), what="the node is ready again", timeout=60)
    assert system.await_running("plain", 2) == names
    assert system.restarts() == 0
    assert allocatable(system)[MILLI] == "1k"
    system.cluster.kubectl("delete", "deployment/plain", "sharepod/left", "-n", NAMESPACE, timeout=90)
    wait_until(lambda: not system.rows(), what="the shares released", timeout=60)


@pytest.mark.promise("operator-line-node-anew")
@pytest.mark.alone
def test_no_pod_fails_when_its_node_is_registered_again_and_the_line_is_readvertised(system: ClaimSystem) -> None:
    system.apply(deployment("stays", 2, "300"))
    names = system.await_running("stays", 2)
    wait_until(lambda: len(system.rows()) == 2, what="two rows", timeout=30)
    node = f"/api/v1/nodes/{system.machine.node}"
    before = system.cluster.api.get(node)["metadata"]["uid"]
    system.machine.real.restart_kubelet(while_down=lambda: system.cluster.api.delete(node))
    wait_until(lambda: uid(system, node) not in ("", before), what="another Node", timeout=30)
    system.installation.add_to_pool(system.machine.node)
    wait_until(lambda: allocatable(system).get(MILLI) == "1k", what="the line advertised again", timeout=30)
    wait_until(lambda: ready(system), what="the node is ready again", timeout=60)
    assert system.await_running("stays", 2) == names
    assert system.restarts() == 0
    assert len(system.rows()) == 2
    # The test's agent must restart, because its token is bound to the deleted Node. The token of a DaemonSet's agent is
    # bound to its Pod and stays valid.
    system.kill_agent()
    system.start_agent()
    system.machine.await_claim_driver(system.agent)


def uid(system: ClaimSystem, path: str) -> str:
    """Return the uid of an object. Empty while the object does not exist."""
    try:
        return str(system.cluster.api.get(path)["metadata"]["uid"])
    except ApiError:
        return ""


@pytest.mark.promise("node-claim-attached", "node-claim-shared", "node-claim-restarts")
@pytest.mark.alone
def test_tenants_by_every_door_share_one_gpu_as_requested_over_all_restarts(system: ClaimSystem) -> None:
    """Each Pod's limit equals its request, so that its share does not depend on time that neighbours leave idle."""
    spread, brief, both = (system.template(name, milli, limit=milli) for name, milli in PARTS)
    line = deployment("plain", 1, "100")
    line["spec"]["template"]["metadata"]["annotations"] = {"sharepod.dev/gpu-limit": "0.1"}
    system.apply(
        spread,
        system.workload("Deployment", "three", "spread", replicas=3),
        brief,
        system.workload("Job", "job", "brief", "--seconds", "600"),
        {**both, "kind": "ResourceClaim", "spec": both["spec"]["spec"]},
        system.pod("one", claim="both"),
        system.pod("two", claim="both"),
        system.sharepod("left", 0.2, gpu={"limit": 0.2}),
        line,
    )
    names = system.await_running("three", 3) + system.await_running("job") + system.await_running("plain")
    system.await_running("one")
    system.await_running("two")
    wait_until(lambda: all(tenant["connected"] for tenant in tenants(system, 7)), what="seven tenants", timeout=60)
    as_they_asked(system, names)
    system.machine.real.restart_kubelet()
    system.restart_operator()
    system.kill_agent()
    system.start_agent()
    wait_until(lambda: ready(system), what="the node is ready again", timeout=60)
    system.machine.await_claim_driver(system.agent)
    wait_until(lambda: all(tenant["connected"] for tenant in tenants(system, 7)), what="seven tenants", timeout=60)
    as_they_asked(system, names)
    assert system.restarts() == 0
    assert len(devices_of_claims(system)) == 6, "three of the Deployment, the Job, two Pods on one, the line"
    system.clear()
    assert devices_of_claims(system) == [], "devices prepared by an earlier agent are released, too"


def devices_of_claims(system: ClaimSystem) -> list[str]:
    """Return the CDI files of SharePod's claims on the node."""
    return [name for name in system.machine.real.run("ls", "/run/cdi").stdout.split() if name.startswith("sharepod")]


PARTS = (("spread", 100), ("brief", 100), ("both", 200))
"""Templates of claims in the test above, each with its thousandths."""


def as_they_asked(system: ClaimSystem, names: list[str]) -> None:
    """Check the shares: a tenth for each named Pod, a fifth for the SharePod, and a fifth for the two Pods of one claim
    together."""
    found = system.machine.shares()
    found.expect(left=20.0, **dict.fromkeys(names, 10.0))
    together = found.of("one") + found.of("two")
    assert right(20.0, together, found.stolen), found


def tenants(system: ClaimSystem, count: int = 3) -> list[Object]:
    found: list[Object] = system.cluster.api.get(system.gpunode)["status"].get("tenants", [])
    return found if len(found) == count else [{"connected": False}]


def ready(system: ClaimSystem) -> bool:
    conditions = system.cluster.api.get(f"/api/v1/nodes/{system.machine.node}")["status"]["conditions"]
    return any(one["type"] == "Ready" and one["status"] == "True" for one in conditions)
