"""Promises of preemption for Pods with several claims on small random clusters: the result is compared with trying
every unit.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest
from property.preemption_oracle import SmallCluster, random_request, small_cluster
from sharepod.api.units import TenantId
from sharepod.placement.engine import Engine
from sharepod.placement.preemption.several_claims import holds_for_several, plans_for_several
from sharepod.placement.preemption.victims import PreemptionPlan, victims_of
from sharepod.placement.state.types import PlacementRequest
from sharepod.placement.together import place_on

_CLUSTERS = 300


def several(chance: random.Random, priority: int) -> PlacementRequest:
    """Draw the requests of one Pod with two or three claims."""
    parts = []
    for number in range(chance.choice((2, 2, 3))):
        drawn = random_request(chance, f"new{number}", priority=priority)
        labels = drawn.gpu.labels.model_copy(update={"affinity": None})
        parts.append(replace(drawn, namespace="one", gpu=replace(drawn.gpu, labels=labels)))
    return replace(parts[0], siblings=tuple(parts[1:]))


def fits(world: SmallCluster, request: PlacementRequest, plan: PreemptionPlan, spared: str = "") -> bool:
    """Return whether the requests have places on the plan's node if the plan is carried out. `spared`: one of its units
    that is not preempted."""
    units = {tenant: fact.unit for tenant, fact in world.victims.items()}
    evicted = frozenset(units[tenant] for tenant in plan.evict) - {spared}
    lowered = frozenset(units[tenant] for tenant in plan.lower) - {spared}
    cluster = world.without(evicted, lowered)
    node = cluster.node(plan.node)
    assert node is not None
    return place_on(cluster, node, request) is not None


@pytest.mark.promise("placement-preempt-claims")
@pytest.mark.parametrize("part", range(3))
def test_a_plan_is_found_whenever_one_exists_and_has_no_superfluous_victim(part: int) -> None:
    seen: Counter[str] = Counter()
    number = part * 100_000
    while sum(seen.values()) < _CLUSTERS // 3:
        number += 1
        chance = random.Random(number)
        world = small_cluster(chance)
        request = several(chance, chance.choice((1, 2, 3)))
        if Engine(world.cluster).find(request) is not None:
            continue
        victims = victims_of(world.victims)
        plan = None
        for plan in plans_for_several(world.cluster, request, victims):  # noqa: B007 the last is the best
            pass
        below = {unit.name for unit in victims.units.values() if unit.priority < request.priority}
        if plan is None:
            assert Engine(world.without(frozenset(below), frozenset())).find(request) is None, f"cluster {number}"
            seen["none"] += 1
            continue
        units = {tenant: fact.unit for tenant, fact in world.victims.items()}
        chosen = {units[tenant] for tenant in (*plan.evict, *plan.lower)}
        assert chosen <= below, f"cluster {number}: {plan}"
        assert fits(world, request, plan), f"cluster {number}: {plan}"
        assert holds_for_several(world.cluster, request, plan, victims)
        for unit in chosen:
            assert not fits(world, request, plan, spared=unit), f"cluster {number}: {unit} could stay, {plan}"
        seen["evicts" if plan.evict else "lowers" if plan.lower else "waits"] += 1
    assert min(seen["evicts"], seen["none"]) >= 1


def test_a_plan_is_invalid_once_a_victim_has_equal_priority() -> None:
    plan, number = None, 0
    while plan is None or not plan.evict:
        number += 1
        chance = random.Random(number)
        world, request = small_cluster(chance), several(chance, 3)
        *_, plan = [None, *plans_for_several(world.cluster, request, victims_of(world.victims))]
    first = TenantId(plan.evict[0])
    worth = {**world.victims, first: replace(world.victims[first], priority=3)}
    assert not holds_for_several(world.cluster, request, plan, victims_of(worth))
