"""Ends of reservations: no share is released before no process can use it, and no work runs twice."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
from cluster.operator_world import GPUNODES, World, wait

NODES = "/api/v1/nodes"


def holds_for(seconds: float, condition: Callable[[], Any], what: str) -> None:
    """Assert for this many seconds that the condition holds."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        assert condition(), f"{what}: ceased to hold"
        time.sleep(0.1)


def evict(world: World, namespace: str, name: str) -> None:
    """Evict a pod by the Eviction API, as `kubectl drain` does."""
    body = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": name, "namespace": namespace}}
    world.api.create(f"/api/v1/namespaces/{namespace}/pods/{name}/eviction", body)


def test_a_share_is_not_given_away_while_its_pod_takes_long_to_end(world: World) -> None:
    (node,) = world.nodes("slow")
    namespace = world.cluster.namespace("slow")
    slow = {"test.sharepod.dev/termination-seconds": "6"}
    made = world.apply(namespace, "old", {"request": 1, "count": 2}, on="slow", annotations=slow)
    world.phase(namespace, "old", "Running")
    world.apply(namespace, "new", {"request": 0.5}, on="slow")
    world.condition(namespace, "new", "Placed", status="False")
    world.delete(namespace, "old")
    wait(
        lambda: "deletionTimestamp" in (world.pod(namespace, "old") or {}).get("metadata", {}),
        what="the pod's deletion",
    )
    holds_for(4, lambda: world.row(node, "new") is None and world.row(node, "old"), "the share stays with the old one")
    world.phase(namespace, "new", "Running")
    assert all(row["id"] != made["metadata"]["uid"] for row in world.rows(node))


@pytest.mark.promise("operator-released-means-gone")
def test_a_process_that_outlives_its_pod_keeps_the_share_until_it_is_gone(world: World) -> None:
    (node,) = world.nodes("left")
    namespace = world.cluster.namespace("left")
    made = world.apply(namespace, "old", {"request": 1, "count": 2}, on="left")
    tenant = made["metadata"]["uid"]
    world.phase(namespace, "old", "Running")
    world.agents.leave_behind(tenant)
    world.apply(namespace, "new", {"request": 0.5}, on="left")
    world.delete(namespace, "old")
    wait(lambda: (world.row(node, "old") or {}).get("state") == "Releasing", what="Releasing")
    wait(lambda: world.pod(namespace, "old") is None, what="the pod, which had ended by then, is deleted")
    holds_for(2, lambda: world.row(node, "new") is None, "the share is taken")
    world.agents.end(tenant)
    world.phase(namespace, "new", "Running")


@pytest.mark.parametrize(("phase", "reason"), [("Succeeded", "Completed"), ("Failed", "PodFailed")])
def test_a_pod_that_ends_by_itself_gives_its_share_back(world: World, phase: str, reason: str) -> None:
    prefix = f"ends-{phase.lower()}"
    (node,) = world.nodes(prefix)
    namespace = world.cluster.namespace(prefix)
    world.apply(namespace, "one", {"request": 1}, on=prefix)
    seen = world.phase(namespace, "one", "Running")
    world.kubelets.finish(namespace, "one", phase=phase, exit_code=0 if phase == "Succeeded" else 3)
    ended = world.phase(namespace, "one", phase)
    message = world.condition(namespace, "one", "PodReady", status="False", reason=reason)
    assert phase == "Succeeded" or "exit code 3" in message
    wait(lambda: not world.rows(node), what="an empty ledger")
    assert ended["status"]["podUID"] == seen["status"]["podUID"]
    assert world.pod(namespace, "one") is not None  # the Pod is kept, so its log stays readable


