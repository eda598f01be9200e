"""One node's agent as a process, with the rights of its ServiceAccount and a token bound to the node. The test plays
the operator and the kubelet.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import yaml
from harness.api import Api, ApiError, Object
from harness.cluster import Cluster, wait_until
from harness.services import Service
from sharepod.agent.kubelet.wire import csi_pb2 as csi
from sharepod.agent.kubelet.wire import registration_pb2 as registration

ROOT = Path(__file__).parents[2]
GPUNODES = "/apis/sharepod.dev/v1alpha1/gpunodes"
LEASES = "/apis/coordination.k8s.io/v1/namespaces/sharepod-system/leases"
GPUS = [f"GPU-{digit * 8}-{digit * 4}-{digit * 4}-{digit * 4}-{digit * 12}" for digit in "12"]


def install(cluster: Cluster) -> None:
    """Install the parts of `manifests/` that an agent needs."""
    cluster.namespace("sharepod-system")
    cluster.kubectl("apply", "--server-side", "--force-conflicts", "-f", ROOT / "crds" / "gpunodes.yaml")
    cluster.kubectl("apply", "-n", "sharepod-system", "-f", ROOT / "manifests" / "rbac" / "agent.yaml")
    cluster.kubectl("apply", "-f", ROOT / "manifests" / "policies" / "agent-own-node.yaml")
    cluster.await_service_account("sharepod-system", "sharepod-agent")

    def served() -> bool:
        try:
            cluster.api.get(GPUNODES)
        except ApiError:
            return False
        return True

    wait_until(served, what="the API of GPUNodes", timeout=30)


def row(tenant_id: str, **changes: Any) -> Object:
    return {
        "id": tenant_id,
        "namespace": "default",
        "podName": f"pod-of-{tenant_id}",
        "state": "Reserved",
        "gpus": [GPUS[0]],
        "requestMilli": 400,
        "limitMilli": 1000,
        "memory": 1 << 30,
        "memoryIsolation": "Enforced",
        "mode": "Shared",
        "labels": {},
        **changes,
    }


class OneNode:
    """A Node of the cluster, its GPUNode, and the agent that a test starts, kills and starts again."""

    def __init__(self, cluster: Cluster, name: str) -> None:
        self.cluster = cluster
        self.name = name
        self.path = f"{GPUNODES}/{name}"
        self.root = Path(tempfile.mkdtemp(prefix="shp-"))
        cluster.services.undo("rm", "-rf", self.root)
        (self.root / "hook.so").write_bytes(b"a hook")
        gpus = [
            {"uuid": uuid, "index": index, "model": "Fake A100", "memory": "40Gi"} for index, uuid in enumerate(GPUS)
        ]
        (self.root / "inventory.yaml").write_text(yaml.safe_dump({"gpus": gpus}))
        cluster.add_fake_nodes(1, prefix=name.removesuffix("-0"))
        self.token = cluster.service_account_token("sharepod-system", "sharepod-agent", bound_node=name)
        self.starts = 0

    @property
    def api(self) -> Api:
        return self.cluster.api

    def make_gpunode(self, *rows: Object) -> Object:
        body: Object = {
            "apiVersion": "sharepod.dev/v1alpha1",
            "kind": "GPUNode",
            "metadata": {"name": self.name},
            "spec": {"pool": "dedicated", "tenants": list(rows)},
        }
        return self.api.create(GPUNODES, body)

    def reserve(self, *rows: Object) -> int:
        """Write these rows as the ledger; return its generation."""
        generation: int = self.api.patch(self.path, {"spec": {"tenants": list(rows)}})["metadata"]["generation"]
        return generation

    def start_agent(self, *, name: str | None = None) -> Service:
        """Start an agent in a separate mount namespace, so that its mounts end with it."""
        self.starts += 1
        private = ["unshare", "--mount", "--propagation", "private", "--"] if os.geteuid() == 0 else []
        apart = ["--apart"] if os.geteuid() == 0 else []  # as in the DaemonSet
        settings = {
            "NODE_NAME": self.name,
            "STATE_DIR": self.root / "state",
            "KUBELET_ROOT": self.root / "kubelet",
            "KUBECONFIG": self.cluster.kubeconfig_for(self.token),
            "INVENTORY_FILE": self.root / "inventory.yaml",
            "INVENTORY_INTERVAL_S": "0.1",
            "HOOK_FILE": self.root / "hook.so",
            "CDI_DIRS": json.dumps([str(self.root / "cdi")]),
            "HTTP_BIND": "127.0.0.1",
            "HTTP_PORT": "0",
        }
        environment = {f"SHAREPOD_AGENT_{key}": str(value) for key, value in settings.items()}
        return self.cluster.services.start(
            name or f"agent-{self.name}-{self.starts}",
            [*private, sys.executable, "-m", "sharepod.agent.main", *apart],
            env={**os.environ, **environment},
        )

    def await_status(self, holds: Callable[[Object], Any], what: str, timeout: float = 30.0) -> Object:
        """Wait until `holds` is true of the GPUNode's status; return the status."""
        found = self.cluster.wait_for(
            self.path, lambda seen: seen and holds(seen.get("status") or {}), what=what, timeout=timeout
        )
        assert found is not None
        status: Object = found["status"]
        return status

    def await_observed(self, generation: int) -> Object:
        return self.await_status(
            lambda status: status.get("observedGeneration", 0) >= generation, f"generation {generation} observed"
        )

    def tenant_directory(self, tenant_id: str) -> Path:
        return self.root / "state" / "tenants" / tenant_id

    def connects(self, tenant_id: str) -> bool:
        """Return whether a process listens on the tenant's socket. The connection is made by a child process, because
        the agent counts connected processes."""
        program = "import socket, sys; socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET).connect(sys.argv[1])"
        command: list[str | Path] = [
            sys.executable,
            "-IS",
            "-c",
            program,
            self.tenant_directory(tenant_id) / "agent.sock",
        ]
        return subprocess.run(command, capture_output=True, check=False, timeout=10).returncode == 0

    # The container toolkit's part

    def write_cdi(self) -> None:
        """Write CDI specifications that name the GPUs as CDI devices."""
        devices = [{"name": uuid, "containerEdits": {"env": [f"GPU={uuid}"]}} for uuid in GPUS]
        spec = {"cdiVersion": "0.6.0", "kind": "nvidia.com/gpu", "devices": devices}
        (self.root / "cdi").mkdir(exist_ok=True)
        (self.root / "cdi" / "nvidia.yaml").write_text(yaml.safe_dump(spec))

    # The kubelet's part

    def registered(self, plugin: str) -> None:
        """Notify the plugin with this socket that the kubelet has registered it."""
        socket = self.root / "kubelet/plugins_registry" / plugin
        wait_until(socket.exists, what=f"the socket {plugin}", timeout=30)
        self.call(
            socket,
            "/pluginregistration.Registration/NotifyRegistrationStatus",
            registration.RegistrationStatus(plugin_registered=True),
            registration.RegistrationStatusResponse,
        )

    @property
    def csi_socket(self) -> Path:
        return self.root / "kubelet/plugins/gpu.sharepod.dev/csi.sock"

    def call(self, socket_path: Path, method: str, request: Any, response: Any) -> Any:
        with grpc.insecure_channel(f"unix:{socket_path}") as channel:
            call = channel.unary_unary(
                method, request_serializer=type(request).SerializeToString, response_deserializer=response.FromString
            )
            return call(request, timeout=20)

    def target(self, pod: Object) -> Path:
        uid: str = pod["metadata"]["uid"]
        return self.root / "kubelet" / "pods" / uid / "volumes" / "kubernetes.io~csi" / "sharepod-gpu" / "mount"

    def publish(self, pod: Object, **context: str) -> None:
        metadata = pod["metadata"]
        about_pod = {
            "ephemeral": "true",
            "pod.namespace": metadata["namespace"],
            "pod.name": metadata["name"],
            "pod.uid": metadata["uid"],
        }
        request = csi.NodePublishVolumeRequest(
            volume_id="csi-1",
            target_path=str(self.target(pod)),
            volume_context={**{f"csi.storage.k8s.io/{key}": value for key, value in about_pod.items()}, **context},
        )
        self.target(pod).parent.mkdir(parents=True, exist_ok=True)
        self.call(self.csi_socket, "/csi.v1.Node/NodePublishVolume", request, csi.NodePublishVolumeResponse)

    def unpublish(self, pod: Object) -> None:
        request = csi.NodeUnpublishVolumeRequest(volume_id="csi-1", target_path=str(self.target(pod)))
        self.call(self.csi_socket, "/csi.v1.Node/NodeUnpublishVolume", request, csi.NodeUnpublishVolumeResponse)

    def make_pod(self, name: str, owner_uid: str | None = None) -> Object:
        owner = {
            "apiVersion": "sharepod.dev/v1alpha1",
            "kind": "SharePod",
            "name": name,
            "uid": owner_uid,
            "controller": True,
        }
        body: Object = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": name, "ownerReferences": [owner] if owner_uid else []},
            "spec": {"nodeName": self.name, "containers": [{"name": "main", "image": "none"}]},
        }
        return self.api.create("/api/v1/namespaces/default/pods", body)


_made = iter(range(1000))


def one_node(cluster: Cluster) -> OneNode:
    install(cluster)
    return OneNode(cluster, f"agent{next(_made)}-0")
