"""Nodes without machines whose pods are processes: real agents with simulated GPUs, the real hook, played kubelets.

A SharePod's process runs under the hook of its tenant's directory once its node's agent has set that up, as a container
starts once its volume exists. A plain pod's process has all of the node's GPUs. CSI calls are left out: the agent knows
a tenant's processes by their connections.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from types import TracebackType
from typing import Self
from uuid import NAMESPACE_DNS, uuid5

import grpc
from doubles.gpus import create_state
from sharepod.agent.kubelet.registration import CSI_PLUGIN, DRA_PLUGIN
from sharepod.agent.kubelet.wire import registration_pb2 as registration
from sharepod.api.objects import GPUS_ANNOTATION

from harness.api import Object
from harness.cluster import Cluster, wait_until
from harness.installation import GROUP, Installation
from harness.machines import LIBCUDA
from harness.process_kubelets import ProcessKubelets
from harness.services import Service

SERVER = Path(__file__).with_name("inference_server.py")
POLL_S = 0.002
"""Seconds between two checks whether the agent has set a tenant up."""
_MODEL, _GPU_BYTES = "Simulated-A100", 40 << 30


class ProcessNodes:
    """Nodes NAME-0 and so on, each with one GPU. A context manager: everything that it started ends with it.

    Args:
        cluster: The cluster, with SharePod installed.
        installation: The installation of SharePod.
        count: Number of nodes.
        name: Prefix of their names, and value of their label `test`.
        agents: True: nodes of the pool, with agents. False: plain nodes, on which no SharePod runs.
    """

    def __init__(
        self, cluster: Cluster, installation: Installation, count: int, name: str, *, agents: bool = True
    ) -> None:
        self._cluster = cluster
        self._installation = installation
        self._directory = tempfile.TemporaryDirectory(prefix="shp-")
        self.name = name
        self._agents: dict[str, Service] = {}
        labels = {"test": name} | ({"sharepod.dev/pool": "dedicated"} if agents else {})
        self.names = cluster.add_fake_nodes(count, labels=labels, prefix=name)
        self._with_agents = agents
        self._gpus = {node: f"GPU-{uuid5(NAMESPACE_DNS, node)}" for node in self.names}
        self.kubelets = ProcessKubelets(cluster.api, self.names, self._start, _run_of)

    def __enter__(self) -> Self:
        root = Path(self._directory.name)
        for node, uuid in self._gpus.items():
            (root / node).mkdir()
            gpu = {"uuid": uuid, "index": 0, "model": _MODEL, "memory": "40Gi"}
            (root / node / "inventory.yaml").write_text(json.dumps({"gpus": [gpu]}))
            create_state(root / node / "gpus", [(uuid, _MODEL, _GPU_BYTES)])
            if self._with_agents:
                self._agents[node] = self._installation.start_agent_process(
                    node,
                    root / node / "inventory.yaml",
                    state=root / node / "s",
                    kubelet_root=root / node / "k",
                    name=f"agent-{node}",
                )
        self.kubelets.start()
        for node in self._agents:
            for plugin in (CSI_PLUGIN, DRA_PLUGIN):
                _register(root / node / "k" / "plugins_registry" / plugin.registration)
            self._cluster.wait_for(f"{GROUP}/gpunodes/{node}", _has_gpus, what=f"GPUs of {node}", timeout=60)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kubelets.stop()
        for agent in self._agents.values():
            agent.stop()
        self._directory.cleanup()

    def _start(self, pod: Object, deleted: threading.Event) -> subprocess.Popen[str] | None:
        node, metadata = pod["spec"]["nodeName"], pod["metadata"]
        root = Path(self._directory.name) / node
        environment = {
            "LD_LIBRARY_PATH": str(LIBCUDA.parent),
            "FAKE_CUDA_STATE": str(root / "gpus"),
            "FAKE_CUDA_VISIBLE": metadata.get("annotations", {}).get(GPUS_ANNOTATION, self._gpus[node]),
            "FAKE_CUDA_LABEL": f"{metadata['namespace']}/{metadata['name']}/main",
        }
        if _is_of_sharepod(pod):
            tenant = root / "s" / "tenants" / metadata["ownerReferences"][0]["uid"]
            while not (tenant / "agent.sock").exists():
                if deleted.wait(POLL_S):
                    return None
            environment["LD_PRELOAD"] = str(tenant / "libsharepod.so")
        (container,) = pod["spec"]["containers"]
        return subprocess.Popen(
            [sys.executable, "-I", "-S", str(SERVER), *container["args"]],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )


def _register(socket: Path) -> None:
    """Notify an agent's plugin that the kubelet has registered it. Without the call, the agent would wait for half a
    minute."""
    wait_until(socket.is_socket, what=f"{socket.name} of the agent", timeout=60)
    with grpc.insecure_channel(f"unix:{socket}") as channel:
        channel.unary_unary(
            "/pluginregistration.Registration/NotifyRegistrationStatus",
            request_serializer=registration.RegistrationStatus.SerializeToString,
            response_deserializer=registration.RegistrationStatusResponse.FromString,
        )(registration.RegistrationStatus(plugin_registered=True), timeout=30, wait_for_ready=True)


def _is_of_sharepod(pod: Object) -> bool:
    return bool(pod["metadata"]["ownerReferences"][0]["kind"] == "SharePod")


def _run_of(pod: Object) -> str:
    """Return the name of a pod's work: its SharePod's name. A plain pod has its own name."""
    metadata = pod["metadata"]
    return str(metadata["name"] if _is_of_sharepod(pod) else metadata["uid"])


def _has_gpus(gpunode: Object | None) -> bool:
    return bool(gpunode is not None and gpunode.get("status", {}).get("gpus"))
