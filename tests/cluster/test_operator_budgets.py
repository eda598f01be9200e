"""PodDisruptionBudgets that select SharePods, with the real disruption controller and the Eviction API."""

from __future__ import annotations

import pytest
from cluster.operator_world import World, wait
from harness.api import ApiError


@pytest.mark.promise("operator-budgets")
@pytest.mark.parametrize("budget", [{"maxUnavailable": 1}, {"minAvailable": "50%"}, {"minAvailable": 2}])
def test_a_budget_over_three_sharepods_allows_one_eviction_at_a_time(
    world: World, budget: dict[str, int | str]
) -> None:
    prefix = "-".join(f"{key}-{value}" for key, value in budget.items()).lower().replace("%", "")
    world.nodes(prefix, 2)
    namespace = world.cluster.namespace(prefix)
    budgets = f"/apis/policy/v1/namespaces/{namespace}/poddisruptionbudgets"
    for name in ("a", "b", "c"):
        world.apply(namespace, name, {"request": 0.2}, on=prefix, labels={"app": "x"}, restartPolicy="Always")
        world.phase(namespace, name, "Running")
    spec = {"selector": {"matchLabels": {"app": "x"}}, **budget}
    world.api.create(
        budgets, {"apiVersion": "policy/v1", "kind": "PodDisruptionBudget", "metadata": {"name": "pdb"}, "spec": spec}
    )

    def allowed() -> int:
        return int(world.api.get(f"{budgets}/pdb").get("status", {}).get("disruptionsAllowed", 0))

    wait(lambda: allowed() == 1, what="a disruption to be allowed")
    evict = {"apiVersion": "policy/v1", "kind": "Eviction"}
    before = world.sharepod(namespace, "a")["status"]["podUID"]
    world.agents.leave_behind(world.sharepod(namespace, "a")["metadata"]["uid"])
    pods = f"/api/v1/namespaces/{namespace}/pods"
    # the finalizer delays the end of this Pod
    world.api.patch(f"{pods}/a", {"metadata": {"finalizers": ["example.com/hold"]}})
    world.api.create(f"{pods}/a/eviction", {**evict, "metadata": {"name": "a", "namespace": namespace}})
    with pytest.raises(ApiError) as refused:  # the operator is still away
        world.api.create(f"{pods}/b/eviction", {**evict, "metadata": {"name": "b", "namespace": namespace}})
    assert refused.value.code == 429
    world.api.patch(f"{pods}/a", {"metadata": {"finalizers": None}})
    world.agents.end(world.sharepod(namespace, "a")["metadata"]["uid"])
    world.until(
        namespace,
        "a",
        lambda seen: seen["status"]["phase"] == "Running" and seen["status"].get("podUID") != before,
        what="another run",
    )
    wait(lambda: allowed() == 1, what="the next disruption to be allowed")
