"""NVIDIA's own device plugin and SharePod on one real kubelet.

Plugin, kubelet, containerd, operator and agent are real. The GPUs, the driver and NVIDIA's runtime are doubles.
"""

from __future__ import annotations

import os
import time
import urllib.request
from collections.abc import Iterator

import pytest
from harness.api import Object
from harness.cluster import Cluster, wait_until
from harness.device_plugin import report_xid
from harness.installation import Installation
from node.gpu_owners import CLOSED_WITHIN_S, GpuOwners
from node.holder_faults import BACK_WITHIN_S, FAULTS, HolderFaults
from node.plugin_node import PODS, SHAREPODS, PluginNode, plugin_node

COUNT = 3
_RATIO = "sharepod_tenant_request_ratio{"


@pytest.fixture(scope="module")
def device_plugin(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[PluginNode]:
    with plugin_node(cluster, tmp_path_factory.mktemp("gpus"), COUNT) as made:
        yield made


@pytest.fixture
def node(device_plugin: PluginNode) -> Iterator[PluginNode]:
    yield device_plugin
    device_plugin.clear()


def test_each_native_pod_sees_only_its_own_gpu_over_a_restart_of_the_kubelet(node: PluginNode) -> None:
    node.run_native("one")
    node.run_native("two")
    seen = [node.seen_by(name) for name in ("one", "two")]
    assert [len(gpus) for gpus in seen] == [1, 1]
    assert seen[0] != seen[1]
    node.restart_kubelet()
    node.run_native("three")
    assert sorted(gpu for gpus in (*seen, node.seen_by("three")) for gpu in gpus) == node.gpus


@pytest.mark.promise("node-native-metrics")
def test_the_agent_measures_native_pods_under_the_names_of_tenants(node: PluginNode) -> None:
    installation = node.installation
    node.run_native("measured")
    (gpu,) = node.seen_by("measured")

    def native() -> dict[str, str]:
        """Return (pod, GPU) of each native Pod in the agent's metrics, as a mapping."""
        found = (_labels(line) for line in metrics_of(installation).splitlines() if line.startswith(_RATIO))
        return {labels["pod"]: labels["gpu"] for labels in found if labels["mode"] == "Native"}

    wait_until(lambda: native() == {"measured": gpu}, what="the native Pod among the metrics", timeout=40)
    node.clear()
    wait_until(lambda: native() == {}, what="no native Pod among the metrics", timeout=40)


@pytest.mark.promise("node-held-shares")
@pytest.mark.alone
def test_two_sharepods_share_a_held_gpu_while_a_native_pod_uses_another(node: PluginNode) -> None:
    node.run_native("whole")
    (native,) = node.seen_by("whole")
    node.apply("alpha", 0.4, "--kernel-us", "2000")
    held = node.gpu_of("alpha")
    node.apply("beta", 0.6, "--kernel-us", "5000")
    assert (node.gpu_of("beta"), held != native) == (held, True)
    assert [row["uuid"] for row in node.holders()] == [held]
    time.sleep(3)
    node.machine.shares().expect(alpha=40, beta=60)
    assert node.seen_by("whole") == [native]


@pytest.mark.promise("node-plugin-health")
def test_a_gpu_that_the_plugin_calls_unhealthy_takes_no_new_tenants_and_others_are_held_instead(
    node: PluginNode,
) -> None:
    node.apply("alpha", 0.3, "--kernel-us", "2000")
    ill = node.gpu_of("alpha")
    report_xid(node.machine, ill, 79)
    waiting = node.cluster.wait_for(
        f"{SHAREPODS}/alpha",
        lambda seen: seen and condition(seen, "GPUHealthy") == "False",
        what="alpha's condition",
        timeout=60,
    )
    assert waiting is not None
    assert "NVIDIA's device plugin no longer offers it" in str(waiting["status"]["conditions"])
    node.apply("beta", 0.3)
    well = node.gpu_of("beta")
    assert well != ill
    assert {row["uuid"] for row in node.holders()} == {ill, well}
    assert node.gpu_of("alpha") == ill, "the run lasts as long as its program"
    node.restart_plugin()  # the plugin offers the GPU again, as after a reset of the GPU
    node.cluster.wait_for(
        f"{SHAREPODS}/alpha",
        lambda seen: seen and condition(seen, "GPUHealthy") == "True",
        what="alpha's condition",
        timeout=60,
    )


@pytest.mark.promise("placement-holder-gone", "placement-holder-unknown")
def test_tenants_of_a_gpu_that_falls_off_the_bus_get_an_event_and_run_on_another_gpu(node: PluginNode) -> None:
    node.apply("alpha", 0.3, "--kernel-us", "2000", restartPolicy="Always")
    lost = node.gpu_of("alpha")
    (holder,) = node.holder_pods()
    try:
        node.machine.lose_gpus(lost)
        wait_until(lambda: "HolderLost" in node.events("alpha"), what="the Event HolderLost", timeout=60)
        wait_until(lambda: not node.holders() and not node.holder_pods(), what="no holder", timeout=60)
        # before the plugin notices the failure, the kubelet could assign the lost GPU to a holder
        node.no_room("alpha")
        assert node.holders() == []
        report_xid(node.machine, lost, 79)
        assert node.gpu_of("alpha") != lost
        (another,) = node.holder_pods()
        assert another["metadata"]["uid"] != holder["metadata"]["uid"]
    finally:
        node.machine.lose_gpus()
        node.clear()
        node.restart_plugin()


STRATEGIES = [
    {"DEVICE_ID_STRATEGY": "index"},
    {"DEVICE_LIST_STRATEGY": "volume-mounts"},
    {"DEVICE_LIST_STRATEGY": "cdi-annotations"},
    {"DEVICE_LIST_STRATEGY": "cdi-cri"},
]


@pytest.mark.promise("node-plugin-strategies")
@pytest.mark.parametrize("env", STRATEGIES, ids=lambda env: "-".join(env.values()))
def test_a_holder_is_found_by_its_gpu_whatever_devices_the_plugin_mounts(node: PluginNode, env: dict[str, str]) -> None:
    try:
        node.restart_plugin(env=env)
        node.run_native("whole")
        wait_until(lambda: node.phase("whole") == "Running", what="the native Pod", timeout=60)
        node.apply("alpha", 0.5)
        held = node.gpu_of("alpha")
        assert [row["uuid"] for row in node.holders()] == [held]
        gpus = {gpu["uuid"]: gpu for gpu in node.gpunode()["status"]["gpus"]}
        assert [uuid for uuid, gpu in gpus.items() if gpu.get("taken")] != [held]
        assert sum(bool(gpu.get("taken")) for gpu in gpus.values()) == 1
    finally:
        node.clear()
        node.restart_plugin()


@pytest.mark.promise("node-whole-gpus")
def test_a_plugin_with_time_slicing_gets_no_holders_and_the_node_reports_why(node: PluginNode) -> None:
    sharing = {"timeSlicing": {"resources": [{"name": "nvidia.com/gpu", "replicas": 4}]}}
    try:
        node.restart_plugin(config={"sharing": sharing})
        condition = node.agent_unready("no whole GPUs (GPU-")
        assert condition["reason"] == "DevicePluginUnusable"
        assert "::" in condition["message"]
        node.apply("alpha", 0.5)
        node.no_room("alpha")
        assert node.holders() == []
    finally:
        node.clear()
        node.restart_plugin()


@pytest.mark.promise("node-whole-gpus")
@pytest.mark.parametrize(("strategy", "resource"), [("single", "nvidia.com/gpu"), ("mixed", "nvidia.com/mig-1g.6gb")])
def test_a_plugin_that_offers_mig_instances_gets_no_holders_and_the_node_reports_why(
    node: PluginNode, strategy: str, resource: str
) -> None:
    try:
        node.restart_plugin(env={"MIG_STRATEGY": strategy})
        path = f"/api/v1/nodes/{node.machine.node}"
        offered = 2 * COUNT
        node.cluster.wait_for(
            path,
            lambda seen: seen and int(seen["status"]["allocatable"].get(resource, 0)) == offered,
            what=f"{offered} of {resource}",
            timeout=60,
        )
        condition = node.agent_unready("no whole GPUs (MIG-")
        assert condition["reason"] == "DevicePluginUnusable"
        node.apply("alpha", 0.5)
        node.no_room("alpha")
        assert node.holders() == []
    finally:
        node.clear()
        node.restart_plugin()


@pytest.mark.promise("placement-holder-lost")
def test_tenants_of_a_holder_evicted_by_the_kubelet_get_an_event_and_run_again(node: PluginNode) -> None:
    with node.disk_limit():
        node.apply("alpha", 0.5, "--kernel-us", "2000", restartPolicy="Always")
        node.gpu_of("alpha")
    (holder,) = node.holder_pods()
    with GpuOwners(node.machine) as owners:
        node.evict_holder_by_kubelet()
        wait_until(lambda: "HolderLost" in node.events("alpha"), what="the Event HolderLost", timeout=60)
        wait_until(
            lambda: holder["metadata"]["uid"] not in [pod["metadata"]["uid"] for pod in node.holder_pods()],
            what="the evicted holder removed",
            timeout=60,
        )
        node.sharepod("alpha", timeout=BACK_WITHIN_S)
    print(owners.report())
    assert owners.overlaps == [], owners.report()


@pytest.mark.promise("placement-holder-lost")
def test_tenants_of_a_holder_preempted_by_kube_scheduler_get_an_event_and_run_again(node: PluginNode) -> None:
    for name in ("one", "two"):
        node.run_native(name, priority="system-cluster-critical")
        node.seen_by(name)
    node.apply("alpha", 0.5, "--kernel-us", "2000", restartPolicy="Always")
    held = node.gpu_of("alpha")
    with GpuOwners(node.machine) as owners:
        node.run_native("urgent", priority="system-node-critical")
        assert node.seen_by("urgent") == [held]
        wait_until(lambda: "HolderLost" in node.events("alpha"), what="the Event HolderLost", timeout=60)
        node.no_room("alpha")
        node.cluster.api.delete(f"{PODS}/one", grace=1)
        node.sharepod("alpha", timeout=BACK_WITHIN_S)
    print(owners.report())
    assert owners.overlaps == [], owners.report()


@pytest.mark.promise("node-held-overlap")
@pytest.mark.alone
def test_no_gpu_has_two_owners_under_kills_and_restarts(node: PluginNode) -> None:
    rounds, seed = int(os.environ.get("ROUNDS", len(FAULTS))), int(os.environ.get("SEED", "1"))
    faults = HolderFaults(node, seed)
    with GpuOwners(node.machine) as owners:
        faults.run(rounds)
    print(*faults.log, owners.report(), sep="\n")
    assert owners.answers
    assert owners.versions
    assert owners.longest_use() <= CLOSED_WITHIN_S, owners.report()
    assert owners.overlaps_but_of(faults.heirs) == [], owners.report()


def condition(item: Object, kind: str) -> str | None:
    """Return the status of an object's condition. None if the object has no such condition."""
    found = (each["status"] for each in item.get("status", {}).get("conditions", []) if each["type"] == kind)
    return next(found, None)


def metrics_of(installation: Installation, name: str = "agent") -> str:
    """Return the metrics of one process; empty while it does not answer."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{installation.ports[name]}/metrics", timeout=5) as answer:
            text: str = answer.read().decode()
            return text
    except OSError:
        return ""


def _labels(sample: str) -> dict[str, str]:
    """Return the labels of one sample of the Prometheus text format."""
    inside = sample[sample.index("{") + 1 : sample.rindex("}")]
    return {name: value.strip('"') for name, value in (part.split("=", 1) for part in inside.split(","))}
