"""The Helm chart equals the kustomize folders: the same objects for the same choices, and the same defaults."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from chart.__main__ import CHART, ROOT, SET_ELSEWHERE, find_kubectl, settings_schema, write_chart
from chart.overlays import BASE, MANIFESTS, Overlay, OverlayError, render
from chart.templates import identity, templates
from chart.values import FOLDERS, as_template, plain_name
from harness.errors import CommandError
from harness.helm import NO_HELM, Helm, find_helm

Object = dict[str, Any]
ON_BASE = (".",)
CASES: dict[str, tuple[Object, Overlay]] = {
    "defaults": ({}, BASE),
    "webhook": (
        {"plainPods": "Webhook", "claims": {"enabled": True}},
        Overlay("", folders=(".", "claims"), components=("plain-webhook",)),
    ),
    "volume": ({"plainPods": "Volume"}, Overlay("", folders=ON_BASE, components=("plain-volume",))),
    "policy": (
        {"plainPods": "Policy", "claims": {"enabled": True, "selfTest": True}, "ownNodes": "Warn"},
        Overlay("", folders=(".", "claims", "claims/self-test", "plain", "own-nodes-warn")),
    ),
    "openshift": (
        {"openshift": True, "selinux": True, "ownNodes": "Enforce"},
        Overlay("", folders=(".", "own-nodes"), components=("openshift",)),
    ),
    "selinux": ({"selinux": True}, Overlay("", folders=ON_BASE, components=("selinux",))),
}
VALUES: Object = yaml.safe_load((CHART / "values.yaml").read_text())


@pytest.fixture(scope="module")
def chart(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the chart's folder as `make dist` writes it."""
    into = tmp_path_factory.mktemp("dist")
    try:
        write_chart(into, find_kubectl(), {})
    except OverlayError as error:
        pytest.skip(str(error))
    return into / "sharepod"


@pytest.fixture(scope="module")
def helm(tmp_path_factory: pytest.TempPathFactory) -> Helm:
    if (program := find_helm()) is None:
        pytest.skip(NO_HELM)
    return Helm(program, tmp_path_factory.mktemp("helm"))


def rendered(helm: Helm, chart: Path, values: Object, *, namespace: str = "sharepod-system") -> list[Object]:
    done = helm.run("template", "sharepod", chart, "-n", namespace, "-f", "-", input=json.dumps(values))
    return [one for one in yaml.safe_load_all(done.stdout) if one]


def comparable(objects: Iterable[Object]) -> dict[tuple[str, str, str], Object]:
    """Return objects by identity, without the chart's additions: the policy `keep` and the checksum of settings."""
    found: dict[tuple[str, str, str], Object] = {}
    for content in objects:
        places = [content["metadata"]]
        if content["kind"] in ("Deployment", "DaemonSet"):
            places.append(content["spec"]["template"]["metadata"])
            for volume in content["spec"]["template"]["spec"].get("volumes", []):
                if "configMap" in volume:
                    volume["configMap"]["name"] = plain_name(volume["configMap"]["name"])
        for place in places:
            for added in ("helm.sh/resource-policy", "checksum/settings"):
                place.get("annotations", {}).pop(added, None)
            if place.get("annotations") == {}:
                del place["annotations"]
        if content["kind"] == "ConfigMap" and "data" in content:
            content["data"] = {name: yaml.safe_load(text) for name, text in content["data"].items()}
            content["metadata"]["name"] = plain_name(content["metadata"]["name"])
        assert identity(content) not in found, "rendered twice"
        found[identity(content)] = content
    return found


@pytest.mark.promise("install-chart-same")
@pytest.mark.parametrize("name", CASES)
def test_values_render_to_the_objects_of_the_overlay_with_the_same_folders(helm: Helm, chart: Path, name: str) -> None:
    values, overlay = CASES[name]
    found = comparable(rendered(helm, chart, values | {"namespace": {"create": True}}, namespace="default"))
    assert found == comparable(render(find_kubectl(), overlay))


