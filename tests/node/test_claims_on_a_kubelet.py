"""A real kubelet and containerd attach tenants by resource claims: plain Pods in `restricted` namespaces, without a
RuntimeClass, a volume or a variable of SharePod.

The test writes rows and allocations in place of the operator.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness.cluster import Cluster, wait_until
from harness.images import image_with_program
from harness.installation import Installation
from harness.machines import RealNode
from harness.node import BASE_IMAGE
from node.claim_node import RESTRICTED, ClaimNode, container, inventory, restricted_namespace

CAT = "sharepod.test/cat:1"


@pytest.fixture(scope="module")
def machine(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealNode]:
    file = tmp_path_factory.mktemp("gpus") / "inventory.yaml"
    file.write_text(inventory(2))
    with RealNode(cluster, file) as running:
        cat = image_with_program(CAT, Path("/bin/cat").resolve(), directory=file.parent)
        running.real.load_image(cat)
        yield running


@pytest.fixture(scope="module")
def whole(cluster: Cluster, machine: RealNode) -> Iterator[ClaimNode]:
    installation = Installation(cluster)
    namespace = restricted_namespace(cluster, "team-a")
    with ClaimNode(cluster, machine, installation, namespace) as running:
        wait_until(lambda: running.condition("CDIDevices").get("status") == "True", what="CDI devices", timeout=40)
        yield running


@pytest.fixture
def node(whole: ClaimNode) -> Iterator[ClaimNode]:
    yield whole
    whole.clear()


@pytest.mark.promise("node-claim-attached")
@pytest.mark.alone
def test_plain_pods_share_a_gpu_as_their_claims_say(node: ClaimNode) -> None:
    rows = [node.give(name, milli) for name, milli in (("alpha", 400), ("beta", 600))]
    for name in ("alpha", "beta"):
        node.await_pod(node.make_pod(name, name))
    time.sleep(3)
    node.machine.shares().expect(alpha=40, beta=60)
    for row in rows:
        node.await_tenant(row["id"], connected=True, enforced=True)
    assert "FailedPrepare" not in node.messages()


@pytest.mark.promise("node-claim-containers")
def test_only_containers_that_name_the_claim_get_gpu_and_hook(node: ClaimNode) -> None:
    node.give("gpu", 400)
    maps = ("/proc/self/maps", "/proc/self/environ")
    shown = {"image": CAT}
    pod = node.make_pod(
        "mixed",
        "gpu",
        container(*maps, **shown),
        container(*maps, name="other", claim=None, **shown),
        initContainers=[
            container(*maps, name="first", **shown),
            container(name="sidecar", restartPolicy="Always"),
            container(*maps, name="first-other", claim=None, **shown),
        ],
        restartPolicy="Never",
    )
    wait_until(lambda: bool(node.logs("mixed", "other") and node.logs("mixed")), what="their output", timeout=40)
    hooked = {
        name: "/run/sharepod/libsharepod.so" in node.logs("mixed", name)
        for name in ("main", "other", "first", "first-other")
    }
    assert hooked == {"main": True, "other": False, "first": True, "first-other": False}
    assert "FAKE_CUDA_STATE" not in node.logs("mixed", "other")
    assert '"event"' in node.logs("mixed", "sidecar")
    assert node.cluster.api.get(pod)["status"]["phase"] != "Failed"


@pytest.mark.promise("node-claim-variable")
def test_a_pod_that_asks_by_variable_gets_nothing_and_a_claims_own_variable_no_more(node: ClaimNode) -> None:
    node.give("gpu", 400)
    everything = {"name": "NVIDIA_VISIBLE_DEVICES", "value": "all"}
    asks = {**container("/proc/self/environ", image=CAT, claim=None), "env": [everything]}
    node.make_pod("foreign", None, asks, restartPolicy="Never")
    entitled = {**container("/proc/self/environ", image=CAT), "env": [everything]}
    node.make_pod("entitled", "gpu", entitled, restartPolicy="Never")
    wait_until(lambda: bool(node.logs("foreign") and node.logs("entitled")), what="their environment", timeout=40)
    assert "FAKE_CUDA" not in node.logs("foreign")
    assert "NVIDIA_VISIBLE_DEVICES=void" in node.logs("entitled")


@pytest.mark.promise("node-claim-shared")
def test_pods_on_one_claim_are_one_tenant(node: ClaimNode) -> None:
    row = node.give("shared", 500, limit=500)
    pods = [node.make_pod(name, "shared") for name in ("one", "two")]
    for pod in pods:
        node.await_pod(pod)
    node.await_tenant(row["id"], processes=2)
    node.cluster.api.delete(pods[0], grace=1)
    node.await_gone(pods[0])
    node.await_tenant(row["id"], processes=1, connected=True)
    node.reserve({**row, "state": "Releasing"})
    node.cluster.api.delete(pods[1], grace=1)
    node.await_tenant(row["id"], drained=True)


def test_several_gpus_of_one_claim(node: ClaimNode) -> None:
    row = node.give("wide", 500, gpus=node.gpus)
    node.await_pod(node.make_pod("wide", "wide", container("--device", "1")))
    node.await_tenant(row["id"], connected=True)
    wait_until(lambda: ("wide", node.gpus[1]) in node.machine.busy_ns(), what="work on the second GPU", timeout=20)


@pytest.mark.promise("node-claim-waits")
def test_a_claim_that_comes_before_its_row_waits_inside_of_the_call(node: ClaimNode) -> None:
    claim = node.make_claim("early", 300)
    node.allocate(claim)
    pod = node.make_pod("early", "early")
    node.cluster.wait_for(pod, lambda seen: seen and seen["spec"].get("nodeName"), what="a bound pod")
    time.sleep(3)
    node.reserve(node.row(claim, 300))
    node.await_pod(pod, timeout=10)
    assert "no share of a GPU" not in node.messages()


@pytest.mark.promise("node-claim-waits", "node-claim-restarts")
def test_a_claim_that_waits_for_its_row_survives_restarts_of_kubelet_and_agent(node: ClaimNode) -> None:
    claim = node.make_claim("long", 300)
    node.allocate(claim)
    pod = node.make_pod("long", "long")
    node.cluster.wait_for(pod, lambda seen: seen and seen["spec"].get("nodeName"), what="a bound pod")
    time.sleep(2)  # by now the kubelet has called the agent, and the call waits for the missing row
    node.machine.real.restart_kubelet()
    node.agent.signal(signal.SIGKILL)
    node.agent.wait(10)
    node.start_agent()
    node.machine.real.restart_kubelet()
    assert node.cluster.api.get(pod)["status"]["phase"] == "Pending"
    node.reserve(node.row(claim, 300))
    node.await_pod(pod, timeout=150)
    node.await_tenant(claim["metadata"]["uid"], processes=1, connected=True)
    assert node.restarts("long") == 0


@pytest.mark.promise("node-claim-restarts")
def test_kubelet_agent_and_container_restart_without_a_disturbance(node: ClaimNode) -> None:
    row = node.give("steady", 500)
    node.await_pod(node.make_pod("steady", "steady"))
    node.await_tenant(row["id"], connected=True)
    node.machine.real.restart_kubelet()
    node.agent.signal(signal.SIGKILL)
    node.agent.wait(10)
    # The CDI file is lost, as after a program that cleans /run. The next agent must write it again.
    node.machine.real.run("sh", "-c", f"rm /run/cdi/sharepod-{row['id']}.json")
    before = node.machine.busy_ns()
    node.start_agent()
    node.await_tenant(row["id"], connected=True, enforced=True)
    wait_until(lambda: sum(node.machine.busy_ns().values()) > sum(before.values()), what="work", timeout=20)
    assert node.restarts("steady") == 0
    # After both restarts, a second Pod of the claim is prepared. The restart of a container, below, prepares nothing.
    node.await_pod(node.make_pod("second", "steady"), timeout=150)
    node.machine.real.run("sh", "-c", "kill $(pgrep launchloop | head -1)")
    wait_until(lambda: node.restarts("steady") + node.restarts("second") == 1, what="a restart", timeout=40)
    node.await_tenant(row["id"], processes=2, timeout=60)


@pytest.mark.promise("node-claim-drained")
def test_no_share_is_free_before_the_last_process_has_exited(node: ClaimNode) -> None:
    row = node.give("slow", 500)
    script = "trap '' TERM; while true; do sleep 0.1; done"
    shell = {**container(image=BASE_IMAGE), "command": ["sh", "-c", script]}
    pod = node.make_pod("slow", "slow", shell, terminationGracePeriodSeconds=8)
    node.await_pod(pod)
    node.reserve({**row, "state": "Releasing"})
    node.cluster.api.delete(pod, grace=0)  # the object is deleted at once; the container ends after its grace period
    node.await_gone(pod)
    node.await_tenant(row["id"], drained=False)
    node.await_tenant(row["id"], drained=True, timeout=60)
    assert not node.machine.real.run("sh", "-c", "pgrep -f '[s]leep 0.1'", check=False).stdout


@pytest.mark.promise("node-claim-drained")
def test_a_claim_released_while_the_agent_is_down_stays_reserved_until_the_agent_returns(node: ClaimNode) -> None:
    row = node.give("away", 500)
    pod = node.make_pod("away", "away")
    node.await_pod(pod)
    node.await_tenant(row["id"], connected=True)
    node.agent.signal(signal.SIGKILL)
    node.agent.wait(10)
    node.cluster.api.delete(pod, grace=0)
    node.reserve({**row, "state": "Releasing"})
    node.start_agent()
    node.await_tenant(row["id"], drained=True, timeout=90)
    assert f"sharepod-{row['id']}.json" not in node.machine.real.run("ls", "/run/cdi").stdout


@pytest.mark.promise("node-claim-waits", "node-cdi-missing")
def test_a_gpu_without_cdi_device_is_reported_and_waited_for(node: ClaimNode) -> None:
    real = node.machine.real
    real.run("sh", "-c", "mv /run/cdi/nvidia.json /run/cdi/away; echo '{\"kind\":' >/run/cdi/broken.json")
    try:
        wait_until(lambda: node.condition("CDIDevices").get("status") == "False", what="a condition", timeout=20)
        assert "nvidia-ctk cdi generate" in node.condition("CDIDevices")["message"]
        assert node.condition("AgentReady")["status"] == "True"
        node.give("waits", 300)
        pod = node.make_pod("waits", "waits")
        node.cluster.wait_for(pod, lambda seen: seen and seen["spec"].get("nodeName"), what="a bound pod")
        time.sleep(2)
    finally:
        real.run("sh", "-c", "mv /run/cdi/away /run/cdi/nvidia.json")
    node.await_pod(pod, timeout=30)
    real.run("rm", "/run/cdi/broken.json")


@pytest.mark.promise("node-claim-containers")
def test_an_ephemeral_container_has_neither_gpu_nor_hook(node: ClaimNode) -> None:
    row = node.give("bare", 400)
    node.await_pod(node.make_pod("bare", "bare"))
    node.await_tenant(row["id"], connected=True)
    looks = ["/proc/self/maps", "/proc/self/environ"]
    debug = {"name": "debug", "image": CAT, "args": looks, "securityContext": RESTRICTED}
    path = f"/api/v1/namespaces/{node.namespace}/pods/bare"
    node.cluster.api.patch(f"{path}/ephemeralcontainers", {"spec": {"ephemeralContainers": [debug]}})
    wait_until(lambda: bool(node.logs("bare", "debug")), what="its output", timeout=30)
    assert "libsharepod" not in node.logs("bare", "debug")
    assert "FAKE_CUDA" not in node.logs("bare", "debug")


def test_a_process_without_the_hook_belongs_to_its_tenant_and_a_foreign_process_does_not(
    node: ClaimNode, machine: RealNode
) -> None:
    row = node.give("bare", 400)
    shell = {**container(image=BASE_IMAGE), "command": ["sh", "-c", "exec sleep 12345"]}
    node.await_pod(node.make_pod("bare", "bare", shell))
    foreign = machine.real.start("foreign", ["sleep", "54321"])
    try:
        named = ("pgrep", "-f", "^sleep 12345")
        wait_until(lambda: machine.real.run(*named, check=False).returncode == 0, what="the program", timeout=20)
        inside = int(machine.real.run(*named).stdout)
        machine.say_processes({inside: node.gpus[0], foreign.pid: node.gpus[1]})
        wait_until(lambda: bool(node.tenant(row["id"]).get("findings")), what="a finding", timeout=20)
        (finding,) = node.tenant(row["id"])["findings"]
        assert (finding["reason"], f"process {inside} " in finding["message"]) == ("ProcessWithoutHook", True)
        assert node.tenant(row["id"])["enforced"] is False
        gpus = {gpu["uuid"]: gpu for gpu in node.cluster.api.get(node.gpunode)["status"]["gpus"]}
        assert gpus[node.gpus[0]].get("shareable", True) is True
        assert f"process {foreign.pid} " in gpus[node.gpus[1]]["reason"]
    finally:
        machine.say_processes({})
        foreign.stop(0)
