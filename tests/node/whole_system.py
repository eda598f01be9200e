"""SharePod on a cluster with one real node of two simulated GPUs: steps and queries of the tests."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from harness.api import Object
from harness.cluster import Cluster, wait_until
from harness.installation import GROUP
from harness.machines import IMAGE, RealNode

NAMESPACE = "team-a"
SHAREPODS = f"{GROUP}/namespaces/{NAMESPACE}/sharepods"

RESTRICTED = {
    "runAsNonRoot": True,
    "runAsUser": 65534,
    "allowPrivilegeEscalation": False,
    "capabilities": {"drop": ["ALL"]},
    "seccompProfile": {"type": "RuntimeDefault"},
}


@contextmanager
def node_of_two_gpus(cluster: Cluster, folder: Path) -> Iterator[RealNode]:
    """Run a real node with two GPUs of 16Gi each. NVIDIA's runtime gives containers the double of their driver."""
    gpus = [
        {
            "uuid": f"GPU-5a9e000{n}-0000-4000-8000-00000000000{n}",
            "index": n - 1,
            "model": "Simulated",
            "memory": "16Gi",
        }
        for n in (1, 2)
    ]
    inventory = folder / "inventory.yaml"
    inventory.write_text(json.dumps({"gpus": gpus}))
    with RealNode(cluster, inventory, nvml=True) as machine:
        yield machine


class System:
    """SharePod on a cluster with one real node of two simulated GPUs."""

    def __init__(self, cluster: Cluster, machine: RealNode) -> None:
        self.cluster = cluster
        self.machine = machine
        cluster.namespace(NAMESPACE, labels={"pod-security.kubernetes.io/enforce": "restricted"})

    def apply(self, name: str, gpu: Object, *args: str, **spec: Any) -> None:
        container = {"name": "main", "image": IMAGE, "args": list(args), "securityContext": RESTRICTED}
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
        """Wait until the agent reports that it serves."""
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
        """Delete every SharePod, and wait until their shares are released."""
        self.cluster.kubectl("delete", "sharepods", "--all", "-n", NAMESPACE, timeout=60)
        wait_until(lambda: not self.tenants(), what="an empty ledger", timeout=40)
