"""Subresources of Pods as ways past the policies on Pods: a user with all rights in a namespace (a Role with wildcards)
may write the status of Pods and bind them. Both requests can carry labels and annotations."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path

import pytest
from cluster.admission import as_user
from harness.api import Object
from harness.cluster import Cluster
from sharepod.api.objects import GPUS_ANNOTATION

from attack.test_gpus_past_sharepod import INJECTIONS

OWN = "of-owners"
PODS = f"/api/v1/namespaces/{OWN}/pods"
RBAC = "rbac.authorization.k8s.io/v1"
UID = "5a9e0001-0000-4000-8000-000000000001"
ANNOTATIONS = {
    GPUS_ANNOTATION: "all",
    "sharepod.dev/gpu-count": "1",
    "sharepod.dev/gpu-mode": "Exclusive",
    **dict.fromkeys(INJECTIONS, "nvidia.com/gpu=all"),
}
LABELS = {"sharepod.dev/tenant": UID, "sharepod.dev/placeholder": "", "sharepod.dev/holder": "x"}
FORGED = [("annotations", key, value) for key, value in ANNOTATIONS.items()] + [
    ("labels", key, value) for key, value in LABELS.items()
]
_numbers = count()

Answer = tuple[int, str]


@pytest.fixture(scope="module")
def owner(server: Cluster) -> Path:
    """Return the kubeconfig of a user with all rights in one namespace and none elsewhere."""
    server.kubectl("create", "namespace", OWN)
    server.await_service_account(OWN, "default")
    rules = [{"apiGroups": ["*"], "resources": ["*"], "verbs": ["*"]}]
    role = {"apiVersion": RBAC, "kind": "Role", "metadata": {"name": "owner"}, "rules": rules}
    server.api.create(f"/apis/{RBAC}/namespaces/{OWN}/roles", role)
    server.kubectl("create", "rolebinding", "owner", "--role=owner", "--user=owner", f"--namespace={OWN}")
    return server.user_kubeconfig("owner")


@pytest.fixture
def pod(server: Cluster) -> Iterator[str]:
    name = f"plain-{next(_numbers)}"
    container = {"name": "main", "image": "x"}
    metadata = {"name": name, "annotations": {"mine": "before"}}
    body: Object = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": {"containers": [container]}}
    server.api.create(PODS, body)
    yield name
    server.api.delete(f"{PODS}/{name}")


def by_status(server: Cluster, user: Path, pod: str, metadata: Object) -> Answer:
    patch = ("patch", "pod", pod, f"--namespace={OWN}", "--subresource=status", "--type=merge", "-p")
    return as_user(server, user, *patch, json.dumps({"metadata": metadata}))


def by_binding(server: Cluster, user: Path, pod: str, metadata: Object, path: str = "") -> Answer:
    body = {
        "apiVersion": "v1",
        "kind": "Binding",
        "metadata": {"name": pod, **metadata},
        "target": {"apiVersion": "v1", "kind": "Node", "name": "gpu-1"},
    }
    raw = path or f"{PODS}/{pod}/binding"
    return as_user(server, user, "create", f"--raw={raw}", "-f", "-", body=body)


@pytest.mark.promise(
    "security-pod-subresources", "security-tenant-label", "security-plain-pod", "operator-line-placement"
)
@pytest.mark.parametrize(("kind", "key", "value"), FORGED, ids=[key for _, key, _ in FORGED])
@pytest.mark.parametrize("way", [by_status, by_binding])
def test_subresources_cannot_set_metadata_that_a_pod_may_not_have(
    way: Callable[..., Answer], kind: str, key: str, value: str, server: Cluster, owner: Path, pod: str
) -> None:
    code, output = way(server, owner, pod, {kind: {key: value}})
    assert (code != 0, f"metadata.{kind}[{key}]" in output) == (True, True), output
    assert key not in server.api.get(f"{PODS}/{pod}")["metadata"].get(kind, {})


@pytest.mark.promise("security-pod-subresources", "security-tenant-label")
def test_the_status_cannot_remove_annotations_of_the_operator(server: Cluster, owner: Path, pod: str) -> None:
    server.api.patch(f"{PODS}/{pod}", {"metadata": {"annotations": {GPUS_ANNOTATION: "GPU-1"}}})
    for value in (None, "GPU-1,GPU-2"):
        code, output = by_status(server, owner, pod, {"annotations": {GPUS_ANNOTATION: value}})
        assert (code != 0, f"metadata.annotations[{GPUS_ANNOTATION}]" in output) == (True, True), output
    code, output = by_status(server, owner, pod, {"annotations": {"mine": "after", "k8s.v1.cni.cncf.io/x": "y"}})
    assert code == 0, f"network plugins write annotations by the status: {output}"
    patch = ("patch", "pod", pod, f"--namespace={OWN}", "--subresource=status", "--type=merge", "-p")
    code, output = as_user(server, owner, *patch, json.dumps({"status": {"message": "x"}}))
    assert code == 0, f"a change of the status only: {output}"


def test_the_status_of_a_pod_with_as_many_annotations_as_fit_is_written_by_kubelets_and_networks(
    server: Cluster, owner: Path, pod: str
) -> None:
    """The API server limits the evaluation cost of a policy. If this policy exceeded the limit, the API server would
    refuse this write of a kubelet or a network plugin."""
    many = {f"example.org/{number}": "x" * 30 for number in range(5000)}
    server.api.patch(f"{PODS}/{pod}", {"metadata": {"annotations": many}})
    server.api.patch(f"{PODS}/{pod}/status", {"status": {"message": "by a kubelet"}})
    code, output = by_status(server, owner, pod, {"annotations": {"k8s.v1.cni.cncf.io/network-status": "x"}})
    assert code == 0, output
    code, output = by_status(server, owner, pod, {"annotations": {GPUS_ANNOTATION: "all"}})
    assert (code != 0, f"metadata.annotations[{GPUS_ANNOTATION}]" in output) == (True, True), output


@pytest.mark.promise("security-pod-subresources", "security-plain-pod")
def test_a_pod_bound_by_its_owner_bypasses_kube_scheduler_like_a_pod_with_node_name(
    server: Cluster, owner: Path, pod: str
) -> None:
    """With NVIDIA's runtime class and `nvidia.com/gpu` the Pod would reach a node whose GPUs are shared: a kubelet
    admits a Pod with a resource that its node lacks."""
    for path in ("", f"/api/v1/namespaces/{OWN}/bindings"):
        code, output = by_binding(server, owner, pod, {}, path)
        assert (code != 0, "target.name: owner may bind pods in namespace of-owners alone" in output) == (True, True)
    assert "nodeName" not in server.api.get(f"{PODS}/{pod}")["spec"]


@pytest.mark.promise("security-pod-subresources", "security-plain-pod")
def test_a_scheduler_may_bind_and_an_administrator_may_write_anything(server: Cluster, pod: str) -> None:
    scheduler = server.user_kubeconfig("system:kube-scheduler")
    code, output = by_binding(server, scheduler, pod, {"annotations": {"of-the-scheduler": "x"}})
    assert code == 0, output
    server.api.patch(f"{PODS}/{pod}/status", {"metadata": {"annotations": {GPUS_ANNOTATION: "by-an-administrator"}}})
    found = server.api.get(f"{PODS}/{pod}")
    assert found["spec"]["nodeName"] == "gpu-1"
    assert found["metadata"]["annotations"]["of-the-scheduler"] == "x"
