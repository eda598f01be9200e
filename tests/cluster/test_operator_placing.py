"""Placement from `kubectl apply` to a bound Pod, and the message of a SharePod for which there is no room."""

from __future__ import annotations

import time
from contextlib import suppress
from typing import Any

import pytest
from cluster.operator_world import GIB, GPUNODES, World, condition_of, gpu_uuid, wait
from harness.api import ApiError, Object


def bound(world: World, namespace: str) -> list[Object]:
    """Return the Pods of a namespace that kube-scheduler has bound."""
    return [pod for pod in world.cluster.pods(namespace) if pod["spec"].get("nodeName")]


def test_an_applied_sharepod_is_reserved_in_the_ledger_then_runs_on_that_gpu(world: World) -> None:
    (node,) = world.nodes("apply")
    namespace = world.cluster.namespace("apply")
    world.apply(namespace, "before", {"request": 0.1, "memory": "1Gi"}, on="apply")
    world.phase(namespace, "before", "Running")  # the operator knows the node and its agent
    made = world.apply(namespace, "one", {"request": 0.4, "limit": 0.7, "memory": "4Gi"}, on="apply")

    seen = world.phase(namespace, "one", "Running")
    row = world.row(node, "one")
    pod = world.pod(namespace, "one")
    assert row is not None
    assert pod is not None
    assert row["id"] == made["metadata"]["uid"]
    assert (row["requestMilli"], row["limitMilli"], row["memory"], row["state"]) == (400, 700, 4 * GIB, "Reserved")
    assert pod["spec"]["nodeName"] == node
    assert pod["metadata"]["ownerReferences"][0]["uid"] == made["metadata"]["uid"]
    assert row["podUID"] == pod["metadata"]["uid"]
    assert pod["metadata"]["annotations"]["sharepod.dev/gpus"] == row["gpus"][0] == gpu_uuid(node, 0)
    status = seen["status"]
    assert (status["node"], status["podUID"], status["gpus"][0]["uuid"]) == (
        node,
        pod["metadata"]["uid"],
        row["gpus"][0],
    )
    assert status["granted"] == {"requestMilli": 400, "limitMilli": 700, "memory": 4 * GIB}
    world.condition(namespace, "one", "Placed", status="True")
    world.condition(namespace, "one", "PodReady", status="True")
    world.condition(namespace, "one", "Enforced", status="Unknown", reason="NoCudaCall")
    reasons = {reason for reason, _ in world.events(namespace, "one")}
    assert reasons - {"Started"} == {"Scheduled"}, "kube-scheduler's, and one of ours once it runs"


def test_annotations_of_gemini_are_placed_as_the_block_is(world: World) -> None:
    (node,) = world.nodes("dialect")
    namespace = world.cluster.namespace("dialect")
    world.apply(namespace, "one", on="dialect", annotations={"gemini/gpu_request": "0.5"})
    world.phase(namespace, "one", "Running")
    row = world.row(node, "one")
    assert row is not None
    assert row["requestMilli"] == 500


def test_a_burst_never_gets_more_of_a_gpu_than_there_is_and_every_gap_is_filled(world: World) -> None:
    nodes = world.nodes("burst", 3)
    namespace = world.cluster.namespace("burst")
    for number in range(20):
        world.apply(namespace, f"p{number}", {"request": 0.35}, on="burst")
    wait(
        lambda: sum(len(world.rows(node)) for node in nodes) == 12 and len(bound(world, namespace)) == 12,
        what="two of 0.35 on each of six GPUs",
    )

    def waiting() -> int:
        items = world.api.get(world.path(namespace))["items"]
        return sum(not (item.get("status") or {}).get("node") for item in items)

    wait(lambda: waiting() == 8, what="the status of the twelve")
    for node in nodes:
        for index in range(2):
            rows = [row for row in world.rows(node) if gpu_uuid(node, index) in row["gpus"]]
            assert sum(row["requestMilli"] for row in rows) <= 1000


