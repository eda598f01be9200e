"""What the API server refuses by itself, with manifests/ in force: SharePods that cannot be meant, and writes that
are no one's.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cluster.malformed import CASES, CONTAINER, UUID, Case
from harness.api import JSON_PATCH, Api, ApiError, Object
from harness.cluster import Cluster
from harness.installation import NAMESPACE, SHAREPODS, install
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sharepod.api.dialects import FIELD_OF, effective
from sharepod.api.sharepod import SpecError

GPUNODES = "/apis/sharepod.dev/v1alpha1/gpunodes"
LEASES = f"/apis/coordination.k8s.io/v1/namespaces/{NAMESPACE}/leases"
PODS = "/api/v1/namespaces/default/pods"


@pytest.fixture(scope="module")
def server() -> Iterator[Cluster]:
    """A control plane with everything of manifests/ but the workloads; nothing schedules here."""
    with Cluster(scheduler=False) as cluster:
        cluster.await_service_account("default", "default")
        install(cluster)
        yield cluster


def sharepod(
    name: str, gpu: dict[str, Any] | None = None, annotations: dict[str, str] | None = None, **spec: Any
) -> Object:
    metadata: Object = {"name": name, "namespace": "default"}
    if annotations:
        metadata["annotations"] = annotations
    body: Object = {"containers": [dict(CONTAINER)], **spec}
    if gpu is not None:
        body["gpu"] = gpu
    return {"apiVersion": "sharepod.dev/v1alpha1", "kind": "SharePod", "metadata": metadata, "spec": body}


def refusal(api: Api, *request: Any, **options: Any) -> str:
    """The message with which a patch is refused."""
    with pytest.raises(ApiError) as refused:
        api.patch(*request, **options)
    return refused.value.message


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.title.replace(" ", "-"))
def test_a_refusal_names_the_field_and_the_mend(server: Cluster, case: Case) -> None:
    answer = server.kubectl("apply", "-f", "-", input=json.dumps(case.manifest()), check=False)
    said = answer.stdout + answer.stderr
    assert answer.returncode != 0, f"accepted: {said}"
    assert case.names in said
    assert case.mend in said


def test_an_accepted_share_shows_in_the_printer_columns(server: Cluster) -> None:
    server.api.create(SHAREPODS, sharepod("columns", {"request": 0.25, "limit": 0.5, "memory": "4Gi"}))
    share = {"request": "0.25", "limit": "0.5", "memory": "4Gi"}
    status = {"phase": "Running", "node": "node-0", "gpuIndexes": "0,1", "share": share}
    server.api.patch(f"{SHAREPODS}/columns/status", {"status": status})
    header, row = server.kubectl("get", "shp", "columns").stdout.splitlines()
    assert header.split() == ["NAME", "REQUEST", "LIMIT", "MEMORY", "NODE", "GPU", "PHASE", "AGE"]
    assert row.split()[:-1] == ["columns", "0.25", "0.5", "4Gi", "node-0", "0,1", "Running"]
    assert "sharepod.sharepod.dev/columns" in server.kubectl("get", "all").stdout


def test_a_gpunode_shows_pool_and_agent(server: Cluster) -> None:
    server.api.create(
        GPUNODES, {"apiVersion": "sharepod.dev/v1alpha1", "kind": "GPUNode", "metadata": {"name": "shown"}, "spec": {}}
    )
    status = {
        "agentVersion": "0.1.0",
        "gpus": [{"uuid": UUID, "index": 0, "model": "A100", "memory": 1}],
        "conditions": [{"type": "AgentReady", "status": "True", "reason": "Running"}],
        "gpuCount": 1,
        "tenantCount": 2,
        "reserved": "0.9",
    }
    server.api.patch(f"{GPUNODES}/shown/status", {"status": status})
    header, row = server.kubectl("get", "gn", "shown").stdout.splitlines()
    assert header.split() == ["NAME", "POOL", "MODEL", "GPUS", "RESERVED", "TENANTS", "READY", "AGENT", "AGE"]
    assert row.split()[:-1] == ["shown", "dedicated", "A100", "1", "0.9", "2", "True", "0.1.0"]


def test_two_tenants_of_one_id_cannot_stand_in_a_ledger(server: Cluster) -> None:
    row = {"id": "a", "namespace": "x", "podName": "p", "gpus": [UUID], "requestMilli": 1, "limitMilli": 1, "memory": 1}
    body: Object = {"apiVersion": "sharepod.dev/v1alpha1", "kind": "GPUNode", "metadata": {"name": "twice"}}
    with pytest.raises(ApiError) as refused:
        server.api.create(GPUNODES, {**body, "spec": {"tenants": [row, row]}})
    assert "Duplicate value" in refused.value.message
    with pytest.raises(ApiError) as refused:
        server.api.create(GPUNODES, {**body, "spec": {"tenants": [row | {"requestMilli": 2}]}})
    assert "requestMilli is more than limitMilli" in refused.value.message


def test_pod_fields_of_a_newer_cluster_are_kept_and_unknown_gpu_fields_are_not(server: Cluster) -> None:
    body = sharepod("newer", {"request": 0.5, "colour": "red"}, futureField={"deep": [1]})
    body["spec"]["containers"][0]["futureProbe"] = {"period": 3}
    made = server.api.create(SHAREPODS, body, fieldValidation="Ignore")
    assert made["spec"]["futureField"] == {"deep": [1]}
    assert made["spec"]["containers"][0]["futureProbe"] == {"period": 3}
    assert "colour" not in made["spec"]["gpu"]


def test_a_quantity_may_be_a_plain_number_as_in_a_pod(server: Cluster) -> None:
    resources = {"requests": {"cpu": 0.5, "memory": 1000000}}
    body = sharepod("numbers", {"request": 0.5}, containers=[{**CONTAINER, "resources": resources}])
    assert server.api.create(SHAREPODS, body)["spec"]["containers"][0]["resources"] == resources


def test_policies_type_check_without_warnings(server: Cluster) -> None:
    path = "/apis/admissionregistration.k8s.io/v1/validatingadmissionpolicies"
    end = time.monotonic() + 30
    while True:
        policies = server.api.get(path)["items"]
        if all("typeChecking" in (policy.get("status") or {}) for policy in policies) or time.monotonic() > end:
            break
        time.sleep(0.2)
    assert len(policies) == 8
    assert [policy["status"]["typeChecking"] for policy in policies] == [{}] * 8


# --- API server and operator agree ----------------------------------------------------------------

_FRACTIONS = (
    "0",
    "0.0",
    "0.5",
    ".25",
    "1",
    "1.",
    "1.000",
    "0.333",
    "0.3334",
    "1.001",
    "-0.1",
    "1e-1",
    "half",
    "",
    " 0.5",
    "0,5",
)
_SIZES = (
    "4Gi",
    "4294967296",
    "1Mi",
    "1048575",
    "4G",
    "1.5Gi",
    "1e9",
    "4GB",
    "-1Gi",
    "0",
    "12345678901234567890",
    "3Ei",
    "",
)
_LABELS = ("red", "a.b-c_d", "-a", "a b", "", "x" * 63, "x" * 64)
_VALUES: dict[str, tuple[str, ...]] = {
    "request": _FRACTIONS,
    "limit": _FRACTIONS,
    "memory": _SIZES,
    "count": ("1", "2", "16", "17", "0", "two", "1.0", ""),
    "mode": ("Shared", "Exclusive", "exclusive", ""),
    "memoryIsolation": ("Enforced", "None", "none"),
    "affinity": _LABELS,
    "antiAffinity": _LABELS,
    "exclusion": _LABELS,
    "placement": ("Binpack", "Spread", "Random"),
    "uuids": (UUID, f"{UUID}, {UUID[:-1]}2", "0", "", f"{UUID},"),
    "models": ("A100", "A100, H100 80GB", "", "A100,,"),
}


@st.composite
def annotation_sets(draw: st.DrawFn) -> dict[str, str]:
    """Annotations that make sense more often than chance has it."""
    fields = draw(st.lists(st.sampled_from(sorted(_VALUES)), max_size=3, unique=True))
    said: dict[str, str] = {}
    for field in {*fields, "request"} if draw(st.integers(0, 3)) else fields:
        names = [name for name, of in FIELD_OF.items() if of == field]
        for name in draw(
            st.lists(st.sampled_from(names), min_size=1, max_size=2 if not draw(st.integers(0, 5)) else 1)
        ):
            values = _VALUES[field]
            said[name] = draw(st.sampled_from(values[: max(2, len(values) // 2)] if draw(st.booleans()) else values))
    return said


@st.composite
def blocks(draw: st.DrawFn) -> dict[str, Any]:
    fraction = st.sampled_from([0, 0.0, 0.001, 0.4, 0.333, 0.3333, 1, 1.0, 1.0001, 1.5, -0.5, 100, 1e300]) | st.floats(
        0, 1
    ).map(lambda value: round(value, 3))
    fields: dict[str, st.SearchStrategy[Any]] = {
        "request": fraction,
        "limit": fraction,
        "memory": st.sampled_from(
            ["4Gi", "1Mi", "1023Ki", "4", 4, 2**30, "4GB", "-1Gi", "1e9", "2Ei", 0, "1500M", "0.5Gi"]
        ),
        "count": st.integers(0, 17),
        "mode": st.sampled_from(["Shared", "Shared", "Exclusive", "exclusive"]),
        "affinity": st.sampled_from(_LABELS),
        "uuids": st.lists(st.sampled_from([UUID, UUID[:-1] + "2", "GPU-1"]), max_size=2, unique=True),
    }
    return {name: draw(values) for name, values in fields.items() if draw(st.booleans())}


def _agree(server: Cluster, body: Object) -> None:
    try:
        effective(body)
        by_operator = ""
    except SpecError as error:
        by_operator = str(error)
    try:
        server.api.create(SHAREPODS, body, dryRun="All")
        by_server = ""
    except ApiError as error:
        by_server = error.message
    assert bool(by_operator) == bool(by_server), (
        f"operator: {by_operator or 'accepts'}; API server: {by_server or 'accepts'}"
    )


@settings(
    max_examples=200, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(said=annotation_sets())
def test_api_server_and_operator_refuse_the_same_annotations(server: Cluster, said: dict[str, str]) -> None:
    _agree(server, sharepod("agreed", annotations=said))


@settings(
    max_examples=200, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(gpu=blocks())
def test_api_server_and_operator_refuse_the_same_gpu_blocks(server: Cluster, gpu: dict[str, Any]) -> None:
    _agree(server, sharepod("agreed", gpu))


# --- Changes --------------------------------------------------------------------------------------


def test_request_limit_and_memory_may_change_and_nothing_else(server: Cluster) -> None:
    path = f"{SHAREPODS}/change"
    server.api.create(SHAREPODS, sharepod("change", {"request": 0.3, "affinity": "a"}, nodeSelector={"a": "b"}))
    changed = server.api.patch(path, {"spec": {"gpu": {"request": 0.4, "limit": 0.8, "memory": "2Gi"}}})
    assert changed["spec"]["gpu"]["limit"] == 0.8
    server.api.patch(path, {"spec": {"gpu": {"limit": None}}})
    server.api.patch(path, {"spec": {"gpu": {"count": 1}}})  # what it is by default
    server.api.patch(path, {"metadata": {"labels": {"a": "b"}, "annotations": {"note": "x"}}})
    for field, value in {
        "count": 2,
        "mode": "Exclusive",
        "affinity": "b",
        "antiAffinity": "c",
        "placement": "Spread",
    }.items():
        cleared = {"request": None, "limit": None, "memory": None} if field == "mode" else {}
        message = refusal(server.api, path, {"spec": {"gpu": {field: value, **cleared}}})
        assert f"spec.gpu.{field}: cannot be changed" in message
        assert "delete the SharePod and create it anew" in message
    assert "spec.gpu.affinity: cannot be changed" in refusal(server.api, path, {"spec": {"gpu": {"affinity": None}}})
    assert "spec.nodeSelector: cannot be changed" in refusal(server.api, path, {"spec": {"nodeSelector": {"a": "c"}}})
    assert "spec.nodeSelector: cannot be changed" in refusal(server.api, path, {"spec": {"nodeSelector": None}})
    assert "spec.hostNetwork: cannot be changed" in refusal(server.api, path, {"spec": {"hostNetwork": True}})
    message = refusal(
        server.api,
        path,
        [{"op": "replace", "path": "/spec/containers/0/image", "value": "other"}],
        content_type=JSON_PATCH,
    )
    assert "spec.containers: cannot be changed" in message
    assert "spec.gpu: cannot be added to or taken from" in refusal(
        server.api, path, {"metadata": {"annotations": {"gemini/gpu_request": "0.5"}}, "spec": {"gpu": None}}
    )


def test_annotations_for_request_limit_and_memory_may_change_and_no_others(server: Cluster) -> None:
    path = f"{SHAREPODS}/annotated"
    server.api.create(SHAREPODS, sharepod("annotated", annotations={"gemini/gpu_request": "0.5", "gemini/GPUID": "a"}))
    server.api.patch(path, {"metadata": {"annotations": {"gemini/gpu_request": "0.6", "gemini/gpu_limit": "0.9"}}})
    for change in ({"gemini/GPUID": "b"}, {"gemini/GPUID": None}, {"gemini/sched_exclusion": "x"}):
        message = refusal(server.api, path, {"metadata": {"annotations": change}})
        assert f"metadata.annotations[{next(iter(change))}]: cannot be changed" in message


def test_a_raise_of_an_annotation_is_checked_like_a_new_one(server: Cluster) -> None:
    path = f"{SHAREPODS}/raised"
    server.api.create(SHAREPODS, sharepod("raised", annotations={"gemini/gpu_request": "0.5"}))
    message = refusal(server.api, path, {"metadata": {"annotations": {"gemini/gpu_request": "1.5"}}})
    assert "metadata.annotations[gemini/gpu_request]: 1.5 is more than one GPU" in message


def test_no_policy_keeps_a_finalizer_from_being_removed(server: Cluster) -> None:
    path = f"{SHAREPODS}/finalized"
    body = sharepod("finalized", {"request": 0.5})
    body["metadata"]["finalizers"] = ["example.com/wait"]
    server.api.create(SHAREPODS, body)
    server.api.delete(path)
    server.api.patch(path, {"metadata": {"annotations": {"gemini/gpu_request": "wrong"}, "finalizers": None}})
    with pytest.raises(ApiError) as gone:
        server.api.get(path)
    assert gone.value.code == 404


# --- Who may write what ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def agent(server: Cluster) -> Api:
    """The agent of node-a, with a token as the kubelet's are."""
    server.add_fake_nodes(2, prefix="agents")
    for node in ("agents-0", "agents-1"):
        server.api.create(
            GPUNODES, {"apiVersion": "sharepod.dev/v1alpha1", "kind": "GPUNode", "metadata": {"name": node}, "spec": {}}
        )
    return server.api_for(server.service_account_token(NAMESPACE, "sharepod-agent", bound_node="agents-0"))


