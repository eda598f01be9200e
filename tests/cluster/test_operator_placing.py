"""Placement from `kubectl apply` to a bound Pod, and the message of a SharePod for which there is no room."""

from __future__ import annotations

import pytest
from cluster.operator_world import GIB, GPUNODES, World, gpu_uuid, wait


def test_an_applied_sharepod_is_reserved_in_the_ledger_then_runs_on_that_gpu(world: World) -> None:
    (node,) = world.nodes("apply")
    namespace = world.cluster.namespace("apply")
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
