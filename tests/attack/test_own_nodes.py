"""Nodes with the taint of `manifests/own-nodes`: which Pods may tolerate the taint, and which Pods bypass it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cluster.admission import PODS, as_user, pod_of
from harness.api import Object
from harness.cluster import Cluster, wait_until
from harness.installation import MANIFESTS, NAMESPACE

TAINT = "sharepod.dev/only"
OURS = {"key": TAINT, "operator": "Exists"}
EVERY = {"operator": "Exists"}


def pod(name: str = "a", *, namespace: str = "default", limits: dict[str, str] | None = None, **spec: Any) -> Object:
    """Return a Pod with one container. `limits`: the container's limits."""
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "namespace": namespace},
        "spec": {"containers": [{"name": "main", "image": "cuda", "resources": {"limits": limits or {}}}], **spec},
    }


warned: dict[str, tuple[bool, str]] = {}
"""For each request, while the policy only warned: whether the API server accepted it, and the warning."""


def tried(server: Cluster, user: Path, body: Object) -> tuple[bool, str]:
    code, output = as_user(server, user, "create", "--dry-run=server", "-f", "-", body=body)
    return code == 0, output


@pytest.fixture(scope="module", autouse=True)
def own_nodes(server: Cluster, alice: Path) -> Iterator[None]:
    server.kubectl("apply", "--server-side", "-k", str(MANIFESTS / "own-nodes-warn"))
    wait_until(
        lambda: "Warning" in tried(server, alice, pod(tolerations=[EVERY]))[1],
        what="the policy that warns",
        timeout=30,
        interval=0.2,
    )
    warned.update(
        {
            "every taint": tried(server, alice, pod(tolerations=[EVERY])),
            "ours": tried(server, alice, pod(tolerations=[OURS])),
            "others": tried(server, alice, ALLOWED["other-taints"]),
        }
    )
    folder = str(MANIFESTS / "own-nodes")
    server.kubectl("apply", "--server-side", "-k", folder)
    wait_until(
        lambda: not tried(server, alice, pod(tolerations=[OURS]))[0],
        what="the policy in force",
        timeout=30,
        interval=0.2,
    )
    yield
    server.kubectl("delete", "-k", folder)


ATTEMPTS: dict[str, tuple[Object, str]] = {
    "by-key": (pod(tolerations=[OURS]), "spec.tolerations"),
    "by-value": (pod(tolerations=[{"key": TAINT, "value": "", "effect": "NoSchedule"}]), "spec.tolerations"),
    "every-taint": (pod(tolerations=[EVERY]), "every taint"),
    "every-taint-of-an-effect": (pod(tolerations=[{**EVERY, "effect": "NoSchedule"}]), "every taint"),
    "behind-others": (pod(tolerations=[{"key": "a", "operator": "Exists"}, OURS]), "spec.tolerations"),
    "none-of-the-line": (pod(tolerations=[OURS], limits={"sharepod.dev/gpu-milli": "0"}), "spec.tolerations"),
    "a-plugins-gpu": (pod(tolerations=[OURS], limits={"nvidia.com/gpu": "1"}), "spec.tolerations"),
    "past-the-scheduler": (pod(nodeName="gpu-node"), "spec.nodeName"),
}


@pytest.mark.promise("security-own-nodes")
@pytest.mark.parametrize("attempt", ATTEMPTS)
def test_a_pod_without_a_share_does_not_get_to_tainted_nodes(attempt: str, server: Cluster, alice: Path) -> None:
    body, field = ATTEMPTS[attempt]
    passed, output = tried(server, alice, body)
    assert (passed, field in output) == (False, True), output


ALLOWED = {
    "other-taints": pod(tolerations=[{"key": "nvidia.com/gpu", "operator": "Exists"}, {"key": "a", "value": "b"}]),
    "no-blocking-effect": pod(tolerations=[{**OURS, "effect": "PreferNoSchedule"}]),
    "a-claim": pod(tolerations=[OURS], resourceClaims=[{"name": "gpu", "resourceClaimName": "mine"}]),
}


@pytest.mark.promise("security-own-nodes-warn")
def test_a_policy_that_only_warns_can_be_applied_before() -> None:
    assert all(passed for passed, _ in warned.values())
    assert [("spec.tolerations" in output) for _, output in warned.values()] == [True, True, False], warned


@pytest.mark.parametrize("case", ALLOWED)
def test_harmless_tolerations_pass(case: str, server: Cluster, alice: Path) -> None:
    assert tried(server, alice, ALLOWED[case])[0], tried(server, alice, ALLOWED[case])[1]


@pytest.mark.promise("security-own-nodes")
def test_a_toleration_cannot_be_added_later(server: Cluster, alice: Path) -> None:
    server.api.create(PODS, pod("tolerates-later"))
    change = '{"spec": {"tolerations": [{"key": "sharepod.dev/only", "operator": "Exists"}]}}'
    code, output = as_user(server, alice, "patch", "pod", "tolerates-later", "--type=strategic", "-p", change)
    assert (code != 0, "spec.tolerations" in output) == (True, True), output
    server.api.create(PODS, pod("tolerates-already", tolerations=[OURS]))
    code, output = as_user(server, alice, "label", "pod", "tolerates-already", "app=x")
    assert code == 0, f"another change of a pod that an administrator has admitted: {output}"


@pytest.mark.promise("security-own-nodes")
def test_a_controller_is_refused_and_the_system_and_the_operator_pass(server: Cluster) -> None:
    controller = server.api_for(server.service_account_token("kube-system", "daemon-set-controller"))
    with pytest.raises(Exception, match="every taint"):
        controller.create(PODS, pod("of-a-daemonset", tolerations=[EVERY]))
    server.kubectl("create", "namespace", "monitoring")
    exporter = pod("exporter", namespace="monitoring", tolerations=[EVERY])
    with pytest.raises(Exception, match="every taint"):
        controller.create("/api/v1/namespaces/monitoring/pods?dryRun=All", exporter)
    server.kubectl("label", "namespace", "monitoring", "sharepod.dev/own-nodes=true")
    controller.create("/api/v1/namespaces/monitoring/pods?dryRun=All", exporter)
    agent = pod("as-an-agents", namespace=NAMESPACE, tolerations=[EVERY])
    controller.create(f"/api/v1/namespaces/{NAMESPACE}/pods?dryRun=All", agent)
    operator = server.api_for(server.service_account_token(NAMESPACE, "sharepod-operator"))
    ours = pod_of(server, "of-a-tolerant-sharepod")
    ours["spec"]["tolerations"] = [OURS]
    operator.create(PODS, ours)
