"""The whole system on a real node: SharePods become pods in a `restricted` namespace, and share a GPU as they asked.

API server, scheduler, kubelet, containerd, operator, agent and hook are real; the GPU is the double.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from harness.api import ApiError, Object
from harness.cluster import Cluster, wait_until
from harness.images import image_with_program
from harness.installation import Installation
from harness.machines import IMAGE, RealNode
from harness.node import BASE_IMAGE
from harness.services import Service

NAMESPACE = "team-a"
GROUP = "/apis/sharepod.dev/v1alpha1"
SHAREPODS = f"{GROUP}/namespaces/{NAMESPACE}/sharepods"

_RESTRICTED = {
    "runAsNonRoot": True,
    "runAsUser": 65534,
    "allowPrivilegeEscalation": False,
    "capabilities": {"drop": ["ALL"]},
    "seccompProfile": {"type": "RuntimeDefault"},
}
_DIALECT = """
apiVersion: sharepod.dev/v1alpha1
kind: SharePod
metadata:
  name: sharepod1
  annotations: {"gemini/gpu_request": "0.5"}
spec:
  containers:
    - name: cuda
      image: nvidia/cuda:9.0-base
      command: ["nvidia-smi", "-L"]
      resources: {limits: {cpu: "1", memory: "500Mi"}}
"""


class System:
    """SharePod on a cluster with one real node of two simulated GPUs."""

    def __init__(self, cluster: Cluster, machine: RealNode, installation: Installation) -> None:
        self.cluster = cluster
        self.machine = machine
        self.installation = installation
        self.agent: Service = machine.start_agent(installation)

    def apply(self, name: str, gpu: Object, *args: str, **spec: Any) -> None:
        container = {"name": "main", "image": IMAGE, "args": list(args), "securityContext": _RESTRICTED}
        body = {"containers": [container], "gpu": gpu, "terminationGracePeriodSeconds": 2, **spec}
        meta = {"name": name, "namespace": NAMESPACE}
        manifest = {"apiVersion": "sharepod.dev/v1alpha1", "kind": "SharePod", "metadata": meta, "spec": body}
        self.cluster.kubectl("apply", "-f", "-", input=json.dumps(manifest))

    def status(self, name: str) -> Object:
        status: Object = self.cluster.api.get(f"{SHAREPODS}/{name}").get("status", {})
        return status

    def await_phase(self, name: str, phase: str, *, timeout: float = 40.0) -> Object:
        self.cluster.wait_for(
            f"{SHAREPODS}/{name}",
            lambda found: found and found.get("status", {}).get("phase") == phase,
            what=f"{name} {phase}",
            timeout=timeout,
        )
        return self.status(name)

    def await_agent(self) -> None:
        """Wait until the agent has said that it serves."""
        self.cluster.wait_for(
            f"{GROUP}/gpunodes/{self.machine.node}",
            lambda seen: (
                seen
                and ("AgentReady", "True")
                in [(each["type"], each["status"]) for each in seen.get("status", {}).get("conditions", [])]
            ),
            what="a serving agent",
        )

    def tenants(self) -> dict[str, Object]:
        """Return the rows of the node's ledger by pod name."""
        node = self.cluster.api.get(f"{GROUP}/gpunodes/{self.machine.node}")
        return {row["podName"]: row for row in node["spec"].get("tenants", [])}

    def clear(self) -> None:
        """Delete every SharePod and wait until their shares are given away."""
        self.cluster.kubectl("delete", "sharepods", "--all", "-n", NAMESPACE, timeout=60)
        wait_until(lambda: not self.tenants(), what="an empty ledger", timeout=40)


