"""Parts of manifests/ for platforms: constraints of OpenShift, labels for SELinux, profiles of volumes.

OpenShift's kinds cannot be applied here. Their structure is compared with `SCC_FIELDS`, which was copied from
openshift/api.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from sharepod.agent.settings import AgentSettings
from sharepod.api.claims.claims import is_ours
from sharepod.api.claims.self_test_claim import request_of_self_test
from sharepod.api.objects import SELF_TEST_CLAIM, SELF_TEST_CLASS
from sharepod.api.pods.pod import PodSettings, build_pod

MANIFESTS = Path(__file__).resolve().parents[3] / "manifests"
CHOICE: dict[str, type] = {"type": str}
"""For each field of a strategy that the manifests use: its type."""
SCC_FIELDS: dict[str, tuple[type | dict[str, type], bool]] = {
    "allowHostDirVolumePlugin": (bool, True),
    "allowHostIPC": (bool, True),
    "allowHostNetwork": (bool, True),
    "allowHostPID": (bool, True),
    "allowHostPorts": (bool, True),
    "allowPrivilegeEscalation": (bool, False),
    "allowPrivilegedContainer": (bool, True),
    "allowedCapabilities": (list, True),
    "defaultAddCapabilities": (list, True),
    "fsGroup": (CHOICE, False),
    "groups": (list, False),
    "priority": (int, True),
    "readOnlyRootFilesystem": (bool, True),
    "requiredDropCapabilities": (list, True),
    "runAsUser": (CHOICE, False),
    "seLinuxContext": (CHOICE, False),
    "seccompProfiles": (list, False),
    "supplementalGroups": (CHOICE, False),
    "users": (list, False),
    "volumes": (list, True),
}
"""For each field of SecurityContextConstraints (security.openshift.io/v1): its type, and whether the field is
required."""
NULLABLE = {"allowedCapabilities", "defaultAddCapabilities", "priority", "requiredDropCapabilities"}
"""Required fields that may be null."""
RESTRICTED_VOLUMES = {
    "configMap",
    "csi",
    "downwardAPI",
    "emptyDir",
    "ephemeral",
    "persistentVolumeClaim",
    "projected",
    "secret",
}
"""Volumes of OpenShift's SecurityContextConstraints `restricted-v2`."""


def document(path: str) -> dict[str, Any]:
    """Return the only document of a file of manifests/."""
    (found,) = yaml.safe_load_all((MANIFESTS / path).read_text())
    assert isinstance(found, dict)
    return found


def pod_spec(path: str) -> dict[str, Any]:
    spec: dict[str, Any] = document(path)["spec"]["template"]["spec"]
    return spec


def volume_kinds(spec: dict[str, Any]) -> set[str]:
    """Return the kinds of a Pod's volumes, as SecurityContextConstraints name them."""
    return {kind for volume in spec["volumes"] for kind in volume if kind != "name"}


def test_a_label_allows_the_volumes_in_restricted_namespaces_of_openshift() -> None:
    labels = document("csidriver.yaml")["metadata"]["labels"]
    assert labels == {"security.openshift.io/csi-ephemeral-volume-profile": "restricted"}


def test_the_constraints_have_the_fields_that_openshift_knows() -> None:
    constraints = document("openshift/scc.yaml")
    assert (constraints.pop("apiVersion"), constraints.pop("kind")) == (
        "security.openshift.io/v1",
        "SecurityContextConstraints",
    )
    assert set(constraints.pop("metadata")) == {"name", "annotations"}, "a kind of the cluster, without namespace"
    assert set(constraints) <= set(SCC_FIELDS)
    assert {name for name, (_, needed) in SCC_FIELDS.items() if needed} <= set(constraints)
    for name, value in constraints.items():
        kind, _ = SCC_FIELDS[name]
        if value is None:
            assert name in NULLABLE
        elif isinstance(kind, dict):
            assert {part: type(one) for part, one in value.items()} == kind, name
        else:
            assert type(value) is kind, name


