"""A real node of pool `device-plugin`, with NVIDIA's device plugin, kubelet, operator and agent, and faults of each of
them.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from harness.api import Object
from harness.cluster import Cluster, suppress_reason, wait_until
from harness.device_plugin import await_gpus, start_device_plugin
from harness.errors import HarnessError
from harness.installation import NAMESPACE, Installation
from harness.machines import IMAGE, RealNode
from harness.node import CUDA_IMAGE
from harness.node_files import PAUSE_IMAGE
from harness.services import Service
from node.claim_node import inventory
from sharepod.api.objects import HOLDER_LABEL
from sharepod.placement.holders import DEVICE_PLUGIN_RESOURCE

NATIVE = "native"
PODS = f"/api/v1/namespaces/{NATIVE}/pods"
GROUP = "/apis/sharepod.dev/v1alpha1"
GPUNODES = f"{GROUP}/gpunodes"
SHAREPODS = f"{GROUP}/namespaces/{NATIVE}/sharepods"
SETTINGS = {"SHAREPOD_HOLDER_IMAGE": PAUSE_IMAGE, "SHAREPOD_HOLDER_IDLE": "3", "SHAREPOD_HOLDER_PENDING": "8"}
_REGISTERED = "Registered device plugin"
"""Line that the plugin logs at each registration with the kubelet."""


def _kill(process: int) -> None:
    with contextlib.suppress(ProcessLookupError):  # the process exited with its parent
        os.kill(process, signal.SIGKILL)


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
        self._operators = self._plugins = self._agents = 1

    def restart_kubelet(self) -> None:
        """Kill the kubelet and start it again. Return once the plugin has registered with it, so that pods get
        GPUs again."""
        before = self._registrations()
        self.machine.real.restart_kubelet()
        self._await_registration(before)

    def hang_kubelet(self, seconds: float) -> None:
        """Stop the kubelet (SIGSTOP) for this many seconds. Its sockets stay open."""
        self.machine.real.signal_kubelet(signal.SIGSTOP)
        try:
            time.sleep(seconds)
        finally:
            self.machine.real.signal_kubelet(signal.SIGCONT)

    def restart_plugin(
        self, *, env: Mapping[str, str] | None = None, config: Mapping[str, object] | None = None
    ) -> None:
        """Kill the plugin and start the next one. Return once it has registered. `env`, `config`: settings of the next
        plugin."""
        self.plugin.stop(grace=0)
        self._start_plugin(env, config)

    def _start_plugin(self, env: Mapping[str, str] | None = None, config: Mapping[str, object] | None = None) -> None:
        self._plugins += 1
        self.plugin = start_device_plugin(self.machine, f"device-plugin-{self._plugins}", config=config, env=env)
        self._await_registration(0)

    def boot_without_plugin(self) -> None:
        """End every container, as a reboot does. Let the kubelet start them again before the plugin has registered."""
        (holder,) = self.holder_pods()
        path = f"/api/v1/namespaces/{NAMESPACE}/pods/{holder['metadata']['name']}"
        self.plugin.stop(grace=0)
        self.machine.real.restart_kubelet(self._end_containers)

        def refused(pod: Object | None) -> bool:
            return (
                pod is None or pod["metadata"]["uid"] != holder["metadata"]["uid"] or pod["status"]["phase"] == "Failed"
            )

        self.cluster.wait_for(path, refused, what="the holder refused by the kubelet", timeout=60)
        self._start_plugin()

    def _end_containers(self) -> None:
        for pod in (*self.holder_pods(), *self.cluster.api.get(PODS)["items"]):
            for process in processes_of(pod["metadata"]["uid"]):
                _kill(process)

    def restart_agent(self) -> None:
        """Kill the agent and start the next one."""
        self.agent.stop(grace=0)
        self._agents += 1
        self.agent = self.machine.start_agent(self.installation, f"agent-{self._agents}")

    def _registrations(self) -> int:
        return self.plugin.log.read_text(errors="replace").count(_REGISTERED)

    def _await_registration(self, before: int) -> None:
        try:
            wait_until(lambda: self._registrations() > before, what="the plugin's registration", timeout=60)
        except HarnessError as error:
            raise HarnessError(f"{error}\n{self.plugin.log_tail()}") from None

    def kill_holder(self) -> None:
        """Kill every process of the only holder, including its sandbox. Return once the kubelet has started
        them again."""
        (pod,) = self.holder_pods()
        uid = pod["metadata"]["uid"]
        killed = processes_of(uid)
        for process in killed:
            _kill(process)
        # Wait for two new processes, the sandbox's and the container's: a container that is killed before it has run
        # grows the kubelet's back-off.
        wait_until(lambda: len(processes_of(uid) - killed) > 1, what="the holder started again", timeout=120)

    def force_delete_holder(self) -> None:
        """Delete the only holder by force, without waiting for the kubelet."""
        (pod,) = self.holder_pods()
        self.cluster.api.delete(f"/api/v1/namespaces/{NAMESPACE}/pods/{pod['metadata']['name']}", grace=0)

    def evict_holder(self) -> None:
        """Evict the only holder, as an administrator's `kubectl drain` does."""
        (pod,) = self.holder_pods()
        name = pod["metadata"]["name"]
        body = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": name, "namespace": NAMESPACE}}
        self.cluster.api.create(f"/api/v1/namespaces/{NAMESPACE}/pods/{name}/eviction", body)

    @contextmanager
    def disk_limit(self) -> Iterator[None]:
        """Give the operator's namespace a default limit of ephemeral storage during the block, as an administrator may
        set."""
        path = f"/api/v1/namespaces/{NAMESPACE}/limitranges"
        limits = [{"type": "Container", "default": {"ephemeral-storage": "1Mi"}}]
        body = {"apiVersion": "v1", "kind": "LimitRange", "metadata": {"name": "disk"}, "spec": {"limits": limits}}
        self.cluster.api.create(path, body)
        try:
            yield
        finally:
            self.cluster.api.delete(f"{path}/disk")

    def evict_holder_by_kubelet(self) -> None:
        """Let the kubelet evict the only holder, as under disk or memory pressure: its log exceeds its limit of
        ephemeral storage. Return once the kubelet has reported the eviction. The holder must have been created under
        `disk_limit`."""
        (pod,) = self.holder_pods()
        uid, name = pod["metadata"]["uid"], pod["metadata"]["name"]
        logs = self.machine.real.path("/var/log/pods")
        pattern = f"{NAMESPACE}_{name}_{uid}/*/0.log"
        wait_until(lambda: any(logs.glob(pattern)), what="the holder's log", timeout=60)
        (log,) = logs.glob(pattern)
        with log.open("ab") as file:
            file.write(b"x" * (4 << 20))

        self.await_evicted(name)

    def await_evicted(self, holder: str) -> None:
        """Wait until the kubelet reports the eviction of a holder."""
        wait_until(lambda: holder in self.evicted(), what="the holder evicted", timeout=120)

    def evicted(self) -> list[str]:
        """Return the names of the Pods that the kubelet has evicted, in the order of its reports."""
        items = self.cluster.api.get("/api/v1/events", fieldSelector="reason=Evicted,involvedObject.kind=Pod")["items"]
        items.sort(key=lambda item: int(item["metadata"]["resourceVersion"]))
        return [str(item["involvedObject"]["name"]) for item in items]

    def restart_operator(self) -> None:
        """Kill the operator and start the next one."""
        self.operator.stop(grace=0)
        self._operators += 1
        self.operator = self.installation.start_operator(f"operator-{self._operators}", env=SETTINGS)

    def operator_leads(self) -> bool:
        """Return whether the operator has logged that it leads. After a kill of the former operator, the new one leads
        only once the former's Lease has expired."""
        return '"event": "leading"' in self.operator.log.read_text(errors="replace")

    def gpunode(self) -> Object:
        """Return the node's GPUNode."""
        found: Object = self.cluster.api.get(f"{GPUNODES}/{self.machine.node}")
        return found

    def agent_unready(self, text: str) -> Object:
        """Wait for the agent's condition that it cannot serve new tenants, with this text in its message. Return the
        condition."""

        def matching(seen: Object | None) -> list[Object]:
            conditions = (seen or {}).get("status", {}).get("conditions", [])
            unready = [each for each in conditions if (each["type"], each["status"]) == ("AgentReady", "False")]
            return [each for each in unready if text in each["message"]]

        what = "the agent's condition"
        path = f"{GPUNODES}/{self.machine.node}"
        (found,) = matching(self.cluster.wait_for(path, lambda seen: bool(matching(seen)), what=what, timeout=60))
        return found

    def holders(self) -> list[Object]:
        """Return the holders in the ledger."""
        rows: list[Object] = self.gpunode()["spec"].get("holders") or []
        return rows

    def holder_pods(self) -> list[Object]:
        """Return the Pods of holders."""
        path = f"/api/v1/namespaces/{NAMESPACE}/pods"
        pods: list[Object] = self.cluster.api.get(path, labelSelector=HOLDER_LABEL)["items"]
        return pods

    def events(self, name: str) -> list[str]:
        """Return the reasons of the Events about a SharePod or native Pod."""
        items = self.cluster.api.get(f"/apis/events.k8s.io/v1/namespaces/{NATIVE}/events")["items"]
        return [str(item["reason"]) for item in items if item["regarding"]["name"] == name]

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

    def run_native(self, name: str, gpus: int = 1, priority: str | None = None) -> None:
        """Create a Pod that requests GPUs from the device plugin, prints the GPUs that it sees, and keeps running.
        `priority`: name of its PriorityClass."""
        container: Object = {
            "name": "main",
            "image": CUDA_IMAGE,
            "command": ["sh", "-c", "nvidia-smi -L; trap exit TERM; while true; do sleep 0.2; done"],
            "resources": {"limits": {DEVICE_PLUGIN_RESOURCE: gpus}},
        }
        spec: Object = {"runtimeClassName": "nvidia", "terminationGracePeriodSeconds": 1, "containers": [container]}
        if priority is not None:
            spec["priorityClassName"] = priority
        self.cluster.api.create(PODS, {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": spec})

    def phase(self, name: str) -> str:
        """Return the phase of a native Pod."""
        return str(self.cluster.api.get(f"{PODS}/{name}")["status"].get("phase"))

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

    def no_room(self, name: str) -> None:
        """Wait until a SharePod's condition reports that there is no room."""

        def refused(seen: Object | None) -> bool:
            conditions = (seen or {}).get("status", {}).get("conditions", [])
            return any((each["type"], each["reason"]) == ("Placed", "NoRoom") for each in conditions)

        self.cluster.wait_for(f"{SHAREPODS}/{name}", refused, what=f"{name} without room", timeout=60)

    def clear(self) -> None:
        """Delete every SharePod and every native Pod. Wait until their Pods and the holders no longer exist."""
        self.cluster.kubectl("delete", "sharepods", "--all", "-n", NATIVE, timeout=120)
        for pod in self.cluster.api.get(PODS)["items"]:
            with suppress_reason("NotFound"):
                self.cluster.api.delete(f"{PODS}/{pod['metadata']['name']}", grace=1)
        wait_until(lambda: not self.cluster.api.get(PODS)["items"], what="no native Pods", timeout=120)
        wait_until(lambda: not self.holders() and not self.holder_pods(), what="every GPU released", timeout=60)


@contextmanager
def plugin_node(cluster: Cluster, directory: Path, gpus: int) -> Iterator[PluginNode]:
    """Run a node of pool `device-plugin` with this number of simulated GPUs. `directory`: folder for the
    inventory file."""
    listed = directory / "inventory.yaml"
    listed.write_text(inventory(gpus))
    with RealNode(cluster, listed) as machine:
        cluster.namespace(NATIVE)
        plugin = start_device_plugin(machine)
        await_gpus(cluster, machine.node, gpus, plugin)
        installation = Installation(cluster)
        installation.add_to_pool(machine.node, "device-plugin")
        yield PluginNode(cluster, machine, plugin, installation)


def processes_of(pod: str) -> set[int]:
    """Return the pids, on this machine, of the processes in a pod's containers. `pod`: its uid."""
    found = set()
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if pod in (entry / "cgroup").read_text():
                found.add(int(entry.name))
        except OSError:  # the process has exited
            continue
    return found
