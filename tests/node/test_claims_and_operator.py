"""The whole system with claims: workloads of any kind share simulated GPUs as their claims say, beside SharePods.

API server, scheduler, controllers, kubelet, containerd, operator, agent and hook are real; the GPU is the double.
"""

from __future__ import annotations

import json
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from harness.api import Object
from harness.cluster import Cluster, wait_until
from harness.installation import Installation
from harness.machines import IMAGE, RealNode
from harness.services import Service
from harness.shares import measured
from node.claim_node import CLASS, GROUP, RESTRICTED, container, inventory, restricted_namespace

NAMESPACE = "team-c"


class ClaimSystem:
    """SharePod on a cluster with one real node of two simulated GPUs, and a team that brings claims."""

    def __init__(self, cluster: Cluster, machine: RealNode, installation: Installation) -> None:
        self.cluster = cluster
        self.machine = machine
        self.installation = installation
        self.gpunode = f"{GROUP}/gpunodes/{machine.node}"
        self.operator: Service = installation.start_operator("operator-1")
        self.agent: Service = machine.start_agent(installation, "agent-1")
        self._starts = 1
        self.most: dict[str, int] = {}
        """Most thousandths of each GPU's time that any version of the ledger gave away."""

    def kill_agent(self) -> None:
        self.agent.signal(signal.SIGKILL)
        self.agent.wait(10)

    def start_agent(self) -> None:
        self._starts += 1
        self.agent = self.machine.start_agent(self.installation, f"agent-{self._starts}")

    def restart_operator(self) -> None:
        """Kill the operator and start it again."""
        self._starts += 1
        self.operator.signal(signal.SIGKILL)
        self.operator.wait(10)
        self.operator = self.installation.start_operator(f"operator-{self._starts}")

    def apply(self, *objects: Object) -> None:
        for each in objects:
            self.cluster.kubectl("apply", "-n", NAMESPACE, "-f", "-", input=json.dumps(each))

    def template(self, name: str, milli: int, *, limit: int = 1000, count: int = 1) -> Object:
        amounts = {"timeMilli": str(milli), "limitMilli": str(limit), "memory": "1Gi"}
        exactly = {"deviceClassName": CLASS, "count": count, "capacity": {"requests": amounts}}
        spec = {"devices": {"requests": [{"name": "gpu", "exactly": exactly}]}}
        meta = {"apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaimTemplate", "metadata": {"name": name}}
        return {**meta, "spec": {"spec": spec}}

    def claim(self, name: str, milli: int) -> Object:
        made = self.template(name, milli)
        return {**made, "kind": "ResourceClaim", "spec": made["spec"]["spec"]}

    def workload(self, kind: str, name: str, template: str, *args: str, **spec: Any) -> Object:
        labels = {"app": name}
        claims = [{"name": "gpu", "resourceClaimTemplateName": template}]
        pod = {"resourceClaims": claims, "containers": [container(*args)], "terminationGracePeriodSeconds": 2}
        if kind == "Job":
            pod["restartPolicy"] = "Never"
        made = {"template": {"metadata": {"labels": labels}, "spec": pod}, **spec}
        if kind == "Deployment":
            made["selector"] = {"matchLabels": labels}
        group = {"Job": "batch/v1", "Deployment": "apps/v1"}[kind]
        return {"apiVersion": group, "kind": kind, "metadata": {"name": name}, "spec": made}

    def pod(self, name: str, *, claim: str | None = None, template: str | None = None) -> Object:
        source = {"resourceClaimName": claim} if claim else {"resourceClaimTemplateName": template}
        spec = {"resourceClaims": [{"name": "gpu", **source}], "containers": [container()]}
        meta = {"name": name, "labels": {"app": name}}
        return {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": meta,
            "spec": {**spec, "terminationGracePeriodSeconds": 2},
        }

    def sharepod(self, name: str, request: float) -> Object:
        one = {"name": "main", "image": IMAGE, "securityContext": RESTRICTED}
        spec = {"gpu": {"request": request, "memory": "1Gi"}, "containers": [one], "terminationGracePeriodSeconds": 2}
        return {
            "apiVersion": "sharepod.dev/v1alpha1",
            "kind": "SharePod",
            "metadata": {"name": name},
            "spec": spec,
        }

    def pods(self, app: str | None = None) -> list[Object]:
        found: list[Object] = self.cluster.api.get(f"/api/v1/namespaces/{NAMESPACE}/pods")["items"]
        return [pod for pod in found if app is None or pod["metadata"].get("labels", {}).get("app") == app]

    def await_running(self, app: str, count: int = 1, *, timeout: float = 60.0) -> list[str]:
        def running() -> list[str]:
            return [
                pod["metadata"]["name"]
                for pod in self.pods(app)
                if pod["status"].get("phase") == "Running" and "deletionTimestamp" not in pod["metadata"]
            ]

        wait_until(lambda: len(running()) == count, what=f"{count} running Pods of {app}", timeout=timeout)
        return running()

    def rows(self) -> list[Object]:
        rows: list[Object] = self.cluster.api.get(self.gpunode)["spec"].get("tenants", [])
        return rows

    def restarts(self) -> int:
        return sum(int(each["restartCount"]) for pod in self.pods() for each in pod["status"]["containerStatuses"])

    def watch_ledger(self, until: threading.Event) -> None:
        """Take in every version of the ledger."""
        seen = self.cluster.api.get(self.gpunode)
        self._note(seen)
        while not until.is_set():
            version = seen["metadata"]["resourceVersion"]
            for event in self.cluster.api.watch(f"{GROUP}/gpunodes", timeout=2, resourceVersion=version):
                seen = event["object"]
                self._note(seen)

    def _note(self, gpunode: Object) -> None:
        given: dict[str, int] = {}
        for row in gpunode["spec"].get("tenants", []):
            for uuid in row["gpus"]:
                given[uuid] = given.get(uuid, 0) + row["requestMilli"]
        self.most = {uuid: max(self.most.get(uuid, 0), given.get(uuid, 0)) for uuid in self.most.keys() | given.keys()}

    def clear(self) -> None:
        kinds = "deployments,jobs,sharepods.sharepod.dev,pods,resourceclaims,resourceclaimtemplates"
        self.cluster.kubectl("delete", kinds, "--all", "-n", NAMESPACE, timeout=90)
        wait_until(lambda: not self.pods(), what="no Pods", timeout=60)
        wait_until(lambda: not self.rows(), what="an empty ledger", timeout=60)


