"""The whole system with claims: workloads of any kind share simulated GPUs by their claims, next to SharePods.

API server, scheduler, controllers, kubelet, containerd, operator, agent and hook are real; the GPU is simulated.
"""

from __future__ import annotations

import json
import threading
import time

import pytest
from harness.cluster import wait_until
from node.claim_system import NAMESPACE, ClaimSystem


@pytest.mark.promise("node-claim-attached")
@pytest.mark.alone
def test_a_claim_and_a_sharepod_share_a_gpu_as_they_asked(system: ClaimSystem) -> None:
    system.apply(system.sharepod("left", 0.4), system.claim("right", 600), system.pod("right", claim="right"))
    system.await_running("right")
    wait_until(
        lambda: any(pod["metadata"]["name"] == "left" and pod["status"]["phase"] == "Running" for pod in system.pods()),
        what="the SharePod's Pod",
        timeout=40,
    )
    left, right = system.rows()
    assert left["gpus"] == right["gpus"]
    time.sleep(3)
    system.machine.shares().expect(left=40, right=60)


@pytest.mark.promise("node-claim-attached")
@pytest.mark.alone
def test_a_deployment_of_three_shares_a_gpu_in_three_parts(system: ClaimSystem) -> None:
    system.apply(system.template("third", 330, limit=330), system.workload("Deployment", "three", "third", replicas=3))
    names = system.await_running("three", 3)
    assert len({row["gpus"][0] for row in system.rows()}) == 1
    time.sleep(3)
    system.machine.shares().expect(**dict.fromkeys(names, 33.0))


def test_a_job_ends_and_its_share_is_released(system: ClaimSystem) -> None:
    system.apply(system.template("half", 500), system.workload("Job", "brief", "half", "--seconds", "2"))
    path = f"/apis/batch/v1/namespaces/{NAMESPACE}/jobs/brief"
    system.cluster.wait_for(
        path, lambda job: job and job.get("status", {}).get("succeeded") == 1, what="a finished Job", timeout=60
    )
    wait_until(lambda: not system.rows(), what="the share released", timeout=60)


def test_every_component_restarts_under_running_claims_without_a_disturbance(system: ClaimSystem) -> None:
    system.apply(
        system.template("part", 300),
        system.workload("Deployment", "steady", "part", replicas=2),
        system.claim("both", 300),
        system.pod("one", claim="both"),
        system.pod("two", claim="both"),
    )
    system.await_running("steady", 2)
    system.await_running("one")
    system.await_running("two")
    before = sorted(json.dumps(row, sort_keys=True) for row in system.rows())
    assert len(before) == 3
    system.machine.real.restart_kubelet()
    system.restart_operator()
    system.kill_agent()
    system.start_agent()

    def connected() -> bool:
        status = system.cluster.api.get(system.gpunode).get("status", {})
        ready = {each["type"]: each["status"] for each in status.get("conditions", [])}
        tenants = [tenant["connected"] for tenant in status.get("tenants", [])]
        return tenants == [True] * 3 and (ready["AgentReady"], ready["CDIDevices"]) == ("True", "True")

    wait_until(connected, what="three tenants in the next agent", timeout=60)
    system.machine.await_claim_driver(system.agent)
    system.apply(system.template("later", 200), system.pod("later", template="later"))
    system.await_running("later", timeout=150)
    assert system.restarts() == 0
    later = [row for row in system.rows() if row["requestMilli"] == 200]
    assert sorted(json.dumps(row, sort_keys=True) for row in system.rows() if row not in later) == before


@pytest.mark.promise("node-claim-drained")
def test_forced_deletions_and_absent_agents_never_assign_a_gpu_twice(system: ClaimSystem) -> None:
    until = threading.Event()
    watching = threading.Thread(target=system.watch_ledger, args=(until,), daemon=True)
    watching.start()
    try:
        system.apply(system.template("most", 700), system.workload("Deployment", "churn", "most", replicas=3))
        system.await_running("churn", 2)
        for agent_is_away in (False, True):
            if agent_is_away:
                system.kill_agent()
            system.cluster.kubectl(
                "delete", "pods", "-l", "app=churn", "-n", NAMESPACE, "--force", "--grace-period=0", timeout=60
            )
            if agent_is_away:
                system.start_agent()
            system.await_running("churn", 2, timeout=150)
    finally:
        until.set()
        watching.join(30)
    assert len(system.most) == 2
    assert max(system.most.values()) <= 1000
