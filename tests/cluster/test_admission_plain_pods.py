"""Plain Pods with a resource line as users apply them: each gets its claim, and invalid ones are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from cluster.admission import PODS, as_user, pod_of
from cluster.claims_world import CLAIMS, claim_path, claim_spec
from cluster.plain_world import (
    MEMORY,
    MILLI,
    answer,
    container,
    install_plain,
    line_pod,
    need_mutating_policies,
)
from harness.api import Api, ApiError, Object
from harness.cluster import Cluster
from harness.installation import NAMESPACE
from sharepod.api.pods.line_volume import with_volume
from sharepod.api.pods.plain_pods import lower
from sharepod.api.sharepod import SpecError

UUID = "GPU-5a9e0001-0000-4000-8000-000000000001"
LINE = f"spec.containers[main].resources.limits[{MILLI}]"


@pytest.fixture(scope="module")
def api(server: Cluster) -> Api:
    need_mutating_policies(server.api)
    install_plain(server)
    return server.api


def annotated(**annotations: str) -> Object:
    """Return a Pod with a line of 0.4 and these annotations, given by key with `_` for `-`."""
    return line_pod(annotations={f"sharepod.dev/{key.replace('_', '-')}": text for key, text in annotations.items()})


def sized(milli: str | None, mib: str | None = None, **annotations: str) -> Object:
    pod = annotated(**annotations)
    pod["spec"]["containers"] = [container(milli=milli, mib=mib)]
    return pod


def with_field(key: str, value: Any) -> Object:
    """Return a container with a line and one further field in its resources."""
    body = container()
    body["resources"] = {**body["resources"], key: value}
    return body


def plugins(resource: str) -> Object:
    """Return a container without a line that requests GPUs by another resource."""
    return {"name": "first", "image": "test", "resources": {"limits": {resource: "1"}}}


GPUS = {"name": "GPUS", "valueFrom": {"fieldRef": {"fieldPath": "metadata.annotations['sharepod.dev/gpus']"}}}
"""Variable of a container that gets its value from the Pod's annotation with the GPUs."""
TAKEN = {
    "a share": line_pod(),
    "a whole GPU": sized("1000"),
    "two whole GPUs": sized("2000", "8192"),
    "two parts": sized("800", gpu_count="2"),
    "exclusive": sized("2000", gpu_mode="Exclusive"),
    "next to a silent container": line_pod(container(), {"name": "silent", "image": "test"}),
    "an init container": line_pod(initContainers=[container("first", milli="1000")]),
    "a sidecar": line_pod(initContainers=[container("side", milli="100", restartPolicy="Always")]),
    "a sidecar alone": line_pod(
        {"name": "main", "image": "test"}, initContainers=[container("side", milli="100", restartPolicy="Always")]
    ),
    "thousandths by a suffix": sized("0.4k"),
    "with CPU of the whole Pod": line_pod(resources={"requests": {"cpu": "1"}, "limits": {"cpu": "2"}}),
    "its annotations by the downward API": line_pod(
        container(
            env=[
                {"name": "GPUS", "valueFrom": {"fieldRef": {"fieldPath": "metadata.annotations['sharepod.dev/gpus']"}}}
            ]
        )
    ),
    "all annotations": annotated(
        gpu_limit="0.8",
        gpu_request="0.2",
        gpu_affinity="a",
        gpu_anti_affinity="b",
        gpu_exclusion="c",
        gpu_placement="Spread",
        gpu_models="A100, H100",
        gpu_latency="Interactive",
        gpu_uuids=UUID,
        gpu_memory_isolation="None",
    ),
    "a gate of another": line_pod(schedulingGates=[{"name": "example.com/quota"}]),
    "KubeShare's dialect": line_pod(annotations={"kubeshare/gpu_limit": "0.5", "kubeshare/GPUID": "team"}),
}
REFUSED: dict[str, tuple[Object, str]] = {
    "zero": (sized("0"), LINE),
    "between a share and two": (sized("1500"), LINE),
    "17 GPUs": (sized("17000"), LINE),
    "more than any number": (sized("9e18"), LINE),
    "more than any number by far": (sized("1e30"), LINE),
    "a sum beyond any number": (
        line_pod(*(container(f"c{number}", "5e17", None) for number in range(20))),
        f"spec.containers[c0].resources.limits[{MILLI}]",
    ),
    "more memory than any number": (sized("400", "1e30"), f"limits[{MEMORY}]"),
    "more in an init container": (
        line_pod(initContainers=[container("first", "1e30", "1024")]),
        f"spec.initContainers[first].resources.limits[{MILLI}]",
    ),
    "two containers between": (
        line_pod(container("a", "700", None), container("b", "600", None)),
        f"spec.containers[a].resources.limits[{MILLI}]",
    ),
    "a count that does not divide": (sized("401", gpu_count="2"), LINE),
    "more than whole GPUs of the count": (sized("3000", gpu_count="2"), LINE),
    "memory that does not divide": (sized("2000", "4097"), f"limits[{MEMORY}]"),
    "memory alone": (sized(None, "4096"), f"limits[{MEMORY}]"),
    "zero memory": (sized("400", "0"), f"limits[{MEMORY}]"),
    "memory of no node": (sized("400", "2G"), f"limits[{MEMORY}]"),
    "memory in one of two": (
        line_pod(container("a"), container("b", mib=None)),
        f"spec.containers[b].resources.limits[{MEMORY}]",
    ),
    "an unknown resource": (
        line_pod({"name": "main", "image": "test", "resources": {"limits": {"sharepod.dev/gpu": "1"}}}),
        "spec.containers[main].resources.limits[sharepod.dev/gpu]",
    ),
    "an unknown annotation": (annotated(gpu_share="0.4"), "metadata.annotations[sharepod.dev/gpu-share]"),
    "a limit out of range": (annotated(gpu_limit="1.5"), "metadata.annotations[sharepod.dev/gpu-limit]"),
    "a limit below the line": (annotated(gpu_limit="0.3"), "metadata.annotations[sharepod.dev/gpu-limit]"),
    "a request above the line": (annotated(gpu_request="0.5"), "metadata.annotations[sharepod.dev/gpu-request]"),
    "best effort without memory": (sized("400", gpu_request="0"), "metadata.annotations[sharepod.dev/gpu-request]"),
    "no mode": (annotated(gpu_mode="Half"), "metadata.annotations[sharepod.dev/gpu-mode]"),
    "no label": (annotated(gpu_affinity="a b"), "metadata.annotations[sharepod.dev/gpu-affinity]"),
    "no count": (annotated(gpu_count="many"), "metadata.annotations[sharepod.dev/gpu-count]"),
    "no UUID": (annotated(gpu_uuids="GPU-1"), "metadata.annotations[sharepod.dev/gpu-uuids]"),
    "fewer UUIDs than GPUs": (sized("2000", gpu_uuids=UUID), "metadata.annotations[sharepod.dev/gpu-uuids]"),
    "one UUID twice": (
        sized("800", gpu_count="2", gpu_uuids=f"{UUID}, {UUID}"),
        "metadata.annotations[sharepod.dev/gpu-uuids]",
    ),
    "memory by annotation": (annotated(gpu_memory="4Gi"), "metadata.annotations[sharepod.dev/gpu-memory]"),
    "one field twice": (
        line_pod(annotations={"sharepod.dev/gpu-limit": "0.5", "gemini/gpu_limit": "0.5"}),
        "metadata.annotations[",
    ),
    "an exclusive part": (sized("400", gpu_mode="Exclusive"), LINE),
    "exclusive with memory": (sized("1000", "4096", gpu_mode="Exclusive"), f"limits[{MEMORY}]"),
    "exclusive with a request": (
        sized("1000", gpu_mode="Exclusive", gpu_request="0.5"),
        "metadata.annotations[sharepod.dev/gpu-request]",
    ),
}
"""Pods that Python also refuses, by name, each with the field that the API server's message names."""


