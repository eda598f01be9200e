"""`preflight` before an installation, and `support` for a problem report, on a cluster in memory."""

from __future__ import annotations

import json
import tarfile
from pathlib import Path

import pytest
from kubectl_sharepod.kubectl import ForbiddenError, Json, Kubectl, KubectlError
from kubectl_sharepod.preflight import preflight, refused_by
from kubectl_sharepod.redaction import CLAIMS, EVENTS, NODES, PODS, REDACTED
from kubectl_sharepod.support import support

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


def unpacked(archive: Path) -> dict[str, bytes]:
    """Return the parts of a bundle."""
    with tarfile.open(archive) as bundle:
        files = {Path(one.name).name: bundle.extractfile(one) for one in bundle.getmembers()}
        return {name: file.read() for name, file in files.items() if file is not None}


def test_a_bundle_has_no_secrets_and_names_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kubectl = cluster()
    secret = {"env": [{"name": "TOKEN", "value": "hunter2"}], "args": ["--password=hunter2"]}
    kubectl.objects["/apis/sharepod.dev/v1alpha1/sharepods"]["items"][0]["spec"]["containers"] = [secret]
    kubectl.objects["/apis/sharepod.dev/v1alpha1/sharepods"]["items"][0]["metadata"]["annotations"] = {"a": "hunter2"}
    monkeypatch.setattr(Memory, "logs", lambda *_: "a line of the log\n", raising=False)
    page = support(kubectl, "team", tmp_path / "bundle.tar.gz")
    parts = unpacked(tmp_path / "bundle.tar.gz")
    assert not any(b"hunter2" in part for part in parts.values())
    assert b"TOKEN" in parts["sharepods.json"]
    assert parts["agent.log"] == b"a line of the log\n"
    assert "gpubudgets.json" in json.loads(parts["missing.json"])
    assert any(line.startswith("gpubudgets.json is missing") for line in page.before)
    assert page.status == 0, "the cluster has no such part, and no right is missing"


def test_a_bundle_without_an_answer_or_a_place_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Memory, "logs", lambda *_: "", raising=False)
    with pytest.raises(KubectlError, match=r"cannot write .*name another file by --file"):
        support(cluster(), "team", tmp_path / "none" / "bundle.tar.gz")
    silent = Memory(objects={})
    with pytest.raises(KubectlError):
        support(silent, "team", tmp_path / "bundle.tar.gz")
    assert not list(tmp_path.iterdir())


def test_a_bundle_of_an_editor_has_the_own_namespace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def logs(*_: object) -> str:
        raise ForbiddenError("pods is forbidden")

    lists = ("nodes", "events", "pods", "namespaces/sharepod-system")
    denied = [f"/api/v1/{one}" for one in lists]
    denied += [f"/apis/sharepod.dev/v1alpha1/{one}" for one in ("gpu", "sharepods")]
    denied += ["/apis/resource.k8s.io/v1/resourceclaims"]
    kubectl = cluster(denied=tuple(denied))
    line = {"containers": [{"name": "main", "resources": {"limits": {"sharepod.dev/gpu-milli": "400"}}}]}
    pods = [pod("team", line), pod("team", {"containers": [{"name": "web"}]})]
    event = {"involvedObject": {"kind": "Pod"}, "message": "m", "reportingComponent": "default-scheduler"}
    more: dict[str, Json] = {
        "/api/v1/namespaces/team/pods": {"items": pods},
        "/api/v1/namespaces/team/events": {"items": [event, event | {"involvedObject": {"kind": "Deployment"}}]},
        "/apis/resource.k8s.io/v1/namespaces/team/resourceclaims": {"items": [{"metadata": {"name": "c"}}]},
    }
    kubectl.objects.update(more)
    monkeypatch.setattr(Memory, "logs", logs, raising=False)
    page = support(kubectl, "team", tmp_path / "bundle.tar.gz")
    parts = unpacked(tmp_path / "bundle.tar.gz")

    def names(part: str) -> list[str]:
        return [one.get("metadata", {}).get("name") for one in json.loads(parts[f"{part}-of-team.json"])["items"]]

    assert page.status == 3
    assert names("sharepods") == ["train", "large"]
    assert (names("resourceclaims"), names("pods")) == (["c"], ["p"])
    assert [one["message"] for one in json.loads(parts["events-of-team.json"])["items"]] == ["m"]
    assert {"nodes.json", "sharepods.json", "agent.log"} <= json.loads(parts["missing.json"]).keys()