def lease(name: str) -> Object:
    return {
        "apiVersion": "coordination.k8s.io/v1",
        "kind": "Lease",
        "metadata": {"name": name},
        "spec": {"holderIdentity": "x"},
    }


def test_an_agent_writes_its_own_node_and_no_other(server: Cluster, agent: Api) -> None:
    agent.patch(f"{GPUNODES}/agents-0/status", {"status": {"agentVersion": "0.1.0"}})
    agent.create(LEASES, lease("sharepod-agent-agents-0"))
    agent.patch(f"{LEASES}/sharepod-agent-agents-0", {"spec": {"leaseDurationSeconds": 20}})
    message = refusal(agent, f"{GPUNODES}/agents-1/status", {"status": {"agentVersion": "0.1.0"}})
    assert "the agent of node agents-0 may write the GPUNode agents-0 only, not agents-1" in message
    for name in ("sharepod-agent-agents-1", "sharepod-operator"):
        with pytest.raises(ApiError) as refused:
            agent.create(LEASES, lease(name))
        assert f"Lease sharepod-agent-agents-0 only, not {name}" in refused.value.message
    server.api.create(LEASES, lease("sharepod-operator"))
    assert "only, not sharepod-operator" in refusal(
        agent, f"{LEASES}/sharepod-operator", {"spec": {"holderIdentity": "me"}}
    )


