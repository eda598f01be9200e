"""Many equal requests in one queue: one decision refuses all of them, and each still gets its own place."""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Iterator
from types import FrameType
from typing import Any

import pytest
from sharepod.api.units import TenantId
from sharepod.controller.placing import explanations, slices
from sharepod.controller.placing.waiting import WaitingTenant, WorkedOut
from sharepod.placement.state.cluster import Cluster
from sharepod.placement.state.cluster_view import HeadReservation
from sharepod.placement.state.types import PlacementRequest, Refusal
from sharepod.placement.whatif import Leavers, leavers
from unit.controller.loop_world import World
from unit.controller.objects import sharepod_object
from unit.controller.preempting_world import playing

_MANY = 50


@pytest.mark.promise("operator-turns")
async def test_many_who_ask_the_same_are_worked_out_looked_at_and_explained_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with playing() as world:
        await world.runs("full", 0.6, memory="1Gi")
        for number in range(_MANY):
            await world.want(f"waits-{number}", 0.9, memory="1Gi")
        calls: Counter[str] = Counter()

        def count(owner: object, name: str) -> None:
            call = getattr(owner, name)

            def counted(*args: Any, **options: Any) -> Any:
                calls[name] += 1
                return call(*args, **options)

            monkeypatch.setattr(owner, name, counted)

        count(world.loop.requests, "of")
        for name in ("find", "serves", "place"):
            count(world.loop.engine, name)
        await world.want("small", 0.1, memory="1Gi")
        calls.clear()
        await world.ends("small")
        await world.later(6)
        assert calls["of"] == 0, "none of them has changed"
        assert calls["serves"] == 1
        assert calls["place"] <= 2, "once in five seconds"
        assert calls["find"] < 10, "an explanation looks what would fit"
        assert all("0/1 nodes" in world.why(f"waits-{number}") for number in range(_MANY))


async def test_what_is_kept_for_one_is_its_own_though_others_ask_the_same() -> None:
    async with playing() as world:
        await world.runs("full", 1.0, memory="1Gi")
        for tenant in ("older", "younger"):
            await world.want(tenant, 0.9, memory="1Gi")
        cluster = world.state.cluster
        node = cluster.known(("a",))[0]
        kept = HeadReservation(TenantId("younger"), "a", frozenset(node.gpus_by_uuid), 0)
        cluster.keep(kept)
        await world.ends("full")
        assert set(world.placed) == {"younger"}
        cluster.give_up(kept.tenant)


async def test_one_whose_pod_asks_for_more_by_now_is_worked_out_again() -> None:
    async with playing() as world:
        await world.runs("full", 1.0, memory="1Gi")
        await world.want("waits", 0.9, memory="1Gi")
        waiting = world.loop._queue.places["waits"]
        before = world.loop.requests.worked_out(waiting)
        assert before is not None
        assert world.loop.requests.worked_out(waiting) is before
        spec = {"gpu": {"request": 0.45, "memory": "1Gi"}}
        world.state.put_sharepod(sharepod_object(uid="waits", name="waits", version=2, spec=spec))
        after = world.loop.requests.worked_out(waiting)
        assert after is not None
        assert (before.request.gpu.request_milli, after.request.gpu.request_milli) == (900, 450)
        assert after.asks != before.asks


@pytest.mark.promise("security-flood")
async def test_a_pass_costs_one_step_per_request_group(monkeypatch: pytest.MonkeyPatch) -> None:
    async with playing() as world:
        await world.runs("full", 0.6, memory="1Gi")
        for number in range(_MANY):
            await world.want(f"waits-{number}", 0.9, memory="1Gi")
        await world.want("small", 0.1, memory="1Gi")
        await world.later(1)
        looked: list[str] = []
        worked_out = world.loop.requests.worked_out

        def counted(waiting: WaitingTenant) -> WorkedOut | None:
            looked.append(waiting.tenant)
            return worked_out(waiting)

        monkeypatch.setattr(world.loop.requests, "worked_out", counted)
        await world.ends("small")
        assert looked.count("waits-0") >= 1, "the oldest was tried"
        assert set(looked) <= {"waits-0", "small"}


@pytest.mark.promise("security-flood")
async def test_what_a_pass_does_does_not_grow_with_those_who_ask_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slices, "SLICE_S", 1e9)  # otherwise the number of slices would depend on the machine's speed

    async def calls(many: int) -> int:
        """Return the number of function calls in the passes after a share has ended, while `many` tenants wait."""
        async with playing() as world:
            await world.runs("full", 0.6, memory="1Gi")
            for number in range(many):
                await world.want(f"waits-{number}", 0.9, memory="1Gi")
            for name in ("small", "other"):
                await world.want(name, 0.1, memory="1Gi")
            await world.later(5)
            await world.ends("small")  # the calls include the checks of each second
            counted = 0

            def count(_frame: FrameType, event: str, _argument: object) -> None:
                nonlocal counted
                counted += event == "call"

            sys.setprofile(count)
            await world.ends("other")
            sys.setprofile(None)
            return counted

    few, many = await calls(_MANY), await calls(4 * _MANY)
    assert few > 100
    assert many - few < _MANY


