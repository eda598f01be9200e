"""The Pod that is built for a SharePod sees its own GPUs and no others, whatever the user's spec contains."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sharepod.api.pods.pod import PodSettings, build_pod, open_gate, requested_pod_spec, require_node
from sharepod.api.sharepod import SpecError

UUIDS = ["GPU-0a1b2c3d-0000-0000-0000-000000000001", "GPU-0a1b2c3d-0000-0000-0000-000000000002"]
SETTINGS = PodSettings()
REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"


def sharepod(gpu: dict[str, Any] | None = None, metadata: dict[str, Any] | None = None, **spec: Any) -> dict[str, Any]:
    return {
        "metadata": {"name": "a", "namespace": "team", "uid": "uid-1", **(metadata or {})},
        "spec": {"gpu": gpu or {"request": 0.5}, "containers": [{"name": "main", "image": "x"}], **spec},
    }


FROM_ANNOTATION = "annotation sharepod.dev/gpus"


def env(container: dict[str, Any]) -> list[tuple[str, str | None]]:
    """Return (name, value) of the variables. For a variable that the kubelet reads from SharePod's annotation, the
    value is `FROM_ANNOTATION`."""
    ours = {"fieldRef": {"fieldPath": "metadata.annotations['sharepod.dev/gpus']"}}
    return [
        (variable["name"], FROM_ANNOTATION if variable.get("valueFrom") == ours else variable.get("value"))
        for variable in container["env"]
    ]


def mounts(container: dict[str, Any]) -> list[str]:
    return [mount["mountPath"] for mount in container["volumeMounts"]]


def test_the_pod_belongs_to_the_sharepod_and_carries_its_name() -> None:
    pod = build_pod(sharepod(), SETTINGS)
    assert pod["metadata"]["name"] == "a"
    assert pod["metadata"]["namespace"] == "team"
    assert pod["metadata"]["labels"] == {"sharepod.dev/tenant": "uid-1"}
    (owner,) = pod["metadata"]["ownerReferences"]
    assert owner == {
        "apiVersion": "sharepod.dev/v1alpha1",
        "kind": "SharePod",
        "name": "a",
        "uid": "uid-1",
        "controller": True,
        "blockOwnerDeletion": True,
    }
    assert "gpu" not in pod["spec"]


def test_labels_and_annotations_are_copied_but_for_kubectls_the_dialects_and_ours() -> None:
    metadata = {
        "labels": {"app": "a", "sharepod.dev/tenant": "another", "sharepod.dev/x": "y"},
        "annotations": {
            "kubectl.kubernetes.io/last-applied-configuration": "{}",
            "sharepod.dev/gpu-request": "0.5",
            "gemini/note": "x",
            "prometheus.io/scrape": "true",
        },
    }
    body = sharepod(metadata=metadata)
    del body["spec"]["gpu"]
    del body["metadata"]["annotations"]["gemini/note"]
    pod = build_pod(body, SETTINGS)
    assert pod["metadata"]["labels"] == {"app": "a", "sharepod.dev/tenant": "uid-1"}
    assert pod["metadata"]["annotations"] == {"prometheus.io/scrape": "true", "sharepod.dev/gpus": "void"}


def test_every_container_gets_the_gpus_the_volume_and_the_hook() -> None:
    body = sharepod(
        {"request": 0.5, "count": 2},
        initContainers=[{"name": "init", "image": "x"}, {"name": "side", "image": "x", "restartPolicy": "Always"}],
    )
    pod = build_pod(body, SETTINGS)
    (volume,) = pod["spec"]["volumes"]
    assert volume == {"name": "sharepod-gpu", "csi": {"driver": "gpu.sharepod.dev", "readOnly": True}}
    for container in [*pod["spec"]["initContainers"], *pod["spec"]["containers"]]:
        assert env(container) == [
            ("NVIDIA_VISIBLE_DEVICES", FROM_ANNOTATION),
            ("NVIDIA_DRIVER_CAPABILITIES", "compute,utility"),
        ]
        assert container["volumeMounts"] == [
            {"name": "sharepod-gpu", "mountPath": "/run/sharepod", "readOnly": True},
            {"name": "sharepod-gpu", "mountPath": "/etc/ld.so.preload", "subPath": "ld.so.preload", "readOnly": True},
        ]


def test_what_the_user_says_of_visible_devices_is_replaced_and_of_capabilities_kept() -> None:
    own = [
        {"name": "A", "value": "$(NVIDIA_VISIBLE_DEVICES)"},
        {"name": "NVIDIA_VISIBLE_DEVICES", "value": "all"},
        {"name": "NVIDIA_DRIVER_CAPABILITIES", "value": "all"},
        {"name": "NVIDIA_VISIBLE_DEVICES", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
    ]
    body = sharepod(containers=[{"name": "main", "image": "x", "env": own}])
    (container,) = build_pod(body, SETTINGS)["spec"]["containers"]
    assert env(container) == [
        ("NVIDIA_VISIBLE_DEVICES", FROM_ANNOTATION),
        ("A", "$(NVIDIA_VISIBLE_DEVICES)"),
        ("NVIDIA_DRIVER_CAPABILITIES", "all"),
    ]


def test_an_exclusive_pod_has_the_volume_and_no_hook() -> None:
    pod = build_pod(sharepod({"mode": "Exclusive"}), SETTINGS)
    assert mounts(pod["spec"]["containers"][0]) == ["/run/sharepod"]


@pytest.mark.parametrize("gpu", [{"request": 0.5, "count": 2}, {"mode": "Exclusive"}])
def test_where_a_claim_attaches_the_gpus_each_container_names_it_and_nothing_else_is_added(gpu: dict[str, Any]) -> None:
    own = [{"name": "A", "value": "1"}, {"name": "NVIDIA_VISIBLE_DEVICES", "value": "all"}]
    body = sharepod(
        gpu,
        initContainers=[
            {"name": "init", "image": "x", "resources": {"claims": [{"name": "nic"}], "limits": {"cpu": 1}}}
        ],
        containers=[{"name": "main", "image": "x", "env": own}],
        resourceClaims=[{"name": "nic", "resourceClaimName": "mine"}],
        runtimeClassName="nvidia",
    )
    spec = build_pod(body, SETTINGS, "one-0badcafe")["spec"]
    assert spec["resourceClaims"] == [
        {"name": "nic", "resourceClaimName": "mine"},
        {"name": "sharepod-gpu", "resourceClaimName": "one-0badcafe"},
    ]
    assert "runtimeClassName" not in spec, "the class may not be there"
    assert "volumes" not in spec
    (init,), (main,) = spec["initContainers"], spec["containers"]
    assert init["resources"] == {"claims": [{"name": "nic"}, {"name": "sharepod-gpu"}], "limits": {"cpu": 1}}
    assert main == {
        "name": "main",
        "image": "x",
        "env": [{"name": "A", "value": "1"}],
        "resources": {"claims": [{"name": "sharepod-gpu"}]},
    }
    assert spec["schedulingGates"] == [{"name": "sharepod.dev/share"}]


def test_a_runtime_class_of_the_users_own_stays_beside_a_claim() -> None:
    spec = build_pod(sharepod(runtimeClassName="kata"), PodSettings(runtime_class=""), "one-0badcafe")["spec"]
    assert spec["runtimeClassName"] == "kata"


@pytest.mark.parametrize("name", ["nvidia", "nvidia-cdi"])
def test_nvidias_runtime_class_does_not_stay_beside_a_claim(name: str) -> None:
    """With this runtime class, an image that sets NVIDIA_VISIBLE_DEVICES gets all GPUs of the node, whatever the claim
    requests."""
    spec = build_pod(sharepod(runtimeClassName=name), PodSettings(runtime_class=""), "one-0badcafe")["spec"]
    assert "runtimeClassName" not in spec


def test_the_users_volumes_and_mounts_stay() -> None:
    container = {"name": "main", "image": "x", "volumeMounts": [{"name": "w", "mountPath": "/run"}]}
    pod = build_pod(sharepod(volumes=[{"name": "w", "emptyDir": {}}], containers=[container]), SETTINGS)
    assert [volume["name"] for volume in pod["spec"]["volumes"]] == ["w", "sharepod-gpu"]
    assert mounts(pod["spec"]["containers"][0]) == ["/run", "/run/sharepod", "/etc/ld.so.preload"]


@pytest.mark.parametrize(
    ("field", "spec"),
    [
        ("spec.volumes[0].name", {"volumes": [{"name": "sharepod-gpu", "emptyDir": {}}]}),
        ("spec.volumes[0].csi.driver", {"volumes": [{"name": "a", "csi": {"driver": "gpu.sharepod.dev"}}]}),
        ("spec.resourceClaims[0].name", {"resourceClaims": [{"name": "sharepod-gpu", "resourceClaimName": "a"}]}),
        ("spec.runtimeClassName", {"runtimeClassName": "kata"}),
        ("spec.ephemeralContainers", {"ephemeralContainers": [{"name": "d"}]}),
    ],
)
def test_a_contradiction_of_the_pod_is_refused_by_field(field: str, spec: dict[str, Any]) -> None:
    with pytest.raises(SpecError) as refused:
        build_pod(sharepod(**spec), SETTINGS)
    assert refused.value.field == field


@pytest.mark.parametrize(
    "path",
    [
        "/run/sharepod",
        "/run/sharepod/",
        "/run/sharepod/limits",
        "/run//sharepod",
        "/var/run/sharepod",
        "/var/./run/sharepod/..",
        "run/sharepod",
        "/run/x/../sharepod",
        "/etc/ld.so.preload",
        "/etc/ld.so.preload/",
        "/etc//ld.so.preload",
        "/etc/./ld.so.preload",
        "//etc/ld.so.preload/.",
        "./etc/ld.so.preload",
        "/etc/x/y/../../ld.so.preload",
        "/x\n/../etc/ld.so.preload",
        "/data/../run",
        "/proc/self/root/run",
        "/dev/fd/5/etc",
    ],
)
def test_no_mount_of_the_user_hides_ours(path: str) -> None:
    container = {"name": "main", "image": "x", "volumeMounts": [{"name": "w", "mountPath": path}]}
    with pytest.raises(SpecError, match="choose another path"):
        build_pod(sharepod(initContainers=[container]), SETTINGS)


@pytest.mark.parametrize(
    "path",
    [
        "/run/sharepods",
        "/run/.sharepod",
        "/etc/ldXsoXpreload",
        "/etc/ld.so.preload.d",
        "/data/run/sharepod",
        "/processes",
        "/dev/fdx",
        "/sharepod",
        "/etc",
    ],
)
def test_mounts_next_to_sharepods_paths_are_allowed(path: str) -> None:
    container = {"name": "main", "image": "x", "volumeMounts": [{"name": "w", "mountPath": path}]}
    build_pod(sharepod(containers=[container]), SETTINGS)


_BY_CLASS = "deviceclass.resource.kubernetes.io"


@pytest.mark.parametrize(
    "resource",
    [
        "nvidia.com/gpu",
        "nvidia.com/gpu.shared",
        "nvidia.com/mig-1g.5gb",
        f"{_BY_CLASS}/gpu.nvidia.com",
        f"{_BY_CLASS}/vfio.gpu.nvidia.com",
        f"{_BY_CLASS}/mig.nvidia.com",
    ],
)
def test_gpus_of_nvidias_device_plugin_and_dra_driver_are_refused(resource: str) -> None:
    container = {"name": "main", "image": "x", "resources": {"limits": {resource: "1"}}}
    with pytest.raises(SpecError, match="takes GPUs past SharePod"):
        build_pod(sharepod(containers=[container]), SETTINGS)


@pytest.mark.parametrize(
    "resource", [f"{_BY_CLASS}/nic.example.com", f"{_BY_CLASS}/notgpu.nvidia.com.example", "example.com/gpu"]
)
def test_devices_of_others_are_the_users_own_affair(resource: str) -> None:
    container = {"name": "main", "image": "x", "resources": {"limits": {resource: "1"}}}
    build_pod(sharepod(containers=[container]), SETTINGS)


@pytest.mark.promise("operator-sharepod-line")
@pytest.mark.parametrize(
    ("gpu", "line"),
    [
        ({"request": 0.4}, {"gpu-milli": "400"}),
        ({"request": 0.4, "memory": "4Gi"}, {"gpu-milli": "400", "gpu-memory-mib": "4096"}),
        ({"request": 0.4, "memory": "4Gi", "count": 2}, {"gpu-milli": "800", "gpu-memory-mib": "8192"}),
        ({"request": 0, "memory": "1100000000"}, {"gpu-milli": "0", "gpu-memory-mib": "1050"}),
        ({"mode": "Exclusive", "count": 2}, {"gpu-milli": "2000"}),
    ],
)
def test_the_first_container_carries_the_line_where_lines_are_in_use(gpu: dict[str, Any], line: dict[str, str]) -> None:
    own = {"limits": {"cpu": "1"}, "requests": {"cpu": "1"}}
    containers = [{"name": "main", "image": "x", "resources": own}, {"name": "side", "image": "x"}]
    pod = build_pod(sharepod(gpu, containers=containers), SETTINGS, line=True)
    first, second = pod["spec"]["containers"]
    amounts = {f"sharepod.dev/{name}": amount for name, amount in line.items()}
    assert first["resources"] == {"limits": {"cpu": "1", **amounts}, "requests": {"cpu": "1"}}
    assert "resources" not in second
    without = build_pod(sharepod(gpu, containers=containers), SETTINGS)
    assert without["spec"]["containers"][0]["resources"] == own


def test_other_resources_of_the_vendor_are_not_gpus() -> None:
    container = {"name": "main", "image": "x", "resources": {"limits": {"nvidia.com/hostdev": "1"}}}
    build_pod(sharepod(containers=[container]), SETTINGS)


def test_a_runtime_class_of_the_user_that_is_the_configured_one_is_no_conflict() -> None:
    assert build_pod(sharepod(runtimeClassName="nvidia"), SETTINGS)["spec"]["runtimeClassName"] == "nvidia"
    default_runtime = PodSettings(runtime_class="")
    assert "runtimeClassName" not in build_pod(sharepod(), default_runtime)["spec"]
    assert build_pod(sharepod(runtimeClassName="kata"), default_runtime)["spec"]["runtimeClassName"] == "kata"


def test_configured_tolerations_are_added_once() -> None:
    own = [{"key": "team", "operator": "Exists"}, dict(SETTINGS.tolerations[0])]
    assert requested_pod_spec(sharepod(tolerations=own), SETTINGS)["tolerations"] == own
    assert requested_pod_spec(sharepod(), SETTINGS)["tolerations"] == [dict(SETTINGS.tolerations[0])]


def test_node_name_beside_a_gpuid_becomes_required_affinity() -> None:
    body = sharepod(
        metadata={"annotations": {"kubeshare/gpu_request": "0.5", "kubeshare/GPUID": "v"}}, nodeName="node-7"
    )
    del body["spec"]["gpu"]
    spec = requested_pod_spec(body, SETTINGS)
    assert "nodeName" not in spec
    assert spec["affinity"]["nodeAffinity"][REQUIRED]["nodeSelectorTerms"] == [
        {"matchFields": [{"key": "metadata.name", "operator": "In", "values": ["node-7"]}]}
    ]


def test_a_pod_is_made_behind_a_gate_and_sees_no_gpu() -> None:
    gates = [{"name": "sharepod.dev/share"}, {"name": "team.example/approved"}]
    pod = build_pod(sharepod(schedulingGates=gates[::-1]), SETTINGS)
    assert pod["spec"]["schedulingGates"] == gates
    assert pod["metadata"]["annotations"] == {"sharepod.dev/gpus": "void"}
    assert "affinity" not in pod["spec"]


def test_the_gate_opens_in_one_patch_with_the_pin_and_the_gpus() -> None:
    terms = [{"matchExpressions": [{"key": "zone", "operator": "Exists"}]}]
    affinity = {"nodeAffinity": {REQUIRED: {"nodeSelectorTerms": terms}}, "podAffinity": {}}
    before = copy.deepcopy(affinity)
    gates = ["team.example/approved", "sharepod.dev/share"]
    test_uid, test_gate, remove, pin, annotate = open_gate("pod-1", gates, affinity, "node-0", UUIDS)
    assert test_uid == {"op": "test", "path": "/metadata/uid", "value": "pod-1"}
    assert test_gate == {"op": "test", "path": "/spec/schedulingGates/1/name", "value": "sharepod.dev/share"}
    assert remove == {"op": "remove", "path": "/spec/schedulingGates/1"}
    assert (pin["op"], pin["path"], pin["value"]["podAffinity"]) == ("add", "/spec/affinity", {})
    (term,) = pin["value"]["nodeAffinity"][REQUIRED]["nodeSelectorTerms"]
    assert term["matchExpressions"] == terms[0]["matchExpressions"]
    assert term["matchFields"] == [{"key": "metadata.name", "operator": "In", "values": ["node-0"]}]
    assert annotate == {"op": "add", "path": "/metadata/annotations/sharepod.dev~1gpus", "value": ",".join(UUIDS)}
    assert affinity == before


def matches(spec: dict[str, Any], name: str, labels: dict[str, str]) -> bool:
    """Evaluate required node affinity with the operator In as kube-scheduler does: one matching term is enough, and an
    empty term matches nothing."""
    required = spec.get("affinity", {}).get("nodeAffinity", {}).get(REQUIRED)
    if required is None:
        return True
    for term in required["nodeSelectorTerms"]:
        fields, expressions = term.get("matchFields") or [], term.get("matchExpressions") or []
        if not fields and not expressions:
            continue
        if all(name in field["values"] for field in fields) and all(
            labels.get(expression["key"]) in expression["values"] for expression in expressions
        ):
            return True
    return False


_expression = st.fixed_dictionaries(
    {"key": st.sampled_from("ab"), "operator": st.just("In"), "values": st.lists(st.sampled_from("xyz"), min_size=1)}
)
_field = st.fixed_dictionaries(
    {
        "key": st.just("metadata.name"),
        "operator": st.just("In"),
        "values": st.lists(st.sampled_from(["n0", "n1"]), min_size=1),
    }
)
_term = st.fixed_dictionaries(
    {}, optional={"matchExpressions": st.lists(_expression, max_size=2), "matchFields": st.lists(_field, max_size=1)}
)


@given(
    st.lists(_term, min_size=1, max_size=3) | st.none(),
    st.sampled_from(["n0", "n1", "n2"]),
    st.dictionaries(st.sampled_from("ab"), st.sampled_from("xyz")),
)
def test_the_pin_narrows_the_users_node_affinity_and_never_widens_it(
    terms: list[dict[str, Any]] | None, name: str, labels: dict[str, str]
) -> None:
    spec: dict[str, Any] = {}
    if terms is not None:
        spec["affinity"] = {"nodeAffinity": {REQUIRED: {"nodeSelectorTerms": terms}}, "podAffinity": {}}
    before = copy.deepcopy(spec)
    require_node(spec, "n1")
    assert matches(spec, name, labels) == (matches(before, name, labels) and name == "n1")


def test_the_sharepod_itself_is_left_as_it_was() -> None:
    body = sharepod(
        affinity={
            "nodeAffinity": {
                REQUIRED: {"nodeSelectorTerms": [{"matchExpressions": [{"key": "a", "operator": "Exists"}]}]}
            }
        },
        initContainers=[{"name": "i", "image": "x", "env": [{"name": "NVIDIA_VISIBLE_DEVICES", "value": "all"}]}],
    )
    before = copy.deepcopy(body)
    build_pod(body, SETTINGS)
    assert body == before
