"""manifests/ and examples/ as users apply them, with the kubectl of the cluster's own version."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from harness.api import Api, Object
from harness.cluster import Cluster
from harness.installation import MANIFESTS, NAMESPACE, await_in_force
from harness.releases import KUBERNETES
from sharepod.agent.settings import AgentSettings
from sharepod.api.pods.pod import PodSettings, build_pod
from sharepod.controller.settings import OperatorSettings

ROOT = MANIFESTS.parent
EXAMPLES = sorted((ROOT / "examples").glob("*.yaml"))


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Yield a control plane on which `kubectl apply -k manifests/` was run twice, because a repeated installation must
    change nothing."""
    with Cluster(scheduler=False) as cluster:
        for _ in range(2):
            cluster.kubectl("apply", "--server-side", "-k", str(MANIFESTS), timeout=60)
        await_in_force(cluster)
        cluster.await_service_account("default", "default")
        cluster.api.create("/apis/node.k8s.io/v1/runtimeclasses", RUNTIME_CLASS)
        yield cluster


RUNTIME_CLASS: Object = {
    "apiVersion": "node.k8s.io/v1",
    "kind": "RuntimeClass",
    "metadata": {"name": "nvidia"},
    "handler": "nvidia",
}


@pytest.fixture(scope="module")
def operator(installed: Cluster) -> Api:
    """Return a client with the operator's own ServiceAccount."""
    return installed.api_for(installed.service_account_token(NAMESPACE, "sharepod-operator"))


def rendered() -> list[dict[str, Any]]:
    """Return every document under manifests/ that is an object of Kubernetes."""
    paths = [path for path in MANIFESTS.rglob("*.yaml") if path.name not in ("kustomization.yaml", "settings.yaml")]
    found = [document for path in paths for document in yaml.safe_load_all(path.read_text())]
    return [document for document in found if isinstance(document, dict)]  # a list is a JSON patch, not an object


def documents(path: Path) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(path.read_text()))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_applies_and_its_pod_is_one_that_the_api_server_takes(
    installed: Cluster, operator: Api, path: Path
) -> None:
    installed.kubectl("apply", "--server-side", "-f", str(path))
    for document in documents(path):
        metadata = document["metadata"]
        if document["kind"] != "SharePod":
            installed.await_service_account(metadata["name"], "default")
            continue
        namespace = metadata.get("namespace", "default")
        stored = installed.api.get(f"/apis/sharepod.dev/v1alpha1/namespaces/{namespace}/sharepods/{metadata['name']}")
        pod = build_pod(stored, PodSettings())
        made = operator.create(f"/api/v1/namespaces/{namespace}/pods", pod, fieldValidation="Strict", dryRun="All")
        for container in [*made["spec"]["containers"], *made["spec"].get("initContainers", [])]:
            from_annotation = container["env"][0]["valueFrom"]["fieldRef"]["fieldPath"]
            assert container["env"][0]["name"] == "NVIDIA_VISIBLE_DEVICES"
            assert from_annotation == "metadata.annotations['sharepod.dev/gpus']"
        assert made["metadata"]["ownerReferences"][0]["controller"] is True


def test_every_example_says_first_what_it_is_for() -> None:
    assert len(EXAMPLES) >= 15
    for path in EXAMPLES:
        assert path.read_text().startswith("# "), path.name


def test_generated_files_are_what_models_and_this_api_server_make(installed: Cluster, tmp_path: Path) -> None:
    if (version := installed.api.get("/version")["gitVersion"]) != f"v{KUBERNETES}":
        pytest.skip(f"the API server is {version}; the files are made with v{KUBERNETES}")
    openapi = tmp_path / "v1.json"
    openapi.write_text(json.dumps(installed.api.get("/openapi/v3/api/v1")))
    command = [sys.executable, str(ROOT / "crds" / "generate.py"), "--check", "--openapi", str(openapi)]
    check = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert check.returncode == 0, check.stderr


def test_the_operators_pod_runs_where_pod_security_is_restricted(installed: Cluster) -> None:
    installed.namespace("restricted-check", labels={"pod-security.kubernetes.io/enforce": "restricted"})
    deployment = installed.api.get(f"/apis/apps/v1/namespaces/{NAMESPACE}/deployments/sharepod-operator")
    template = deployment["spec"]["template"]
    spec = {**template["spec"], "serviceAccountName": "default"}
    spec.pop("priorityClassName")
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "check"}, "spec": spec}
    installed.api.create("/api/v1/namespaces/restricted-check/pods", pod, dryRun="All", fieldValidation="Strict")


