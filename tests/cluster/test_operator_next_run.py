"""A run that ends with its lost node and is followed by another run."""

from __future__ import annotations

import pytest
from cluster.operator_world import World
from harness.api import Object

NODES = "/api/v1/nodes"


def runs_again(world: World, namespace: str, name: str, former: Object, *, timeout: float = 20) -> Object:
    """Wait until a SharePod runs in another Pod than `former`."""
    uid = former["status"]["podUID"]

    def again(seen: Object) -> bool:
        status = seen.get("status") or {}
        return status.get("phase") == "Running" and status.get("podUID") != uid

    return world.until(namespace, name, again, what="another run", timeout=timeout)


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