def test_an_agent_can_write_no_ledger_and_read_no_secret(agent: Api) -> None:
    assert "cannot patch resource" in refusal(agent, f"{GPUNODES}/agents-0", {"spec": {"pool": "dedicated"}})
    for path in ("/api/v1/namespaces/sharepod-system/secrets", "/api/v1/pods", SHAREPODS):
        with pytest.raises(ApiError) as refused:
            agent.get(path)
        assert refused.value.code == 403


def test_a_token_that_names_no_node_writes_nothing(server: Cluster, agent: Api) -> None:
    unbound = server.api_for(server.service_account_token(NAMESPACE, "sharepod-agent"))
    assert "names no node" in refusal(unbound, f"{GPUNODES}/agents-0/status", {"status": {"agentVersion": "0.1.0"}})


@pytest.fixture(scope="module")
def alice(server: Cluster) -> Path:
    """A user who may edit namespace default."""
    server.kubectl("create", "rolebinding", "alice", "--clusterrole=edit", "--user=alice", "--namespace=default")
    return server.user_kubeconfig("alice")


def as_user(server: Cluster, kubeconfig: Path, *arguments: str, body: Object | None = None) -> tuple[int, str]:
    answer = server.kubectl(
        *arguments, kubeconfig=kubeconfig, input=None if body is None else json.dumps(body), check=False
    )
    return answer.returncode, answer.stdout + answer.stderr


