"""A real node without its agent: the agent was ended, killed, or replaced by a standby agent.

Operator and agent are processes here, not Pods, because the kubelet would restart an ended agent's container at once.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
from harness.cluster import Cluster, wait_until
from harness.installation import GROUP, Installation
from harness.machines import RealNode
from harness.services import Service
from node.whole_system import NAMESPACE, System, node_of_two_gpus


class SystemOfProcesses(System):
    """SharePod whose operator and agent are processes of the test."""

    def __init__(self, cluster: Cluster, machine: RealNode) -> None:
        super().__init__(cluster, machine)
        self.installation = Installation(cluster)
        self.installation.start_operator()
        self.installation.add_to_pool(machine.node)
        self.agent: Service = machine.start_agent(self.installation)


@pytest.fixture(scope="module")
def whole(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SystemOfProcesses]:
    with node_of_two_gpus(cluster, tmp_path_factory.mktemp("gpus")) as machine:
        yield SystemOfProcesses(cluster, machine)


@pytest.fixture
def system(whole: SystemOfProcesses) -> Iterator[SystemOfProcesses]:
    yield whole
    whole.clear()


@pytest.mark.promise("install-agent-gap")
def test_an_agent_upgrade_kills_no_tenant_and_keeps_its_memory_counted(system: SystemOfProcesses) -> None:
    system.apply("steady", {"request": 0.5, "memory": "2Gi"}, "--memory", "1G")
    system.await_phase("steady", "Running")
    time.sleep(1)
    system.agent.stop()
    before = system.machine.busy_ns()
    time.sleep(2)
    assert sum(system.machine.busy_ns().values()) > sum(before.values())
    system.agent = system.machine.start_agent(system.installation)

    def counted() -> bool:
        rows = system.cluster.api.get(f"{GROUP}/gpunodes/{system.machine.node}").get("status", {}).get("tenants", [])
        return [(row["connected"], row["memory"] >= 1 << 30) for row in rows] == [(True, True)]

    wait_until(counted, what="the tenant's memory in the new agent's account", timeout=40)
    pod = system.cluster.api.get(f"/api/v1/namespaces/{NAMESPACE}/pods/steady")
    assert pod["status"]["containerStatuses"][0]["restartCount"] == 0


@pytest.mark.promise("install-standby")
def test_a_standby_agent_takes_over_volumes_and_tenants(system: SystemOfProcesses) -> None:
    system.apply("steady", {"request": 0.5, "memory": "2Gi"}, "--memory", "1G")
    system.await_phase("steady", "Running")
    following = system.machine.start_agent(system.installation, "following")
    wait_until(lambda: "standing by" in following.log.read_text(), what="the next agent", timeout=40)
    system.agent.stop()
    system.agent = following
    system.await_agent()
    system.apply("later", {"request": 0.5, "memory": "2Gi"})
    system.await_phase("later", "Running", timeout=60)
    pod = system.cluster.api.get(f"/api/v1/namespaces/{NAMESPACE}/pods/steady")
    assert pod["status"]["containerStatuses"][0]["restartCount"] == 0


@pytest.mark.promise("node-agent-first")
def test_a_container_does_not_start_before_its_agent_is_up(system: SystemOfProcesses) -> None:
    system.await_agent()
    system.agent.stop(grace=0)  # by SIGKILL: the agent does not release its Lease, which stays valid for a while
    system.apply("early", {"request": 0.3, "memory": "1Gi"})
    system.cluster.wait_for(
        f"/api/v1/namespaces/{NAMESPACE}/pods/early",
        lambda pod: pod and pod["spec"].get("nodeName"),
        what="a bound pod",
        timeout=20,
    )
    time.sleep(2)
    pod = system.cluster.api.get(f"/api/v1/namespaces/{NAMESPACE}/pods/early")
    assert not any("running" in status["state"] for status in pod["status"].get("containerStatuses", []))
    system.agent = system.machine.start_agent(system.installation)
    system.await_phase("early", "Running", timeout=60)
