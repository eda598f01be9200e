"""The event loop on a virtual clock, on which other tests depend."""

from __future__ import annotations

import asyncio

import pytest
from unit.virtual_time import BEGIN_S, VirtualTimeLoop


def test_time_passes_only_when_nothing_can_run() -> None:
    order: list[tuple[str, float]] = []

    async def busy(name: str) -> None:
        for _ in range(1000):
            await asyncio.sleep(0)
        order.append((name, asyncio.get_running_loop().time()))

    async def play() -> None:
        tasks = [asyncio.create_task(busy(name)) for name in "ab"]
        await asyncio.sleep(0.001)
        order.append(("timer", asyncio.get_running_loop().time()))
        await asyncio.gather(*tasks)

    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        runner.run(play())
    assert order == [("a", BEGIN_S), ("b", BEGIN_S), ("timer", pytest.approx(BEGIN_S + 0.001))]


def test_a_wait_that_nothing_can_end_is_an_error() -> None:
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner, pytest.raises(RuntimeError, match="without end"):
        runner.run(asyncio.wait_for(asyncio.Event().wait(), None))