def test_who_edits_a_namespace_edits_its_sharepods_but_neither_status_nor_ledger(server: Cluster, alice: Path) -> None:
    code, said = as_user(server, alice, "apply", "-f", "-", body=sharepod("alices", {"request": 0.5}))
    assert code == 0, said
    code, said = as_user(
        server,
        alice,
        "patch",
        "shp",
        "alices",
        "--subresource=status",
        "--type=merge",
        "-p",
        '{"status": {"podUID": "x"}}',
    )
    assert code != 0
    assert "cannot patch resource" in said
    for verb in ("create", "patch", "delete", "get"):
        code, said = as_user(server, alice, "auth", "can-i", verb, "gpunodes.sharepod.dev")
        assert "no" in said.split()


def volume_pod(name: str) -> Object:
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "namespace": "default"},
        "spec": {
            "containers": [dict(CONTAINER)],
            "volumes": [{"name": "mine", "csi": {"driver": "gpu.sharepod.dev", "readOnly": True}}],
        },
    }


def test_a_users_pod_cannot_carry_our_volume_and_the_operators_can(server: Cluster, alice: Path) -> None:
    code, said = as_user(server, alice, "apply", "-f", "-", body=volume_pod("forged"))
    assert code != 0
    assert "spec.volumes[mine]" in said
    assert "create a SharePod in place of this pod" in said
    operator = server.api_for(server.service_account_token(NAMESPACE, "sharepod-operator"))
    operator.create(PODS, volume_pod("made"))


