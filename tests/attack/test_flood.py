"""A flood of SharePods of one namespace, at the limits of names and labels, beside one SharePod of another."""

from __future__ import annotations

from typing import Any

import pytest
from cluster.operator_world import World, condition_of

FLOOD = 300
"""SharePods: ten times what the operator writes a second here."""
MESSAGE_MAX = 1024
"""Characters of a condition's message: what a list of SharePods costs whoever reads it."""

pytestmark = pytest.mark.timeout(400)


def longest(number: int) -> dict[str, Any]:
    """Name and labels as long as the API server takes them."""
    labels = {f"{'p' * 249}.{each:03}/{'n' * 63}": "v" * 63 for each in range(20)}
    return {"name": f"f{number:03}".ljust(63, "x"), "labels": labels}


@pytest.mark.promise("security-flood")
def test_who_floods_the_queue_waits_in_it_and_a_small_request_of_another_passes(world: World) -> None:
    """The flood asks for more than half of both GPUs, so that one runs; the rest of the GPUs is anybody's."""
    (node,) = world.nodes("flood")
    attacker, victim = world.cluster.namespace("flood"), world.cluster.namespace("flooded")
    for number in range(FLOOD):
        world.apply(attacker, on="flood", gpu={"request": 0.6, "count": 2, "memory": "8Gi"}, **longest(number))
    world.apply(victim, "small", {"request": 0.1, "memory": "1Gi"}, on="flood")
    world.phase(victim, "small", "Running", timeout=120)
    assert [row["podName"] for row in world.rows(node) if row["namespace"] == victim] == ["small"]
    assert sum(row["namespace"] == attacker for row in world.rows(node)) <= 1

    def all_told() -> bool:
        items = world.api.get(world.path(attacker))["items"]
        return len(items) == FLOOD and all(condition_of(item, "Placed").get("message") for item in items[1:])

    world.cluster.wait_for(world.path(attacker), lambda _: all_told(), what="a word to each owner", timeout=120)
    messages = [
        condition.get("message", "")
        for item in world.api.get(world.path(attacker))["items"]
        for condition in item["status"]["conditions"]
    ]
    assert max(len(message) for message in messages) <= MESSAGE_MAX
    assert world.operator is not None
    assert world.operator.running()
