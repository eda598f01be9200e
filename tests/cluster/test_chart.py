"""The Helm chart on a real API server: install, upgrade, adopt from kustomize, roll back, uninstall.

The older chart of these tests is this chart with another version, one field less in a CRD, one operator, and one
additional object.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from chart.__main__ import find_kubectl, write_chart, write_install
from harness.api import Object
from harness.cluster import Cluster, suppress_reason
from harness.helm import NO_HELM, Helm, find_helm
from harness.installation import MANIFESTS, NAMESPACE, SHAREPODS, await_in_force

DEFINITIONS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
FIELD = "latency"
"""Field of spec.gpu that the older chart lacks."""
LEFT_BEHIND = "sharepod-of-before"
SHAREPOD: Object = {
    "apiVersion": "sharepod.dev/v1alpha1",
    "kind": "SharePod",
    "metadata": {"name": "kept"},
    "spec": {"gpu": {"request": 0.4, "memory": "4Gi"}, "containers": [{"name": "main", "image": "x"}]},
}
EVERYTHING: dict[str, Object] = {
    "policy": {"plainPods": "Policy", "claims": {"enabled": True, "selfTest": True}, "ownNodes": "Enforce"},
    "webhook": {"plainPods": "Webhook", "claims": {"enabled": True}, "ownNodes": "Warn", "selinux": True},
    "volume": {"plainPods": "Volume"},
}
WEBHOOK = "/apis/admissionregistration.k8s.io/v1/mutatingwebhookconfigurations/sharepod-plain-pods"
SECRET = f"/api/v1/namespaces/{NAMESPACE}/secrets/sharepod-webhook"
RELEASE = ("sharepod", "-n", NAMESPACE)

pytestmark = pytest.mark.skipif(find_helm() is None, reason=NO_HELM)


@pytest.fixture(scope="module")
def charts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with two charts: `sharepod`, of this tree, and `before`, the older one."""
    into = tmp_path_factory.mktemp("dist")
    write_chart(into, find_kubectl(), {})
    shutil.copytree(into / "sharepod", into / "before")
    facts = into / "before" / "Chart.yaml"
    facts.write_text(re.sub(r"(?m)^(version|appVersion): .*", r"\1: 0.0.9", facts.read_text()))
    templates = into / "before" / "templates"
    path = templates / "customresourcedefinition-sharepods.sharepod.dev.yaml"
    definition = yaml.safe_load(path.read_text().replace('{{ "{{" }}', "{{"))
    for version in definition["spec"]["versions"]:
        gpu = version["schema"]["openAPIV3Schema"]["properties"]["spec"]["properties"]["gpu"]
        del gpu["properties"][FIELD]
        gpu["x-kubernetes-validations"] = [
            rule for rule in gpu.get("x-kubernetes-validations", []) if FIELD not in json.dumps(rule)
        ]
    path.write_text(yaml.safe_dump(definition).replace("{{", '{{ "{{" }}'))
    more = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": LEFT_BEHIND, "namespace": NAMESPACE}}
    (templates / "more.yaml").write_text(yaml.safe_dump(more))
    return into


@pytest.fixture
def bare(cluster_factory: Callable[..., Cluster]) -> Cluster:
    return cluster_factory(scheduler=False)


@pytest.fixture
def helm(bare: Cluster, tmp_path: Path) -> Helm:
    program = find_helm()
    assert program is not None
    return Helm(program, tmp_path, bare.kubeconfig)


def fields_of_gpu(cluster: Cluster) -> set[str]:
    """Return the fields of spec.gpu that the API server knows."""
    definition = cluster.api.get(f"{DEFINITIONS}/sharepods.sharepod.dev")
    (version,) = definition["spec"]["versions"]
    spec = version["schema"]["openAPIV3Schema"]["properties"]["spec"]
    return set(spec["properties"]["gpu"]["properties"])


def operators(cluster: Cluster) -> Object:
    found: Object = cluster.api.get(f"/apis/apps/v1/namespaces/{NAMESPACE}/deployments/sharepod-operator")
    return found


def exists(cluster: Cluster, path: str) -> bool:
    with suppress_reason("NotFound"):
        cluster.api.get(path)
        return True
    return False


def uids(cluster: Cluster) -> dict[str, str]:
    """Return the uids of a SharePod, its CRD and the workloads."""
    paths = {
        "sharepod": f"{SHAREPODS}/kept",
        "definition": f"{DEFINITIONS}/sharepods.sharepod.dev",
        "operator": f"/apis/apps/v1/namespaces/{NAMESPACE}/deployments/sharepod-operator",
        "agent": f"/apis/apps/v1/namespaces/{NAMESPACE}/daemonsets/sharepod-agent",
    }
    return {name: cluster.api.get(path)["metadata"]["uid"] for name, path in paths.items()}