@pytest.mark.promise("install-openshift-constraints")
def test_the_constraints_allow_what_the_agent_asks_for_and_nothing_else() -> None:
    constraints, spec = document("openshift/scc.yaml"), pod_spec("agent/daemonset.yaml")
    containers = [*spec["containers"], *pod_spec("selinux/agent.yaml")["initContainers"]]
    secured = [container["securityContext"] for container in containers]
    assert constraints["allowPrivilegedContainer"] is all(each["privileged"] for each in secured)
    assert constraints["allowPrivilegeEscalation"] is True, "a privileged container has it"
    assert constraints["readOnlyRootFilesystem"] is all(each["readOnlyRootFilesystem"] for each in secured)
    for field, asked in (("allowHostPID", "hostPID"), ("allowHostIPC", "hostIPC"), ("allowHostNetwork", "hostNetwork")):
        assert constraints[field] is spec.get(asked, False), field
    assert constraints["allowHostPorts"] is any(
        "hostPort" in port for each in containers for port in each.get("ports", [])
    )
    assert set(constraints["volumes"]) == volume_kinds(spec) | {"projected"}, "and the ServiceAccount's token"
    assert constraints["allowHostDirVolumePlugin"] is ("hostPath" in constraints["volumes"])
    assert constraints["users"] == constraints["groups"] == [], "by a Role, for the agent alone"


def test_the_agents_account_alone_may_use_the_constraints() -> None:
    role, binding = yaml.safe_load_all((MANIFESTS / "openshift" / "rbac.yaml").read_text())
    (rule,) = role["rules"]
    assert rule == {
        "apiGroups": ["security.openshift.io"],
        "resources": ["securitycontextconstraints"],
        "resourceNames": [document("openshift/scc.yaml")["metadata"]["name"]],
        "verbs": ["use"],
    }
    account = pod_spec("agent/daemonset.yaml")["serviceAccountName"]
    namespace = document("namespace.yaml")["metadata"]["name"]
    assert binding["subjects"] == [{"kind": "ServiceAccount", "name": account, "namespace": namespace}]
    assert binding["roleRef"]["name"] == role["metadata"]["name"]
    assert role["metadata"]["namespace"] == binding["metadata"]["namespace"] == namespace


@pytest.mark.promise("security-operator-elsewhere")
def test_the_operator_prefers_nodes_without_an_agent() -> None:
    agents = pod_spec("agent/daemonset.yaml")["affinity"]["nodeAffinity"][
        "requiredDuringSchedulingIgnoredDuringExecution"
    ]
    (label,) = [each["key"] for term in agents["nodeSelectorTerms"] for each in term["matchExpressions"]]
    (preferred,) = pod_spec("operator/deployment.yaml")["affinity"]["nodeAffinity"][
        "preferredDuringSchedulingIgnoredDuringExecution"
    ]
    assert preferred["preference"]["matchExpressions"] == [{"key": label, "operator": "DoesNotExist"}]


