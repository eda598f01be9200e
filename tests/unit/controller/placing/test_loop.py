"""The placement loop: who is tried when, and what is kept for one who has waited long."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
from sharepod.api.units import Bytes, TenantId
from sharepod.budgets.standing import Standing
from sharepod.controller.placing import explanations, slices
from sharepod.placement.resizing import resize
from sharepod.placement.state.types import Assignment, Outlook, PlacementRequest, Refusal, Taint
from unit.controller.loop_world import FAIR_WAIT, HEAD_RESERVATION_AFTER, World, node_state
from unit.controller.objects import pod_object, sharepod_object

BRIEF_S = 700.0
"""Seconds for which the world `brief` keeps GPUs for the head of the line at first."""


@pytest.fixture
async def world() -> AsyncIterator[World]:
    async with deciding(World()) as each:
        yield each


@asynccontextmanager
async def deciding(world: World) -> AsyncIterator[World]:
    task = asyncio.create_task(world.loop.run())
    yield world
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_room_wakes_only_those_it_could_serve(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("a", "b", "c"):
        world.node(name)
    for tenant in ("t1", "t2", "t3"):
        await world.want(tenant, 0.9)
    for tenant, request in (("large", 0.8), ("huge", 1.0), ("named", 0.5)):
        gpu: dict[str, Any] = {"uuids": ["GPU-c-0"]} if tenant == "named" else {}
        await world.want(tenant, request, **gpu)
    tried: list[str] = []

    find = world.loop.engine.find

    def counted(request: PlacementRequest) -> Assignment | None:
        tried.append(request.name)
        return find(request)

    monkeypatch.setattr(world.loop.engine, "find", counted)
    world.state.on_room_changed()
    await world.settle()
    assert tried == [], "nothing has changed"
    resize(world.state.cluster, TenantId("t1"), request_milli=200, limit_milli=1000, memory=Bytes(1 << 30))  # type: ignore[arg-type]
    at = next(row for row in world.state.cluster.pending("a") if row.tenant == "t1")
    world.state.cluster.load(
        "a", [at if row.tenant == "t1" else row for row in world.state.cluster.reservations("a")], 2
    )
    world.state.on_room_changed()
    await world.settle()
    assert tried == ["large"], "0.8 of node a are free: neither enough for huge nor the GPU that is named"
    assert world.placed["large"] == "a"


async def test_a_new_node_wakes_who_waits_in_the_order_of_the_queue(world: World) -> None:
    world.node("a")
    await world.want("first", 0.6)
    await world.want("older", 0.7)
    await world.want("younger", 0.7)
    assert set(world.placed) == {"first"}
    world.node("b")
    await world.settle()
    assert world.placed["older"] == "b"
    assert "younger" not in world.placed
    await world.later(6)
    assert "0/2 nodes" in world.why("younger"), "a reason is worked out again after five seconds"


async def test_a_waiting_member_follows_its_group_to_where_that_has_begun(world: World) -> None:
    world.node("a")
    world.node("b")
    await world.want("full-a", 0.8)
    await world.want("full-b", 0.8)
    await world.want("first", 0.5, affinity="g")
    await world.want("second", 0.2, affinity="g")
    begun = world.placed["second"]
    await world.leaves({"a": "full-b", "b": "full-a"}[begun])
    assert "first" not in world.placed, "the GPU of its group has no room"
    await world.leaves(f"full-{begun}")
    assert world.placed["first"] == begun


async def test_a_member_that_waits_goes_elsewhere_once_its_group_has_ended(world: World) -> None:
    world.node("a")
    await world.want("first", 0.8, affinity="g")
    await world.want("follower", 0.5, affinity="g")
    world.node("b")
    await world.settle()
    assert "follower" not in world.placed, "its group is on a"
    await world.want("full-a", 0.2)
    world.state.cluster.remove_node("a")  # no node has got room: that the group has ended is all that has changed
    await world.leaves("first")
    assert world.placed["follower"] == "b"


async def test_a_share_that_is_to_change_is_tried_at_once_and_again_when_there_is_room(world: World) -> None:
    world.node("a")
    await world.want("grows", 0.5)
    await world.want("other", 0.4)
    world.placed.clear()
    world.state.put_sharepod(sharepod_object(uid="grows", name="grows", version=1000, spec={"gpu": {"request": 0.8}}))
    world.loop.want_resize("grows", changed=True)
    await world.settle()
    assert world.placed == {}
    assert world.memos.of("grows").resize_refusal is not None
    world.state.ledgers.unreserve("a", "other")
    await world.settle()
    assert world.placed == {"grows": "a"}


async def test_nothing_is_decided_while_this_process_does_not_lead(world: World) -> None:
    world.node("a")
    await world.want("shrinks", 0.4)
    world.placed.clear()
    world.leading = False
    world.state.put_sharepod(
        sharepod_object(uid="shrinks", name="shrinks", version=1000, spec={"gpu": {"request": 0.3}})
    )
    world.loop.want_resize("shrinks", changed=True)
    await world.want("waits", 0.5)
    assert world.placed == {}
    world.leading = True
    world.loop.room_changed()
    await world.settle()
    assert world.placed == {"shrinks": "a", "waits": "a"}


async def test_nothing_is_decided_once_leadership_is_lost_during_a_pass(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    await world.want("first", 0.3)
    await world.want("second", 0.3)
    find = world.loop.engine.find

    def find_and_lose(request: PlacementRequest) -> Assignment | None:
        world.leading = False
        return find(request)

    monkeypatch.setattr(world.loop.engine, "find", find_and_lose)
    world.node("a")
    await world.settle()
    assert world.placed == {"first": "a"}
    world.leading = True
    world.loop.room_changed()
    await world.settle()
    assert world.placed == {"first": "a", "second": "a"}


async def test_no_refusal_is_explained_once_leadership_is_lost_during_a_pass(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.node("a")
    find = world.loop.engine.find

    def find_and_lose(request: PlacementRequest) -> Assignment | None:
        world.leading = False
        return find(request)

    monkeypatch.setattr(world.loop.engine, "find", find_and_lose)
    await world.want("pair", 0.5, count=2)
    assert not world.leading, "the pass has decided"
    assert world.why("pair") == ""


@pytest.mark.promise("security-flood")
async def test_one_that_comes_does_not_wait_until_all_refusals_are_explained(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(explanations, "_EXPLAIN_S", 0.0)
    world.node("a")
    await world.want("taken", 0.5)
    for number in range(20):
        spec = {"gpu": {"request": 0.6}}
        world.state.put_sharepod(sharepod_object(uid=f"crowd-{number}", name=f"crowd-{number}", spec=spec))
        gated = pod_object(uid=f"pod-{number}", name=f"crowd-{number}", owner=f"crowd-{number}", gated=True)
        world.state.put_pod(gated)
        world.loop.want_place(f"crowd-{number}")
    explained: list[str] = []
    explain = world.loop.engine.place

    def place(request: PlacementRequest) -> Assignment | Refusal:
        explained.append(request.name)
        if len(explained) == 1:
            world.state.put_sharepod(sharepod_object(uid="newcomer", name="newcomer", spec={"gpu": {"request": 0.1}}))
            world.state.put_pod(pod_object(uid="pod-new", name="newcomer", owner="newcomer", gated=True))
            world.loop.want_place("newcomer")
        elif len(explained) == 2:
            assert "newcomer" in world.placed
        return explain(request)

    monkeypatch.setattr(world.loop.engine, "place", place)
    await world.settle()
    assert "newcomer" in world.placed
    await world.later(10)
    assert all(world.why(f"crowd-{number}") for number in range(20)), "each has its reason in the end"


@pytest.mark.promise("placement-namespace-turns")
async def test_one_that_comes_while_a_crowd_is_tried_waits_for_one_of_the_crowd(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slices, "SLICE_S", -1.0)
    world.node("a")
    await world.want("taken", 0.5)
    tried: list[str] = []
    find = world.loop.engine.find

    def come(name: str, request: float, namespace: str) -> None:
        metadata = {"namespace": namespace, "creationTimestamp": "2026-01-01T00:30:00Z"}
        spec = {"gpu": {"request": request}}
        world.state.put_sharepod(sharepod_object(uid=name, name=name, spec=spec, metadata=metadata))
        pod = pod_object(uid=f"pod-{name}", name=name, owner=name, gated=True)
        pod["metadata"]["namespace"] = namespace
        world.state.put_pod(pod)
        world.loop.want_place(name)

    def counted(request: PlacementRequest) -> Assignment | None:
        tried.append(request.name)
        if len(tried) == 3:
            come("newcomer", 0.1, "another")
        return find(request)

    monkeypatch.setattr(world.loop.engine, "find", counted)
    for number in range(20):
        come(f"crowd-{number:02}", 0.6 + number / 1000, "crowd")
    await world.settle()
    assert world.placed["newcomer"] == "a"
    assert tried.index("newcomer") <= 4
    assert set(tried) == {"newcomer", *(f"crowd-{number:02}" for number in range(20))}


@pytest.mark.promise("placement-namespace-turns")
async def test_room_for_several_goes_to_several_namespaces(world: World) -> None:
    for number in range(3):
        await world.want(f"a{number}", 0.9, namespace="first")
    await world.want("b0", 0.9, namespace="second")
    for name in ("a", "b"):
        world.state.cluster.upsert_node(node_state(name))
    world.state.on_room_changed()
    await world.settle()
    assert set(world.placed) == {"a0", "b0"}


async def test_what_is_kept_is_let_go_when_the_queue_is_emptied(world: World) -> None:
    world.node("a")
    await world.want("small", 0.5)
    await world.want("whole", 1.0)
    await world.long_wait()
    assert world.state.cluster.head_reservation is not None
    world.loop.clear()
    await world.want("late", 0.5)
    assert world.placed["late"] == "a"


async def test_one_that_cannot_be_placed_blocks_nobody_until_it_has_waited_long(world: World) -> None:
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
    assert world.placed["late"] == "a", "what is not kept is for everybody"
    await world.leaves(on_b[1])
    assert world.placed["pair"] == "b"
    assert world.state.cluster.head_reservation is None
    await world.want("after", 0.5)
    assert "after" in world.placed


@pytest.fixture
async def brief() -> AsyncIterator[World]:
    """A world in which GPUs are kept for `BRIEF_S` at first."""
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
    await brief.later(BRIEF_S)
    assert brief.placed["late"] == "a"
    assert brief.kept_for is None
    await brief.want("young-pair", 0.5, count=2)
    await brief.later(HEAD_RESERVATION_AFTER - 60)
    assert brief.kept_for is None
    await brief.later(120)
    assert brief.kept_for == "pair", "the older of the two"
    await brief.later(2 * BRIEF_S - 120)
    assert brief.kept_for == "pair", "twice as long"
    await brief.later(120)
    assert brief.kept_for == "young-pair", "another has a turn"


@pytest.mark.promise("budgets-no-starvation")
async def test_the_wait_of_one_for_which_gpus_were_kept_in_vain_counts_on(brief: World) -> None:
    brief.standings = {"little": Standing(share_milli=0)}
    brief.node("a", 2)
    await brief.want("small", 0.9)
    await brief.want("pair", 0.5, count=2)
    for doubled in range(3):
        await brief.later(HEAD_RESERVATION_AFTER + BRIEF_S * 2**doubled + 2)
    assert brief.kept_for is None
    await brief.want("of-little", 0.5, count=2, namespace="little")
    brief.remove_node("a")
    await brief.later(HEAD_RESERVATION_AFTER + 60)
    brief.node("a", 2)
    await brief.later(5)
    await brief.later(5)
    assert brief.kept_for == "pair", "it has waited fair_wait by now"


@pytest.mark.promise("placement-head-expires")
async def test_one_for_which_gpus_were_kept_longest_in_vain_waits_anew(brief: World) -> None:
    brief.node("a", 2)
    await brief.want("small", 0.9)
    await brief.want("pair", 0.5, count=2)
    for doubled in range(5):
        await brief.long_wait()
        assert brief.kept_for == "pair", doubled
        await brief.later(BRIEF_S * 2**doubled)
        assert brief.kept_for is None, doubled
    await brief.want("young", 0.9, count=2)
    await brief.long_wait()
    assert brief.kept_for == "pair"
    await brief.later(BRIEF_S)
    assert brief.kept_for == "young", "the pair's began anew"


@pytest.mark.promise("placement-head-idle")
async def test_the_next_reservation_begins_once_what_stood_idle_is_paid_off() -> None:
    async with deciding(World(idle_ratio=0.1)) as world:
        world.node("a", 2)
        await world.want("small", 0.9)
        await world.want("pair", 0.5, count=2)
        await world.want("next-pair", 0.6, count=2)
        await world.long_wait()
        assert world.kept_for == "pair"
        await world.later(400)
        await world.leaves("small")
        assert "pair" in world.placed
        await world.later(1)
        assert world.kept_for is None, "of 2 GPUs 1.1 stood idle for 400 s, at a tenth: 1,800 s"
        await world.later(1750)
        assert world.kept_for is None
        await world.later(60)
        assert world.kept_for == "next-pair"


@pytest.mark.promise("placement-head-own-namespace")
async def test_what_is_kept_for_one_is_not_kept_from_its_own_namespace_until_it_has_waited_fair_wait(
    world: World,
) -> None:
    world.node("a", 2)
    await world.want("small", 0.9)
    await world.want("pair", 0.5, count=2)
    await world.long_wait()
    assert world.kept_for == "pair"
    await world.want("of-another", 0.3, namespace="other")
    await world.want("of-its-own", 0.3)
    await world.want("lower", 0.3, priority=-1)
    assert world.placed.keys() == {"small", "of-its-own"}
    await world.later(FAIR_WAIT - HEAD_RESERVATION_AFTER)
    assert world.kept_for == "pair"
    await world.want("late-of-its-own", 0.3)
    assert "late-of-its-own" not in world.placed, "it has waited long enough"
    await world.leaves("of-its-own")
    await world.leaves("small")
    assert "pair" in world.placed


async def test_what_is_kept_is_let_go_when_its_owner_leaves(world: World) -> None:
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


async def test_what_is_kept_on_a_node_that_goes_away_is_kept_elsewhere(world: World) -> None:
    world.node("a")
    await world.want("small", 0.5)
    await world.want("whole", 1.0)
    await world.long_wait()
    world.node("b")
    await world.settle()
    assert world.placed["whole"] == "b", "what is kept keeps nobody from better places"


async def test_what_is_kept_on_a_node_that_is_cordoned_is_kept_elsewhere(world: World) -> None:
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


async def test_a_refusal_that_counts_a_node_which_is_gone_is_explained_again_at_once(world: World) -> None:
    world.node("a")
    await world.want("whole", 1.0)
    await world.want("late", 0.3)
    before = world.why("late")
    assert "1 node" in before or "0/1" in before
    world.remove_node("a")
    await world.later(0.1)
    assert world.why("late") == before
    world.loop.node_left()
    await world.later(0.1)
    assert world.why("late") != before


@pytest.mark.promise("placement-head-priority")
async def test_nobody_waits_behind_what_is_kept_for_one_of_lower_priority(world: World) -> None:
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


@pytest.mark.promise("budgets-order")
async def test_of_one_priority_the_team_that_has_used_least_of_its_entitlement_comes_first(world: World) -> None:
    world.node("a")
    world.standings = {"much": Standing(share_milli=1500), "little": Standing(share_milli=500)}
    await world.want("runs", 1.0)
    await world.want("of-much", 1.0, namespace="much")
    await world.want("of-none", 1.0)
    await world.want("of-little", 1.0, namespace="little")
    await world.want("late-of-little", 1.0, namespace="little")
    order = []
    now = "runs"
    for _ in range(4):
        await world.leaves(now)
        (now,) = world.placed
        order.append(now)
    assert order == ["of-little", "late-of-little", "of-none", "of-much"]


@pytest.mark.promise("budgets-lowered")
async def test_a_team_that_borrows_comes_after_lower_priorities_that_are_above_what_it_is_lowered_to(
    world: World,
) -> None:
    world.node("a")
    world.standings = {"spent": Standing(lowered_to=-1000, share_milli=0)}
    await world.want("runs", 1.0)
    await world.want("borrows", 1.0, namespace="spent", priority=1000)
    await world.want("low", 1.0, priority=-10)
    await world.leaves("runs")
    assert set(world.placed) == {"low"}
    await world.leaves("low")
    assert set(world.placed) == {"borrows"}, "and it runs where there is room"


@pytest.mark.promise("budgets-queue")
async def test_where_a_spent_budget_queues_new_ones_wait_with_the_time_of_the_refill(world: World) -> None:
    world.node("a")
    await world.want("runs", 0.5, namespace="spent")
    world.standings = {"spent": Standing(waits_until="2026-02-01T00:00:00Z")}
    world.loop.order_changed()
    await world.want("new", 0.1, namespace="spent")
    await world.want("other", 0.1)
    assert set(world.placed) == {"runs", "other"}
    assert "2026-02-01T00:00:00Z" in world.why("new")
    refusal = world.memos.of("new").refusal
    assert refusal is not None
    assert refusal.outlook is Outlook.SPENT
    world.standings = {"spent": Standing(share_milli=2000)}
    world.loop.order_changed()
    await world.settle()
    assert set(world.placed) == {"runs", "other", "new"}


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
    assert kept.tenant == "first", "what is kept stays with its owner"
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


@pytest.mark.promise("placement-exclusion-cap")
@pytest.mark.parametrize("how", ["leaves", "asks for more", "another joins"])
async def test_one_that_the_cap_on_excluded_gpus_stops_is_placed_once_its_namespace_excludes_fewer(how: str) -> None:
    async with deciding(World(max_excluded_gpus=1)) as world:
        world.node("a")
        world.node("b")
        await world.want("first", 0, memory="1Gi", exclusion="x")
        await world.want("second", 0.2, exclusion="y")
        assert "second" not in world.placed
        assert "max_excluded_gpus" in world.why("second")
        if how == "leaves":
            await world.leaves("first")
        elif how == "another joins":
            await world.want("joins", 0.5, memory="1Gi", exclusion="x")
        else:
            gpu = {"request": 0.5, "memory": "1Gi", "exclusion": "x"}
            world.state.put_sharepod(sharepod_object(uid="first", name="first", version=1000, spec={"gpu": gpu}))
            world.loop.want_resize("first", changed=True)
            await world.settle()
        assert "second" in world.placed


async def test_a_burst_is_decided_by_weights_once_so_many_have_come_that_there_are_any(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without weights each decision looks at each GPU of the cluster."""
    for number in range(20):
        world.node(f"n{number}", gpus=8)
    by_weights: list[bool] = []
    find = world.loop.engine.find

    def noted(request: PlacementRequest) -> Assignment | None:
        by_weights.append(world.loop.engine.packing.ready)
        return find(request)

    monkeypatch.setattr(world.loop.engine, "find", noted)
    monkeypatch.setattr(world, "settle", lambda: asyncio.sleep(0))
    kicked = world.loop.want_place
    names = [f"t{number}" for number in range(200)]
    monkeypatch.setattr(world.loop, "want_place", lambda _tenant: None)
    for name in names:
        await world.want(name, 0.5)
    for name in names:
        kicked(name)
    async with asyncio.timeout(10):
        while len(by_weights) < len(names):  # noqa: ASYNC110 - nobody tells
            await asyncio.sleep(0)
    assert by_weights.count(False) < len(names) / 2