def by_volume(pod: Object) -> Object:
    """Return the Pod as a cluster without claims creates it, with a volume."""
    patch = with_volume(pod, "")
    metadata = {**pod["metadata"], **patch["metadata"]}
    return {**pod, "metadata": metadata, "spec": {**pod["spec"], **patch["spec"]}}


FORGED: dict[str, tuple[Object, str]] = {
    "the line's claim by another name": (
        line_pod(resourceClaims=[{"name": "sharepod", "resourceClaimName": "mine"}]),
        "spec.resourceClaims[sharepod]",
    ),
    "a template of another for the line": (
        line_pod(resourceClaims=[{"name": "sharepod", "resourceClaimTemplateName": "large"}]),
        "spec.resourceClaims[sharepod]",
    ),
    "the template without a line": (
        line_pod(
            {"name": "main", "image": "test", "resources": {"claims": [{"name": "gpu"}]}},
            resourceClaims=[{"name": "gpu", "resourceClaimTemplateName": "sharepod"}],
        ),
        f"resources.limits[{MILLI}]",
    ),
    "the template a second time": (
        line_pod(resourceClaims=[{"name": "more", "resourceClaimTemplateName": "sharepod"}]),
        "spec.resourceClaims",
    ),
    "a node of its choice": (line_pod(nodeName="node-0"), "spec.nodeName"),
    "a request without its limit": (
        line_pod({"name": "main", "image": "test", "resources": {"requests": {MILLI: "400"}}}),
        "spec.containers[0].resources.limits",
    ),
    "a request unlike its limit": (
        line_pod(
            {"name": "main", "image": "test", "resources": {"limits": {MILLI: "400"}, "requests": {MILLI: "300"}}}
        ),
        MILLI,
    ),
    "a fraction": (sized("0.4"), MILLI),
    "a limit in one container and its request in another": (
        line_pod(
            {"name": "main", "image": "test", "resources": {"limits": {MILLI: "400"}}},
            {"name": "other", "image": "test", "resources": {"requests": {MILLI: "400"}}},
        ),
        "spec.containers[1].resources.limits",
    ),
    "a line of the whole Pod": (
        line_pod({"name": "main", "image": "test"}, resources={"limits": {MILLI: "400"}}),
        f"spec.resources.limits[{MILLI}]",
    ),
    "a mirror of a static Pod": (
        line_pod(nodeName="node-0", annotations={"kubernetes.io/config.mirror": "a"}),
        "static pods do not support resource claims",
    ),
    "the gate of SharePods": (line_pod(schedulingGates=[{"name": "sharepod.dev/share"}]), "spec.schedulingGates"),
    "a volume in place of the claim": (by_volume(line_pod()), "spec.schedulingGates[sharepod.dev/share]"),
    "a part of the line's claim": (
        line_pod(with_field("claims", [{"name": "sharepod", "request": "another"}])),
        "spec.containers[main].resources.claims[sharepod].request",
    ),
    "a plugin's GPU next to the line": (
        line_pod(with_field("limits", {MILLI: "400", "nvidia.com/gpu": "1"})),
        "spec.containers[main].resources.limits[nvidia.com/gpu]",
    ),
    "a MIG slice in another container": (
        line_pod(container(), initContainers=[plugins("nvidia.com/mig-1g.10gb")]),
        "spec.initContainers[first].resources.limits[nvidia.com/mig-1g.10gb]",
    ),
    "another class by a resource": (
        line_pod(container(), plugins("deviceclass.resource.kubernetes.io/gpu.nvidia.com")),
        "spec.containers[first].resources.limits[deviceclass.resource.kubernetes.io/gpu.nvidia.com]",
    ),
    "a mount over the hook": (
        line_pod(
            container(volumeMounts=[{"name": "mine", "mountPath": "/etc/ld.so.preload"}]),
            volumes=[{"name": "mine", "emptyDir": {}}],
        ),
        "spec.containers[main].volumeMounts: /etc/ld.so.preload",
    ),
    "a mount over the hook with other slashes": (
        line_pod(
            container(volumeMounts=[{"name": "mine", "mountPath": "/etc//ld.so.preload"}]),
            volumes=[{"name": "mine", "emptyDir": {}}],
        ),
        "spec.containers[main].volumeMounts: /etc//ld.so.preload",
    ),
    "a mount that leads to the hook": (
        line_pod(
            container(volumeMounts=[{"name": "mine", "mountPath": "/proc/self/root/etc/ld.so.preload"}]),
            volumes=[{"name": "mine", "emptyDir": {}}],
        ),
        "spec.containers[main].volumeMounts: /proc/self/root/etc/ld.so.preload",
    ),
    "the end's message over the hook": (
        line_pod(container(terminationMessagePath="/etc/ld.so.preload")),
        "spec.containers[main].terminationMessagePath: /etc/ld.so.preload",
    ),
    "a mount over the socket": (
        line_pod(
            container(),
            initContainers=[
                {"name": "first", "image": "test", "volumeMounts": [{"name": "mine", "mountPath": "/run/sharepod/x"}]}
            ],
            volumes=[{"name": "mine", "emptyDir": {}}],
        ),
        "spec.initContainers[first].volumeMounts: /run/sharepod/x",
    ),
}


