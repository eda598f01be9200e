"""Promises of moving, on small random clusters: the result is compared with trying every tenant and every place."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations

import pytest
from property.preemption_oracle import SmallCluster, drawn, refused_requests
from sharepod.api.units import Bytes, GpuUuid, Milli, TenantId
from sharepod.placement.engine import Engine
from sharepod.placement.preemption.moves import Movable, MovePlan, cost_of_move, place_holds, plan_move
from sharepod.placement.state.cluster import Cluster
from sharepod.placement.state.types import Assignment, PlacementError, PlacementRequest

_CLUSTERS = 400


@pytest.mark.parametrize("part", range(5))
def test_the_cheapest_move_is_found_whenever_a_move_exists(part: int) -> None:
    seen: Counter[str] = Counter()
    for case, chance, world, request in refused_requests(part, _CLUSTERS // 5, priorities=(0,)):
        movable = _movable(chance, world)
        plan = plan_move(world.cluster, request, movable, Engine(world.cluster).find)
        possible = {tenant for tenant in movable if _can_move(world, request, movable[tenant])}
        if plan is None or not possible:
            assert plan is None, f"{case}: {plan} although none can move"
            assert not possible, f"{case}: no plan although {possible} could move"
            seen["none"] += 1
            continue
        least = min(cost_of_move(movable[tenant]) for tenant in possible)
        assert plan.cost == cost_of_move(movable[plan.tenant]) == least, f"{case}: {plan}"
        _holds_until_its_new_place_is_taken(world, request, movable[plan.tenant], plan)
        _carry_out(world, request, movable[plan.tenant], plan)
        seen["inside" if plan.to.node == plan.node else "elsewhere"] += 1
    assert seen["inside"] + seen["elsewhere"] >= 1


@pytest.mark.parametrize("number", [1130, 2370, 2655, 2838])
def test_of_several_movable_tenants_the_cheapest_moves_wherever_it_is(number: int) -> None:
    """In each of these clusters the planner tries a more expensive movable tenant before the cheapest."""
    chance, world, request = drawn(number, (0,))
    movable = _movable(chance, world)
    plan = plan_move(world.cluster, request, movable, Engine(world.cluster).find)
    costs = {cost_of_move(one) for tenant, one in movable.items() if _can_move(world, request, one)}
    assert len(costs) > 1
    assert plan is not None
    assert plan.cost == min(costs)


def _movable(chance: random.Random, world: SmallCluster) -> dict[TenantId, Movable]:
    """Draw the tenants that may be moved, with the requests by which they were placed."""
    found = {}
    for rows in world.rows.values():
        for row in rows:
            fact = world.victims.get(row.tenant)
            if fact is not None and not fact.leaving and chance.random() < 0.8:
                found[row.tenant] = Movable(
                    request=world.requests[row.tenant], started=fact.started, lost_seconds=fact.lost_seconds
                )
    return found


def _can_move(world: SmallCluster, request: PlacementRequest, mover: Movable) -> bool:
    """Return whether the request has a place without the mover, and the mover has another place while its old share
    still counts."""
    if mover.request.gpu.labels.affinity is not None:
        return False
    before, after = world.cluster, world.cluster
    node = _leave(after, mover)
    assert node is not None
    for place in _places(after, request):
        if place.node != node:
            continue
        moved_world = world.cluster
        _leave(moved_world, mover)
        if not _reserve(moved_world, request, place):
            continue
        for to in _places(moved_world, mover.request):
            if to.node != node:
                if _takes(before, replace(mover.request, tenant=TenantId("moving")), to):
                    return True
            elif not set(to.gpus) & set(place.gpus):
                return True
    return False


def _leave(cluster: Cluster, mover: Movable) -> str | None:
    tenant = mover.request.tenant
    places = cluster.reservations_of(tenant)
    for node, _ in places:
        cluster.release(node, tenant)
        cluster.remove_pod(f"pod-{tenant}")
    return places[0][0] if places else None


def _places(cluster: Cluster, request: PlacementRequest) -> Iterator[Assignment]:
    """Yield every place for the request that passes the engine's filters."""
    for node in cluster.nodes():
        for gpus in combinations([gpu.state.uuid for gpu in node.gpus], request.gpu.count):
            named = replace(request, gpu=replace(request.gpu, uuids=gpus))
            found = Engine(cluster).find(named)
            if found is not None and set(found.gpus) == set(gpus):
                yield found


def _takes(cluster: Cluster, request: PlacementRequest, place: Assignment) -> bool:
    return any((one.node, set(one.gpus)) == (place.node, set(place.gpus)) for one in _places(cluster, request))


def _reserve(cluster: Cluster, request: PlacementRequest, place: Assignment) -> bool:
    try:
        cluster.reserve(place.node, place.reservation(request))
    except PlacementError:
        return False
    return True


def _carry_out(world: SmallCluster, request: PlacementRequest, mover: Movable, plan: MovePlan) -> None:
    """Carry out a plan step by step. Each place must be free when it is reserved. A new place on another node is
    reserved while the mover still has its old one."""
    cluster = world.cluster
    moving = replace(mover.request, tenant=TenantId("moving"))
    # 1. The mover's new place is free before any tenant has ended.
    if plan.to.node != plan.node:
        assert _takes(cluster, moving, plan.to), plan
        cluster.reserve(plan.to.node, plan.to.reservation(moving))
    # 2. The mover ends. 3. The request gets its place. 4. The mover gets its new place.
    assert _leave(cluster, mover) == plan.node
    place = _at(cluster, request, plan.node, plan.gpus)
    assert _takes(cluster, request, place), plan
    cluster.reserve(place.node, place.reservation(request))
    if plan.to.node == plan.node:
        assert _takes(cluster, moving, plan.to), plan
        cluster.reserve(plan.to.node, plan.to.reservation(moving))
    assert cluster.overcommits() == ()


def _holds_until_its_new_place_is_taken(
    world: SmallCluster, request: PlacementRequest, mover: Movable, plan: MovePlan
) -> None:
    cluster = world.cluster
    assert place_holds(cluster, request, mover.request, plan.preemption), plan
    node = cluster.node(plan.to.node)
    assert node is not None
    if plan.to.node == plan.node:
        return  # on the same node the account already contains the request
    gpu = node.gpus_by_uuid[plan.to.gpus[0]]
    all_of_it = replace(mover.request.gpu, count=1, request_milli=Milli(gpu.free_milli), memory=Bytes(gpu.free_memory))
    first = replace(mover.request, tenant=TenantId("first"), gpu=all_of_it)
    cluster.reserve(node.name, _at(cluster, first, node.name, frozenset({gpu.state.uuid})).reservation(first))
    assert not place_holds(cluster, request, mover.request, plan.preemption), "another has its place"


def _at(cluster: Cluster, request: PlacementRequest, name: str, gpus: frozenset[GpuUuid]) -> Assignment:
    node = cluster.node(name)
    assert node is not None
    chosen = [gpu for gpu in node.gpus if gpu.state.uuid in gpus]
    memory = min(request.gpu.memory_on(gpu.state.memory) for gpu in chosen)
    return Assignment(node=name, gpus=tuple(gpu.state.uuid for gpu in chosen), memory=Bytes(memory))
