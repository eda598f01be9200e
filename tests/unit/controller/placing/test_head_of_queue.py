"""The head of the queue: how long GPUs are reserved for a tenant that has waited long."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace

import pytest
from sharepod.budgets.standing import Standing
from sharepod.placement.state.types import Taint
from unit.controller.loop_world import FAIR_WAIT, HEAD_RESERVATION_AFTER, World, deciding

BRIEF_S = 700.0
"""Seconds for which the fixture `brief` first reserves GPUs for the head of the queue."""
LOOK_S = 1.0
"""Seconds between two checks of the reservation."""


@pytest.fixture
async def world() -> AsyncIterator[World]:
    async with deciding(World()) as each:
        yield each


async def test_nominations_end_when_the_queue_is_emptied(world: World) -> None:
    world.node("a")
    await world.want("small", 0.5)
    await world.want("whole", 1.0)
    await world.long_wait()
    assert world.state.cluster.head_reservation is not None
    world.loop.clear()
    await world.want("late", 0.5)
    assert world.placed["late"] == "a"


async def test_an_unplaceable_request_blocks_no_other_until_it_has_waited_long(world: World) -> None:
    world.node("a")
    await world.want("small-1", 0.5)
    await world.want("whole", 1.0)
    await world.later(HEAD_RESERVATION_AFTER - 1)
    await world.want("small-2", 0.3)
    assert world.placed["small-2"] == "a"
    assert "whole" not in world.placed


@pytest.mark.promise("placement-no-starvation", "placement-head-keeps")
async def test_for_the_oldest_that_has_waited_long_one_group_of_gpus_is_kept(world: World) -> None:
    world.node("a")
    world.node("b", 2)
    for number, request in enumerate((0.9, 0.9, 0.9)):
        await world.want(f"t{number}", request)
    await world.want("pair", 0.5, count=2)
    await world.want("late", 0.5, namespace="other")
    await world.long_wait()
    kept = world.state.cluster.head_reservation
    assert kept is not None
    assert (kept.tenant, kept.node, len(kept.gpus)) == ("pair", "b", 2)
    assert "are kept for it" in world.why("pair")
    on_b = [tenant for tenant, node in world.placed.items() if node == "b"]
    await world.leaves(on_b[0])
    assert "late" not in world.placed, "its room is kept"
    on_a = [tenant for tenant, node in world.placed.items() if node == "a"]
    await world.leaves(on_a[0])
    assert world.placed["late"] == "a", "unreserved GPUs are free for all"
    await world.leaves(on_b[1])
    assert world.placed["pair"] == "b"
    assert world.state.cluster.head_reservation is None
    await world.want("after", 0.5)
    assert "after" in world.placed


@pytest.fixture
async def brief() -> AsyncIterator[World]:
    """Yield a world in which the first reservation lasts `BRIEF_S`."""
    async with deciding(World(lasts=BRIEF_S)) as each:
        yield each


@pytest.mark.promise("placement-head-expires")
async def test_what_is_kept_is_free_again_after_a_time_and_its_owner_keeps_its_place_in_the_line(brief: World) -> None:
    brief.node("a", 2)
    await brief.want("small", 0.9)
    await brief.want("pair", 0.5, count=2)
    await brief.long_wait()
    assert brief.kept_for == "pair"
    await brief.want("late", 0.5, namespace="other")
    assert "late" not in brief.placed, "one GPU is idle for the pair"
    await brief.later(BRIEF_S + LOOK_S)
    assert brief.placed["late"] == "a"
    assert brief.kept_for is None
    await brief.want("young-pair", 0.5, count=2)
    await brief.long_wait()
    assert brief.kept_for == "young-pair", "another has a turn"
    await brief.later(BRIEF_S + LOOK_S)
    assert brief.kept_for == "pair", "the older of the two"


@pytest.mark.promise("budgets-no-starvation")
async def test_the_wait_of_one_for_which_gpus_were_kept_in_vain_counts_on(brief: World) -> None:
    brief.standings = {"little": Standing(share_milli=0)}
    brief.node("a", 2)
    await brief.want("small", 0.9)
    await brief.want("pair", 0.5, count=2)
    before = HEAD_RESERVATION_AFTER + 3.2 * BRIEF_S
    await brief.later(before)
    assert brief.kept_for is None, "in the second pause"
    await brief.want("of-little", 0.5, count=2, namespace="little")
    brief.remove_node("a")
    await brief.later(FAIR_WAIT - before)
    brief.node("a", 2)
    await brief.later(5)
    await brief.later(5)
    assert brief.kept_for == "pair", "it has waited fair_wait by now"


@pytest.mark.promise("placement-head-idle")
async def test_the_next_reservation_begins_once_what_stood_idle_is_paid_off() -> None:
    async with deciding(World(idle_ratio=0.1)) as world:
        world.node("a", 2)
        await world.want("small", 0.9)
        await world.want("pair", 0.5, count=2)
        await world.want("next-pair", 0.6, count=2)
        await world.long_wait()
        assert world.kept_for == "pair"
        await world.want("single", 0.7)
        await world.later(400)
        await world.leaves("small")
        assert "pair" in world.placed
        await world.later(1)
        assert world.kept_for is None, "of 2 GPUs 0.7 stood idle for 400 s that another could use, at a tenth: 1,000 s"
        await world.later(950)
        assert world.kept_for is None
        await world.later(60)
        assert world.kept_for == "next-pair"


@pytest.mark.promise("placement-head-idle")
async def test_what_no_other_that_waits_could_use_costs_nothing() -> None:
    async with deciding(World(idle_ratio=0.1)) as world:
        world.node("a", 2)
        await world.want("small", 0.9)
        await world.want("pair", 0.5, count=2)
        await world.want("next-pair", 0.6, count=2)
        await world.long_wait()
        await world.later(400)
        await world.leaves("small")
        assert "pair" in world.placed
        await world.later(2)
        assert world.kept_for == "next-pair"


@pytest.mark.promise("placement-head-keeps")
async def test_what_is_kept_for_one_is_kept_from_its_own_namespace_too(world: World) -> None:
    world.node("a", 2)
    await world.want("small", 0.9)
    await world.want("pair", 0.5, count=2)
    await world.long_wait()
    assert world.kept_for == "pair"
    await world.want("of-another", 0.3, namespace="other")
    await world.want("of-its-own", 0.3)
    assert world.placed.keys() == {"small"}
    await world.leaves("small")
    assert "pair" in world.placed


async def runs_of(world: World, namespace: str, seconds: float) -> None:
    """Let enough tenants of a namespace run for this many seconds, so that their run times are learned."""
    for number in range(10):
        await world.want(f"{namespace}-{number}", 0.9, namespace=namespace)
        await world.later(seconds)
        await world.leaves(f"{namespace}-{number}")


@pytest.mark.promise("placement-head-soonest")
async def test_gpus_are_kept_where_tenants_are_expected_to_end_first(world: World) -> None:
    world.node("a")
    await runs_of(world, "long", 9000)
    await runs_of(world, "brief", 900)
    await world.want("stays", 0.9, namespace="long")
    world.node("b")
    await world.want("ends", 0.9, namespace="brief")
    assert world.placed == {"stays": "a", "ends": "b"}
    await world.want("whole", 1.0)
    await world.long_wait()
    assert (world.kept_for, world.kept_on) == ("whole", "b")


async def test_a_nomination_ends_when_its_owner_leaves(world: World) -> None:
    world.node("a")
    await world.want("small", 0.5)
    await world.want("whole", 1.0)
    await world.long_wait()
    await world.want("waits", 0.5, namespace="other")
    assert "waits" not in world.placed
    world.loop.leave("whole")
    await world.settle()
    assert world.placed["waits"] == "a"


async def test_nothing_is_kept_for_one_that_could_never_fit(world: World) -> None:
    world.node("a")
    await world.want("small", 0.5)
    await world.want("never", 0.5, count=2)
    await world.want("whole", 1.0)
    await world.long_wait()
    kept = world.state.cluster.head_reservation
    assert kept is not None
    assert kept.tenant == "whole"


async def test_a_nomination_on_a_deleted_node_moves_to_another(world: World) -> None:
    world.node("a")
    await world.want("small", 0.5)
    await world.want("whole", 1.0)
    await world.long_wait()
    world.node("b")
    await world.settle()
    assert world.placed["whole"] == "b", "a reservation does not bind its owner to a worse place"


async def test_a_nomination_on_a_cordoned_node_moves_to_another(world: World) -> None:
    for name in ("a", "b"):
        world.node(name)
        await world.want(f"on-{name}", 0.5)
    await world.want("full", 0.2)
    await world.want("whole", 1.0)
    await world.long_wait()
    kept = world.state.cluster.head_reservation
    assert kept is not None
    node = world.state.cluster.node(kept.node)
    assert node is not None
    assert node.state is not None
    world.put_node(replace(node.state, taints=(Taint("node.kubernetes.io/unschedulable"),)))
    await world.later(1)
    await world.later(1)
    now_kept = world.state.cluster.head_reservation
    assert now_kept is not None
    assert (now_kept.tenant, now_kept.node) == ("whole", {"a": "b", "b": "a"}[kept.node])


@pytest.mark.promise("placement-head-priority")
async def test_no_request_waits_for_a_nomination_of_lower_priority(world: World) -> None:
    world.node("a")
    await world.want("small", 0.5)
    await world.want("whole", 1.0)
    await world.long_wait()
    assert world.state.cluster.head_reservation is not None
    await world.want("late", 0.3, namespace="other")
    assert "late" not in world.placed
    await world.want("urgent", 0.3, priority=10)
    assert world.placed["urgent"] == "a"
    kept = world.state.cluster.head_reservation
    assert kept is not None
    assert kept.tenant == "whole"


@pytest.mark.promise("budgets-head-order")
async def test_gpus_are_kept_for_the_team_that_has_used_least_and_has_waited(world: World) -> None:
    world.node("a")
    world.standings = {"much": Standing(share_milli=1500), "little": Standing(share_milli=500)}
    await world.want("small", 0.5)
    await world.want("first", 1.0)
    await world.later(HEAD_RESERVATION_AFTER / 2)
    await world.want("of-much", 1.0, namespace="much")
    await world.want("of-little", 1.0, namespace="little")
    await world.long_wait()
    kept = world.state.cluster.head_reservation
    assert kept is not None
    assert kept.tenant == "first", "the reservation stays with its owner"
    await world.leaves("small")
    await world.later(2)
    await world.want("fills", 1.0, priority=1)
    await world.leaves("first")
    await world.later(2)
    kept = world.state.cluster.head_reservation
    assert kept is not None
    assert kept.tenant == "of-little"


@pytest.mark.promise("budgets-head-order")
async def test_one_that_has_just_come_keeps_nothing_from_one_that_has_waited(world: World) -> None:
    world.node("a")
    world.standings = {"much": Standing(share_milli=1500), "little": Standing(share_milli=500)}
    await world.want("small", 0.5)
    await world.want("of-much", 1.0, namespace="much")
    await world.later(HEAD_RESERVATION_AFTER - 5)
    await world.want("of-little", 1.0, namespace="little")
    await world.later(7)
    kept = world.state.cluster.head_reservation
    assert kept is not None
    assert kept.tenant == "of-much"


@pytest.mark.promise("budgets-no-starvation")
async def test_after_fair_wait_gpus_are_kept_by_age_whatever_the_standing(world: World) -> None:
    world.node("a")
    world.standings = {"much": Standing(share_milli=1500), "little": Standing(share_milli=0)}
    for number in range(2):
        await world.want(f"first-{number}", 1.0)
    await world.want("of-much", 1.0, namespace="much")
    for number in range(12):
        await world.want(f"little-{number}", 1.0, namespace="little")
    order = []
    for _ in range(10):
        await world.later(700)
        (runs,) = world.placed
        order.append(runs)
        await world.leaves(runs)
    placed_at_s = 700 * order.index("of-much")
    assert FAIR_WAIT <= placed_at_s <= FAIR_WAIT + 2 * 700
    assert all(name.startswith("little") for name in order[2 : order.index("of-much")])


@pytest.mark.promise("placement-head-next")
async def test_where_nothing_can_be_kept_for_the_oldest_it_is_for_the_next(world: World) -> None:
    world.node("a")
    world.node("b")
    await world.want("first", 0.5, affinity="g")
    await world.want("other", 0.6)
    await world.want("member", 0.6, affinity="g")
    await world.want("whole", 1.0)
    world.remove_node(world.placed["first"])
    await world.later(HEAD_RESERVATION_AFTER)
    await world.later(6)
    await world.later(1)
    kept = world.state.cluster.head_reservation
    assert kept is not None, world.why("member")
    assert kept.tenant == "whole"