def test_what_never_fits_says_so_and_goes_on_when_room_appears(world: World) -> None:
    namespace = world.cluster.namespace("never")
    world.nodes("never", 1)
    world.apply(namespace, "four", {"request": 0.5, "count": 3}, on="never")
    message = world.condition(namespace, "four", "Placed", status="False", reason="NeverFits")
    assert "3" in message
    world.event(namespace, "four", "NeverFits")
    assert world.sharepod(namespace, "four")["status"]["phase"] == "Pending"

    name = world.cluster.add_fake_nodes(1, labels={"sharepod.dev/pool": "dedicated", "test": "never"}, prefix="large")[
        0
    ]
    world.cluster.wait_for(f"{GPUNODES}/{name}", bool, what="its GPUNode")
    gpus = [
        {"uuid": gpu_uuid(name, index), "index": index, "model": "Test GPU", "memory": 16 * GIB} for index in range(4)
    ]
    world.api.patch(f"{GPUNODES}/{name}/status", {"status": {"gpus": gpus}})
    world.agents._beat_once(name)
    world.phase(namespace, "four", "Running")
    row = world.row(name, "four")
    assert row is not None
    assert len(set(row["gpus"])) == 3


def test_one_that_waits_is_placed_as_soon_as_another_has_gone(world: World) -> None:
    world.nodes("turn")
    namespace = world.cluster.namespace("turn")
    world.apply(namespace, "first", {"request": 0.6, "count": 2}, on="turn")
    world.phase(namespace, "first", "Running")
    world.apply(namespace, "second", {"request": 0.6}, on="turn")
    message = world.condition(namespace, "second", "Placed", status="False", reason="NoRoom")
    assert "0.4" in message
    world.delete(namespace, "first")
    world.phase(namespace, "second", "Running")


@pytest.mark.promise("placement-exclusive")
def test_an_exclusive_sharepod_is_alone_on_its_gpu(world: World) -> None:
    (node,) = world.nodes("alone")
    namespace = world.cluster.namespace("alone")
    world.apply(namespace, "small", {"request": 0.1}, on="alone")
    world.phase(namespace, "small", "Running")
    world.apply(namespace, "whole", {"mode": "Exclusive"}, on="alone")
    world.phase(namespace, "whole", "Running")
    small, whole = world.row(node, "small"), world.row(node, "whole")
    assert small is not None
    assert whole is not None
    assert set(small["gpus"]).isdisjoint(whole["gpus"])
    world.condition(namespace, "whole", "Enforced", status="True", reason="Exclusive")
    world.apply(namespace, "other", {"mode": "Exclusive"}, on="alone")
    world.condition(namespace, "other", "Placed", status="False", reason="NoRoom")


@pytest.mark.promise("time-resized")
def test_a_raise_is_granted_where_there_is_room_and_refused_with_a_reason_where_not(world: World) -> None:
    (node,) = world.nodes("resize")
    namespace = world.cluster.namespace("resize")
    # Two members of an affinity group, which therefore share a GPU.
    for name, request in (("a", 0.4), ("b", 0.4)):
        world.apply(namespace, name, {"request": request, "memory": "4Gi", "affinity": "pair"}, on="resize")
        world.phase(namespace, name, "Running")
    path = world.path(namespace, "a")

    world.api.patch(path, {"spec": {"gpu": {"request": 0.6, "memory": "6Gi"}}})
    world.condition(namespace, "a", "Resized", status="True", reason="Granted")
    row = world.row(node, "a")
    assert row is not None
    assert (row["requestMilli"], row["memory"]) == (600, 6 * GIB)
    assert world.sharepod(namespace, "a")["status"]["granted"]["requestMilli"] == 600

    world.api.patch(path, {"spec": {"gpu": {"request": 0.9}}})
    message = world.condition(namespace, "a", "Resized", status="False", reason="NoRoom")
    assert "0.6" in message
    assert world.sharepod(namespace, "a")["status"]["granted"]["requestMilli"] == 600

    # The lowered share of the other SharePod makes room.
    world.api.patch(world.path(namespace, "b"), {"spec": {"gpu": {"request": 0.1}}})
    world.condition(namespace, "a", "Resized", status="True", reason="Granted")
    wait(lambda: (world.row(node, "a") or {})["requestMilli"] == 900, what="the raise")
    pod = world.pod(namespace, "a")
    assert pod is not None
    assert pod["metadata"]["uid"] == world.sharepod(namespace, "a")["status"]["podUID"]