@pytest.mark.promise("install-operator-any-user")
def test_the_operator_runs_as_any_user_but_root() -> None:
    spec = pod_spec("operator/deployment.yaml")
    (container,) = spec["containers"]
    assert spec["securityContext"] == {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    assert container["securityContext"]["allowPrivilegeEscalation"] is False
    assert volume_kinds(spec) <= RESTRICTED_VOLUMES


def test_a_tenants_volume_is_read_only_so_that_the_kubelet_does_not_relabel_it() -> None:
    sharepod = {
        "metadata": {"name": "one", "namespace": "team", "uid": "u"},
        "spec": {"gpu": {"request": 0.5, "memory": "1Gi"}, "containers": [{"name": "c", "image": "i"}]},
    }
    spec = build_pod(sharepod, PodSettings())["spec"]
    assert [volume["csi"]["readOnly"] for volume in spec["volumes"] if "csi" in volume] == [True]
    assert volume_kinds(spec) <= RESTRICTED_VOLUMES
    assert "securityContext" not in spec, "user and SELinux level are OpenShift's to choose"


def test_what_is_labelled_for_selinux_is_the_agents_state_directory() -> None:
    (label,) = pod_spec("selinux/agent.yaml")["initContainers"]
    directory = str(AgentSettings().state_dir)
    assert label["command"][-1] == directory
    volumes = {volume["name"]: volume for volume in pod_spec("agent/daemonset.yaml")["volumes"]}
    (mount,) = label["volumeMounts"]
    assert mount["mountPath"] == volumes[mount["name"]]["hostPath"]["path"] == directory
    (agent,) = pod_spec("agent/daemonset.yaml")["containers"]
    assert label["image"] == agent["image"], "one image to pull, and overlays that rename it rename both"


def test_a_component_that_adds_a_container_pins_its_image_as_the_base_does() -> None:
    pinned = document("kustomization.yaml")["images"]
    (image,) = document("selinux/kustomization.yaml")["images"]
    assert image in pinned, "the base's tags do not reach a container that a component adds"


def self_test() -> dict[str, Any]:
    _account, daemonset = yaml.safe_load_all((MANIFESTS / "agent" / "self-test.yaml").read_text())
    spec: dict[str, Any] = daemonset["spec"]["template"]["spec"]
    return spec


@pytest.mark.promise("node-hook-loads")
def test_the_self_test_is_a_container_as_a_tenants() -> None:
    """Its paths, rights and confinement equal a tenant's container's, because they determine whether the hook
    loads."""
    sharepod = {
        "metadata": {"name": "one", "namespace": "team", "uid": "u"},
        "spec": {"gpu": {"request": 0.5, "memory": "1Gi"}, "containers": [{"name": "c", "image": "i"}]},
    }
    (tenant,) = build_pod(sharepod, PodSettings())["spec"]["containers"]
    (tested,), spec = self_test()["containers"], self_test()
    places = [[{**mount, "name": ""} for mount in container["volumeMounts"]] for container in (tenant, tested)]
    assert places[0] == places[1]
    assert not {"hostPID", "hostIPC", "hostNetwork", "runtimeClassName"} & set(spec)
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert tested["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    assert tested["securityContext"]["allowPrivilegeEscalation"] is False
    assert spec["automountServiceAccountToken"] is False
    assert spec["affinity"] == pod_spec("agent/daemonset.yaml")["affinity"]
    (volume,) = spec["volumes"]
    assert volume["hostPath"]["path"] == str(AgentSettings(node_name="n").state_dir / "self-test")


def test_the_self_tests_constraints_on_openshift_allow_the_directory_and_nothing_else() -> None:
    constraints, role, binding = yaml.safe_load_all((MANIFESTS / "openshift" / "self-test.yaml").read_text())
    assert set(constraints) - {"apiVersion", "kind", "metadata"} <= set(SCC_FIELDS)
    assert {name for name, (_, needed) in SCC_FIELDS.items() if needed} <= set(constraints)
    assert set(constraints["volumes"]) == volume_kinds(self_test()) == {"hostPath"}
    granted = {name for name, value in constraints.items() if name.startswith("allow") and value is True}
    assert granted == {"allowHostDirVolumePlugin"}
    assert constraints["seLinuxContext"] == {"type": "MustRunAs"}, "a label of a container, as a tenant's has"
    assert role["rules"][0]["resourceNames"] == [constraints["metadata"]["name"]]
    assert [subject["name"] for subject in binding["subjects"]] == [self_test()["serviceAccountName"]]


@pytest.mark.promise("node-claims-attach")
def test_the_self_test_by_a_claim_is_a_container_as_the_other_and_has_nothing_but_its_claim_and_a_mark() -> None:
    kinds = {
        each["kind"]: each for each in yaml.safe_load_all((MANIFESTS / "claims/self-test/self-test.yaml").read_text())
    }
    plain, spec = self_test(), kinds["DaemonSet"]["spec"]["template"]["spec"]
    (tested,), (other,) = spec["containers"], plain["containers"]
    parts = ("resourceClaims", "containers")
    assert {name: part for name, part in spec.items() if name not in parts} == {
        name: part for name, part in plain.items() if name not in parts
    }
    assert {name: tested[name] for name in ("image", "command", "securityContext")} == {
        name: other[name] for name in ("image", "command", "securityContext")
    }
    assert "env" not in tested
    (mount,) = tested["volumeMounts"]
    assert mount["mountPath"] == "/run/sharepod-self-test"
    (used,), (claim,) = tested["resources"]["claims"], spec["resourceClaims"]
    template, device_class = kinds["ResourceClaimTemplate"], kinds["DeviceClass"]["metadata"]["name"]
    assert used["name"] == claim["name"]
    assert claim["resourceClaimTemplateName"] == template["metadata"]["name"]
    assert kinds["DaemonSet"]["metadata"]["name"] == SELF_TEST_CLAIM
    assert device_class == SELF_TEST_CLASS
    assert request_of_self_test(template["spec"]) == "self-test"
    assert is_ours(template["spec"]) is False, "no tenant's claim"


@pytest.mark.parametrize("path", ["policies/gpus-past-sharepod.yaml", "own-nodes/own-nodes.yaml"])
def test_pods_of_sharepods_own_namespace_are_exempt_by_its_name(path: str) -> None:
    """Helm and other tools create the namespace without the labels of namespace.yaml."""
    _policy, binding = yaml.safe_load_all((MANIFESTS / path).read_text())
    selected = binding["spec"]["matchResources"]["namespaceSelector"]["matchExpressions"]
    exempt = {"key": "kubernetes.io/metadata.name", "operator": "NotIn", "values": ["kube-system", "sharepod-system"]}
    assert exempt in selected