@pytest.mark.promise("security-flood")
@pytest.mark.parametrize("alike", [1, 2])
async def test_what_comes_before_the_decision_for_one_that_comes_does_not_grow_with_those_that_ask_otherwise(
    alike: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slices, "SLICE_S", 1e9)  # otherwise the number of slices would depend on the machine's speed

    async def calls(many: int) -> int:
        """Return the number of function calls from the moment at which there is room and a tenant of another namespace
        arrives until that tenant is decided. While it arrives, `many` tenants wait, of which `alike` have equal
        requests."""
        async with playing() as world:
            await world.runs("full", 0.6, memory="1Gi")
            for number in range(many * alike):
                await world.want(f"waits-{number}", 0.9, memory=f"{1024 + number // alike}Mi")
            for name in ("small", "other"):
                await world.want(name, 0.1, memory="1Gi")
            await world.later(20)
            await world.ends("small")  # the calls include the checks of each second
            counted, decided = 0, False
            placed = world.loop._on_decided

            def count(_frame: FrameType, event: str, _argument: object) -> None:
                nonlocal counted
                counted += event == "call" and not decided

            def decide(tenant: str, node: str) -> None:
                nonlocal decided
                decided = decided or tenant == "newcomer"
                placed(tenant, node)

            world.loop._on_decided = decide
            world.state.drop_pod(world.pod("other"))
            world.state.cluster.release(world.placed.pop("other"), TenantId("other"))
            world.state.on_room_changed()
            world.wants("newcomer", 0.2, namespace="another", memory="1Gi")
            sys.setprofile(count)
            await world.settle()
            sys.setprofile(None)
            assert decided
            return counted

    few, many = await calls(_MANY), await calls(4 * _MANY)
    assert few > 50
    assert many - few < _MANY


@pytest.mark.promise("placement-no-lost-wake-up")
async def test_where_there_is_room_for_two_who_ask_the_same_two_are_placed() -> None:
    async with playing() as world:
        for number in range(3):
            await world.runs(f"full-{number}", 0.33, memory="1Gi")
        for number in range(_MANY):
            await world.want(f"waits-{number}", 0.33, memory="1Gi")
        world.state.drop_pod("pod-of-full-0")
        for number in range(2):
            world.state.cluster.release(world.placed.pop(f"full-{number}"), TenantId(f"full-{number}"))
        world.state.on_room_changed()
        await world.settle()
        assert set(world.placed) == {"full-2", "waits-0", "waits-1"}, "the oldest"


@pytest.mark.promise("placement-no-lost-wake-up")
async def test_one_that_asks_for_less_by_now_is_tried_though_no_room_has_appeared() -> None:
    async with playing() as world:
        await world.runs("full", 0.6, memory="1Gi")
        for number in range(3):
            await world.want(f"waits-{number}", 0.9, memory="1Gi")
        await world.later(6)
        _asks_for(world, "waits-1", 0.4, version=2)
        world.loop.want_place("waits-1")  # the reconciler calls this at each change of a waiting tenant
        await world.settle()
        assert set(world.placed) == {"full", "waits-1"}


def _asks_for(world: World, tenant: str, request: float, version: int) -> None:
    """Give a SharePod another request than before."""
    spec = {"gpu": {"request": request, "memory": "1Gi"}}
    world.state.put_sharepod(sharepod_object(uid=tenant, name=tenant, version=version, spec=spec))


@pytest.mark.promise("placement-no-lost-wake-up")
async def test_one_that_asks_for_less_twice_before_it_is_tried_again_is_tried_for_the_least() -> None:
    async with playing() as world:
        await world.runs("full", 0.6, memory="1Gi")
        for number in range(3):
            await world.want(f"waits-{number}", 0.9, memory="1Gi")
        await world.later(2)  # the next explanation, which would find the change, is not due yet
        for tenant, request, version in (("waits-1", 0.8, 2), ("waits-2", 0.8, 2), ("waits-2", 0.4, 3)):
            _asks_for(world, tenant, request, version)
            world.loop.want_place(tenant)
        await world.settle()
        assert set(world.placed) == {"full", "waits-2"}