@pytest.mark.promise("install-chart-life")
def test_a_release_is_upgraded_with_its_definitions_rolled_back_uninstalled_and_installed_again(
    bare: Cluster, helm: Helm, charts: Path
) -> None:
    helm.run("install", *RELEASE, "--create-namespace", charts / "before", "--set", "operator.replicas=1")
    await_in_force(bare)
    bare.api.create(SHAREPODS, SHAREPOD)
    assert FIELD not in fields_of_gpu(bare)
    before = uids(bare)
    left_behind = f"/api/v1/namespaces/{NAMESPACE}/configmaps/{LEFT_BEHIND}"
    assert exists(bare, left_behind)

    helm.run("upgrade", *RELEASE, charts / "sharepod", "--reset-values")
    assert FIELD in fields_of_gpu(bare), "definitions are upgraded"
    assert not exists(bare, left_behind), "what the new chart has not is deleted"
    assert uids(bare) == before, "nothing is deleted and made again"
    assert operators(bare)["spec"]["replicas"] == 2

    helm.run("rollback", *RELEASE, "1")
    assert FIELD not in fields_of_gpu(bare)
    assert operators(bare)["spec"]["replicas"] == 1
    assert uids(bare) == before

    helm.run("uninstall", *RELEASE)
    assert bare.api.get(f"{SHAREPODS}/kept")["metadata"]["uid"] == before["sharepod"], "no SharePod is lost"
    remaining = bare.kubectl("get", "deployments,daemonsets", "-n", NAMESPACE, "-o", "name").stdout
    policies = bare.kubectl("get", "validatingadmissionpolicies,clusterroles", "-o", "name").stdout
    assert remaining == ""
    assert "sharepod" not in policies

    helm.run("install", *RELEASE, charts / "sharepod")
    assert uids(bare)["sharepod"] == before["sharepod"]


@pytest.mark.promise("install-chart-adopts")
def test_a_release_takes_over_what_kustomize_has_applied(bare: Cluster, helm: Helm, charts: Path) -> None:
    bare.kubectl("apply", "--server-side", "-k", str(MANIFESTS), timeout=60)
    await_in_force(bare)
    bare.api.create(SHAREPODS, SHAREPOD)
    before = uids(bare)
    applied = bare.kubectl("get", "-k", str(MANIFESTS), "-o", "json", "--show-managed-fields", timeout=60).stdout
    # the same change as by the `sed` of docs/install.md
    handed_over = applied.replace('"manager": "kubectl"', '"manager": "helm"')
    bare.kubectl("replace", "-f", "-", input=handed_over, timeout=60)
    helm.run("install", *RELEASE, "--take-ownership", charts / "sharepod")
    assert uids(bare) == before
    assert "kubectl" not in {each["manager"] for each in operators(bare)["metadata"]["managedFields"]}
    helm.run("upgrade", *RELEASE, charts / "sharepod", "--set", "operator.replicas=1")
    assert operators(bare)["spec"]["replicas"] == 1
    helm.run("uninstall", *RELEASE)
    bare.kubectl("apply", "--server-side", "-k", str(MANIFESTS), timeout=60)
    assert uids(bare)["sharepod"] == before["sharepod"], "kustomize installs over the definitions that Helm keeps"


def test_an_upgrade_keeps_the_certificates_that_the_operator_has_written(
    bare: Cluster, helm: Helm, charts: Path
) -> None:
    values = json.dumps(EVERYTHING["volume"])
    helm.run("install", *RELEASE, "--create-namespace", charts / "sharepod", "-f", "-", input=values)
    configuration = bare.api.get(WEBHOOK)
    (webhook,) = configuration["webhooks"]
    webhook["clientConfig"]["caBundle"] = "Y2VydGlmaWNhdGU="
    bare.api.patch(WEBHOOK, {"webhooks": [webhook]})
    bare.api.patch(SECRET, {"data": {"tls.key": "a2V5"}})
    helm.run("upgrade", *RELEASE, charts / "sharepod", "--set", "operator.replicas=1", "--reuse-values")
    assert bare.api.get(WEBHOOK)["webhooks"][0]["clientConfig"]["caBundle"] == "Y2VydGlmaWNhdGU="
    assert bare.api.get(SECRET)["data"] == {"tls.key": "a2V5"}


def test_agents_are_admitted_in_a_namespace_that_helm_has_created(bare: Cluster, helm: Helm, charts: Path) -> None:
    helm.run("install", *RELEASE, "--create-namespace", charts / "sharepod", "--set", "ownNodes=Enforce")
    await_in_force(bare)
    bare.runtime_class()
    assert "sharepod.dev/system" not in bare.api.get(f"/api/v1/namespaces/{NAMESPACE}")["metadata"]["labels"]
    daemonset = bare.api.get(f"/apis/apps/v1/namespaces/{NAMESPACE}/daemonsets/sharepod-agent")
    bare.await_service_account(NAMESPACE, "sharepod-agent")
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "probe"},
        "spec": daemonset["spec"]["template"]["spec"],
    }
    controller = bare.api_for(bare.service_account_token("kube-system", "daemon-set-controller"))
    controller.create(f"/api/v1/namespaces/{NAMESPACE}/pods", pod, dryRun="All")


@pytest.mark.parametrize("name", EVERYTHING)
def test_a_real_api_server_takes_what_values_render_to(bare: Cluster, helm: Helm, charts: Path, name: str) -> None:
    bare.namespace(NAMESPACE)
    values = json.dumps(EVERYTHING[name])
    text = helm.run("template", *RELEASE, charts / "sharepod", "-f", "-", input=values).stdout
    dry_run(bare, text)


def test_a_real_api_server_takes_install_yaml(bare: Cluster, tmp_path: Path) -> None:
    bare.namespace(NAMESPACE)
    dry_run(bare, write_install(tmp_path, find_kubectl(), "registry.example.com/sharepod", {}).read_text())


def dry_run(cluster: Cluster, text: str) -> None:
    """Let the API server check the objects as if they were applied. Unknown fields are errors."""
    argv = ("apply", "--server-side", "--dry-run=server", "--validate=strict", "-f", "-")
    done: Any = cluster.kubectl(*argv, input=text, timeout=60)
    assert len(done.stdout.splitlines()) == sum(1 for one in yaml.safe_load_all(text) if one)
