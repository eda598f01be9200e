"""Moving by the placement loop: choice of the mover, reservations for both tenants, and the end of a move."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
from sharepod.api.sharepod import KeptPlace
from sharepod.api.units import Milli, TenantId
from sharepod.budgets.standing import WITHOUT_BUDGET, Standing
from unit.controller.objects import sharepod_object
from unit.controller.preempting_world import Playing, playing


@asynccontextmanager
async def scattered(
    *, mover: dict[str, Any] | None = None, priority: int = 0, **options: Any
) -> AsyncIterator[Playing]:
    """Yield a world with two GPUs: `mover` has 0.4 of node a, `fixed` 0.5 of node b. A request of 0.8 has a place once
    the mover is on b."""
    async with playing(**{"moves": 600.0, **options}) as world:
        gpu: dict[str, Any] = {"request": 0.4, "memory": "1Gi", "movable": True, "restart": "Always"} | (mover or {})
        await world.runs("mover", **gpu, priority=priority)
        await world.runs("blocker", 0.6, memory="1Gi")
        world.node("b")
        await world.runs("fixed", 0.5, memory="1Gi")
        await world.ends("blocker")
        yield world


def moves(world: Playing) -> list[tuple[tuple[str, ...], str]]:
    """Return the moves that have begun: (moving tenants, their new node)."""
    return [(item.plan.evict, item.plan.move_to.node) for item in world.begun if item.plan.move_to is not None]


@pytest.mark.promise("placement-move-keeps")
async def test_a_mover_makes_room_for_an_equal_and_both_places_are_kept_until_they_are_taken() -> None:
    async with scattered() as world:
        moved: list[tuple[str, str]] = []
        world.loop.preemptions.moving.on_moved = lambda move, node: moved.append((move.mover.tenant, node))
        await world.want("waits", 0.8, memory="1Gi")
        await world.later(2)
        assert moves(world) == [(("mover",), "b")]
        assert world.kept() == {"waits", "mover"}
        await world.want("slips", 0.25, memory="1Gi")
        world.deletes("mover")
        await world.later(5)
        assert len(world.begun) == 1
        await world.ends("mover")
        assert world.placed.get("waits") == "a"
        assert "slips" not in world.placed
        assert world.kept() == {"mover"}
        await world.comes_back("mover")
        assert world.placed.get("mover") == "b"
        assert moved == [("mover", "b")]
        await world.later(2)
        assert world.kept() == set()
        assert "slips" not in world.placed, "no room is left for it"
        await world.ends("waits")
        assert "slips" in world.placed


@pytest.mark.promise("placement-move-consent")
@pytest.mark.parametrize("movable", [None, False])
async def test_nobody_is_moved_for_an_equal_whose_owner_has_not_said_so(movable: bool | None) -> None:
    async with scattered(mover={"movable": movable}) as world:
        await world.want("waits", 0.8, memory="1Gi")
        await world.later(30)
        assert world.begun == []


async def test_a_tenant_that_would_not_restart_is_not_moved() -> None:
    async with scattered(mover={"restart": "Never"}) as world:
        await world.want("waits", 0.8, memory="1Gi")
        await world.later(30)
        assert world.begun == []


async def test_no_tenant_is_moved_for_a_request_of_lower_priority() -> None:
    async with scattered(priority=5) as world:
        await world.want("waits", 0.8, memory="1Gi")
        await world.later(30)
        assert world.begun == []


@pytest.mark.promise("placement-move-first")
async def test_a_mover_goes_before_one_that_would_have_to_be_evicted_and_time_before_both() -> None:
    async with scattered() as world:
        await world.want("time", 0.8, memory="1Gi", priority=9)
        await world.later(2)
        assert moves(world) == []
        assert world.begun[0].plan.lower, "time alone is enough"
    async with scattered() as world:
        await world.want("memory", 0.1, memory="15.5Gi", priority=9)
        await world.later(2)
        assert moves(world) == [(("mover",), "b")], "both nodes would have to evict"


@pytest.mark.parametrize(("allows", "moved"), [(None, True), (True, True), (False, False)])
async def test_best_effort_is_moved_instead_of_being_evicted_unless_its_owner_objects(
    allows: bool | None, moved: bool
) -> None:
    async with scattered(mover={"request": 0, "memory": "12Gi", "movable": allows}) as world:
        await world.want("equal", 0.1, memory="15.5Gi")
        await world.later(2)
        assert bool(moves(world)) is (allows is True)
    async with scattered(mover={"request": 0, "memory": "12Gi", "movable": allows}) as world:
        await world.want("high", 0.1, memory="15.5Gi", priority=9)
        await world.later(2)
        assert bool(moves(world)) is moved


async def test_best_effort_stays_for_an_equal_though_others_may_be_moved_for_it() -> None:
    async with scattered(mover={"request": 0, "memory": "12Gi", "movable": None}) as world:
        await world.runs("marked", 0.1, memory="1Gi", movable=True, restart="Always")
        await world.want("equal", 0.1, memory="15.5Gi")
        await world.later(2)
        assert moves(world) == []


async def test_a_mover_that_fits_nowhere_else_is_evicted_for_one_of_higher_priority() -> None:
    async with playing(moves=600.0) as world:
        await world.runs("mover", 0.4, memory="12Gi", movable=True, restart="Always")
        await world.want("high", 0.4, memory="12Gi", priority=9)
        await world.later(2)
        assert [(item.plan.evict, item.plan.move_to) for item in world.begun] == [(("mover",), None)]


@pytest.mark.parametrize("off", [{"moves": 0.0}, {"move_after": 3600.0}])
async def test_nobody_is_moved_where_that_is_off_or_who_has_not_run_long_enough(off: dict[str, Any]) -> None:
    async with scattered(**off) as world:
        await world.want("waits", 0.8, memory="1Gi")
        await world.later(30)
        assert world.begun == []


async def test_moves_are_made_where_preemption_is_off_and_nobody_is_lowered() -> None:
    async with scattered(per_minute=0.0) as world:
        await world.want("waits", 0.8, memory="1Gi", priority=9)
        await world.later(2)
        assert moves(world) == [(("mover",), "b")]
        assert len(world.begun) == 1


@pytest.mark.promise("placement-move-rate")
@pytest.mark.parametrize(("limits", "within_30_s"), [({"moves": 1.0}, 1), ({"moves": 60.0, "per_minute": 0.0}, 2)])
async def test_moves_are_limited_to_so_many_a_minute(limits: dict[str, float], within_30_s: int) -> None:
    async with playing(**limits) as world:
        for pair in "xy":
            world.remove_node("a")
            for number in "12":
                world.node(pair + number)
            await world.runs(f"mover-{pair}", 0.4, memory="1Gi", movable=True, restart="Always")
            await world.runs(f"full-{pair}", 0.6, memory="1Gi")
            await world.runs(f"fixed-{pair}", 0.5, memory="1Gi")
            await world.runs(f"more-{pair}", 0.4, memory="1Gi")
        for pair in "xy":
            await world.ends(f"full-{pair}")
            await world.ends(f"more-{pair}")
        for name in ("one", "two"):
            await world.want(name, 0.8, memory="1Gi")
        await world.later(30)
        assert len(moves(world)) == within_30_s
        await world.later(40)
        assert len(moves(world)) == 2


@pytest.mark.parametrize("how", ["waits no longer", "refused"])
async def test_a_move_that_is_given_up_before_the_eviction_keeps_nothing(how: str) -> None:
    async with scattered() as world:
        await world.want("waits", 0.8, memory="1Gi")
        await world.later(2)
        assert world.kept() == {"waits", "mover"}
        if how == "refused":
            world.loop.preemptions.refused("waits", "pod-of-mover")
        else:
            world.loop.leave("waits")
        assert world.kept() == set()
        await world.later(5)
        assert len(world.begun) == 1, "a budget that has refused is not asked again at once"


async def test_the_place_of_a_mover_that_does_not_come_back_is_given_up() -> None:
    async with scattered() as world:
        await world.want("waits", 0.8, memory="1Gi")
        await world.later(2)
        world.deletes("mover")
        await world.ends("mover")
        await world.later(100)
        assert world.kept() == {"mover"}
        await world.later(30)
        assert world.kept() == set()


async def test_the_place_of_a_mover_that_is_deleted_is_given_up_at_once() -> None:
    async with scattered() as world:
        await world.want("waits", 0.8, memory="1Gi")
        await world.later(2)
        world.deletes("mover")
        await world.ends("mover")
        world.state.drop_sharepod("mover")
        await world.later(2)
        assert world.kept() == set()


async def test_one_that_borrows_moves_with_request_0_as_it_runs() -> None:
    spent = Standing(lowered_to=-1000, over_budget_milli=1, refill_at="2026-02-01T00:00:00Z")
    async with scattered(standing=lambda namespace: spent if namespace == "n" else WITHOUT_BUDGET) as world:
        await world.runs("more", 0.3, memory="1Gi")
        assert world.placed["more"] == "b"
        (_, row) = world.state.cluster.reservations_of(TenantId("mover"))[0]
        world.state.cluster.change_share(replace(row, request_milli=Milli(0)))
        await world.writes()
        await world.want("waits", 0.8, memory="15.5Gi", namespace="other")
        await world.later(2)
        assert moves(world) == [(("mover",), "b")]


@pytest.mark.promise("placement-advice-helps")
async def test_one_that_waits_is_told_whose_move_would_help_if_its_owner_allowed_it() -> None:
    async with scattered(mover={"movable": None}) as world:
        await world.want("waits", 0.8, memory="1Gi")
        await world.later(6)
        assert "It would fit if mover ran elsewhere on b: movable: true lets it be moved there." in world.why("waits")
    async with scattered(mover={"movable": None, "restart": "Never"}) as world:
        await world.want("waits", 0.8, memory="1Gi")
        await world.later(6)
        assert "It would fit if mover ended." in world.why("waits")


@pytest.mark.promise("placement-move-crash")
@pytest.mark.parametrize("pod", ["is deleted", "is missing", "runs"])
async def test_the_next_leader_keeps_the_place_of_one_that_moves_before_it_decides_anything(pod: str) -> None:
    async with scattered() as world:
        await world.want("waits", 0.8, memory="1Gi")
        await world.later(2)
        place = world.loop.preemptions.moving.kept_place(TenantId("mover"))
        assert place == KeptPlace(node="b", gpus=("GPU-b-0",))
        if pod != "runs":
            world.deletes("mover")
        if pod == "is missing":
            await world.ends("mover")
        world.loop.clear()
        assert world.kept() == set()
        world.state.put_sharepod(_as_written("mover", {"movesTo": place.dump()}))
        await world.want("slips", 0.5, memory="1Gi")
        assert ("mover" in world.kept()) is (pod != "runs")
        assert (world.placed.get("slips") == "b") is (pod == "runs"), "one whose Pod runs is not moved any more"
        if pod == "is missing":
            await world.comes_back("mover")
            assert world.placed["mover"] == "b"
            await world.later(2)
            assert "mover" not in world.kept()


@pytest.mark.promise("placement-holder-kept")
async def test_the_next_leader_keeps_and_gives_up_places_though_nobody_waits_and_nobody_is_moved_any_more() -> None:
    place = KeptPlace(node="b", gpus=("GPU-b-0",))
    async with playing() as world:
        world.node("b")
        await world.runs("mover", 0.4, memory="1Gi", restart="Always")
        world.deletes("mover")
        await world.ends("mover")
        world.loop.clear()
        world.state.put_sharepod(_as_written("mover", {"movesTo": place.dump()}))
        world.loop.take_over()
        assert world.kept() == {"mover"}
        await world.later(130)
        assert world.kept() == set()


def _as_written(tenant: str, status: dict[str, Any]) -> dict[str, Any]:
    spec = {"gpu": {"request": 0.4, "memory": "1Gi", "movable": True}, "restartPolicy": "Always"}
    return sharepod_object(uid=tenant, name=tenant, version=2, spec=spec, status=status)