@pytest.mark.promise("operator-no-second-run")
def test_a_pod_deleted_by_hand_fails_the_sharepod_and_nothing_runs_twice(world: World) -> None:
    (node,) = world.nodes("byhand")
    namespace = world.cluster.namespace("byhand")
    world.apply(namespace, "one", {"request": 1}, on="byhand")
    world.phase(namespace, "one", "Running")
    world.api.delete(f"/api/v1/namespaces/{namespace}/pods/one")
    world.phase(namespace, "one", "Failed")
    world.condition(namespace, "one", "PodReady", status="False", reason="PodLost")
    wait(lambda: not world.rows(node), what="an empty ledger")
    wait(lambda: world.pod(namespace, "one") is None, what="the end of the Pod")
    holds_for(2, lambda: world.pod(namespace, "one") is None, "no second pod")


@pytest.mark.promise("operator-orphan")
def test_a_pod_that_was_left_alone_keeps_its_share_until_it_ends(world: World) -> None:
    (node,) = world.nodes("orphan")
    namespace = world.cluster.namespace("orphan")
    world.apply(namespace, "one", {"request": 1}, on="orphan")
    world.phase(namespace, "one", "Running")
    path = world.path(namespace, "one")
    world.api.delete(path, orphan=True)
    world.cluster.wait_for(path, lambda seen: seen is None, what="the end of the SharePod")

    def runs() -> bool:
        pod, row = world.pod(namespace, "one") or {"metadata": {"deletionTimestamp": ""}}, world.row(node, "one")
        return "deletionTimestamp" not in pod["metadata"] and row is not None and row["state"] == "Reserved"

    holds_for(3, runs, "pod and share stay together")
    world.kubelets.finish(namespace, "one")
    wait(lambda: not world.rows(node), what="an empty ledger")


@pytest.mark.promise("operator-evicted")
def test_an_evicted_pod_fails_the_sharepod_as_evicted(world: World) -> None:
    (node,) = world.nodes("evict")
    namespace = world.cluster.namespace("evict")
    world.apply(namespace, "one", {"request": 1}, on="evict")
    world.phase(namespace, "one", "Running")
    evict(world, namespace, "one")
    world.phase(namespace, "one", "Failed")
    assert "vict" in world.condition(namespace, "one", "PodReady", status="False", reason="Evicted")
    wait(lambda: not world.rows(node), what="an empty ledger")
    wait(lambda: world.pod(namespace, "one") is None, what="the end of the Pod")


@pytest.mark.promise("operator-agent-away")
def test_without_its_agent_a_node_is_not_used_and_nothing_of_its_tenants_is_given_away(world: World) -> None:
    (node,) = world.nodes("away")
    namespace = world.cluster.namespace("away")
    for name in ("stays", "ends"):
        world.apply(namespace, name, {"request": 0.5, "affinity": "pair"}, on="away")
        world.phase(namespace, name, "Running")
    world.agents.stop(node)
    world.cluster.wait_for(
        f"{GPUNODES}/{node}",
        lambda seen: any(
            item["type"] == "AgentAlive" and item["status"] == "False" and "force-release" in item["message"]
            for item in (seen or {}).get("status", {}).get("conditions", [])
        ),
        what="the condition with advice",
    )
    world.apply(namespace, "late", {"request": 0.2}, on="away")
    assert "agent" in world.condition(namespace, "late", "Placed", status="False")
    world.delete(namespace, "ends")
    wait(lambda: (world.row(node, "ends") or {}).get("state") == "Releasing", what="Releasing")
    holds_for(3, lambda: world.row(node, "ends") and world.row(node, "stays"), "both rows stay")
    world.agents.start(node)
    wait(lambda: world.row(node, "ends") is None, what="the release")
    world.phase(namespace, "late", "Running")
    assert world.row(node, "stays") is not None
    wait(
        lambda: all(
            item["status"] == "True"
            for item in world.api.get(f"{GPUNODES}/{node}")["status"].get("conditions", [])
            if item["type"] == "AgentAlive"
        ),
        what="the advice to go",
    )


