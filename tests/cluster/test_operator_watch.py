"""Agents' findings reach users as conditions and Events. By policy, the operator evicts pods with unenforced shares."""

from __future__ import annotations

from typing import Any

import pytest
from cluster.operator_world import World, wait

EVICT = {
    "SHAREPOD_UNENFORCED_POLICY": "Evict",
    "SHAREPOD_UNENFORCED_GRACE": "1",
    "SHAREPOD_EVICTIONS_PER_MINUTE": "120",
    "SHAREPOD_EVICTION_PATIENCE": "3",
}
UNHOOKED = {"reason": "ProcessWithoutHook", "message": "process 7 uses the GPU without the hook"}


def running(world: World, prefix: str, **options: Any) -> tuple[str, str, str]:
    """Start a SharePod; return its node, namespace and tenant id once it runs."""
    (node,) = world.nodes(prefix)
    namespace = world.cluster.namespace(prefix)
    made = world.apply(namespace, "one", {"request": 0.5}, on=prefix, **options)
    world.phase(namespace, "one", "Running")
    return node, namespace, made["metadata"]["uid"]


@pytest.mark.promise("operator-eviction-budget")
def test_by_policy_a_pod_without_the_hook_is_evicted_even_against_its_own_budget(world: World) -> None:
    assert world.operator is not None
    world.operator.stop()
    world.start_operator(**EVICT)
    _, namespace, tenant = running(world, "evicts")
    world.agents.report(tenant, connected=True, enforced=True)
    world.condition(namespace, "one", "Enforced", status="True")
    world.agents.report(tenant, enforced=False, findings=[UNHOOKED])
    world.phase(namespace, "one", "Failed")
    text = world.condition(namespace, "one", "PodReady", status="False", reason="Evicted")
    assert UNHOOKED["message"] in text
    wait(lambda: world.metric("sharepod_operator_evictions_total") == 1, what="one eviction counted")

    _, namespace, tenant = running(world, "budget", labels={"app": "x"})
    budget = {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": {"name": "mine"},
        "spec": {"minAvailable": 1, "selector": {"matchLabels": {"app": "x"}}},
    }
    world.api.create(f"/apis/policy/v1/namespaces/{namespace}/poddisruptionbudgets", budget)
    world.cluster.wait_for(
        f"/apis/policy/v1/namespaces/{namespace}/poddisruptionbudgets/mine",
        lambda seen: seen and (seen.get("status") or {}).get("observedGeneration"),
        what="the budget is enforced",
    )
    world.agents.report(tenant, connected=True, enforced=False, findings=[UNHOOKED])
    world.event(namespace, "one", "EvictionRefused")
    world.phase(namespace, "one", "Failed")
    assert UNHOOKED["message"] in world.condition(namespace, "one", "PodReady", status="False", reason="Evicted")