def test_debug_containers_of_our_pods_get_no_gpu(server: Cluster) -> None:
    server.api.create(PODS, volume_pod("debugged"))
    plain = volume_pod("plain")
    plain["spec"].pop("volumes")
    server.api.create(PODS, plain)

    def debug(pod: str, *env: dict[str, str]) -> None:
        container = {"name": f"debug-{len(env)}", "image": "cuda", "env": list(env)}
        server.api.patch(
            f"{PODS}/{pod}/ephemeralcontainers",
            {"spec": {"ephemeralContainers": [container]}},
            content_type="application/strategic-merge-patch+json",
        )

    debug("plain")
    for env in ((), ({"name": "NVIDIA_VISIBLE_DEVICES", "value": "all"},)):
        with pytest.raises(ApiError) as refused:
            debug("debugged", *env)
        assert "--env=NVIDIA_VISIBLE_DEVICES=void" in refused.value.message
    debug("debugged", {"name": "NVIDIA_VISIBLE_DEVICES", "value": "void"})
    debug("debugged", {"name": "NVIDIA_VISIBLE_DEVICES", "value": "void"}, {"name": "A", "value": "b"})


def test_the_tenant_label_is_the_operators_to_give_and_no_ones_to_change(server: Cluster, alice: Path) -> None:
    body = volume_pod("labelled")
    body["spec"].pop("volumes")
    body["metadata"]["labels"] = {"sharepod.dev/tenant": "someone"}
    code, said = as_user(server, alice, "apply", "-f", "-", body=body)
    assert code != 0
    assert "metadata.labels[sharepod.dev/tenant]: is put on the pods of SharePods alone" in said
    operator = server.api_for(server.service_account_token(NAMESPACE, "sharepod-operator"))
    operator.create(PODS, body)
    for value in ("another", None):
        message = refusal(server.api, f"{PODS}/labelled", {"metadata": {"labels": {"sharepod.dev/tenant": value}}})
        assert "cannot be changed; delete the SharePod to end this pod" in message
    server.api.patch(f"{PODS}/labelled", {"metadata": {"labels": {"app": "x"}}})
    code, said = as_user(server, alice, "run", "unlabelled", "--image=x")
    assert code == 0, said
    code, said = as_user(server, alice, "label", "pod", "unlabelled", "sharepod.dev/tenant=someone")
    assert code != 0
    assert "cannot be changed" in said


