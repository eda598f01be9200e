"""Slices of the placement loop's work: other tasks run between two slices."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from sharepod.controller.placing import slices


class Others:
    """Another task of the event loop, which counts its turns. A request arrives in the turn with the number `comes`."""

    def __init__(self) -> None:
        self.turns = 0
        self.comes = 1_000
        self.arrived = asyncio.Event()

    async def run(self) -> None:
        while True:
            self.turns += 1
            if self.turns == self.comes:
                self.arrived.set()
            await asyncio.sleep(0)


@pytest.fixture
async def others() -> AsyncIterator[Others]:
    made = Others()
    running = asyncio.create_task(made.run())
    yield made
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def test_others_get_their_turns_between_two_slices(others: Others) -> None:
    await slices.let_others_go_on(others.arrived)
    assert others.turns >= slices._TURNS


@pytest.mark.promise("security-flood")
async def test_one_that_comes_waits_for_one_turn_of_others(others: Others, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slices, "SLICE_S", -1.0)
    others.comes = 3
    await slices.let_others_go_on(others.arrived)
    assert others.turns == 3
    await slices.turns_of_others(0.0, others.arrived)
    assert others.turns == 4
    looked = [item async for item in slices.in_slices(range(3 * slices._AT_ONCE), others.arrived)]
    assert looked == list(range(3 * slices._AT_ONCE))
    assert others.turns <= 4 + 3


@pytest.mark.promise("security-flood")
async def test_a_rest_that_is_over_at_once_gives_others_their_turns_all_the_same(others: Others) -> None:
    woken = asyncio.Event()
    woken.set()
    await slices.rest(0.0, woken, 1.0, arrived=others.arrived)
    assert others.turns >= slices._TURNS