def test_usage_and_enforcement_are_shown_as_the_agent_reports_them(world: World) -> None:
    world.nodes("usage")
    namespace = world.cluster.namespace("usage")
    made = world.apply(namespace, "one", {"request": 0.4}, on="usage")
    world.phase(namespace, "one", "Running")
    tenant = made["metadata"]["uid"]
    world.agents.report(tenant, connected=True, enforced=True, heldMilli=390, memory=GIB)
    world.condition(namespace, "one", "Enforced", status="True")
    usage = {"heldMilli": 390, "memory": GIB, "shown": "0.39", "memoryShown": "1Gi"}
    world.until(namespace, "one", lambda seen: seen["status"].get("usage") == usage, what="usage")
    world.agents.report(tenant, enforced=False)
    message = world.condition(namespace, "one", "Enforced", status="False")
    assert "glibc" in message


def test_usage_is_written_at_most_once_in_its_interval(world: World) -> None:
    world.nodes("calm")
    namespace = world.cluster.namespace("calm")
    made = world.apply(namespace, "one", {"request": 0.4}, on="calm")
    world.phase(namespace, "one", "Running")
    tenant = made["metadata"]["uid"]
    world.agents.report(tenant, connected=True, enforced=True, heldMilli=50, memory=GIB)
    world.until(namespace, "one", lambda seen: seen["status"].get("usage"), what="usage")
    began = time.monotonic()
    versions = {world.sharepod(namespace, "one")["metadata"]["resourceVersion"]}
    # the usage differs from the last written value by more each time than the operator tolerates
    for held in range(100, 700, 60):
        world.agents.report(tenant, heldMilli=held)
        versions.add(world.sharepod(namespace, "one")["metadata"]["resourceVersion"])
    world.until(namespace, "one", lambda seen: seen["status"]["usage"]["heldMilli"] == 640, what="the last usage")
    took = time.monotonic() - began
    assert len(versions) <= took + 2  # the interval between two writes of usage is 1 s here


def test_a_sharepod_that_slipped_past_admission_gets_a_condition(world: World) -> None:
    world.nodes("invalid")
    namespace = world.cluster.namespace("invalid")
    policy = "/apis/admissionregistration.k8s.io/v1/validatingadmissionpolicybindings"
    bindings = world.api.get(policy)["items"]
    for binding in bindings:
        world.api.delete(f"{policy}/{binding['metadata']['name']}")
    try:

        def slips() -> bool:
            try:
                world.apply(namespace, "bad", on="invalid", annotations={"gemini/gpu_request": "1.4"})
            except Exception:
                return False
            return True

        wait(slips, what="the policies are deleted", interval=0.5)
        message = world.condition(namespace, "bad", "Placed", status="False", reason="Invalid")
        assert "gemini/gpu_request" in message
    finally:
        for binding in bindings:
            metadata = {key: binding["metadata"][key] for key in ("name", "labels") if key in binding["metadata"]}
            world.api.create(policy, {**binding, "metadata": metadata})
    world.apply(namespace, "good", {"request": 0.1}, on="invalid")
    world.phase(namespace, "good", "Running")


@pytest.mark.promise("operator-refused")
def test_a_pod_that_the_api_server_refuses_ends_the_sharepod_with_its_words(world: World) -> None:
    (node,) = world.nodes("refused")
    namespace = world.cluster.namespace("refused")
    # The CRD has the types of a PodSpec but not all its rules, so this invalid container name passes.
    containers = [{"name": "Main", "image": "test"}]
    world.apply(namespace, "one", {"request": 0.4}, on="refused", containers=containers)
    world.phase(namespace, "one", "Failed")
    assert "spec.containers[0].name" in world.condition(
        namespace, "one", "PodReady", status="False", reason="PodRefused"
    )
    wait(lambda: not world.rows(node), what="its share is released")