@pytest.mark.promise("placement-no-lost-wake-up")
async def test_those_lined_up_with_one_that_asks_for_more_by_now_are_tried_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def nothing(*_: object) -> None: ...

    async with playing() as world:
        await world.runs("full", 0.9, memory="1Gi")
        await world.runs("small", 0.1, memory="1Gi")
        for number in range(3):
            await world.want(f"waits-{number}", 0.9, memory="1Gi")
        await world.later(6)
        _asks_for(world, "waits-0", 1.0, 2)  # the reconciler of this tenant has not run yet
        # otherwise the explanation would find that there is room
        monkeypatch.setattr(world.loop._explanations, "work_out", nothing)
        await world.ends("full")
        assert set(world.placed) == {"small", "waits-1"}


@pytest.fixture
async def resting() -> AsyncIterator[World]:
    """Yield a world whose loop pauses for very long after each try."""
    world = World(rests=1e9)
    deciding = asyncio.create_task(world.loop.run())
    yield world
    deciding.cancel()
    await asyncio.gather(deciding, return_exceptions=True)


@pytest.mark.promise("security-flood")
async def test_one_that_comes_waits_for_no_rest_between_tries_of_those_who_each_ask_otherwise(
    resting: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = resting
    world.node("a")
    await world.want("taken", 0.5)
    await world.want("small", 0.1)
    for number in range(_MANY):
        await world.want(f"waits-{number}", 0.6 + number / 1000)
    monkeypatch.setattr(slices, "SLICE_S", -1.0)
    tried: list[str] = []
    serves = world.loop.engine.serves

    def counted(request: PlacementRequest, nodes: Iterable[str]) -> bool:
        tried.append(request.name)
        return serves(request, nodes)

    monkeypatch.setattr(world.loop.engine, "serves", counted)
    await world.leaves("small")
    assert len(tried) <= 2, "it rests after the first"
    await world.want("newcomer", 0.2, namespace="another")
    assert world.placed["newcomer"] == "a"
    assert len(tried) <= 4


@pytest.mark.promise("security-flood")
async def test_reasons_are_worked_out_by_turns_of_namespaces(monkeypatch: pytest.MonkeyPatch) -> None:
    async with playing() as world:
        await world.runs("full", 1.0, memory="1Gi")
        answered: list[str] = []
        store = world.loop._explanations.store

        def counted(waiting: WaitingTenant, refusal: Refusal) -> None:
            answered.append(waiting.tenant)
            store(waiting, refusal)

        world.leading = False
        for number in range(_MANY):
            await world.want(f"crowd-{number}", 0.2 + number / 1000, memory="1Gi", namespace="crowd")
        await world.want("other", 0.9, memory="1Gi", namespace="other")
        monkeypatch.setattr(world.loop._explanations, "store", counted)
        world.leading = True
        world.state.on_room_changed()
        await world.later(6)
        assert answered.index("other") <= 1
        assert len(set(answered)) == _MANY + 1


async def test_changed_reasons_are_rewritten_fifty_a_second_and_other_namespaces_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(slices, "SLICE_S", 1e9)  # otherwise the length of a pass would depend on the machine's speed
    async with playing() as world:
        await world.runs("full", 0.6, memory="1Gi")
        for number in range(300):
            await world.want(f"waits-{number}", 0.9, memory="1Gi", namespace="crowd")
        await world.want("alone", 0.9, memory="1Gi", namespace="other")
        await world.later(10)
        reason = world.why("alone")
        world.node("b")
        world.state.cluster.remove_node("b")
        await world.runs("more", 0.2, memory="1Gi")
        await world.later(0.2)
        differs = [world.why(f"waits-{number}") != reason for number in range(300)]
        assert world.why("alone") != reason, "its namespace has a turn of its own"
        assert 0 < sum(differs) < 30
        await world.later(6)
        assert all(world.why(f"waits-{number}") != reason for number in range(300))


@pytest.mark.promise("security-flood")
async def test_looking_for_tenants_that_would_have_to_go_stops_for_one_that_comes_and_goes_on_afterwards(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with playing() as world:
        await world.runs("full", 0.6, memory="1Gi")
        monkeypatch.setattr(slices, "SLICE_S", -1.0)
        is_placed: list[bool] = []
        look = leavers

        def long(cluster: Cluster, request: PlacementRequest) -> Iterator[Leavers | None]:
            for number in range(20):
                if number == 5:
                    world.wants("newcomer", 0.2, namespace="another")
                is_placed.append("newcomer" in world.placed)
                yield None
            yield from look(cluster, request)

        monkeypatch.setattr(explanations, "leavers", long)
        await world.want("waits", 0.9, memory="1Gi")
        assert is_placed == [False] * 6 + [True] * 14
        assert "It would fit if full" in world.why("waits")
