"""Agents' findings reach users as conditions and Events. By policy, the operator evicts pods with unenforced shares."""

from __future__ import annotations

from typing import Any

import pytest
from cluster.operator_world import GPUNODES, World, wait

EVICT = {
    "SHAREPOD_UNENFORCED_POLICY": "Evict",
    "SHAREPOD_UNENFORCED_GRACE": "1",
    "SHAREPOD_EVICTIONS_PER_MINUTE": "120",
    "SHAREPOD_EVICTION_PATIENCE": "3",
}
UNHOOKED = {"reason": "ProcessWithoutHook", "message": "process 7 uses the GPU without the hook"}
GAP = {"reason": "MemoryBeyondTracked", "message": "the driver counts 600 MiB more"}


def running(world: World, prefix: str, **options: Any) -> tuple[str, str, str]:
    """Start a SharePod; return its node, namespace and tenant id once it runs."""
    (node,) = world.nodes(prefix)
    namespace = world.cluster.namespace(prefix)
    made = world.apply(namespace, "one", {"request": 0.5}, on=prefix, **options)
    world.phase(namespace, "one", "Running")
    return node, namespace, made["metadata"]["uid"]


@pytest.mark.promise("operator-report-only")
def test_what_the_agent_found_out_is_shown_and_the_default_policy_ends_nothing(world: World) -> None:
    _, namespace, tenant = running(world, "report")
    world.agents.report(tenant, connected=True, enforced=True, findings=[GAP])
    assert "600 MiB more" in world.condition(namespace, "one", "Enforced", status="True", reason="HookConnected")
    world.agents.report(tenant, enforced=False, findings=[UNHOOKED])
    text = world.condition(namespace, "one", "Enforced", status="False", reason="ProcessWithoutHook")
    assert text == UNHOOKED["message"]
    for reason in ("MemoryBeyondTracked", "ProcessWithoutHook"):
        world.event(namespace, "one", reason)
    wait(lambda: world.metric("sharepod_operator_unenforced") == 1, what="the metric")
    world.agents.report(tenant, enforced=None, findings=[{"reason": "ProcessesNotTold", "message": "not reported"}])
    world.condition(namespace, "one", "Enforced", status="Unknown", reason="ProcessesNotTold")
    assert world.phase(namespace, "one", "Running")


@pytest.mark.promise("node-gpu-events")
def test_a_gpu_that_fails_is_told_to_its_tenants_and_its_node(world: World) -> None:
    node, namespace, _ = running(world, "fails")
    gpus = world.api.get(f"{GPUNODES}/{node}")["status"]["gpus"]
    sick = [{**gpu, "health": "Unhealthy", "shareable": False, "reason": "the driver reported Xid 79"} for gpu in gpus]
    world.agents.stop(node)
    world.api.patch(f"{GPUNODES}/{node}/status", {"status": {"gpus": sick}})
    assert "Xid 79" in world.condition(namespace, "one", "GPUHealthy", status="False", reason="GpuFailed")
    world.event(namespace, "one", "GpuFailed")
    world.event("default", node, "GpuFailed")
    world.agents.start(node)
    world.condition(namespace, "one", "GPUHealthy", status="True", reason="GpuRecovered")
    world.event("default", node, "GpuRecovered")


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