@pytest.fixture(scope="module")
def whole(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClaimSystem]:
    file = tmp_path_factory.mktemp("gpus") / "inventory.yaml"
    file.write_text(inventory(2))
    with RealNode(cluster, file) as machine:
        installation = Installation(cluster)
        installation.install_claims()
        installation.add_to_pool(machine.node)
        restricted_namespace(cluster, NAMESPACE)
        yield ClaimSystem(cluster, machine, installation)


@pytest.fixture
def system(whole: ClaimSystem) -> Iterator[ClaimSystem]:
    yield whole
    whole.clear()


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
    measured(system.machine.busy_ns).expect(left=40, right=60)


@pytest.mark.promise("node-claim-attached")
@pytest.mark.alone
def test_a_deployment_of_three_shares_a_gpu_in_three_parts(system: ClaimSystem) -> None:
    system.apply(system.template("third", 330, limit=330), system.workload("Deployment", "three", "third", replicas=3))
    names = system.await_running("three", 3)
    assert len({row["gpus"][0] for row in system.rows()}) == 1
    time.sleep(3)
    measured(system.machine.busy_ns).expect(**dict.fromkeys(names, 33.0))


def test_a_job_ends_and_its_share_comes_back(system: ClaimSystem) -> None:
    system.apply(system.template("half", 500), system.workload("Job", "brief", "half", "--seconds", "2"))
    path = f"/apis/batch/v1/namespaces/{NAMESPACE}/jobs/brief"
    system.cluster.wait_for(
        path, lambda job: job and job.get("status", {}).get("succeeded") == 1, what="a finished Job", timeout=60
    )
    wait_until(lambda: not system.rows(), what="the share given back", timeout=60)


def test_all_that_can_restart_does_so_under_running_claims_without_a_disturbance(system: ClaimSystem) -> None:
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
def test_forced_deletions_and_absent_agents_never_give_a_gpu_away_twice(system: ClaimSystem) -> None:
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
