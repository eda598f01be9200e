"""Runs that end and are followed by another run. Causes: a drain, a deletion, a failure, a lost node."""

from __future__ import annotations

import pytest
from cluster.operator_world import World, condition_of, wait
from harness.api import Object

NODES = "/api/v1/nodes"


def drain(world: World, namespace: str, name: str, node: str) -> None:
    """Drain a node as `kubectl drain` does: cordon it, evict its pod."""
    world.api.patch(f"{NODES}/{node}", {"spec": {"unschedulable": True}})
    body = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": name, "namespace": namespace}}
    world.api.create(f"/api/v1/namespaces/{namespace}/pods/{name}/eviction", body)


def runs_again(world: World, namespace: str, name: str, former: Object, *, timeout: float = 20) -> Object:
    """Wait until a SharePod runs in another Pod than `former`."""
    uid = former["status"]["podUID"]

    def again(seen: Object) -> bool:
        status = seen.get("status") or {}
        return status.get("phase") == "Running" and status.get("podUID") != uid

    return world.until(namespace, name, again, what="another run", timeout=timeout)


@pytest.mark.promise("operator-comes-back")
def test_a_sharepod_follows_drains_from_node_to_node_and_back(world: World) -> None:
    first, second = world.nodes("drains", 2)
    namespace = world.cluster.namespace("drains")
    world.apply(namespace, "one", {"request": 0.7}, on="drains", restartPolicy="Always")
    seen = world.phase(namespace, "one", "Running")
    for restarts in (1, 2):
        node = seen["status"]["node"]
        drain(world, namespace, "one", node)
        seen = runs_again(world, namespace, "one", seen, timeout=60)
        assert seen["status"]["node"] == ({first, second} - {node}).pop()
        assert (seen["status"]["restarts"], seen["status"]["lastEnd"]["cause"]) == (restarts, "Drained")
        assert world.rows(node) == []
        world.api.patch(f"{NODES}/{node}", {"spec": {"unschedulable": False}})
        pod = world.pod(namespace, "one")
        assert pod is not None
        assert pod["metadata"]["uid"] == seen["status"]["podUID"]
    wait(
        lambda: [reason for reason, _ in world.events(namespace, "one")].count("Drained") == 2,
        what="an Event for each drain",
    )


@pytest.mark.promise("operator-one-run-at-a-time")
def test_a_process_that_outlives_its_pod_keeps_the_next_run_waiting(world: World) -> None:
    (node,) = world.nodes("outlives")
    namespace = world.cluster.namespace("outlives")
    made = world.apply(namespace, "one", {"request": 0.7}, on="outlives", restartPolicy="OnFailure")
    seen = world.phase(namespace, "one", "Running")
    world.agents.leave_behind(made["metadata"]["uid"])
    world.api.delete(f"/api/v1/namespaces/{namespace}/pods/one", grace=0)
    world.condition(namespace, "one", "Placed", status="False", reason="Releasing")
    wait(lambda: (world.row(node, "one") or {}).get("state") == "Releasing", what="a row that is released")
    assert world.pod(namespace, "one") is None
    world.agents.end(made["metadata"]["uid"])
    seen = runs_again(world, namespace, "one", seen)
    assert seen["status"]["lastEnd"]["cause"] == "Deleted"


@pytest.mark.promise("operator-back-off")
def test_a_pod_that_failed_keeps_its_log_until_the_next_run_and_that_waits(world: World) -> None:
    (node,) = world.nodes("fails")
    namespace = world.cluster.namespace("fails")
    world.apply(namespace, "one", {"request": 0.7}, on="fails", restartPolicy="OnFailure")
    seen = world.phase(namespace, "one", "Running")
    world.kubelets.finish(namespace, "one", phase="Failed", exit_code=3)
    message = world.condition(namespace, "one", "Placed", status="False", reason="BackOff")
    waiting = world.sharepod(namespace, "one")
    assert waiting["status"]["lastEnd"]["retryAt"] in message
    assert "exit code 3" in condition_of(waiting, "PodReady")["message"]
    pod = world.pod(namespace, "one")
    assert pod is not None
    assert pod["status"]["phase"] == "Failed"
    wait(lambda: not world.rows(node), what="an empty ledger")
    again = runs_again(world, namespace, "one", seen, timeout=40)
    assert again["status"]["lastEnd"]["cause"] == "ContainerFailed"


@pytest.mark.promise("operator-comes-back-lost-node")
def test_on_a_node_that_does_not_answer_it_says_what_it_waits_for_and_comes_back_once_the_node_is_gone(
    world: World,
) -> None:
    names = world.nodes("lost", 2)
    namespace = world.cluster.namespace("lost")
    world.apply(namespace, "one", {"request": 0.7}, on="lost", restartPolicy="Always")
    seen = world.phase(namespace, "one", "Running")
    node = seen["status"]["node"]
    world.agents.stop(node)
    silent = [{"type": "Ready", "status": "Unknown", "reason": "NodeStatusUnknown", "message": "no word"}]
    status = world.api.get(f"{NODES}/{node}")["status"]
    others = [item for item in status["conditions"] if item["type"] != "Ready"]
    world.api.patch(f"{NODES}/{node}/status", {"status": {"conditions": others + silent}})
    world.api.delete(f"/api/v1/namespaces/{namespace}/pods/one", grace=0)
    message = world.condition(namespace, "one", "Placed", status="False", reason="NodeUnreachable")
    assert f"kubectl delete node {node}" in message
    assert world.pod(namespace, "one") is None
    world.api.delete(f"{NODES}/{node}")
    again = runs_again(world, namespace, "one", seen, timeout=40)
    assert again["status"]["node"] == (set(names) - {node}).pop()
