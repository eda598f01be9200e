"""Preemption of Pods with grace periods of hours: they are evicted last, and at most one set of them for each pending
request.
"""

from __future__ import annotations

import pytest
from unit.controller.preempting_world import Playing, playing

HOUR = 3600


async def low_ones(world: Playing, *graces: int, priority: int = 0) -> None:
    """Place one tenant of low priority for each grace period, each on a node of its own."""
    for number, grace in enumerate(graces):
        if number:
            world.node(f"n{number}")
        await world.runs(f"low{number}", 0.3, memory="12Gi", priority=priority)
        world.has_grace(f"low{number}", grace)


def evicted(world: Playing) -> list[tuple[str, ...]]:
    return [item.plan.evict for item in world.begun if item.plan.evict]


async def goes_slowly(world: Playing, ends_by: str) -> None:
    """Delete the Pod of each evicted tenant, with a grace period that ends at `ends_by`, and run the loop for a
    minute."""
    for _ in range(4):
        for (tenant,) in evicted(world):
            world.deletes(tenant, ends_by=ends_by)
        await world.later(15)


@pytest.mark.promise("placement-preempt-slow")
async def test_one_that_takes_hours_to_go_makes_no_more_victims_for_the_same_one() -> None:
    async with playing() as world:
        await low_ones(world, 2 * HOUR, 2 * HOUR, 2 * HOUR)
        await world.want("high", 0.3, priority=9, memory="12Gi")
        await goes_slowly(world, "2026-01-01T02:00:00Z")
        assert len(evicted(world)) == 1
        assert world.kept() == set(), "nothing stands idle for hours"
        await world.later(HOUR)
        assert world.kept() == {"high"}, "it goes within the hour"
        assert len(evicted(world)) == 1
        await world.ends(evicted(world)[0][0])
        assert world.placed["high"] is not None


@pytest.mark.promise("placement-preempt-slow")
async def test_one_that_goes_within_an_hour_is_evicted_before_one_that_does_not() -> None:
    async with playing() as world:
        await low_ones(world, 2 * HOUR, HOUR, priority=1)
        world.node("cheaper")
        await world.runs("cheaper", 0.3, memory="12Gi")
        world.has_grace("cheaper", 5 * 365 * 24 * HOUR)
        await world.want("high", 0.3, priority=9, memory="12Gi")
        await world.later(5)
        assert evicted(world) == [("low1",)]
        assert world.kept() == {"high"}


@pytest.mark.promise("placement-preempt-slow")
async def test_once_another_can_be_evicted_that_goes_soon_nobody_waits_for_the_slow_one() -> None:
    async with playing() as world:
        await low_ones(world, 2 * HOUR)
        await world.want("high", 0.3, priority=9, memory="12Gi")
        await goes_slowly(world, "2026-01-01T02:00:00Z")
        world.node("later")
        await world.want("quick", 0.3, memory="12Gi", priority=10)
        assert world.placed["quick"] == "later"
        await world.runs_where_it_was_placed("quick", 0)
        await world.later(15)
        assert evicted(world) == [("low0",), ("quick",)]


async def test_one_whose_eviction_was_not_taken_is_chosen_again() -> None:
    async with playing() as world:
        await low_ones(world, 2 * HOUR)
        await world.want("high", 0.3, priority=9, memory="12Gi")
        await world.later(5)
        assert evicted(world) == [("low0",)]
        await world.later(150)  # the API server refuses evictions in this time
        assert evicted(world) == [("low0",), ("low0",)]