@pytest.mark.parametrize("name", TAKEN)
def test_a_pod_that_python_reads_is_taken(api: Api, name: str) -> None:
    lower(TAKEN[name])
    assert answer(api, TAKEN[name]) == ""


@pytest.mark.promise("operator-line-at-apply")
@pytest.mark.parametrize("name", REFUSED)
def test_what_python_refuses_the_api_server_refuses_at_apply(api: Api, name: str) -> None:
    body, field = REFUSED[name]
    with pytest.raises(SpecError) as caught:
        lower(body)
    message = answer(api, body)
    assert "ValidatingAdmissionPolicy 'sharepod-plain-pods'" in message
    assert field in message
    assert field in caught.value.field
    assert "; " in message.partition(field)[2]  # the remedy


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (sized("17000"), f"[{MILLI}]: 17000 is more than the GPUs of a node are; write at most 16000"),
        (sized("400", "2G"), f"[{MEMORY}]: 2000000000 MiB is more memory than any node has"),
        (sized("400", "0"), f"[{MEMORY}]: 0 asks for nothing; write a whole number such as 4096, or remove it"),
        (sized("0"), f"[{MILLI}]: 0 asks for nothing; write a whole number such as 400, or remove it"),
        (annotated(gpu_limt="0.5"), "is not known; use one of sharepod.dev/gpu-limit, sharepod.dev/gpu-request, "),
    ],
)
def test_a_refusal_quotes_the_value_and_advises_what_a_line_may_have(api: Api, body: Object, message: str) -> None:
    found = answer(api, body)
    assert message in found
    assert "sharepod.dev/gpu-memory," not in found