def test_values_of_images_and_settings_render_to_the_objects_of_an_overlay_with_them(helm: Helm, chart: Path) -> None:
    digest = f"sha256:{'5' * 64}"
    values = {
        "image": {"registry": "registry.example.com/sharepod", "tag": "0.2.0"},
        "agent": {"digest": digest},
        "namespace": {"create": True},
    }
    images = [
        {"name": "registry.invalid/sharepod/operator", "newName": "registry.example.com/sharepod/operator"}
        | {"newTag": "0.2.0"},
        {"name": "registry.invalid/sharepod/agent", "newName": "registry.example.com/sharepod/agent", "digest": digest},
    ]
    found = comparable(rendered(helm, chart, values, namespace="default"))
    assert found == comparable(render(find_kubectl(), BASE, images=images))


def test_a_release_in_its_own_namespace_has_all_objects_but_the_namespace(helm: Helm, chart: Path) -> None:
    found, base = rendered(helm, chart, {}), render(find_kubectl(), BASE)
    assert {identity(one) for one in base} - {identity(one) for one in found} == {("Namespace", "", "sharepod-system")}


def test_free_shares_are_published_unless_their_value_is_false(helm: Helm, chart: Path) -> None:
    with_them, without = rendered(helm, chart, {}), rendered(helm, chart, {"freeShares": False})
    left_out = {identity(one) for one in with_them} - {identity(one) for one in without}
    assert left_out == {(kind, "sharepod-system", "sharepod-free") for kind in ("ConfigMap", "Role", "RoleBinding")}


def test_definitions_stay_at_uninstall(helm: Helm, chart: Path) -> None:
    found = rendered(helm, chart, {})
    definitions = [one for one in found if one["kind"] == "CustomResourceDefinition"]
    assert len(definitions) == len(list((ROOT / "crds").glob("*.yaml"))) - 1
    assert all(one["metadata"]["annotations"]["helm.sh/resource-policy"] == "keep" for one in definitions)
    assert not (chart / "crds").exists(), "Helm never upgrades definitions of that folder"


def test_values_reach_the_pods(helm: Helm, chart: Path) -> None:
    values: Object = {
        "image": {"pullSecrets": [{"name": "registry"}], "pullPolicy": "Always"},
        "runtimeClass": "",
        "operator": {"replicas": 1, "nodeSelector": {"a": "b"}, "tolerations": [{"operator": "Exists"}]},
        "agent": {
            "nodeSelector": {"c": "d"},
            "tolerations": [],
            "resources": {"limits": {"memory": "2Gi"}},
            "settings": {"kubelet_root": "/data/kubelet", "grace_ms": 70},
        },
    }
    found = {
        identity(one)[2]: one for one in rendered(helm, chart, values) if one["kind"] in ("Deployment", "DaemonSet")
    }
    pods = {name: one["spec"]["template"]["spec"] for name, one in found.items()}
    assert pods.keys() == {"sharepod-operator", "sharepod-agent", "sharepod-self-test"}
    for pod in pods.values():
        assert pod["imagePullSecrets"] == [{"name": "registry"}]
        assert {container["imagePullPolicy"] for container in pod["containers"]} == {"Always"}
        assert "runtimeClassName" not in pod
    operator, agent = pods["sharepod-operator"], pods["sharepod-agent"]
    assert found["sharepod-operator"]["spec"]["replicas"] == 1
    assert (operator["nodeSelector"], operator["tolerations"]) == ({"a": "b"}, [{"operator": "Exists"}])
    assert agent["nodeSelector"] == pods["sharepod-self-test"]["nodeSelector"] == {"c": "d"}
    assert "tolerations" not in agent
    assert agent["containers"][0]["resources"]["limits"] == {"memory": "2Gi"}
    mounts = {mount["name"]: mount["mountPath"] for mount in agent["containers"][0]["volumeMounts"]}
    assert mounts["pods"] == "/data/kubelet/pods"
    settings = {
        identity(one)[2]: yaml.safe_load(one["data"]["settings.yaml"])
        for one in rendered(helm, chart, values)
        if one["kind"] == "ConfigMap" and "data" in one
    }
    assert settings["sharepod-operator-settings"]["runtime_class"] is None
    assert settings["sharepod-agent-settings"]["grace_ms"] == 70


