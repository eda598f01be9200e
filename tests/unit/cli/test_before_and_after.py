"""`preflight` before an installation, and `support` for a problem report, on a cluster in memory."""

from __future__ import annotations

import json
import tarfile
from pathlib import Path

import pytest
from kubectl_sharepod.kubectl import Json, Kubectl, KubectlError
from kubectl_sharepod.preflight import preflight, refused_by
from kubectl_sharepod.support import redacted, support

from .fleet import Memory, cluster

NOTHING: Json = {"items": []}
KINDS = ("apis/apps/v1/deployments", "apis/apps/v1/daemonsets", "apis/apps/v1/statefulsets", "apis/batch/v1/jobs")


def node(name: str, *, gpus: str = "0", **labels: str) -> Json:
    named = {key.replace("__", "/").replace("_", "."): value for key, value in labels.items()}
    info = {"architecture": "amd64", "kubeletVersion": "v1.36.0", "containerRuntimeVersion": "containerd://2.1"}
    return {
        "metadata": {"name": name, "labels": named},
        "status": {"nodeInfo": info, "allocatable": {"nvidia.com/gpu": gpus}},
    }


def pod(namespace: str, spec: Json) -> Json:
    return {"metadata": {"name": "p", "namespace": namespace}, "spec": spec}


def before(version: str = "v1.36.1", *, nodes: list[Json], pods: list[Json] = [], **changes: Json) -> Memory:  # noqa: B006
    """Return a cluster without SharePod."""
    objects: dict[str, Json] = {
        "/version": {"gitVersion": version},
        "/apis/resource.k8s.io/v1": {},
        "/apis/node.k8s.io/v1/runtimeclasses/nvidia": {"handler": "nvidia"},
        "/apis/resource.k8s.io/v1/deviceclasses": NOTHING,
        "/api/v1/nodes": {"items": nodes},
        "/api/v1/pods": {"items": pods},
        "/api/v1/namespaces": {"items": []},
        "/apis/batch/v1/cronjobs": NOTHING,
    }
    objects |= {f"/{kind}": NOTHING for kind in KINDS} | {"/" + key: value for key, value in changes.items()}
    return Memory(objects=objects)


def verdicts(kubectl: Kubectl) -> dict[str, tuple[str, str]]:
    return {row[0]: (row[1], row[2]) for row in preflight(kubectl).rows}


def test_a_cluster_that_can_take_sharepod_has_no_failed_check() -> None:
    page = preflight(before(nodes=[node("gpu", nvidia_com__gpu_present="true")]))
    assert page.status == 0
    assert {row[1] for row in page.rows} == {"ok"}


def test_an_old_cluster_and_a_missing_runtime_class_fail() -> None:
    kubectl = before("v1.29.3", nodes=[])
    del kubectl.objects["/apis/node.k8s.io/v1/runtimeclasses/nvidia"]
    page = preflight(kubectl)
    assert page.status == 1
    found = verdicts(kubectl)
    assert found["version"] == ("failed", "Kubernetes v1.29.3; SharePod needs 1.30 or newer")
    assert found["runtime"][0] == "failed"
    assert found["nodes"][0] == "warning"


@pytest.mark.parametrize(
    ("version", "served", "detail"),
    [("v1.33.0", False, "manifests/plain-volume"), ("v1.34.1", True, "DRAConsumableCapacity"), ("v1.36.0", True, "")],
)
def test_the_doors_that_a_version_has(version: str, served: bool, detail: str) -> None:
    kubectl = before(version, nodes=[])
    if not served:
        del kubectl.objects["/apis/resource.k8s.io/v1"]
    verdict, text = verdicts(kubectl)["claims"]
    assert (verdict, detail in text) == ("warning" if detail else "ok", True)


def test_nodes_with_a_misspelt_pool_or_the_device_plugin_are_warned_of() -> None:
    nodes = [
        node("typo", sharepod_dev__pool="dedicted"),
        node("both", gpus="8", sharepod_dev__pool="dedicated"),
        node("plugin", gpus="8"),
        node("cpu"),
    ]
    found = verdicts(before(nodes=nodes))
    assert "sharepod.dev/pool=dedicted is unknown" in found["node typo"][1]
    assert "remove the plugin" in found["node both"][1]
    assert "sharepod.dev/pool=device-plugin" in found["node plugin"][1]
    assert "node cpu" not in found