@pytest.mark.promise("install-other-nodes")
def test_the_agent_runs_on_labelled_nodes_only_and_without_a_cpu_limit(installed: Cluster) -> None:
    daemonset = installed.api.get(f"/apis/apps/v1/namespaces/{NAMESPACE}/daemonsets/sharepod-agent")
    spec = daemonset["spec"]["template"]["spec"]
    required = spec["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    assert required["nodeSelectorTerms"] == [{"matchExpressions": [{"key": "sharepod.dev/pool", "operator": "Exists"}]}]
    (container,) = spec["containers"]
    assert "cpu" not in container["resources"]["limits"]
    mounts = {mount["name"]: mount for mount in container["volumeMounts"]}
    paths = {volume["name"]: volume["hostPath"]["path"] for volume in spec["volumes"] if "hostPath" in volume}
    assert {name: mounts[name]["mountPath"] for name in paths} == paths, (
        "a bind mount is found at the same path on the node"
    )
    assert mounts["pods"]["mountPropagation"] == "Bidirectional"


def test_no_role_has_a_wildcard_or_reaches_secrets() -> None:
    roles = [document for document in rendered() if document["kind"] in ("Role", "ClusterRole")]
    assert roles
    for role in roles:
        for rule in role["rules"]:
            for part in ("apiGroups", "resources", "verbs"):
                assert "*" not in rule.get(part, ()), role["metadata"]["name"]
            if (role["metadata"]["name"], role["kind"]) == ("sharepod-webhook", "Role"):
                assert rule["resourceNames"] == ["sharepod-webhook"], "one Secret, whose name is known"
                assert rule["verbs"] == ["get", "patch"]
                continue
            if rule.get("resourceNames") == ["sharepod-free"] and len(rule["verbs"]) == 1:
                continue  # skip the ConfigMap of free shares, which the operator patches and users read
            assert not {"secrets", "configmaps", "serviceaccounts", "roles", "clusterroles"} & set(
                rule.get("resources", ())
            )


ALLOWED = [
    ("sharepod-operator", "create", "/api/v1/namespaces/default/pods"),
    ("sharepod-operator", "delete", "/api/v1/namespaces/default/pods"),
    ("sharepod-operator", "list", "/api/v1/nodes"),
    ("sharepod-operator", "patch", "/apis/sharepod.dev/v1alpha1/gpunodes"),
    ("sharepod-operator", "patch", "/apis/sharepod.dev/v1alpha1/gpunodes/status"),
    ("sharepod-operator", "patch", "/apis/sharepod.dev/v1alpha1/namespaces/default/sharepods/status"),
    ("sharepod-operator", "create", "/apis/sharepod.dev/v1alpha1/gpustatements"),
    ("sharepod-operator", "patch", "/apis/sharepod.dev/v1alpha1/gpustatements/status"),
    ("sharepod-operator", "create", "/apis/events.k8s.io/v1/namespaces/default/events"),
    ("sharepod-operator", "create", "/apis/resource.k8s.io/v1/namespaces/default/resourceclaims"),
    ("sharepod-operator", "patch", "/apis/resource.k8s.io/v1/namespaces/default/resourceclaims"),
    ("sharepod-operator", "patch", "/apis/resource.k8s.io/v1/namespaces/default/resourceclaims/binding"),
    ("sharepod-operator", "create", "/apis/resource.k8s.io/v1/namespaces/default/resourceclaimtemplates"),
    ("sharepod-operator", "patch", "/api/v1/nodes/status"),
    ("sharepod-operator", "list", "/api/v1/namespaces/default/resourcequotas"),
    ("sharepod-operator", "create", f"/apis/coordination.k8s.io/v1/namespaces/{NAMESPACE}/leases"),
    ("sharepod-agent", "watch", "/apis/sharepod.dev/v1alpha1/gpunodes"),
    ("sharepod-agent", "patch", "/apis/sharepod.dev/v1alpha1/gpunodes/status"),
    ("sharepod-agent", "create", "/apis/resource.k8s.io/v1/resourceslices"),
    ("sharepod-agent", "delete", "/apis/resource.k8s.io/v1/resourceslices"),
    ("sharepod-agent", "patch", f"/apis/coordination.k8s.io/v1/namespaces/{NAMESPACE}/leases"),
]
REFUSED = [
    ("sharepod-operator", "get", "/api/v1/namespaces/default/secrets"),
    ("sharepod-operator", "patch", "/api/v1/nodes"),
    ("sharepod-operator", "patch", "/apis/sharepod.dev/v1alpha1/namespaces/default/sharepods"),
    ("sharepod-operator", "create", "/apis/sharepod.dev/v1alpha1/namespaces/default/sharepods"),
    ("sharepod-operator", "update", f"/apis/coordination.k8s.io/v1/namespaces/{NAMESPACE}/leases"),
    ("sharepod-operator", "create", "/apis/coordination.k8s.io/v1/namespaces/kube-system/leases"),
    ("sharepod-operator", "delete", "/apis/resource.k8s.io/v1/namespaces/default/resourceclaims"),
    ("sharepod-operator", "create", "/apis/resource.k8s.io/v1/resourceslices"),
    ("sharepod-operator", "patch", "/apis/resource.k8s.io/v1/namespaces/default/resourceclaimtemplates"),
    ("sharepod-operator", "delete", "/apis/sharepod.dev/v1alpha1/gpustatements"),
    ("sharepod-agent", "get", "/api/v1/namespaces/default/pods"),
    ("sharepod-agent", "list", "/api/v1/namespaces/default/pods"),
    ("sharepod-agent", "patch", "/apis/sharepod.dev/v1alpha1/gpunodes"),
    ("sharepod-agent", "create", "/apis/sharepod.dev/v1alpha1/gpunodes"),
    ("sharepod-agent", "get", "/apis/sharepod.dev/v1alpha1/namespaces/default/sharepods"),
    ("sharepod-agent", "get", "/apis/resource.k8s.io/v1/namespaces/default/resourceclaims"),
    ("sharepod-agent", "update", "/apis/coordination.k8s.io/v1/namespaces/kube-system/leases"),
]


@pytest.mark.parametrize(
    ("account", "verb", "path", "allowed"),
    [(*asked, True) for asked in ALLOWED] + [(*asked, False) for asked in REFUSED],
)
def test_an_account_may_do_its_work_and_no_more(
    installed: Cluster, account: str, verb: str, path: str, allowed: bool
) -> None:
    match = re.fullmatch(r"/apis?(?:/(?P<group>[^/]+\.[^/]+))?/v1\w*(?:/namespaces/(?P<ns>[^/]+))?/(?P<what>.+)", path)
    assert match is not None
    resource, _, subresource = match["what"].partition("/")
    review = installed.api.create(
        "/apis/authorization.k8s.io/v1/subjectaccessreviews",
        {
            "apiVersion": "authorization.k8s.io/v1",
            "kind": "SubjectAccessReview",
            "spec": {
                "user": f"system:serviceaccount:{NAMESPACE}:{account}",
                "groups": ["system:serviceaccounts", "system:authenticated"],
                "resourceAttributes": {
                    "namespace": match["ns"] or "",
                    "group": match["group"] or "",
                    "resource": resource,
                    "subresource": subresource,
                    "verb": verb,
                },
            },
        },
    )
    assert review["status"]["allowed"] is allowed


def test_the_settings_of_manifests_are_settings() -> None:
    operator = OperatorSettings(**yaml.safe_load((MANIFESTS / "operator" / "settings.yaml").read_text()))
    assert operator.runtime_class == PodSettings().runtime_class
    own_nodes = {"key": "sharepod.dev/only", "operator": "Exists"}
    tolerations = tuple(toleration.manifest() for toleration in operator.tolerations)
    assert tolerations == (*PodSettings().tolerations, own_nodes)
    agent = AgentSettings(**yaml.safe_load((MANIFESTS / "agent" / "settings.yaml").read_text()))
    assert str(agent.state_dir) == "/var/lib/sharepod"


def test_probes_ask_the_ports_that_the_programs_listen_on() -> None:
    found = {
        (container["name"], port["name"]): port["containerPort"]
        for document in rendered()
        if document["kind"] in ("Deployment", "DaemonSet")
        # a component's patch may contain no containers
        for container in document["spec"]["template"]["spec"].get("containers", [])
        for port in container.get("ports", [])
    }
    (patch,) = documents(MANIFESTS / "line-webhook" / "operator.yaml")
    (environment,) = (each["env"] for each in patch["spec"]["template"]["spec"]["containers"])
    variables = {each["name"]: each["value"] for each in environment}
    assert found == {
        ("operator", "webhook"): int(variables["SHAREPOD_WEBHOOK_PORT"]),
        ("operator", "health"): OperatorSettings.model_fields["health_port"].default,
        ("operator", "metrics"): OperatorSettings.model_fields["metrics_port"].default,
        ("agent", "metrics"): AgentSettings.model_fields["http_port"].default,
        ("agent", "health"): AgentSettings().listens_for_probes(),
    }


@pytest.mark.promise("install-settings-restart")
def test_an_overlay_sets_images_and_settings_and_the_workloads_follow(installed: Cluster, tmp_path: Path) -> None:
    overlay: dict[str, Any] = {
        "resources": [os.path.relpath(MANIFESTS, tmp_path)],
        "images": [{"name": "registry.invalid/sharepod/operator", "newName": "registry.example.com/sharepod/operator"}],
        "configMapGenerator": [
            {
                "name": "sharepod-operator-settings",
                "namespace": NAMESPACE,
                "behavior": "replace",
                "files": ["settings.yaml"],
            }
        ],
    }
    (tmp_path / "kustomization.yaml").write_text(yaml.safe_dump(overlay))
    (tmp_path / "settings.yaml").write_text("runtime_class: null\n")
    found = list(yaml.safe_load_all(installed.kubectl("kustomize", str(tmp_path)).stdout))
    (deployment,) = [document for document in found if document["kind"] == "Deployment"]
    spec = deployment["spec"]["template"]["spec"]
    assert spec["containers"][0]["image"] == "registry.example.com/sharepod/operator:0.1.0"
    settings = {
        document["metadata"]["name"]: document["data"]
        for document in found
        if document["kind"] == "ConfigMap" and "data" in document
    }
    mounted = next(volume["configMap"]["name"] for volume in spec["volumes"] if volume["name"] == "settings")
    assert settings[mounted] == {"settings.yaml": "runtime_class: null\n"}