def test_only_listed_fields_of_a_pod_stay() -> None:
    secret = "hunter2"
    probe = {"httpGet": {"path": f"/?token={secret}"}}
    container = {
        "name": "main", "image": "i",
        "env": [{"name": "A", "value": secret}, {"name": "B", "valueFrom": {"k": secret}}],
        "command": [secret], "args": [secret], "livenessProbe": probe, "lifecycle": {"preStop": probe},
        "envFrom": [{"prefix": secret}], "resources": {"limits": {"sharepod.dev/gpu-milli": "400"}},
    }  # fmt: skip
    terminated = {"reason": "Error", "exitCode": 1, "message": secret}
    terms = [{"key": "sharepod.dev/pool", "operator": "In", "values": ["dedicated"]}]
    terms += [{"key": "own", "operator": "In", "values": [secret]}]
    affinity = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [{"matchExpressions": terms}]}}
    item = {
        "metadata": {
            "name": "p",
            "labels": {"own": secret, "sharepod.dev/tenant": "line", "app.kubernetes.io/name": secret},
            "annotations": {"own": secret, "sharepod.dev/gpu-request": "0.2", "kubeshare/gpu_request": "0.3"},
        },
        "spec": {
            "containers": [container],
            "hostAliases": [{"hostnames": [secret]}],
            "nodeSelector": {"own": secret, "kubernetes.io/arch": "amd64"},
            "affinity": {"nodeAffinity": affinity, "podAffinity": {"x": secret}},
            "volumes": [
                {"name": "v", "csi": {"driver": "d", "volumeAttributes": {"x": secret}}, "nfs": {"path": secret}}
            ],
            "fieldOfALaterKubernetes": secret,
        },
        "status": {
            "phase": "Running",
            "containerStatuses": [{"name": "main", "lastState": {"terminated": terminated}}],
        },
    }
    text = json.dumps(PODS({"kind": "PodList", "items": [item]}))
    assert secret not in text
    kept = (
        "main",
        '"A"',
        '"B"',
        '"400"',
        "line",
        '"0.2"',
        '"0.3"',
        "amd64",
        "dedicated",
        "Running",
        '"Error"',
        "livenessProbe",
    )
    assert [word for word in kept if word not in text] == []


def test_claims_keep_the_parameters_of_sharepods_drivers_only() -> None:
    def config(driver: str) -> Json:
        return {"requests": ["r"], "opaque": {"driver": driver, "parameters": {"x": f"of {driver}"}}}

    drivers = ("gpu.sharepod.dev", "net.example.com")
    configs = [config(driver) for driver in drivers]
    devices = [{"driver": driver, "pool": "n", "device": "d", "data": {"x": f"of {driver}"}} for driver in drivers]
    allocation = {"devices": {"results": [{"pool": "n"}], "config": configs}}
    spec = {"devices": {"requests": [{"name": "r"}], "config": configs}}
    text = json.dumps(CLAIMS({"items": [{"spec": spec, "status": {"allocation": allocation, "devices": devices}}]}))
    assert (text.count("of gpu.sharepod.dev"), text.count("of net.example.com")) == (3, 0)
    assert text.count('"net.example.com"') == 3, "the driver stays"


def test_events_of_the_kubelet_lose_their_message_which_quotes_probes() -> None:
    def message(reporter: str) -> str:
        found: str = EVENTS({"items": [{"reportingComponent": reporter, "message": "m"}]})["items"][0]["message"]
        return found

    reporters = ("sharepod.dev/operator", "default-scheduler", "kubelet", "")
    assert [message(reporter) for reporter in reporters] == ["m", "m", REDACTED, REDACTED]


def test_node_labels_of_known_domains_stay() -> None:
    labels = {"sharepod.dev/pool": "dedicated", "topology.kubernetes.io/zone": "z", "own": "x"}
    (item,) = NODES({"items": [{"metadata": {"labels": labels}, "status": {"capacity": {"cpu": "1"}}}]})["items"]
    assert item["metadata"]["labels"] == labels | {"own": REDACTED}
    assert item["status"] == {"capacity": {"cpu": "1"}}