def test_a_sharepods_pod_cannot_be_given_to_another_controller(server: Cluster) -> None:
    def owners(uid: str) -> list[dict[str, object]]:
        return [{"apiVersion": "v1", "kind": "ConfigMap", "name": "owner", "uid": uid, "controller": True}]

    owner = server.api.create(
        "/api/v1/namespaces/default/configmaps",
        {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "owner"}},
    )
    operator = server.api_for(server.service_account_token(NAMESPACE, "sharepod-operator"))
    body = volume_pod("owned")
    body["spec"].pop("volumes")
    body["metadata"] |= {"labels": {"sharepod.dev/tenant": "mine"}, "ownerReferences": owners(owner["metadata"]["uid"])}
    operator.create(PODS, body)
    merge = {"metadata": {"ownerReferences": owners("victim")}}
    assert "cannot be given to another controller" in refusal(server.api, f"{PODS}/owned", merge)
    server.api.patch(f"{PODS}/owned", {"metadata": {"labels": {"app": "x"}}})
    server.api.patch(f"{PODS}/owned", {"metadata": {"ownerReferences": None}})
    assert "cannot be given to another controller" in refusal(server.api, f"{PODS}/owned", merge)


def test_a_ledger_with_tenants_cannot_be_deleted(server: Cluster) -> None:
    row = {
        "id": "a",
        "namespace": "team",
        "podName": "p",
        "gpus": [UUID],
        "requestMilli": 1,
        "limitMilli": 1,
        "memory": 1,
    }
    body: Object = {"apiVersion": "sharepod.dev/v1alpha1", "kind": "GPUNode", "metadata": {"name": "kept"}}
    server.api.create(GPUNODES, {**body, "spec": {"tenants": [row]}})
    with pytest.raises(ApiError) as refused:
        server.api.delete(f"{GPUNODES}/kept")
    assert "is the ledger of 1 tenants, the first of them team/p; delete their SharePods first" in refused.value.message
    server.api.patch(f"{GPUNODES}/kept", {"spec": {"tenants": []}})
    server.api.delete(f"{GPUNODES}/kept")