@pytest.mark.promise("operator-kubernetes-refusals")
@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({MILLI: "0.4"}, '"400m": must be an integer'),
        ({MILLI: "400m"}, '"400m": must be an integer'),
        ({MILLI: "40%"}, "quantities must match the regular expression"),
        ({}, "Limit must be set for non overcommitable resources"),
    ],
)
def test_kubernetes_own_refusals_of_a_line_are_in_the_documents(api: Api, limits: Object, message: str) -> None:
    resources = {"limits": limits} if limits else {"requests": {MILLI: "400"}}
    assert message in answer(api, line_pod({"name": "main", "image": "test", "resources": resources}))
    assert message in (Path(__file__).resolve().parents[2] / "docs" / "troubleshooting.md").read_text()


@pytest.mark.promise("operator-line-forged")
@pytest.mark.parametrize("name", FORGED)
def test_a_pod_that_goes_past_its_line_is_refused(api: Api, name: str) -> None:
    body, field = FORGED[name]
    assert field in answer(api, body)


@pytest.mark.promise("operator-line-claim")
def test_a_line_becomes_one_claim_named_by_the_containers_that_ask(api: Api) -> None:
    body = line_pod(
        container("a"),
        container("b", "200"),
        {"name": "silent", "image": "test"},
        initContainers=[container("first", "100")],
        resourceClaims=[{"name": "nic", "resourceClaimName": "mine"}],
    )
    body["spec"]["containers"][0]["resources"]["claims"] = [{"name": "nic"}]
    spec = api.create("/api/v1/namespaces/default/pods", body, dryRun="All")["spec"]
    entries = sorted(spec["resourceClaims"], key=lambda entry: entry["name"])
    assert [(entry["name"], entry.get("resourceClaimTemplateName")) for entry in entries] == [
        ("nic", None),
        ("sharepod", "sharepod"),
    ]
    used = {
        one["name"]: {claim["name"] for claim in one["resources"].get("claims", ())}
        for one in (*spec["containers"], *spec["initContainers"])
    }
    assert used == {"a": {"nic", "sharepod"}, "b": {"sharepod"}, "silent": set(), "first": {"sharepod"}}