@pytest.mark.promise("operator-forbidden")
def test_a_quota_is_shown_and_the_pod_is_made_when_it_allows(world: World) -> None:
    world.nodes("quota")
    namespace = world.cluster.namespace("quota")
    quota = {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "none"}, "spec": {"hard": {"pods": "0"}}}
    path = f"/api/v1/namespaces/{namespace}/resourcequotas"
    world.api.create(path, quota)
    world.cluster.wait_for(f"{path}/none", lambda seen: (seen or {}).get("status", {}).get("hard"), what="the quota")
    world.apply(namespace, "one", {"request": 0.4}, on="quota")
    assert "quota" in world.condition(namespace, "one", "PodReady", status="False", reason="PodForbidden")
    world.api.delete(f"{path}/none")
    world.phase(namespace, "one", "Running")


@pytest.mark.promise("operator-forbidden-share")
def test_a_pod_whose_annotations_leave_no_room_for_its_gpus_gives_the_share_back(world: World) -> None:
    """The annotations of the Pod have the greatest size. So the Pod is created, but the API server refuses the patch
    that adds the GPUs."""
    (node,) = world.nodes("full")
    namespace = world.cluster.namespace("full")
    key, taken = "example.com/notes", len("sharepod.dev/gpus") + len("void")
    notes = "x" * ((256 << 10) - len(key) - taken)
    world.apply(namespace, "full", {"request": 0.6}, on="full", annotations={key: notes})
    message = world.condition(namespace, "full", "PodReady", status="False", reason="PodForbidden")
    assert "metadata.annotations: Too long" in message
    wait(lambda: not world.rows(node), what="its share is released")
    world.api.patch(f"/api/v1/namespaces/{namespace}/pods/full", {"metadata": {"annotations": {key: None}}})
    world.phase(namespace, "full", "Running")


@pytest.mark.promise("operator-forbidden")
def test_a_policy_that_denies_the_pod_is_told_and_the_pod_is_made_once_it_allows_it(world: World) -> None:
    world.nodes("denied")
    namespace = world.cluster.namespace("denied")
    group = "/apis/admissionregistration.k8s.io/v1"
    rules = [{"apiGroups": [""], "apiVersions": ["v1"], "operations": ["CREATE"], "resources": ["pods"]}]
    mine = {"kubernetes.io/metadata.name": namespace}
    policy = {
        "apiVersion": "admissionregistration.k8s.io/v1",
        "kind": "ValidatingAdmissionPolicy",
        "metadata": {"name": "denied"},
        "spec": {
            "matchConstraints": {"resourceRules": rules},
            "validations": [{"expression": "false", "message": "no pods on Sundays"}],
        },
    }
    binding = {
        "apiVersion": "admissionregistration.k8s.io/v1",
        "kind": "ValidatingAdmissionPolicyBinding",
        "metadata": {"name": "denied"},
        "spec": {
            "policyName": "denied",
            "validationActions": ["Deny"],
            "matchResources": {"namespaceSelector": {"matchLabels": mine}},
        },
    }
    world.api.create(f"{group}/validatingadmissionpolicies", policy)
    world.api.create(f"{group}/validatingadmissionpolicybindings", binding)
    probe = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "probe"},
        "spec": {"containers": [{"name": "main", "image": "test"}], "nodeSelector": {"test": "nowhere"}},
    }
    pods = f"/api/v1/namespaces/{namespace}/pods"

    def denied() -> bool:
        with suppress(ApiError):
            world.api.create(pods, probe)
            world.api.delete(f"{pods}/probe", grace=0)
            return False
        return True

    wait(denied, what="the policy is enforced", interval=0.5)
    world.apply(namespace, "one", {"request": 0.4}, on="denied")
    message = world.condition(namespace, "one", "PodReady", status="False", reason="PodForbidden")
    assert "no pods on Sundays" in message
    world.api.delete(f"{group}/validatingadmissionpolicybindings/denied")
    world.phase(namespace, "one", "Running", timeout=70)
    world.api.delete(f"{group}/validatingadmissionpolicies/denied")


