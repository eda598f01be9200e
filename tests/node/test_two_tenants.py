"""The whole system on a real node: SharePods become pods in a `restricted` namespace, and share a GPU as requested.

API server, scheduler, kubelet, containerd, operator, agent and hook are real. Operator, agent and hook come from
unchanged images and manifests. The GPU is the double.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness.api import Object
from harness.cluster import Cluster, wait_until
from harness.delivered import await_workloads, deliveries
from harness.images import image_with_program
from harness.installation import POOL_LABEL
from node.whole_system import NAMESPACE, RESTRICTED, System, node_of_two_gpus


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