@pytest.fixture(scope="module")
def whole(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    inventory = tmp_path_factory.mktemp("gpus") / "inventory.yaml"
    gpus = [
        {
            "uuid": f"GPU-5a9e000{n}-0000-4000-8000-00000000000{n}",
            "index": n - 1,
            "model": "Simulated",
            "memory": "16Gi",
        }
        for n in (1, 2)
    ]
    inventory.write_text(json.dumps({"gpus": gpus}))
    with RealNode(cluster, inventory) as machine:
        installation = Installation(cluster)
        installation.start_operator()
        installation.add_to_pool(machine.node)
        cluster.namespace(NAMESPACE, labels={"pod-security.kubernetes.io/enforce": "restricted"})
        yield System(cluster, machine, installation)


@pytest.fixture
def system(whole: System) -> Iterator[System]:
    yield whole
    whole.clear()


@pytest.mark.promise("time-guarantee")
@pytest.mark.alone
def test_two_tenants_get_the_shares_that_they_asked_for(system: System) -> None:
    system.apply("alpha", {"request": 0.4, "limit": 0.7, "memory": "4Gi"}, "--kernel-us", "2000")
    system.apply("beta", {"request": 0.6, "limit": 0.8, "memory": "8Gi"}, "--kernel-us", "5000")
    on = [system.await_phase(name, "Running")["gpus"] for name in ("alpha", "beta")]
    assert on[0] == on[1]
    time.sleep(3)
    system.machine.shares().expect(alpha=40, beta=60)


@pytest.mark.promise("time-limit")
@pytest.mark.alone
def test_one_alone_gets_its_limit_and_without_a_limit_all(system: System) -> None:
    system.apply("capped", {"request": 0.4, "limit": 0.7, "memory": "1Gi"})
    system.apply("free", {"request": 0.4, "memory": "1Gi", "placement": "Spread"})
    placed = [system.await_phase(name, "Running")["gpus"] for name in ("capped", "free")]
    assert placed[0] != placed[1]
    time.sleep(3)
    system.machine.shares().expect(capped=70, free=100)


@pytest.mark.promise("memory-oom")
def test_not_a_byte_over_the_limit_and_the_program_is_told(system: System) -> None:
    system.apply("greedy", {"request": 0.2, "memory": "1Gi"}, "--memory", "2G", "--chunk", "256M")
    system.await_phase("greedy", "Running")

    def start_line() -> Object | None:
        log = system.cluster.kubectl("logs", "-n", NAMESPACE, "greedy", check=False).stdout
        lines = [json.loads(line) for line in log.splitlines() if line.startswith("{")]
        return next((line for line in lines if line["event"] == "start"), None)

    wait_until(lambda: start_line() is not None, what="the program's first line", timeout=20)
    line = start_line()
    assert line is not None
    assert line["allocated"] == 1 << 30
    assert line["refused_allocations"] == 4
    assert (line["memory_total"], line["memory_free"]) == (1 << 30, 0)


def test_a_manifest_in_an_older_dialect_runs_as_it_stands(system: System, tmp_path: Path) -> None:
    system.cluster.namespace("legacy")
    system.cluster.kubectl("apply", "-n", "legacy", "-f", "-", input=_DIALECT)
    path = f"{GROUP}/namespaces/legacy/sharepods/sharepod1"
    # A bare pod with the default restart policy starts again when it ends; its first run is what counts.
    found = system.cluster.wait_for(
        path, lambda seen: seen and seen.get("status", {}).get("podUID"), what="a pod", timeout=30
    )
    assert found is not None
    uuid = found["status"]["gpus"][0]["uuid"]

    def printed() -> bool:
        return uuid in system.cluster.kubectl("logs", "-n", "legacy", "sharepod1", check=False).stdout

    wait_until(printed, what="the GPU in the program's output", timeout=30)
    system.cluster.kubectl("delete", "sharepod", "sharepod1", "-n", "legacy", timeout=60)


@pytest.mark.promise("program-silent", "install-unprivileged")
def test_a_program_without_cuda_is_preloaded_and_notices_nothing(system: System, tmp_path: Path) -> None:
    program = Path("/bin/cat").resolve()
    system.machine.real.load_image(image_with_program("sharepod.test/cat:1", program, directory=tmp_path))
    container = {
        "name": "main",
        "image": "sharepod.test/cat:1",
        "args": ["/proc/self/maps", "/proc/self/status", "/etc/ld.so.preload"],
        "securityContext": _RESTRICTED,
    }
    system.apply("plain", {"request": 0.1}, containers=[container], restartPolicy="Never")
    system.await_phase("plain", "Succeeded")
    log = system.cluster.kubectl("logs", "-n", NAMESPACE, "plain").stdout
    assert "/run/sharepod/libsharepod.so" in log.split("Name:")[0]
    assert "libcuda" not in log
    assert "Threads:\t1\n" in log
    assert log.endswith("/run/sharepod/libsharepod.so\n")


def test_a_share_is_not_given_away_while_the_pod_takes_its_time_to_end(system: System) -> None:
    script = "trap 'sleep 6; exit 0' TERM; while true; do sleep 0.1; done"
    container = {"name": "main", "image": BASE_IMAGE, "command": ["sh", "-c", script], "securityContext": _RESTRICTED}
    gpu = {"request": 0.8, "count": 2, "memory": "1Gi"}
    system.apply("slow", gpu, containers=[container], terminationGracePeriodSeconds=30)
    system.await_phase("slow", "Running")
    system.cluster.kubectl("delete", "sharepod", "slow", "-n", NAMESPACE, "--wait=false")
    system.apply("next", gpu)
    deadline = time.monotonic() + 40
    while system.status("next").get("phase") != "Running":
        rows = system.tenants()
        left = [pod for pod in system.cluster.pods(NAMESPACE) if pod["metadata"]["name"] == "slow"]
        if any("running" in each["state"] for pod in left for each in pod["status"]["containerStatuses"]):
            assert rows["slow"]["gpus"]
            assert "next" not in rows
        assert time.monotonic() < deadline, system.status("next")
        time.sleep(0.2)


@pytest.mark.promise("install-agent-gap")
def test_an_agent_upgrade_kills_no_tenant_and_keeps_its_memory_counted(system: System) -> None:
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
def test_an_agent_that_stands_by_takes_over_volumes_and_tenants(system: System) -> None:
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
def test_a_container_does_not_start_before_its_agent_is_up(system: System) -> None:
    system.await_agent()
    system.agent.stop(grace=0)  # killed: it says no word, and its Lease lasts for a while yet
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


def test_an_agent_cannot_speak_for_another_node(system: System) -> None:
    system.cluster.api.create(
        f"{GROUP}/gpunodes",
        {
            "apiVersion": "sharepod.dev/v1alpha1",
            "kind": "GPUNode",
            "metadata": {"name": "elsewhere"},  # of no Node: the operator removes it in time
            "spec": {"pool": "dedicated"},
        },
    )
    token = system.cluster.service_account_token("sharepod-system", "sharepod-agent", bound_node=system.machine.node)
    with pytest.raises(ApiError) as refused:
        system.cluster.api_for(token).patch(f"{GROUP}/gpunodes/elsewhere/status", {"status": {"gpus": []}})
    assert "elsewhere" in refused.value.message
