"""Advice for waiting requests: if it is followed the request has a place, and no smaller set of tenants would
be enough."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import combinations

import pytest
from property.preemption_oracle import SmallCluster, random_request, small_cluster
from sharepod.api.units import Bytes, TenantId
from sharepod.placement.engine import Engine
from sharepod.placement.preemption.moves import Movable
from sharepod.placement.preemption.victims import VictimFacts
from sharepod.placement.state.types import Assignment, PlacementRequest
from sharepod.placement.whatif import leavers, move_advice

_CLUSTERS = 120


def alone(world: SmallCluster) -> SmallCluster:
    """Return the same cluster, with every tenant as a unit of its own."""
    rows = [row for some in world.rows.values() for row in some]
    return SmallCluster(world.nodes, world.rows, {row.tenant: VictimFacts(unit=row.tenant, priority=0) for row in rows})


def all_movable(world: SmallCluster) -> dict[TenantId, Movable]:
    """Return all tenants as movable, with the requests by which they were placed."""
    rows = [row for some in world.rows.values() for row in some]
    return {row.tenant: Movable(request=world.requests[row.tenant]) for row in rows}


def places(world: SmallCluster, request: PlacementRequest, leaving: frozenset[str]) -> bool:
    return Engine(world.without(leaving, frozenset())).find(request) is not None


@pytest.mark.promise("placement-advice-helps")
@pytest.mark.parametrize("part", range(3))
def test_advice_followed_means_placed_and_fewer_would_not_do(part: int) -> None:
    helped = number = 0
    while helped < _CLUSTERS // 3:
        number += 1
        chance = random.Random(part * 100_000 + number)
        world = alone(small_cluster(chance))
        request = replace(random_request(chance, "new", priority=0), namespace=chance.choice(("one", "two")))
        cluster = world.cluster
        if Engine(cluster).find(request) is not None:
            continue
        found = [None, *leavers(cluster, request)][-1]
        names = {row.tenant: row.namespace for some in world.rows.values() for row in some}
        if found is None:
            of_group = request.gpu.labels.affinity
            assert of_group is not None or not places(world, request, frozenset(names)), f"{part}/{number}"
            continue
        helped += 1
        assert places(world, request, frozenset(found.tenants)), f"{part}/{number}: {found}"
        mine = [one for one in names if names[one] == request.namespace]
        for fewer in combinations(list(names) if found.others else mine, len(found.tenants) - 1):
            assert not places(world, request, frozenset(fewer)), f"{part}/{number}: {fewer} would do"
        assert set(found.own) == {one for one in found.tenants if names[one] == request.namespace}
        assert found.others == sum(names[one] != request.namespace for one in found.tenants)
        foreign = [one for one in names if names[one] != request.namespace]
        words = found.advice.replace(",", " ").split()
        assert not set(words) & {str(one) for one in foreign}, "another namespace's tenant is named"


@pytest.mark.promise("placement-advice-helps")
def test_advice_to_move_one_followed_means_placed() -> None:
    helped = number = 0
    while helped < _CLUSTERS // 3:
        number += 1
        chance = random.Random(number)
        world = small_cluster(chance)
        request = replace(random_request(chance, "new", priority=0), namespace=chance.choice(("one", "two")))
        cluster = world.cluster
        movable = all_movable(world)
        if Engine(cluster).find(request) is not None:
            continue
        found = [None, *move_advice(cluster, request, movable, Engine(cluster).find)][-1]
        if found is None:
            continue
        helped += 1
        mover = movable[found.tenant].request
        assert found.name == mover.name
        after = world.cluster
        ((former, _),) = after.reservations_of(found.tenant)
        after.release(former, found.tenant)
        after.remove_pod(f"pod-{found.tenant}")
        node = after.node(found.node)
        assert node is not None
        memory = min(mover.gpu.memory_on(node.gpus_by_uuid[uuid].state.memory) for uuid in found.gpus)
        to = Assignment(node=found.node, gpus=found.gpus, memory=Bytes(memory))
        after.reserve(found.node, to.reservation(mover))
        assert Engine(after).find(request) is not None, f"{number}: {found}"
