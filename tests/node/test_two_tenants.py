"""The whole system on a real node: SharePods become pods in a `restricted` namespace, and share a GPU as requested.

API server, scheduler, kubelet, containerd, operator, agent and hook are real. Operator, agent and hook come from
unchanged images and manifests. The GPU is simulated.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness.api import ApiError, Object
from harness.cluster import Cluster, wait_until
from harness.delivered import WORKLOADS, await_workloads, deliveries
from harness.images import image_with_program
from harness.installation import GROUP, POOL_LABEL
from harness.installation import NAMESPACE as OURS
from harness.node import BASE_IMAGE
from node.whole_system import NAMESPACE, RESTRICTED, System, node_of_two_gpus

_DIALECT = """
apiVersion: sharepod.dev/v1alpha1
kind: SharePod
metadata:
  name: sharepod1
  annotations: {"gemini/gpu_request": "0.5"}
spec:
  containers:
    - name: cuda
      image: nvidia/cuda:12.9.1-base-ubuntu24.04
      command: ["nvidia-smi", "-L"]
      resources: {limits: {cpu: "1", memory: "500Mi"}}
"""


@pytest.fixture(scope="module")
def whole(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    """Return a system with unchanged images and manifests: the operator is a Deployment, the agent a DaemonSet."""
    delivered = deliveries()
    if isinstance(delivered, str):
        pytest.skip(delivered)
    with node_of_two_gpus(cluster, tmp_path_factory.mktemp("gpus")) as machine:
        machine.real.serve_api()
        delivered[1].install(cluster, machine.real)
        cluster.kubectl("label", "node", machine.node, f"{POOL_LABEL}=dedicated")
        await_workloads(cluster)
        system = System(cluster, machine)
        system.await_agent()
        yield system


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
def test_a_single_tenant_gets_its_limit_and_without_a_limit_the_whole_gpu(system: System) -> None:
    system.apply("capped", {"request": 0.4, "limit": 0.7, "memory": "1Gi"})
    system.apply("free", {"request": 0.4, "memory": "1Gi", "placement": "Spread"})
    placed = [system.await_phase(name, "Running")["gpus"] for name in ("capped", "free")]
    assert placed[0] != placed[1]
    time.sleep(3)
    system.machine.shares().expect(capped=70, free=100)


@pytest.mark.promise("memory-oom")
def test_no_byte_is_allocated_over_the_limit_and_the_program_gets_the_error(system: System) -> None:
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


def test_a_manifest_in_an_older_dialect_runs_unchanged(system: System, tmp_path: Path) -> None:
    system.cluster.namespace("legacy")
    system.cluster.kubectl("apply", "-n", "legacy", "-f", "-", input=_DIALECT)
    path = f"{GROUP}/namespaces/legacy/sharepods/sharepod1"
    # A bare pod with the default restartPolicy is restarted when it ends, so only its first run counts.
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
def test_a_program_without_cuda_is_preloaded_and_behaves_as_before(system: System, tmp_path: Path) -> None:
    program = Path("/bin/cat").resolve()
    system.machine.real.load_image(image_with_program("sharepod.test/cat:1", program, directory=tmp_path))
    container = {
        "name": "main",
        "image": "sharepod.test/cat:1",
        "args": ["/proc/self/maps", "/proc/self/status", "/etc/ld.so.preload"],
        "securityContext": RESTRICTED,
    }
    system.apply("plain", {"request": 0.1}, containers=[container], restartPolicy="Never")
    system.await_phase("plain", "Succeeded")
    log = system.cluster.kubectl("logs", "-n", NAMESPACE, "plain").stdout
    assert "/run/sharepod/libsharepod.so" in log.split("Name:")[0]
    assert "libcuda" not in log
    assert "Threads:\t1\n" in log
    assert log.endswith("/run/sharepod/libsharepod.so\n")


def test_a_share_is_not_reassigned_while_its_pod_is_terminating(system: System) -> None:
    script = "trap 'sleep 6; exit 0' TERM; while true; do sleep 0.1; done"
    container = {"name": "main", "image": BASE_IMAGE, "command": ["sh", "-c", script], "securityContext": RESTRICTED}
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


@pytest.mark.promise("install-standby")
def test_a_rollout_of_the_agent_disturbs_no_tenant(system: System) -> None:
    def agents() -> set[str]:
        pods = system.cluster.pods(OURS)
        return {pod["metadata"]["uid"] for pod in pods if pod["metadata"]["name"].startswith("sharepod-agent-")}

    system.apply("steady", {"request": 0.5, "memory": "2Gi"}, "--memory", "1G")
    system.await_phase("steady", "Running")
    before = agents()
    system.cluster.kubectl("rollout", "restart", "-n", OURS, WORKLOADS["agent"])
    await_workloads(system.cluster)
    wait_until(lambda: not before & agents(), what="the end of the agent before", timeout=40)
    system.await_agent()
    system.apply("later", {"request": 0.5, "memory": "2Gi"})
    system.await_phase("later", "Running", timeout=60)
    pod = system.cluster.api.get(f"/api/v1/namespaces/{NAMESPACE}/pods/steady")
    assert pod["status"]["containerStatuses"][0]["restartCount"] == 0


def test_an_agent_cannot_speak_for_another_node(system: System) -> None:
    system.cluster.api.create(
        f"{GROUP}/gpunodes",
        {
            "apiVersion": "sharepod.dev/v1alpha1",
            "kind": "GPUNode",
            "metadata": {"name": "elsewhere"},  # the operator will delete this GPUNode, because it belongs to no Node
            "spec": {"pool": "dedicated"},
        },
    )
    token = system.cluster.service_account_token("sharepod-system", "sharepod-agent", bound_node=system.machine.node)
    with pytest.raises(ApiError) as refused:
        system.cluster.api_for(token).patch(f"{GROUP}/gpunodes/elsewhere/status", {"status": {"gpus": []}})
    assert "elsewhere" in refused.value.message