def test_a_pod_without_a_line_is_left_alone(api: Api) -> None:
    body = line_pod({"name": "main", "image": "test"}, annotations={"example.com/gpu-share": "0.4"})
    made = api.create("/api/v1/namespaces/default/pods", body, dryRun="All")
    assert "resourceClaims" not in made["spec"]


def test_a_claim_of_no_device_at_all_is_left_alone(api: Api) -> None:
    body = {"apiVersion": "resource.k8s.io/v1", "metadata": {"name": "none"}, "spec": {"devices": {}}}
    api.create(f"{CLAIMS}/namespaces/default/resourceclaims", {**body, "kind": "ResourceClaim"}, dryRun="All")
    made = {**body, "kind": "ResourceClaimTemplate", "spec": {"spec": body["spec"]}}
    api.create(f"{CLAIMS}/namespaces/default/resourceclaimtemplates", made, dryRun="All")


@pytest.mark.promise("operator-line-namespace")
def test_in_a_namespace_that_is_left_out_a_line_is_refused_and_says_why(api: Api, server: Cluster) -> None:
    body = {
        "apiVersion": "v1",
        "kind": "Namespace",
        "metadata": {"name": "left-out", "labels": {"sharepod.dev/plain-pods": "disabled"}},
    }
    api.create("/api/v1/namespaces", body)
    server.await_service_account("left-out", "default")
    message = answer(api, line_pod(), "left-out")
    assert "sharepod.dev/plain-pods=disabled" in message
    assert LINE in message
    assert answer(api, line_pod({"name": "main", "image": "test"}), "left-out") == ""
    by_hand = line_pod(with_field("claims", [{"name": "sharepod"}]))
    by_hand["spec"]["resourceClaims"] = [{"name": "sharepod", "resourceClaimTemplateName": "sharepod"}]
    assert answer(api, by_hand) == ""
    assert "gives no share in namespace left-out" in answer(api, by_hand, "left-out")


def test_an_ephemeral_container_has_no_line(api: Api) -> None:
    body = line_pod(name="debugged")
    api.create("/api/v1/namespaces/default/pods", body)
    debug = {"name": "debug", "image": "test", "resources": {"limits": {MILLI: "400"}}}
    with pytest.raises(ApiError, match=r"ephemeralContainers\[0\].resources"):
        api.patch(
            "/api/v1/namespaces/default/pods/debugged/ephemeralcontainers",
            {"spec": {"ephemeralContainers": [debug]}},
        )
    api.delete("/api/v1/namespaces/default/pods/debugged", grace=0)


@pytest.mark.promise("operator-line-annotations")
def test_of_a_pod_that_exists_only_the_request_may_change(api: Api) -> None:
    path = "/api/v1/namespaces/default/pods/changed"
    api.create(
        "/api/v1/namespaces/default/pods", line_pod(name="changed", annotations={"sharepod.dev/gpu-limit": "0.8"})
    )

    def annotate(**annotations: str | None) -> str:
        try:
            api.patch(path, {"metadata": {"annotations": {f"sharepod.dev/{k}": v for k, v in annotations.items()}}})
        except ApiError as error:
            return error.message
        return ""

    assert annotate(**{"gpu-request": "0.2"}) == ""
    assert "more than the line has" in annotate(**{"gpu-request": "0.5"})
    assert "cannot be changed" in annotate(**{"gpu-limit": "0.9"})
    assert "cannot be changed" in annotate(**{"gpu-limit": None})
    assert "cannot be changed" in annotate(**{"gpu-affinity": "a"})
    assert annotate(**{"gpu-request": None}) == ""
    api.delete(path, grace=0)


@pytest.mark.promise("operator-line-in-place")
@pytest.mark.parametrize("milli", ["200", "800"])
def test_the_line_cannot_be_resized_in_place(api: Api, server: Cluster, milli: str) -> None:
    of_sharepod = pod_of(server, f"resized-{milli}")
    of_sharepod["spec"]["containers"][0]["resources"] = container()["resources"]
    for body in (line_pod(name=f"line-{milli}"), of_sharepod):
        made = api.create(PODS, body)
        path, containers = f"{PODS}/{made['metadata']['name']}", made["spec"]["containers"]
        for kind in ("limits", "requests"):
            containers[0]["resources"][kind][MILLI] = milli
        with pytest.raises(ApiError, match="only cpu and memory resources are mutable"):
            api.patch(f"{path}/resize", {"spec": {"containers": containers}})
        api.delete(path, grace=0)