def test_changed_settings_restart_the_pods(helm: Helm, chart: Path) -> None:
    def checksum(values: Object) -> str:
        (one,) = (each for each in rendered(helm, chart, values) if each["kind"] == "Deployment")
        return str(one["spec"]["template"]["metadata"]["annotations"]["checksum/settings"])

    assert checksum({}) == checksum({"agent": {"settings": {"grace_ms": 70}}})
    assert checksum({}) != checksum({"operator": {"settings": {"moves_per_minute": 0}}})


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"operator": {"settings": {"moves_per_minutes": 1}}}, "moves_per_minutes"),
        ({"plainPod": "Policy"}, "plainPod"),
        ({"agent": {"digest": "latest"}}, "digest"),
        ({"plainPods": "Policy"}, "set claims.enabled=true"),
        ({"claims": {"selfTest": True}}, "set claims.enabled=true"),
        ({"namespace": {"create": True}}, "--create-namespace"),
    ],
)
def test_values_without_a_working_installation_are_refused(
    helm: Helm, chart: Path, values: Object, message: str
) -> None:
    with pytest.raises(CommandError, match=message):
        rendered(helm, chart, values)


def test_a_release_in_another_namespace_is_refused(helm: Helm, chart: Path) -> None:
    with pytest.raises(CommandError, match="--namespace sharepod-system"):
        rendered(helm, chart, {}, namespace="default")


def test_the_chart_passes_helm_lint(helm: Helm, chart: Path) -> None:
    for values, _overlay in CASES.values():
        helm.run("lint", "--strict", "-n", "sharepod-system", chart, "-f", "-", input=json.dumps(values))


# Without Helm and kubectl


def test_version_and_defaults_are_those_of_package_and_manifests() -> None:
    project = (ROOT / "pyproject.toml").read_text()
    facts = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert f'version = "{facts["version"]}"' in project
    assert facts["version"] == facts["appVersion"]
    for part, kind in (("operator", "deployment"), ("agent", "daemonset")):
        workload = yaml.safe_load((MANIFESTS / part / f"{kind}.yaml").read_text())
        pod = workload["spec"]["template"]["spec"]
        assert VALUES[part]["resources"] == pod["containers"][0]["resources"]
        assert VALUES[part]["tolerations"] == pod.get("tolerations", [])
        assert VALUES[part].get("replicas") == workload["spec"].get("replicas")
        settings = yaml.safe_load((MANIFESTS / part / "settings.yaml").read_text())
        assert VALUES[part]["settings"] == {name: each for name, each in settings.items() if name != "runtime_class"}
    assert VALUES["agent"]["settings"] == FOLDERS


def test_the_schema_knows_every_value_and_takes_the_defaults() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())
    for part in SET_ELSEWHERE:
        schema["properties"][part]["properties"]["settings"], definitions = settings_schema(part)
        assert not definitions.keys() & schema["$defs"].keys() - {"MetricsAccess"}, "one name, two meanings"
        schema["$defs"] |= definitions
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.validate(VALUES, schema)
    assert VALUES.keys() == schema["properties"].keys() - {"global"}
    for name, each in VALUES.items():
        if isinstance(each, dict):
            assert each.keys() == schema["properties"][name]["properties"].keys()


def test_braces_of_the_manifests_stay_text() -> None:
    text = as_template({"kind": "Rule", "metadata": {"name": "n"}, "spec": "{{ $labels.pod }} }}"})
    assert "{{ $labels" not in text
    assert '{{ "{{" }} $labels.pod }} }}' in text


def test_an_object_that_differs_between_overlays_is_written_once_for_each_choice() -> None:
    first = {"kind": "Role", "metadata": {"name": "a"}, "spec": 1}
    other = Overlay(".Values.other", folders=("other",))
    third = Overlay(".Values.third", folders=("third",))
    (text, _checks) = templates({BASE: [first], other: [first | {"spec": 2}], third: [first]}).values()
    assert text.startswith("{{- if .Values.other }}\n---\n")
    assert text.count("spec: 2") == text.count("spec: 1") == text.count("{{- else }}") == 1
