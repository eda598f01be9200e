"""Promises of preemption on small random clusters: the result is compared with trying every set of victims."""

from __future__ import annotations

from collections import Counter

import pytest
from property.preemption_oracle import cheapest, cost_of_plan, fits_without, refused_requests, units_of
from sharepod.placement.preemption.planner import plan_preemption
from sharepod.placement.preemption.victims import victims_of

_CLUSTERS = 300


@pytest.mark.promise("placement-least-victims")
@pytest.mark.parametrize("part", range(5))
def test_no_set_of_victims_costs_less_than_the_chosen_set(part: int) -> None:
    seen: Counter[str] = Counter()
    for case, _, world, request in refused_requests(part, _CLUSTERS // 5, priorities=(1, 2, 5, 9)):
        plan, best = plan_preemption(world.cluster, request, victims_of(world.victims)), cheapest(world, request)
        if plan is None or best is None:
            assert plan is None, f"{case}: {plan} although no set makes room"
            assert best is None, f"{case}: no plan although the least is {best}"
            seen["no victim"] += 1
            continue
        assert cost_of_plan(world, plan) == best == plan.cost, f"{case}: {plan}"
        evicted, lowered = units_of(plan.evict, world.victims), units_of(plan.lower, world.victims)
        assert fits_without(world, request, evicted, lowered), f"{case}: {plan} makes no room"
        for unit in evicted | lowered:
            assert not fits_without(world, request, evicted - {unit}, lowered - {unit}), f"{case}: {unit} is too much"
        victims = [world.victims[tenant] for tenant in (*plan.evict, *plan.lower)]
        assert all(fact.priority < request.priority and not fact.leaving for fact in victims)
        seen["lowered" if lowered and not evicted else "evicted" if evicted else "leaving"] += 1
    assert seen["evicted"] >= 10
    assert seen["lowered"] >= 1
