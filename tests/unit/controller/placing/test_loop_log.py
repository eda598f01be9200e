"""A pass of the placement loop logs its number and the use of its time."""

from __future__ import annotations

import asyncio

from structlog.testing import capture_logs
from unit.controller.loop_world import World


async def test_each_pass_logs_its_number_and_the_time_of_its_phases() -> None:
    world = World()
    world.node("a")
    deciding = asyncio.create_task(world.loop.run())
    with capture_logs() as logs:
        await world.want("first", 0.6)
        await world.want("second", 0.7)
    deciding.cancel()
    await asyncio.gather(deciding, return_exceptions=True)
    passes = [entry for entry in logs if entry["event"] == "placement pass"]
    numbers = [entry["cycle"] for entry in passes]
    assert len(numbers) >= 2
    assert numbers == sorted(set(numbers))
    assert all(entry["log_level"] == "debug" for entry in passes)
    for entry in passes:
        assert list(entry["phases_ms"]) == ["resize", "sort", "place", "renew", "head", "preempt", "explain"]
        assert all(taken >= 0 for taken in entry["phases_ms"].values())
