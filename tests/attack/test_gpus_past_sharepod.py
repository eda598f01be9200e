"""GPUs without a share: plain Pods that request devices from NVIDIA's runtime or from a container runtime's plugins."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from cluster.admission import PODS, as_user, pod_of, sharepod
from harness.api import Object
from harness.cluster import Cluster
from harness.installation import NAMESPACE

VISIBLE = {"name": "NVIDIA_VISIBLE_DEVICES", "value": "all"}
BY_FIELD = {"name": "NVIDIA_VISIBLE_DEVICES", "valueFrom": {"fieldRef": {"fieldPath": "metadata.annotations['gpus']"}}}
DEVICES = {"name": "devices", "mountPath": "/var/run/nvidia-container-devices/all"}
EMPTY = [{"name": "devices", "emptyDir": {}}]


def pod(
    name: str, *, annotations: dict[str, str] | None = None, container: Object | None = None, **spec: Any
) -> Object:
    """Return a Pod with one container named main."""
    main = {"name": "main", "image": "cuda", **(container or {})}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "namespace": "default", "annotations": annotations or {}},
        "spec": {"containers": [main], **spec},
    }


def asking(resource: str, amount: str) -> Object:
    return {"resources": {"limits": {resource: amount}}}


ATTEMPTS: dict[str, tuple[Object, str]] = {
    "runtime-class": (pod("a", runtimeClassName="nvidia"), "spec.runtimeClassName: nvidia"),
    "runtime-class-cdi": (pod("a", runtimeClassName="nvidia-cdi"), "spec.runtimeClassName: nvidia-cdi"),
    "variable": (pod("a", container={"env": [VISIBLE]}), "spec.containers[main].env[NVIDIA_VISIBLE_DEVICES]"),
    "variable-by-field": (
        pod("a", annotations={"gpus": "all"}, container={"env": [BY_FIELD]}),
        "spec.containers[main].env[NVIDIA_VISIBLE_DEVICES]",
    ),
    "variable-twice": (
        pod("a", container={"env": [{**VISIBLE, "value": "void"}, VISIBLE]}),
        "spec.containers[main].env[NVIDIA_VISIBLE_DEVICES]",
    ),
    "variable-of-an-init-container": (
        pod("a", initContainers=[{"name": "first", "image": "cuda", "env": [VISIBLE]}]),
        "spec.containers[first].env[NVIDIA_VISIBLE_DEVICES]",
    ),
    "mount": (
        pod("a", container={"volumeMounts": [DEVICES]}, volumes=EMPTY),
        "spec.containers[main].volumeMounts",
    ),
    "mount-with-a-plugins-resource": (
        pod("a", container={"volumeMounts": [DEVICES], **asking("nvidia.com/gpu", "1")}, volumes=EMPTY),
        "spec.containers[main].volumeMounts",
    ),
    "cdi-annotation": (
        pod("a", annotations={"cdi.k8s.io/x": "nvidia.com/gpu=all"}),
        "metadata.annotations[cdi.k8s.io/x]",
    ),
    "nvidias-cdi-annotation": (
        pod("a", annotations={"nvidia.cdi.k8s.io/x": "nvidia.com/gpu=all"}),
        "metadata.annotations[nvidia.cdi.k8s.io/x]",
    ),
    "nri-devices": (
        pod("a", annotations={"devices.nri.io/container.main": "- path: /dev/nvidia0"}),
        "metadata.annotations[devices.nri.io/container.main]",
    ),
    "nri-cdi-devices": (
        pod("a", annotations={"cdi-devices.nri.io": "- nvidia.com/gpu=all"}),
        "metadata.annotations[cdi-devices.nri.io]",
    ),
    "cri-o-devices": (
        pod("a", annotations={"io.kubernetes.cri-o.Devices": "/dev/nvidia0"}),
        "metadata.annotations[io.kubernetes.cri-o.Devices]",
    ),
    "cri-o-devices-of-a-container": (
        pod("a", annotations={"devices.crio.io/main": "/dev/nvidia0"}),
        "metadata.annotations[devices.crio.io/main]",
    ),
    "none-of-the-plugins-resource": (
        pod("a", runtimeClassName="nvidia", container=asking("nvidia.com/gpu", "0")),
        "spec.runtimeClassName: nvidia",
    ),
    # A kubelet admits a Pod that names its node itself, even if the node lacks the resource.
    "the-plugins-resource-past-kube-scheduler": (
        pod("a", runtimeClassName="nvidia", nodeName="gpu-1", container=asking("nvidia.com/gpu", "1")),
        "spec.runtimeClassName: nvidia",
    ),
    # The Pod's own variable replaces the device plugin's variable: the Pod would see every GPU of a node, including
    # shared GPUs.
    "more-than-the-plugin-gives": (
        pod("a", container={"env": [VISIBLE], **asking("nvidia.com/gpu", "1")}),
        "spec.containers[main].env[NVIDIA_VISIBLE_DEVICES]",
    ),
    "nvidias-nri-plugin": (
        pod("a", annotations={"cdi-devices.noderesource.dev/container.main": "- nvidia.com/gpu=all"}),
        "metadata.annotations[cdi-devices.noderesource.dev/container.main]",
    ),
    "nri-devices-by-their-new-name": (
        pod("a", annotations={"devices.noderesource.dev": "- path: /dev/nvidia0"}),
        "metadata.annotations[devices.noderesource.dev]",
    ),
    "nri-folders-of-the-node": (
        pod("a", annotations={"mounts.noderesource.dev/pod": "- source: /var/lib/kubelet/pods"}),
        "metadata.annotations[mounts.noderesource.dev/pod]",
    ),
    "nri-folders-by-their-old-name": (
        pod("a", annotations={"mounts.nri.io": "- source: /var/lib/kubelet/pods"}),
        "metadata.annotations[mounts.nri.io]",
    ),
    "nri-cdi-by-its-first-name": (
        pod("a", annotations={"cdi.nri.io/pod": "nvidia.com/gpu=all"}),
        "metadata.annotations[cdi.nri.io/pod]",
    ),
    "gkes-nri-plugin": (
        pod("a", annotations={"devices.gke.io/container.main": "- path: /dev/nvidia0"}),
        "metadata.annotations[devices.gke.io/container.main]",
    ),
    "gkes-nri-plugin-past-kube-scheduler": (
        pod(
            "a",
            annotations={"devices.gke.io/container.main": "- path: /dev/nvidia0"},
            nodeName="gpu-1",
            container=asking("nvidia.com/gpu", "1"),
        ),
        "metadata.annotations[devices.gke.io/container.main]",
    ),
}


@pytest.fixture(scope="module", autouse=True)
def runtime_classes(server: Cluster) -> None:
    for name in ("nvidia", "nvidia-cdi", "gvisor"):
        server.api.create(
            "/apis/node.k8s.io/v1/runtimeclasses",
            {"apiVersion": "node.k8s.io/v1", "kind": "RuntimeClass", "metadata": {"name": name}, "handler": "nvidia"},
        )


@pytest.mark.promise("security-plain-pod", "security-no-injection")
@pytest.mark.parametrize("attempt", ATTEMPTS)
def test_a_plain_pod_that_asks_for_gpus_is_refused(attempt: str, server: Cluster, alice: Path) -> None:
    body, field = ATTEMPTS[attempt]
    code, output = as_user(server, alice, "create", "--dry-run=server", "-f", "-", body=body)
    assert code != 0
    assert field in output
    assert "create a SharePod" in output


ALLOWED = {
    "nothing": pod("a"),
    "no-gpu": pod("a", container={"env": [{"name": "NVIDIA_VISIBLE_DEVICES", "value": "void"}]}),
    "another-runtime-class": pod("a", runtimeClassName="gvisor"),
    "a-plugins-gpu": pod("a", runtimeClassName="nvidia", container=asking("nvidia.com/gpu", "1")),
    "gkes-network-with-a-plugins-gpu": pod(
        "a",
        annotations={"devices.gke.io/container.main": "- path: /dev/nvidia0"},
        container=asking("nvidia.com/gpu", "1"),
    ),
    "a-named-node": pod("a", nodeName="gpu-1"),
    "another-plugin-of-nri": pod("a", annotations={"memory-qos.nri.io": "class: silver"}),
    "a-mig-slice": pod("a", runtimeClassName="nvidia", container=asking("nvidia.com/mig-1g.10gb", "1")),
    "an-annotation-that-looks-alike": pod("a", annotations={"notcdi.k8s.io/x": "y", "example.org/cdi.k8s.io": "y"}),
}


@pytest.mark.parametrize("case", ALLOWED)
def test_other_pods_pass(case: str, server: Cluster, alice: Path) -> None:
    code, output = as_user(server, alice, "create", "--dry-run=server", "-f", "-", body=ALLOWED[case])
    assert code == 0, output


@pytest.mark.promise("security-plain-pod")
def test_a_field_refused_at_creation_cannot_be_added_to_a_pod(server: Cluster, alice: Path) -> None:
    server.api.create(PODS, pod("added-to"))
    code, output = as_user(server, alice, "annotate", "pod", "added-to", "cdi.k8s.io/x=nvidia.com/gpu=all")
    assert (code != 0, "metadata.annotations[cdi.k8s.io/x]" in output) == (True, True), output
    server.kubectl("annotate", "pod", "added-to", "cdi.k8s.io/x=allowed-to-an-admin")
    code, output = as_user(server, alice, "label", "pod", "added-to", "app=x")
    assert code == 0, f"another change of a pod with that field: {output}"
    server.kubectl("create", "role", "debugger", "--verb=patch", "--resource=pods/ephemeralcontainers")
    server.kubectl("create", "rolebinding", "debugger", "--role=debugger", "--user=alice")
    debug = ["debug", "added-to", "--image=cuda", "--container=debug", "--env=NVIDIA_VISIBLE_DEVICES=all"]
    code, output = as_user(server, alice, *debug)
    assert (code != 0, "spec.containers[debug].env[NVIDIA_VISIBLE_DEVICES]" in output) == (True, True), output


@pytest.mark.promise("security-plain-pod")
def test_a_controller_has_no_more_rights_than_its_owner(server: Cluster) -> None:
    controller = server.api_for(server.service_account_token("kube-system", "replicaset-controller"))
    with pytest.raises(Exception, match="runtimeClassName"):
        controller.create(PODS, pod("of-a-replicaset", runtimeClassName="nvidia"))


def test_the_system_and_the_operator_pass(server: Cluster) -> None:
    operator = server.api_for(server.service_account_token(NAMESPACE, "sharepod-operator"))
    ours = pod_of(server, "of-a-sharepod")
    ours["spec"] |= {"runtimeClassName": "nvidia"}
    ours["spec"]["containers"][0]["env"] = [VISIBLE]
    operator.create(PODS, ours)
    assert server.api.get(f"/api/v1/namespaces/{NAMESPACE}")["metadata"]["labels"]["sharepod.dev/system"] == "true"
    server.kubectl("create", "namespace", "gpu-tools")
    server.kubectl("create", "rolebinding", "bob", "--clusterrole=admin", "--user=bob", "--namespace=gpu-tools")
    bob = server.user_kubeconfig("bob")
    exporter = pod("exporter", runtimeClassName="nvidia")
    exporter["metadata"]["namespace"] = "gpu-tools"
    code, _ = as_user(server, bob, "label", "namespace", "gpu-tools", "sharepod.dev/system=true")
    assert code != 0, "the admin of a namespace cannot exempt it"
    assert as_user(server, bob, "create", "--dry-run=server", "-f", "-", body=exporter)[0] != 0
    server.kubectl("label", "namespace", "gpu-tools", "sharepod.dev/system=true")
    code, output = as_user(server, bob, "create", "--dry-run=server", "-f", "-", body=exporter)
    assert code == 0, output


@pytest.mark.promise("security-system-label")
def test_a_user_who_may_label_namespaces_cannot_exempt_them_from_the_policies(server: Cluster) -> None:
    """On some platforms teams may create namespaces, and the platform's policies protect only the labels of Pod
    Security."""
    server.kubectl("create", "clusterrole", "namespaces", "--verb=create,get,patch,update", "--resource=namespaces")
    server.kubectl("create", "clusterrolebinding", "namespaces", "--clusterrole=namespaces", "--user=carol")
    carol = server.user_kubeconfig("carol")
    assert as_user(server, carol, "create", "namespace", "of-carol")[0] == 0
    for key in ("sharepod.dev/system", "sharepod.dev/own-nodes"):
        made: Object = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "made", "labels": {key: "true"}}}
        for attempt in (("create", "-f", "-"), ("label", "namespace", "of-carol", f"{key}=true")):
            body = made if attempt[0] == "create" else None
            code, output = as_user(server, carol, *attempt, "--dry-run=server", body=body)
            assert (code != 0, f"metadata.labels[{key}]" in output) == (True, True), output
        server.kubectl("label", "namespace", "of-carol", f"{key}=true")
        code, output = as_user(server, carol, "label", "--overwrite", "namespace", "of-carol", f"team={key[-5:]}")
        assert code == 0, f"another label of a namespace that an administrator has exempted: {output}"
        assert as_user(server, carol, "label", "namespace", "of-carol", f"{key}-")[0] == 0


INJECTIONS = [
    "cdi.k8s.io/x",
    "nvidia.cdi.k8s.io/x",
    "devices.nri.io/container.main",
    "cdi-devices.nri.io",
    "io.kubernetes.cri-o.Devices",
    "devices.crio.io/main",
    "cdi-devices.noderesource.dev/pod",
    "mounts.noderesource.dev",
    "devices.gke.io/container.main",
]


@pytest.mark.promise("security-injection", "security-no-injection")
@pytest.mark.parametrize("key", INJECTIONS)
def test_a_sharepod_carries_no_injection_into_its_pod(key: str, server: Cluster, alice: Path) -> None:
    body = sharepod("injected", {"request": 0.25}, {key: "nvidia.com/gpu=all"})
    code, output = as_user(server, alice, "create", "--dry-run=server", "-f", "-", body=body)
    assert code != 0
    assert f"metadata.annotations[{key}]" in output