@pytest.mark.promise("operator-line-placement")
def test_the_annotation_with_the_gpus_is_written_by_the_operator_alone(api: Api, server: Cluster, alice: Path) -> None:
    code, text = as_user(
        server, alice, "apply", "-f", "-", body=line_pod(name="forged", annotations={"sharepod.dev/gpus": UUID})
    )
    assert code
    assert "written only by the operator" in text
    code, text = as_user(server, alice, "apply", "-f", "-", body=line_pod(name="placed"))
    assert not code, text
    operator = server.api_for(server.service_account_token(NAMESPACE, "sharepod-operator"))
    operator.patch("/api/v1/namespaces/default/pods/placed", {"metadata": {"annotations": {"sharepod.dev/gpus": UUID}}})
    code, text = as_user(server, alice, "annotate", "pod", "placed", "sharepod.dev/gpus=all", "--overwrite")
    assert "written only by the operator" in text
    api.delete("/api/v1/namespaces/default/pods/placed", grace=0)


@pytest.mark.promise("operator-line-claims-kept")
def test_a_claim_without_sizes_is_its_pods_and_the_templates_name_is_taken(api: Api) -> None:
    sizeless = {"devices": {"requests": [{"name": "line", "exactly": {"deviceClassName": "sharepod.dev"}}]}}

    def template(name: str, spec: Object) -> Object:
        return {
            "apiVersion": "resource.k8s.io/v1",
            "kind": "ResourceClaimTemplate",
            "metadata": {"name": name},
            "spec": {"spec": spec},
        }

    templates = f"{CLAIMS}/namespaces/default/resourceclaimtemplates"
    api.create(templates, template("sharepod", sizeless), dryRun="All")
    with pytest.raises(ApiError, match="use another name"):
        api.create(templates, template("sharepod", claim_spec()), dryRun="All")
    with pytest.raises(ApiError, match="capacity"):
        api.create(templates, template("mine", sizeless), dryRun="All")
    for field, value in (("tolerations", [{"operator": "Exists"}]), ("capacity", {}), ("adminAccess", False)):
        exactly: Object = {"deviceClassName": "sharepod.dev", field: value}
        other = {"devices": {"requests": [{"name": "line", "exactly": exactly}]}}
        # Such a template is refused, because the operator would take each claim made from it for a claim of a line.
        with pytest.raises(ApiError, match="capacity"):
            api.create(templates, template("sharepod", other), dryRun="All")

    def claim(*owners: Object) -> Object:
        metadata = {"name": "of-a-line", "ownerReferences": list(owners)}
        return {
            "apiVersion": "resource.k8s.io/v1",
            "kind": "ResourceClaim",
            "metadata": metadata,
            "spec": sizeless,
        }

    pods = {name: api.create("/api/v1/namespaces/default/pods", line_pod(name=name)) for name in ("one", "two")}

    def owner(name: str) -> Object:
        uid = pods[name]["metadata"]["uid"]
        return {"apiVersion": "v1", "kind": "Pod", "name": name, "uid": uid, "controller": True}

    with pytest.raises(ApiError, match="capacity"):
        api.create(claim_path("default"), claim(), dryRun="All")
    api.create(claim_path("default"), claim(owner("one")))
    with pytest.raises(ApiError, match="belongs to the Pod"):
        api.patch(claim_path("default", "of-a-line"), {"metadata": {"ownerReferences": [owner("two")]}})

    def reserve(name: str) -> None:
        result = {"request": "line", "driver": "gpu.sharepod.dev", "pool": "n", "device": "gpu-0"}
        status = {
            "allocation": {"devices": {"results": [result]}},
            "reservedFor": [{"resource": "pods", "name": name, "uid": pods[name]["metadata"]["uid"]}],
        }
        api.patch(claim_path("default", "of-a-line") + "/status", {"status": status})

    with pytest.raises(ApiError, match="not for two"):
        reserve("two")
    reserve("one")
    for name in pods:
        api.delete(f"/api/v1/namespaces/default/pods/{name}", grace=0)
