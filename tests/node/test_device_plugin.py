"""NVIDIA's own device plugin beside SharePod on a real kubelet.

Plugin, kubelet, containerd, operator and agent are real; the GPUs, the driver and NVIDIA's runtime are the doubles.
"""

from __future__ import annotations

import os
import time
import urllib.request
from collections.abc import Iterator

import pytest
from harness.cluster import Cluster, wait_until
from harness.installation import Installation
from harness.shares import measured
from node.gpu_owners import CLOSED_WITHIN_S, GpuOwners
from node.holder_faults import FAULTS, HolderFaults
from node.plugin_node import PluginNode, plugin_node

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


def test_each_native_pod_sees_its_own_gpu_alone_over_a_restart_of_the_kubelet(node: PluginNode) -> None:
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
        """Return pod and GPU of each native Pod among the agent's metrics."""
        found = (_labels(line) for line in metrics_of(installation).splitlines() if line.startswith(_RATIO))
        return {labels["pod"]: labels["gpu"] for labels in found if labels["mode"] == "Native"}

    wait_until(lambda: native() == {"measured": gpu}, what="the native Pod among the metrics", timeout=40)
    node.clear()
    wait_until(lambda: native() == {}, what="no native Pod among the metrics", timeout=40)


@pytest.mark.promise("node-held-shares")
@pytest.mark.alone
def test_two_sharepods_share_a_held_gpu_beside_a_native_pod_on_another(node: PluginNode) -> None:
    node.run_native("whole")
    (native,) = node.seen_by("whole")
    node.apply("alpha", 0.4, "--kernel-us", "2000")
    held = node.gpu_of("alpha")
    node.apply("beta", 0.6, "--kernel-us", "5000")
    assert (node.gpu_of("beta"), held != native) == (held, True)
    assert [row["uuid"] for row in node.holders()] == [held]
    time.sleep(3)
    measured(node.machine.busy_ns).expect(alpha=40, beta=60)
    assert node.seen_by("whole") == [native]


@pytest.mark.promise("node-held-overlap")
@pytest.mark.alone
def test_no_gpu_has_two_owners_under_kills_and_restarts(node: PluginNode) -> None:
    rounds, seed = int(os.environ.get("ROUNDS", len(FAULTS))), int(os.environ.get("SEED", "1"))
    faults = HolderFaults(node, seed)
    with GpuOwners(node.machine) as owners:
        faults.run(rounds)
    print(*faults.told, owners.report(), sep="\n")
    assert owners.answers
    assert owners.versions
    assert owners.longest_use() <= CLOSED_WITHIN_S, owners.report()
    assert owners.overlaps_but_after(faults.forced) == [], owners.report()


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
