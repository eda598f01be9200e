"""NVIDIA's own device plugin beside SharePod on a real kubelet.

Plugin, kubelet, containerd, operator and agent are real; the GPUs, the driver and NVIDIA's runtime are the doubles.
"""

from __future__ import annotations

import time
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest
from harness.api import Object
from harness.cluster import Cluster, suppress_reason, wait_until
from harness.device_plugin import await_gpus, start_device_plugin
from harness.errors import HarnessError
from harness.installation import NAMESPACE, Installation
from harness.machines import IMAGE, RealNode
from harness.node import CUDA_IMAGE
from harness.node_files import PAUSE_IMAGE
from harness.services import Service
from harness.shares import measured
from node.claim_node import inventory
from sharepod.api.objects import HOLDER_LABEL
from sharepod.placement.holders import DEVICE_PLUGIN_RESOURCE

NATIVE = "native"
PODS = f"/api/v1/namespaces/{NATIVE}/pods"
GROUP = "/apis/sharepod.dev/v1alpha1"
GPUNODES = f"{GROUP}/gpunodes"
SHAREPODS = f"{GROUP}/namespaces/{NATIVE}/sharepods"
COUNT = 3
SETTINGS = {"SHAREPOD_HOLDER_IMAGE": PAUSE_IMAGE, "SHAREPOD_HOLDER_IDLE": "3", "SHAREPOD_HOLDER_PENDING": "8"}
_RATIO = "sharepod_tenant_request_ratio{"


class PluginNode:
    """A real node whose GPUs belong to NVIDIA's device plugin."""

    def __init__(self, cluster: Cluster, machine: RealNode, plugin: Service, installation: Installation) -> None:
        self.cluster = cluster
        self.machine = machine
        self.plugin = plugin
        self.installation = installation
        self.gpus = [gpu["uuid"] for gpu in machine.gpus]
        self.operator = installation.start_operator(env=SETTINGS)
        self.agent = machine.start_agent(installation)
        self._operators = 1

    def restart_operator(self) -> None:
        """Kill the operator and start the next one."""
        self.operator.stop(grace=0)
        self._operators += 1
        self.operator = self.installation.start_operator(f"operator-{self._operators}", env=SETTINGS)

    def gpunode(self) -> Object:
        """The node's GPUNode."""
        found: Object = self.cluster.api.get(f"{GPUNODES}/{self.machine.node}")
        return found

    def holders(self) -> list[Object]:
        """The holders of the ledger."""
        rows: list[Object] = self.gpunode()["spec"].get("holders") or []
        return rows

    def holder_pods(self) -> list[Object]:
        """The Pods of holders."""
        path = f"/api/v1/namespaces/{NAMESPACE}/pods"
        pods: list[Object] = self.cluster.api.get(path, labelSelector=HOLDER_LABEL)["items"]
        return pods

    def apply(self, name: str, request: float, *args: str, **spec: Any) -> None:
        """Create a SharePod that runs launchloop."""
        container = {"name": "main", "image": IMAGE, "args": list(args)}
        gpu = {"request": request, "memory": "1Gi"}
        body = {"gpu": gpu, "containers": [container], "terminationGracePeriodSeconds": 1, **spec}
        kind = {"apiVersion": "sharepod.dev/v1alpha1", "kind": "SharePod", "metadata": {"name": name}}
        self.cluster.api.create(SHAREPODS, {**kind, "spec": body})

    def sharepod(self, name: str, phase: str = "Running", timeout: float = 60.0) -> Object:
        """Return the status of a SharePod once it has that phase."""
        try:
            found = self.cluster.wait_for(
                f"{SHAREPODS}/{name}",
                lambda seen: seen and seen.get("status", {}).get("phase") == phase,
                what=f"{name} {phase}",
                timeout=timeout,
            )
        except HarnessError as error:
            seen = self.cluster.api.get(f"{SHAREPODS}/{name}")
            logs = f"{self.operator.log_tail(40)}\n{self.agent.log_tail(20)}"
            raise HarnessError(f"{error}\n{seen}\n{self.gpunode()}\n{logs}") from None
        assert found is not None
        status: Object = found["status"]
        return status

    def gpu_of(self, name: str) -> str:
        """Return the GPU of a SharePod that runs."""
        (gpu,) = self.sharepod(name)["gpus"]
        return str(gpu["uuid"])

    def run_native(self, name: str, gpus: int = 1) -> None:
        """Create a Pod that asks the device plugin for GPUs, prints which it sees, and stays."""
        container: Object = {
            "name": "main",
            "image": CUDA_IMAGE,
            "command": ["sh", "-c", "nvidia-smi -L; trap exit TERM; while true; do sleep 0.2; done"],
            "resources": {"limits": {DEVICE_PLUGIN_RESOURCE: gpus}},
        }
        spec = {"runtimeClassName": "nvidia", "terminationGracePeriodSeconds": 1, "containers": [container]}
        self.cluster.api.create(PODS, {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": spec})

    def seen_by(self, name: str) -> list[str]:
        """Return the UUIDs of the GPUs that a native Pod sees, once it runs."""
        self.cluster.wait_for(
            f"{PODS}/{name}",
            lambda pod: pod and pod["status"].get("phase") == "Running",
            what=f"{name} running",
            timeout=60,
        )

        def shown() -> list[str]:
            log = self.cluster.kubectl("logs", "-n", NATIVE, name, check=False).stdout
            return [gpu for gpu in self.gpus if gpu in log]

        wait_until(lambda: bool(shown()), what=f"the GPUs that {name} sees", timeout=30)
        return shown()

    def clear(self) -> None:
        """Delete every SharePod and every native Pod, and wait until they are gone."""
        self.cluster.kubectl("delete", "sharepods", "--all", "-n", NATIVE, timeout=120)
        for pod in self.cluster.api.get(PODS)["items"]:
            with suppress_reason("NotFound"):
                self.cluster.api.delete(f"{PODS}/{pod['metadata']['name']}", grace=1)
        wait_until(lambda: not self.cluster.api.get(PODS)["items"], what="no native Pods", timeout=120)


@pytest.fixture(scope="module")
def device_plugin(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[PluginNode]:
    listed = tmp_path_factory.mktemp("gpus") / "inventory.yaml"
    listed.write_text(inventory(COUNT))
    with RealNode(cluster, listed) as machine:
        cluster.namespace(NATIVE)
        plugin = start_device_plugin(machine)
        await_gpus(cluster, machine.node, COUNT, plugin)
        installation = Installation(cluster)
        installation.add_to_pool(machine.node, "device-plugin")
        yield PluginNode(cluster, machine, plugin, installation)


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
    node.machine.real.restart_kubelet()  # the plugin has to register anew
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