@pytest.mark.promise("operator-override-admin")
def test_force_release_gives_away_what_no_agent_confirms_but_never_what_runs(world: World) -> None:
    (node,) = world.nodes("force")
    namespace = world.cluster.namespace("force")
    made = {}
    for name in ("live", "dead"):
        made[name] = world.apply(namespace, name, {"request": 0.5, "affinity": "pair"}, on="force")["metadata"]["uid"]
        world.phase(namespace, name, "Running")
    world.agents.stop(node)
    world.delete(namespace, "dead")
    wait(lambda: (world.row(node, "dead") or {}).get("state") == "Releasing", what="Releasing")
    annotation = "sharepod.dev/force-release"
    world.api.patch(f"{GPUNODES}/{node}", {"metadata": {"annotations": {annotation: ",".join(made.values())}}})
    wait(lambda: world.row(node, "dead") is None, what="the forced release")
    assert world.row(node, "live") is not None
    for reason in ("ShareGivenAway", "ForceReleaseRefused"):
        world.event("default", node, reason)
    world.api.patch(f"{GPUNODES}/{node}", {"metadata": {"annotations": {annotation: made["dead"]}}})
    wait(
        lambda: annotation not in world.api.get(f"{GPUNODES}/{node}")["metadata"].get("annotations", {}),
        what="the annotation to go once it has done its work",
    )


@pytest.mark.promise("operator-override-taint")
def test_the_out_of_service_taint_gives_away_what_no_agent_confirms(world: World) -> None:
    (node,) = world.nodes("broken")
    namespace = world.cluster.namespace("broken")
    world.apply(namespace, "one", {"request": 0.5}, on="broken")
    world.phase(namespace, "one", "Running")
    world.agents.stop(node)
    world.delete(namespace, "one")
    wait(lambda: (world.row(node, "one") or {}).get("state") == "Releasing", what="Releasing")
    taint = {"key": "node.kubernetes.io/out-of-service", "value": "nodeshutdown", "effect": "NoExecute"}
    world.api.patch(f"{NODES}/{node}", {"spec": {"taints": [taint]}})
    wait(lambda: not world.rows(node), what="an empty ledger")


@pytest.mark.promise("operator-node-back")
def test_a_node_deleted_and_registered_again_keeps_its_ledger(world: World) -> None:
    (node,) = world.nodes("again")
    namespace = world.cluster.namespace("again")
    world.apply(namespace, "one", {"request": 0.7}, on="again")
    world.phase(namespace, "one", "Running")
    before = world.api.get(f"{GPUNODES}/{node}")
    body = world.api.get(f"{NODES}/{node}")
    world.api.delete(f"{NODES}/{node}")
    body["metadata"] = {key: body["metadata"][key] for key in ("name", "labels")}
    status = body.pop("status")
    body["spec"] = {}
    world.api.create(NODES, body)
    world.api.patch(f"{NODES}/{node}/status", {"status": status})
    world.api.patch(f"{NODES}/{node}", {"spec": {"taints": None}})
    holds_for(2, lambda: world.row(node, "one"), "the row stays")
    after = world.api.get(f"{GPUNODES}/{node}")
    assert after["metadata"]["uid"] == before["metadata"]["uid"]
    assert after["spec"]["tenants"] == before["spec"]["tenants"]
    world.apply(namespace, "two", {"request": 0.7, "affinity": "x"}, on="again")
    world.phase(namespace, "two", "Running")
    assert world.sharepod(namespace, "one")["status"]["phase"] == "Running"


