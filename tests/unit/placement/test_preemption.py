"""Preemption planner: which tenants it preempts, one rule at a time. tests/property/test_preemption.py tests all rules
together.
"""

from __future__ import annotations

from dataclasses import replace

from sharepod.api.gpunode import Mode
from sharepod.api.units import Milli, TenantId
from sharepod.placement.preemption.planner import plan_preemption, still_holds
from sharepod.placement.preemption.victims import PreemptionPlan, VictimFacts, Victims, victims_of
from sharepod.placement.state.cluster_view import HeadReservation
from sharepod.placement.state.types import PlacementRequest
from unit.placement.world import GI, ClusterWithEngine, ask, cluster_of, node, put

_PRIORITY = 10


def wants(request: int = 500, *, priority: int = _PRIORITY, count: int = 1, memory: int = GI) -> PlacementRequest:
    return replace(ask("new", request, memory=memory, count=count), priority=priority)


def full(*requests: int, gpus: int = 1) -> ClusterWithEngine:
    """Return a node with tenants a, b, c and so on with these requests. Each has a tenth of the memory."""
    cluster = cluster_of(node(gpus=gpus))
    for name, request in zip("abcdefgh", requests, strict=False):
        put(cluster, ask(name, request, memory=8 * GI))
    return cluster


def facts(**tenants: VictimFacts) -> Victims:
    return victims_of({TenantId(name): fact for name, fact in tenants.items()})


def fact(unit: str, priority: int = 0, **more: int | bool) -> VictimFacts:
    return replace(VictimFacts(unit=unit, priority=priority), **more)  # type: ignore[arg-type]


def found(cluster: ClusterWithEngine, request: PlacementRequest, victims: Victims) -> PreemptionPlan:
    plan = plan_preemption(cluster, request, victims)
    assert plan is not None
    return plan


def test_the_lowest_priority_goes_first() -> None:
    plan = found(full(500, 500), wants(), facts(a=fact("a", 5), b=fact("b", 1)))
    assert plan.evict == ("b",)


def test_one_victim_goes_rather_than_two_of_the_same_priority() -> None:
    plan = found(full(250, 250, 500), wants(), facts(a=fact("a"), b=fact("b"), c=fact("c")))
    assert plan.evict == ("c",)


def test_the_one_furthest_over_budget_goes_then_the_youngest_then_the_least_work() -> None:
    cluster = full(500, 500)
    assert found(cluster, wants(), facts(a=fact("a", over_budget_milli=1), b=fact("b"))).evict == ("a",)
    assert found(cluster, wants(), facts(a=fact("a", started=1), b=fact("b", started=2))).evict == ("b",)
    assert found(cluster, wants(), facts(a=fact("a", lost_seconds=1), b=fact("b", lost_seconds=2))).evict == ("a",)


def test_nobody_is_preempted_by_an_equal() -> None:
    assert plan_preemption(full(1000), wants(), facts(a=fact("a", _PRIORITY))) is None


def test_a_tenant_of_which_nothing_is_known_stays() -> None:
    assert plan_preemption(full(1000), wants(), facts()) is None


def test_time_alone_ends_nobody_where_memory_is_free() -> None:
    plan = found(full(500, 500), wants(), facts(a=fact("a", 1, lowerable=True), b=fact("b", 0)))
    assert (plan.lower, plan.evict) == (("a",), ())


def test_a_request_of_0_does_not_help_where_memory_is_short() -> None:
    cluster = full(500, 500)
    plan = found(cluster, wants(memory=70 * GI), facts(a=fact("a", lowerable=True), b=fact("b", lowerable=True)))
    assert len(plan.evict) == 1
    assert not plan.lower


def test_an_eviction_that_was_refused_lately_is_tried_last() -> None:
    cluster = full(500, 500)
    plan = found(cluster, wants(), facts(a=fact("a", 0, protected=True), b=fact("b", 5)))
    assert plan.evict == ("b",)
    assert not plan.refused_lately
    assert found(cluster, wants(), facts(a=fact("a", protected=True))).refused_lately


def test_what_ends_together_is_one_victim() -> None:
    cluster = full(500, 500, 500, 500, gpus=2)
    victims = facts(a=fact("gang", 0), c=fact("gang", 0), b=fact("b", 0, lost_seconds=9), d=fact("d", 7))
    assert found(cluster, wants(), victims).evict == ("a", "c")
    guarded = facts(a=fact("gang", 0), c=fact("gang", _PRIORITY), b=fact("b", 0, lost_seconds=9), d=fact("d", 7))
    assert found(cluster, wants(), guarded).evict == ("b",)


def test_an_exclusive_request_needs_all_tenants_of_a_gpu_gone() -> None:
    cluster = full(500, 500, 300, gpus=2)
    request = replace(ask("new", mode=Mode.EXCLUSIVE), priority=_PRIORITY)
    victims = facts(a=fact("a", lowerable=True), b=fact("b", lowerable=True), c=fact("c", 5, lowerable=True))
    plan = found(cluster, request, victims)
    assert (plan.lower, plan.evict) == ((), ("a", "b"))


def test_what_leaves_anyway_is_waited_for() -> None:
    plan = found(full(500, 500), wants(), facts(a=fact("a", 5, leaving=True), b=fact("b", 0)))
    assert (plan.evict, plan.leaving) == ((), ("a",))


def test_gpus_kept_for_another_are_not_taken_by_its_equal() -> None:
    cluster = full(1000)
    victims = facts(a=fact("a"))
    gpus = found(cluster, wants(), victims).gpus
    cluster.reserve_for_head(HeadReservation(TenantId("other"), "node-a", gpus, _PRIORITY))
    assert plan_preemption(cluster, wants(), victims) is None
    assert plan_preemption(cluster, wants(priority=_PRIORITY + 1), victims) is not None


def test_several_gpus_are_freed_at_least_cost_and_those_that_are_free_are_used() -> None:
    cluster = full(1000, 1000, 1000, gpus=4)
    plan = found(cluster, wants(1000, count=2), facts(a=fact("a", 3), b=fact("b", 1), c=fact("c", 2)))
    assert plan.evict == ("b",)
    assert "GPU-node-a-3" in plan.gpus


def test_a_plan_holds_until_a_victim_is_worth_more_or_room_is_taken() -> None:
    cluster = full(500, 500)
    victims = facts(a=fact("a", lowerable=True), b=fact("b", 5))
    plan = found(cluster, wants(), victims)
    assert still_holds(cluster, wants(), plan, victims)
    assert not still_holds(cluster, wants(), plan, facts(a=fact("a", _PRIORITY), b=fact("b", 5)))
    cluster.change_share(replace(cluster.reservations_of(TenantId("a"))[0][1], request_milli=Milli(100)))
    cluster.read_back("node-a", cluster.reservations_of(TenantId("a"))[0][1], 2)
    put(cluster, ask("late", 300, memory=GI))
    assert not still_holds(cluster, wants(), plan, victims)