def test_workloads_that_the_policies_refuse_are_named_by_namespace() -> None:
    runtime = {"runtimeClassName": "nvidia", "containers": [{"name": "c"}]}
    kubectl = before(nodes=[], pods=[pod("monitoring", runtime), pod("kube-system", runtime)])
    template = {"spec": {"template": {"spec": runtime}}}
    kubectl.objects["/apis/apps/v1/deployments"] = {
        "items": [{"metadata": {"name": "d", "namespace": "web"}} | template]
    }
    kubectl.objects["/api/v1/namespaces"] = {
        "items": [{"metadata": {"name": "web", "labels": {"sharepod.dev/system": "true"}}}]
    }
    found = verdicts(kubectl)
    assert "Pod p (runtimeClassName nvidia without nvidia.com/gpu)" in found["namespace monitoring"][1]
    assert not {"namespace kube-system", "namespace web"} & found.keys()


@pytest.mark.parametrize(
    ("container", "annotation", "refused"),
    [
        ({}, "", False),
        ({"env": [{"name": "NVIDIA_VISIBLE_DEVICES", "value": "all"}]}, "", True),
        ({"env": [{"name": "NVIDIA_VISIBLE_DEVICES", "value": "none"}]}, "", False),
        ({"volumeMounts": [{"mountPath": "/var/run/nvidia-container-devices/all"}]}, "", True),
        ({}, "cdi.k8s.io/gpu", True),
        ({"resources": {"limits": {"nvidia.com/gpu": "1"}}}, "devices.gke.io/x", False),
    ],
)
def test_refusals_are_those_of_the_policy(container: Json, annotation: str, refused: bool) -> None:
    metadata = {"annotations": {annotation: "x"}} if annotation else {}
    assert bool(refused_by({"containers": [{"name": "c", **container}]}, metadata)) is refused


def test_a_check_without_rights_is_a_warning() -> None:
    kubectl = before(nodes=[])
    denied = Memory(objects=kubectl.objects, denied=("/api/v1/nodes",))
    assert verdicts(denied)["nodes"][1].startswith("not checked: ")


def test_a_bundle_has_no_secrets_and_names_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kubectl = cluster()
    secret = {"env": [{"name": "TOKEN", "value": "hunter2"}], "args": ["--password=hunter2"]}
    kubectl.objects["/apis/sharepod.dev/v1alpha1/sharepods"]["items"][0]["spec"]["containers"] = [secret]
    kubectl.objects["/apis/sharepod.dev/v1alpha1/sharepods"]["items"][0]["metadata"]["annotations"] = {"a": "hunter2"}
    monkeypatch.setattr(Memory, "logs", lambda *_: "a line of the log\n", raising=False)
    page = support(kubectl, tmp_path / "bundle.tar.gz")
    with tarfile.open(tmp_path / "bundle.tar.gz") as bundle:
        files = {Path(one.name).name: bundle.extractfile(one) for one in bundle.getmembers()}
        parts = {name: file.read() for name, file in files.items() if file is not None}
    assert not any(b"hunter2" in part for part in parts.values())
    assert b"TOKEN" in parts["sharepods.json"]
    assert parts["agent.log"] == b"a line of the log\n"
    assert "nodes.json" in json.loads(parts["missing.json"])
    assert any(line.startswith("nodes.json is missing") for line in page.before)


def test_a_bundle_without_an_answer_or_a_place_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Memory, "logs", lambda *_: "", raising=False)
    with pytest.raises(KubectlError, match=r"cannot write .*name another file by --file"):
        support(cluster(), tmp_path / "none" / "bundle.tar.gz")
    silent = Memory(objects={})
    with pytest.raises(KubectlError):
        support(silent, tmp_path / "bundle.tar.gz")
    assert not list(tmp_path.iterdir())


def test_redaction_keeps_names_and_drops_values() -> None:
    assert redacted({"env": [{"name": "A", "valueFrom": {"secretKeyRef": {"name": "s"}}}], "image": "i"}) == {
        "env": [{"name": "A", "value": "<redacted>"}],
        "image": "i",
    }