@pytest.mark.promise("operator-override-node")
def test_when_its_node_is_gone_for_good_the_ledger_ends_with_its_tenants(world: World) -> None:
    (node,) = world.nodes("lost")
    namespace = world.cluster.namespace("lost")
    world.apply(namespace, "one", {"request": 0.7}, on="lost")
    world.phase(namespace, "one", "Running")
    world.agents.stop(node)
    world.api.delete(f"{NODES}/{node}")
    holds_for(1, lambda: world.row(node, "one"), "the row stays while its pod is there")
    # Delete the Pod without a grace period, as Kubernetes' pod garbage collector does after about 40 s.
    world.api.delete(f"/api/v1/namespaces/{namespace}/pods/one", grace=0)
    world.phase(namespace, "one", "Failed")
    world.cluster.wait_for(f"{GPUNODES}/{node}", lambda seen: seen is None, what="the GPUNode to go")


@pytest.mark.promise("operator-reservation-lost")
def test_a_row_removed_by_an_admin_does_not_leave_an_unaccounted_pod(world: World) -> None:
    (node,) = world.nodes("ledger")
    namespace = world.cluster.namespace("ledger")
    world.apply(namespace, "one", {"request": 0.7}, on="ledger")
    world.phase(namespace, "one", "Running")
    world.api.patch(f"{GPUNODES}/{node}", {"spec": {"tenants": []}})
    world.phase(namespace, "one", "Failed")
    message = world.condition(namespace, "one", "PodReady", status="False", reason="ReservationLost")
    assert "create the SharePod again" in message
    wait(lambda: world.pod(namespace, "one") is None, what="the pod to go")
    assert not world.rows(node)


def test_a_gpunode_without_tenants_that_an_admin_deleted_is_made_again(world: World) -> None:
    (node,) = world.nodes("remade")
    uid = world.api.get(f"{GPUNODES}/{node}")["metadata"]["uid"]
    world.api.delete(f"{GPUNODES}/{node}")
    world.cluster.wait_for(
        f"{GPUNODES}/{node}", lambda seen: seen is not None and seen["metadata"]["uid"] != uid, what="a new GPUNode"
    )
    namespace = world.cluster.namespace("remade")
    world.apply(namespace, "one", {"request": 0.7}, on="remade")
    world.phase(namespace, "one", "Running")


@pytest.mark.promise("budgets-sharepod-final")
def test_totals_of_all_runs_are_in_the_status_and_final_once_the_share_is_gone(world: World) -> None:
    (node,) = world.nodes("totals")
    namespace = world.cluster.namespace("totals")
    made = world.apply(namespace, "one", {"request": 0.5}, on="totals", restartPolicy="OnFailure")
    tenant = made["metadata"]["uid"]

    def counted(since: int, held: int, borrowed: int, reserved: int, memory: int) -> None:
        world.agents.report(
            tenant,
            countedSince=f"2026-01-0{since}T00:00:00.000Z",
            heldSeconds=held,
            borrowedSeconds=borrowed,
            reservedSeconds=reserved,
            memoryMebibyteSeconds=memory,
        )

    def consumed() -> Any:
        found = world.sharepod(namespace, "one")["status"].get("consumed") or {}
        return [found.get(f"{name}Seconds") for name in ("held", "borrowed", "reserved", "memoryMebibyte")]

    world.phase(namespace, "one", "Running")
    counted(1, 400, 100, 300, 9)
    wait(lambda: consumed() == [400, 100, 300, 9], what="the totals of a while")
    counted(1, 440, 110, 330, 10)
    evict(world, namespace, "one")
    world.until(
        namespace,
        "one",
        lambda seen: (seen["status"].get("restarts") or 0) == 1 and seen["status"]["phase"] == "Running",
        what="the second run",
    )
    assert consumed() == [440, 110, 330, 10], "the first run's totals are final"
    counted(2, 5, 0, 7, 1)
    world.kubelets.finish(namespace, "one", phase="Succeeded", exit_code=0)
    world.phase(namespace, "one", "Succeeded")
    wait(lambda: not world.rows(node), what="the row is removed")
    wait(lambda: consumed() == [445, 110, 337, 11], what="the totals of both runs")
    assert world.sharepod(namespace, "one")["status"]["consumed"]["since"] == "2026-01-01T00:00:00.000Z"
