"""SharePod installed on a test cluster: all of `manifests/`, with operator and agent as processes.

Guarantees:
- Operator and agents use the ServiceAccounts of the manifests, with tokens as a kubelet would mount them (an agent's
  token is bound to its Node). So their RBAC and the policies apply.
- Every process ends with the cluster, or with its node.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import yaml

from harness.api import ApiError, Object
from harness.cluster import Cluster, free_ports, wait_until
from harness.commands import command
from harness.node import Node
from harness.services import Service

NAMESPACE = "sharepod-system"
POOL_LABEL = "sharepod.dev/pool"
MANIFESTS = Path(__file__).resolve().parents[2] / "manifests"
GROUP = "/apis/sharepod.dev/v1alpha1"
SHAREPODS = f"{GROUP}/namespaces/default/sharepods"

_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_PROGRAMS = Path(sys.executable).parent
OPERATOR: tuple[str | Path, ...] = (_PROGRAMS / "sharepod-operator",)
AGENT: tuple[str | Path, ...] = (_PROGRAMS / "sharepod-agent",)


def install(cluster: Cluster, manifests: Path = MANIFESTS) -> None:
    """Apply all of `manifests` except the operator's Deployment and the agent's DaemonSet; wait until it is
    effective."""
    documents = rendered(cluster.bin / "kubectl", manifests=manifests)
    chosen = [one for one in documents if one["kind"] not in ("Deployment", "DaemonSet")]
    cluster.kubectl("apply", "--server-side", "-f", "-", input=yaml.safe_dump_all(chosen), timeout=60)
    await_in_force(cluster)


def rendered(kubectl: Path, *components: str, manifests: Path = MANIFESTS) -> list[Object]:
    """Return the objects of an overlay of `manifests` with these components. `kubectl`: path of the program."""
    with tempfile.TemporaryDirectory(prefix="shp-") as at:
        ours, resources = (os.path.relpath(path, Path(at).resolve()) for path in (MANIFESTS, manifests))
        overlay = {"resources": [resources], "components": [f"{ours}/{component}" for component in components]}
        (Path(at) / "kustomization.yaml").write_text(yaml.safe_dump(overlay))
        text = command(kubectl, "kustomize", at).stdout
    return list(yaml.load_all(text, Loader=_LOADER))


def await_in_force(cluster: Cluster, *, timeout: float = 30.0) -> None:
    """Wait until SharePods are served and the policies are enforced. The function checks only the policy binding that
    is applied last."""
    unmeant: Object = {
        "apiVersion": "sharepod.dev/v1alpha1",
        "kind": "SharePod",
        "metadata": {"name": "probe"},
        "spec": {"containers": [{"name": "main", "image": "x"}]},
    }

    def ruled() -> bool:
        try:
            cluster.api.get(f"{GROUP}/gpunodes")
            cluster.api.create(SHAREPODS, unmeant, dryRun="All")
        except ApiError as error:
            return "sharepod-request" in error.message
        return False  # the API server accepted a SharePod without spec.gpu, so the policy is not enforced yet

    wait_until(ruled, what="manifests effective", timeout=timeout, interval=0.1)


class Installation:
    """SharePod on `cluster`. The installation takes about 2 s. Raises CommandError with kubectl's output.

    `manifests`: folder of the manifests, of this version by default.
    """

    def __init__(self, cluster: Cluster, manifests: Path = MANIFESTS) -> None:
        self.cluster = cluster
        self.ports: dict[str, int] = {}
        """For each process name: port of `/metrics` on loopback."""
        self.health_ports: dict[str, int] = {}
        """For each operator name: port of `/readyz` on loopback."""
        self._operators: list[Service] = []
        install(cluster, manifests)
        cluster.await_service_account(NAMESPACE, "sharepod-operator")
        cluster.await_service_account(NAMESPACE, "sharepod-agent")

    def install_claims(self) -> None:
        """Apply `manifests/claims`, which needs an API server that serves resource.k8s.io/v1."""
        self.cluster.kubectl("apply", "--server-side", "-k", str(MANIFESTS / "claims"), timeout=60)

    def start_operator(
        self,
        name: str = "operator",
        *,
        env: Mapping[str, str] | None = None,
        program: Sequence[str | Path] = OPERATOR,
    ) -> Service:
        """Start an operator. Its log is `name`.log of the cluster. `env`: settings, such as `SHAREPOD_BIND_TIMEOUT`."""
        token = self.cluster.service_account_token(NAMESPACE, "sharepod-operator")
        health, metrics = free_ports(2)
        self.ports[name], self.health_ports[name] = metrics, health
        settings = {
            "SHAREPOD_KUBECONFIG": str(self.cluster.kubeconfig_for(token, name=name)),
            "SHAREPOD_IDENTITY": name,
            "SHAREPOD_BIND_ADDRESS": "127.0.0.1",
            "SHAREPOD_HEALTH_PORT": str(health),
            "SHAREPOD_METRICS_PORT": str(metrics),
            "SHAREPOD_METRICS_ACCESS": "Open",
        }
        started = self.cluster.services.start(name, [*program], env={**os.environ, **settings, **(env or {})})
        self._operators.append(started)
        return started

    def stop_operators(self) -> None:
        """Stop all started operators."""
        for operator in self._operators:
            operator.stop()

    def add_to_pool(self, node: str, pool: str = "dedicated") -> None:
        """Label a Node with a pool, so that the operator manages it."""
        self.cluster.kubectl("label", "node", node, f"{POOL_LABEL}={pool}", "--overwrite")

    def start_agent(
        self, node: Node, inventory: Path, name: str = "agent", *, env: Mapping[str, str] | None = None
    ) -> Service:
        """Start the agent of `node` with simulated GPUs. Its log is `name`.log of the node."""
        settings = self._agent_settings(node.name, inventory, name)
        return node.start(name, [*AGENT], env={**os.environ, **settings, **(env or {})})

    def start_agent_process(
        self,
        node: str,
        inventory: Path,
        *,
        state: Path,
        kubelet_root: Path,
        name: str = "agent",
        env: Mapping[str, str] | None = None,
        program: Sequence[str | Path] = AGENT,
    ) -> Service:
        """Start the agent of a node without a kubelet, as a process of this user with its own directories."""
        settings = self._agent_settings(node, inventory, name) | {
            "SHAREPOD_AGENT_STATE_DIR": str(state),
            "SHAREPOD_AGENT_KUBELET_ROOT": str(kubelet_root),
        }
        return self.cluster.services.start(name, [*program], env={**os.environ, **settings, **(env or {})})

    def _agent_settings(self, node: str, inventory: Path, name: str) -> dict[str, str]:
        token = self.cluster.service_account_token(NAMESPACE, "sharepod-agent", bound_node=node)
        metrics, health = free_ports(2)
        self.ports[name] = metrics
        return {
            "SHAREPOD_AGENT_KUBECONFIG": str(self.cluster.kubeconfig_for(token, name=f"{name}-{node}")),
            "SHAREPOD_AGENT_NODE_NAME": node,
            "SHAREPOD_AGENT_INVENTORY_FILE": str(inventory),
            "SHAREPOD_AGENT_HTTP_BIND": "127.0.0.1",
            "SHAREPOD_AGENT_HTTP_PORT": str(metrics),
            "SHAREPOD_AGENT_HEALTH_PORT": str(health),
            "SHAREPOD_AGENT_METRICS_ACCESS": "Open",
        }