def test_a_foreign_pod_of_that_name_is_left_alone_and_named(world: World) -> None:
    world.nodes("foreign")
    namespace = world.cluster.namespace("foreign")
    pods = f"/api/v1/namespaces/{namespace}/pods"
    body = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "one"},
        "spec": {"containers": [{"name": "main", "image": "test"}], "nodeSelector": {"test": "foreign"}},
    }
    uid = world.api.create(pods, body)["metadata"]["uid"]
    world.apply(namespace, "one", {"request": 0.4}, on="foreign")
    message = world.condition(namespace, "one", "PodReady", status="False", reason="PodNameTaken")
    assert "another name" in message
    found = world.pod(namespace, "one")
    assert found is not None
    assert found["metadata"]["uid"] == uid
    world.api.delete(f"{pods}/one", grace=0)
    world.phase(namespace, "one", "Running")


@pytest.mark.promise("operator-taken-back")
def test_a_pod_refused_by_kube_scheduler_is_withdrawn_and_placed_elsewhere(world: World) -> None:
    nodes = world.nodes("refuse", 2)
    namespace = world.cluster.namespace("refuse")
    # Binpack chooses the same GPU for the second SharePod. A rule that only kube-scheduler knows forbids its node.
    world.apply(namespace, "first", {"request": 0.4}, on="refuse", labels={"app": "x"})
    first = world.phase(namespace, "first", "Running")["status"]["node"]
    apart = {
        "podAntiAffinity": {
            "requiredDuringSchedulingIgnoredDuringExecution": [
                {"labelSelector": {"matchLabels": {"app": "x"}}, "topologyKey": "kubernetes.io/hostname"}
            ]
        }
    }
    world.apply(namespace, "second", {"request": 0.4}, on="refuse", affinity=apart)
    seen = world.phase(namespace, "second", "Running")
    (other,) = set(nodes) - {first}
    assert seen["status"]["node"] == other
    assert world.row(first, "second") is None
    world.event(namespace, "second", "PodTakenBack")


@pytest.mark.promise("placement-order")
def test_the_higher_priority_goes_first(world: World) -> None:
    namespace = world.cluster.namespace("prio")
    world.api.create(
        "/apis/scheduling.k8s.io/v1/priorityclasses",
        {
            "apiVersion": "scheduling.k8s.io/v1",
            "kind": "PriorityClass",
            "metadata": {"name": "urgent"},
            "value": 1000,
        },
    )
    node = world.cluster.add_fake_nodes(1, labels={"sharepod.dev/pool": "dedicated", "test": "prio"}, prefix="prio")[0]
    specs: dict[str, dict[str, Any]] = {"older": {}, "urgent": {"priorityClassName": "urgent"}}
    for name, spec in specs.items():
        world.apply(namespace, name, {"request": 0.9, "count": 2}, on="prio", **spec)
        world.condition(namespace, name, "Placed", status="False")
    world.agents.start(node)
    world.phase(namespace, "urgent", "Running")
    assert condition_of(world.sharepod(namespace, "older"), "Placed")["status"] == "False"


@pytest.mark.promise("operator-pod-first", "security-no-new-right")
def test_a_pod_that_is_forbidden_holds_no_share_and_the_reason_stays(world: World) -> None:
    (node,) = world.nodes("barred")
    namespace, other = world.cluster.namespace("barred"), world.cluster.namespace("unbarred")
    quota = {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "none"}, "spec": {"hard": {"pods": "0"}}}
    path = f"/api/v1/namespaces/{namespace}/resourcequotas"
    world.api.create(path, quota)
    world.cluster.wait_for(f"{path}/none", lambda seen: (seen or {}).get("status", {}).get("hard"), what="the quota")
    world.apply(namespace, "one", {"request": 1, "count": 2}, on="barred")
    world.condition(namespace, "one", "PodReady", status="False", reason="PodForbidden")
    assert world.row(node, "one") is None
    world.apply(other, "two", {"request": 1, "count": 2}, on="barred")
    world.phase(other, "two", "Running")
    seen = world.phase(namespace, "one", "Pending")
    assert "node" not in seen["status"]
    assert "quota" in world.condition(namespace, "one", "PodReady", status="False", reason="PodForbidden")
