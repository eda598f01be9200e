"""The placement loop: which tenants are tried when, and in which order."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from sharepod.api.units import Bytes, TenantId
from sharepod.budgets.standing import Standing
from sharepod.controller.placing import explanations, slices
from sharepod.placement.resizing import resize
from sharepod.placement.state.types import Assignment, Outlook, PlacementRequest, Refusal
from unit.controller.loop_world import World, deciding, node_state
from unit.controller.objects import pod_object, sharepod_object


@pytest.fixture
async def world() -> AsyncIterator[World]:
    async with deciding(World()) as each:
        yield each


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


async def test_the_longest_wait_is_the_wait_of_the_first_that_still_waits(world: World) -> None:
    world.node("a")
    await world.want("runs", 1.0)
    assert world.loop.longest_wait_s() == 0
    await world.want("first", 0.5)
    await world.later(100.0)
    await world.want("second", 0.5)
    await world.later(20.0)
    assert world.loop.longest_wait_s() == pytest.approx(120.0, abs=1.0)
    world.loop.leave("first")
    assert world.loop.longest_wait_s() == pytest.approx(20.0, abs=1.0)


@pytest.mark.promise("placement-no-lost-wake-up")
async def test_a_request_that_avoids_a_node_for_a_time_is_tried_there_afterwards(world: World) -> None:
    world.node("a")
    world.memos.of("t1").avoid = {"a": ("refused it", asyncio.get_running_loop().time() + 30.0)}
    await world.want("t1", 0.5)
    await world.later(29)
    assert world.placed == {}
    await world.later(2)
    assert world.placed == {"t1": "a"}


async def test_a_new_node_wakes_pending_requests_in_the_order_of_the_queue(world: World) -> None:
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
    world.state.cluster.remove_node("a")  # no node has more room; the only change is that the group has ended
    await world.leaves("first")
    assert world.placed["follower"] == "b"


async def test_a_share_that_is_to_change_is_tried_at_once_and_again_when_there_is_room(world: World) -> None:
    world.node("a")
    await world.want("grows", 0.5)
    await world.want("other", 0.4)
    world.placed.clear()
    world.state.put_sharepod(sharepod_object(uid="grows", name="grows", version=1000, spec={"gpu": {"request": 0.8}}))
    world.loop.want_resize("grows", 1)
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
    world.loop.want_resize("shrinks", 1)
    await world.want("waits", 0.5)
    assert world.placed == {}
    world.leading = True
    world.loop.room_changed()
    await world.settle()
    assert world.placed == {"shrinks": "a", "waits": "a"}


async def test_whose_turn_comes_as_this_process_ceases_to_lead_has_it_again_once_it_leads(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The placement loop keeps the tenant's turn. It does so, too, while the watches are too old for a decision."""
    world.node("a")
    answers = iter([True, False])  # (result before the pass, result at the tenant's turn)
    monkeypatch.setattr(world.loop, "_may_act", lambda: next(answers, True))
    await world.want("waits", 0.5)
    assert world.placed == {}
    world.loop.room_changed()
    await world.settle()
    assert world.placed == {"waits": "a"}


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


@pytest.mark.promise("budgets-queue")
async def test_a_larger_budget_is_not_said_to_help_where_no_gpu_may_be_free(world: World) -> None:
    world.standings = {"spent": Standing(waits_until="2026-02-01T00:00:00Z")}
    await world.want("new", 0.1, namespace="spent")
    assert "would help" not in world.why("new")
    assert "Free GPUs are checked then" in world.why("new")


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
            world.loop.want_resize("first", 1)
            await world.settle()
        assert "second" in world.placed


async def test_a_burst_is_decided_by_weights_once_so_many_have_come_that_there_are_any(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without weights, each decision examines each GPU of the cluster."""
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
        while len(by_weights) < len(names):  # noqa: ASYNC110 - no event to await
            await asyncio.sleep(0)
    assert by_weights.count(False) < len(names) / 2
