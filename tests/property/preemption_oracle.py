"""Oracle of preemption: tries all sets of victims on small random clusters, and returns the cheapest. Victims are
units: tenants that end together (a gang, or the claims of one Pod) and count once.

It shares only input and output values with the planner. To try a set, it builds the cluster without the tenants of the
set and asks the engine.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product

from sharepod.api.gpunode import Latency, Mode, SchedulingLabels
from sharepod.api.sharepod import GpuRequest
from sharepod.api.units import MIB, Bytes, GpuUuid, Milli, TenantId
from sharepod.placement.engine import Engine
from sharepod.placement.preemption.victims import PreemptionPlan, VictimFacts
from sharepod.placement.state.cluster import Cluster
from sharepod.placement.state.types import (
    GpuState,
    NodeState,
    PlacementRequest,
    PodNeeds,
    Reservation,
    Resources,
)

_LABELS = (None, None, None, None, "x", "y")
Cost = tuple[int, ...]


@dataclass
class SmallCluster:
    """One random cluster: its nodes, its rows by node, and the facts and requests of their tenants."""

    nodes: tuple[NodeState, ...]
    rows: dict[str, list[Reservation]]
    victims: dict[TenantId, VictimFacts]
    requests: dict[TenantId, PlacementRequest] = field(default_factory=dict)

    def without(self, evicted: frozenset[str], lowered: frozenset[str]) -> Cluster:
        """Build the cluster without the evicted units. The lowered units have request 0."""
        cluster = Cluster()
        for node in self.nodes:
            cluster.upsert_node(node)
        for name, rows in self.rows.items():
            for row in rows:
                fact = self.victims.get(row.tenant)
                if fact is not None and (fact.unit in evicted or fact.leaving):
                    continue
                if fact is not None and fact.unit in lowered and _may_be_lowered(row):
                    row = replace(row, request_milli=Milli(0))
                cluster.reserve(name, row)
                cluster.set_pod_usage(name, f"pod-{row.tenant}", row.needs, tenant=row.tenant)
        return cluster

    @property
    def cluster(self) -> Cluster:
        cluster = Cluster()
        for node in self.nodes:
            cluster.upsert_node(node)
        for name, rows in self.rows.items():
            for row in rows:
                cluster.reserve(name, row)
                cluster.set_pod_usage(name, f"pod-{row.tenant}", row.needs, tenant=row.tenant)
        return cluster


def _may_be_lowered(row: Reservation) -> bool:
    return row.mode is Mode.SHARED and row.latency is Latency.NORMAL


def small_cluster(chance: random.Random) -> SmallCluster:
    """Draw one or two nodes with one to three GPUs each, and fill them with tenants."""
    nodes = tuple(
        NodeState(
            name=f"n{number}",
            allocatable=Resources(chance.choice((4_000, 64_000)), 100, {}),
            pods=chance.choice((110, 110, 4)),
            gpus=tuple(
                GpuState(uuid=GpuUuid(f"GPU-n{number}-{index}"), index=index, model="big", memory=Bytes(100 * MIB))
                for index in range(chance.choice((1, 2, 2, 3)))
            ),
        )
        for number in range(chance.choice((1, 2, 2)))
    )
    world = SmallCluster(nodes, {node.name: [] for node in nodes}, {})
    for number in range(chance.randrange(4, 9)):
        request = random_request(chance, f"t{number}", priority=0)
        cluster = world.cluster
        place = Engine(cluster).find(request)
        if place is None:
            continue
        world.requests[request.tenant] = request
        world.rows[place.node].append(replace(place.reservation(request), needs=request.pod.resources))
        if chance.random() < 0.95:
            world.victims[request.tenant] = VictimFacts(
                unit=chance.choice((request.tenant, request.tenant, request.tenant, f"gang{number % 2}")),
                priority=chance.choice((0, 0, 1, 2, 5)),
                over_budget_milli=chance.choice((0, 0, 100, 300)),
                started=chance.randrange(5),
                lost_seconds=chance.randrange(3),
                protected=chance.random() < 0.15,
                lowerable=chance.random() < 0.6,
                leaving=chance.random() < 0.1 and request.gpu.labels.affinity is None,
            )
    return world


def refused_requests(
    part: int, count: int, priorities: Sequence[int]
) -> Iterator[tuple[str, random.Random, SmallCluster, PlacementRequest]]:
    """Yield small clusters, each with a request that has no place in it: (name to draw the case again, random
    generator, cluster, request)."""
    number = part * 100_000 + 50_000
    while count:
        number += 1
        chance, world, request = drawn(number, priorities)
        if Engine(world.cluster).find(request) is None:
            count -= 1
            yield f"cluster {number}", chance, world, request


def drawn(number: int, priorities: Sequence[int]) -> tuple[random.Random, SmallCluster, PlacementRequest]:
    """Draw the cluster with this number and a new request. Return (generator, cluster, request)."""
    chance = random.Random(number)
    world = small_cluster(chance)
    return chance, world, random_request(chance, "new", priority=chance.choice(priorities))


def random_request(chance: random.Random, tenant: str, *, priority: int) -> PlacementRequest:
    """Draw a request that often competes with other tenants."""
    exclusive = chance.random() < 0.1
    milli = 1000 if exclusive else chance.choice((0, 100, 200, 300, 500, 700, 1000))
    memory = None if exclusive else chance.choice((None, MIB, 20 * MIB, 45 * MIB, 90 * MIB))
    interactive = not exclusive and 0 < milli < 1000 and chance.random() < 0.2
    return PlacementRequest(
        tenant=TenantId(tenant),
        namespace=chance.choice(("one", "one", "two")),
        name=tenant,
        gpu=GpuRequest(
            request_milli=Milli(milli),
            limit_milli=Milli(1000),
            memory=Bytes(MIB) if memory is None and milli == 0 else (None if memory is None else Bytes(memory)),
            count=chance.choice((1, 1, 1, 2)),
            mode=Mode.EXCLUSIVE if exclusive else Mode.SHARED,
            latency=Latency.INTERACTIVE if interactive else Latency.NORMAL,
            labels=SchedulingLabels(
                affinity=chance.choice((*_LABELS, None, None)),
                anti_affinity=chance.choice(_LABELS),
                exclusion=chance.choice((*_LABELS, None, None)),
            ),
        ),
        pod=PodNeeds(resources=Resources(chance.choice((0, 0, 1_000, 3_000)), 0, {})),
        priority=priority,
    )


def cheapest(world: SmallCluster, request: PlacementRequest) -> Cost | None:
    """Return the least cost of all sets of victims that give the request a place; None if no set does."""
    eligible = _eligible(world, request)
    if Engine(world.without(frozenset(eligible), frozenset())).find(request) is None:
        return None
    sets = sorted(
        (cost(world, evicted, lowered), sorted(evicted), sorted(lowered)) for evicted, lowered in _sets(world, eligible)
    )
    for price, evicted, lowered in sets:
        if fits_without(world, request, frozenset(evicted), frozenset(lowered)):
            return price
    return None


def fits_without(
    world: SmallCluster, request: PlacementRequest, evicted: frozenset[str], lowered: frozenset[str]
) -> bool:
    """Return whether the engine places the request once these units are evicted or lowered."""
    return Engine(world.without(evicted, lowered)).find(request) is not None


def _eligible(world: SmallCluster, request: PlacementRequest) -> list[str]:
    """Return the units that the request may preempt: all tenants of lower priority, except its affinity group."""
    group = request.gpu.labels.affinity
    rows = {row.tenant: row for rows in world.rows.values() for row in rows}
    kept = {
        fact.unit
        for tenant, fact in world.victims.items()
        if (not fact.leaving and fact.priority >= request.priority)
        or (group is not None and (rows[tenant].namespace, rows[tenant].labels.affinity) == (request.namespace, group))
    }
    return sorted({fact.unit for fact in world.victims.values() if not fact.leaving} - kept)


def _sets(world: SmallCluster, eligible: list[str]) -> Iterator[tuple[frozenset[str], frozenset[str]]]:
    may_lower = {
        unit: all(fact.lowerable for fact in world.victims.values() if fact.unit == unit and not fact.leaving)
        for unit in eligible
    }
    for choice in product("-el", repeat=len(eligible)):
        if any(what == "l" and not may_lower[unit] for unit, what in zip(eligible, choice, strict=True)):
            continue
        named = {what: frozenset(u for u, w in zip(eligible, choice, strict=True) if w == what) for what in "el"}
        yield named["e"], named["l"]


def cost(world: SmallCluster, evicted: frozenset[str], lowered: frozenset[str]) -> Cost:
    """Return the cost of a set, with its items in the order of docs/design.md."""
    lowest = -(1 << 40)
    facts = {
        unit: [fact for fact in world.victims.values() if fact.unit == unit and not fact.leaving]
        for unit in evicted | lowered
    }
    return (
        sum(any(fact.protected for fact in facts[unit]) for unit in evicted),
        max((fact.priority for unit in evicted for fact in facts[unit]), default=lowest),
        len(evicted),
        -sum(max(fact.over_budget_milli for fact in facts[unit]) for unit in evicted),
        -min((fact.started for unit in evicted for fact in facts[unit]), default=0),
        sum(max(fact.lost_seconds for fact in facts[unit]) for unit in evicted),
        max((fact.priority for unit in lowered for fact in facts[unit]), default=lowest),
        len(lowered),
        -sum(max(fact.over_budget_milli for fact in facts[unit]) for unit in lowered),
    )


def units_of(tenants: tuple[TenantId, ...], victims: Mapping[TenantId, VictimFacts]) -> frozenset[str]:
    """Return the units to which these tenants belong."""
    return frozenset(victims[tenant].unit for tenant in tenants)


def cost_of_plan(world: SmallCluster, plan: PreemptionPlan) -> Cost:
    """Return the cost of a plan, computed independently of the planner."""
    return cost(world, units_of(plan.evict, world.victims), units_of(plan.lower, world.victims))
