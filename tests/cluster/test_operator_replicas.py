"""The two replicas of the operator in the manifests: they run on different nodes, and one is always available. Also in
a cloud that limits critical Pods.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness.api import ApiError, Object
from harness.cluster import Cluster, wait_until
from harness.fakes import FakeKubelets
from harness.installation import MANIFESTS, NAMESPACE

INSTALL = (MANIFESTS.parent / "docs" / "install.md").read_text()
LIMITED: Object = {
    "apiVersion": "apiserver.config.k8s.io/v1",
    "kind": "ResourceQuotaConfiguration",
    "limitedResources": [
        {
            "resource": "pods",
            "matchScopes": [
                {
                    "scopeName": "PriorityClass",
                    "operator": "In",
                    "values": ["system-cluster-critical", "system-node-critical"],
                }
            ],
        }
    ],
}
"""Configuration of a cloud's API server: critical Pods are admitted only with a ResourceQuota for them."""
PATIENCE_S = 90.0


@pytest.fixture
def cloud(tmp_path: Path) -> Iterator[Cluster]:
    """Yield a control plane that limits critical Pods, with two nodes in each of two zones."""
    quotas, config = tmp_path / "quotas.yaml", tmp_path / "admission.yaml"
    quotas.write_text(json.dumps(LIMITED))
    plugins = [{"name": "ResourceQuota", "path": str(quotas)}]
    kind = {"apiVersion": "apiserver.config.k8s.io/v1", "kind": "AdmissionConfiguration"}
    config.write_text(json.dumps({**kind, "plugins": plugins}))
    with (
        Cluster(apiserver_args=[f"--admission-control-config-file={config}"]) as cluster,
        FakeKubelets(cluster.api),
    ):
        for zone in ("a", "b"):
            cluster.add_fake_nodes(2, labels={"topology.kubernetes.io/zone": zone}, prefix=zone)
        yield cluster


def documented_quota() -> str:
    """Return the ResourceQuota in docs/install.md."""
    (found,) = re.findall(
        r"^```yaml\n(apiVersion: v1\nkind: ResourceQuota\n.*?)^```", INSTALL, re.MULTILINE | re.DOTALL
    )
    return str(found)


@pytest.mark.promise("install-critical-quota", "install-two-operators")
def test_two_operators_run_in_two_zones_once_the_quota_is_there_and_one_stays_in_a_drain(cloud: Cluster) -> None:
    cloud.kubectl("apply", "--server-side", "-k", str(MANIFESTS), timeout=60)

    def pods() -> list[Object]:
        return cloud.pods(NAMESPACE, selector="app.kubernetes.io/name=sharepod-operator")

    def ready() -> list[str]:
        """Return the nodes of the operator's ready Pods."""
        conditions = [(pod, pod.get("status", {}).get("conditions") or ()) for pod in pods()]
        return [
            pod["spec"]["nodeName"]
            for pod, known in conditions
            if "deletionTimestamp" not in pod["metadata"]
            and any(item["type"] == "Ready" and item["status"] == "True" for item in known)
        ]

    def refused() -> bool:
        answer = cloud.kubectl("-n", NAMESPACE, "get", "events", "-o", "json").stdout
        reasons = [item["message"] for item in json.loads(answer)["items"] if item["reason"] == "FailedCreate"]
        return any("insufficient quota to match these scopes" in reason for reason in reasons)

    wait_until(refused, what="critical Pods are limited", timeout=PATIENCE_S)
    assert pods() == []
    cloud.kubectl("apply", "-f", "-", input=documented_quota())
    wait_until(lambda: len(ready()) == 2, what="two operators", timeout=PATIENCE_S)
    assert sorted(node[0] for node in ready()) == ["a", "b"], "in two zones"

    budget = f"/apis/policy/v1/namespaces/{NAMESPACE}/poddisruptionbudgets/sharepod-operator"
    wait_until(
        lambda: (cloud.api.get(budget).get("status") or {}).get("disruptionsAllowed") == 1,
        what="a budget that allows one eviction",
        timeout=PATIENCE_S,
    )
    for node in cloud.api.get("/api/v1/nodes")["items"]:
        cloud.kubectl("cordon", node["metadata"]["name"])
    first, second = (pod["metadata"]["name"] for pod in pods())

    def evict(name: str) -> None:
        body = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": name, "namespace": NAMESPACE}}
        cloud.api.create(f"/api/v1/namespaces/{NAMESPACE}/pods/{name}/eviction", body)

    evict(first)
    with pytest.raises(ApiError) as kept:
        evict(second)
    assert kept.value.code == 429
    for node in cloud.api.get("/api/v1/nodes")["items"]:
        cloud.kubectl("uncordon", node["metadata"]["name"])
    wait_until(lambda: len(ready()) == 2, what="another operator", timeout=PATIENCE_S)
    cloud.kubectl("drain", ready()[0], "--ignore-daemonsets", "--timeout=60s", timeout=70)
