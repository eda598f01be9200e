"""Garbage collection of new objects: cycles are freed, and survivors are not visited again."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
from sharepod.controller import garbage
from sharepod.controller.garbage import Garbage

_ENOUGH = 2 * garbage._YOUNG * (garbage._LOOKS + 1)
"""Number of new objects after which every new object was visited."""


class Cycle:
    """Object in a reference cycle, which only a collection frees."""

    def __init__(self) -> None:
        self.itself = self


@pytest.fixture
def looks() -> Iterator[list[int]]:
    """Return, for each collection of two or more generations so far, the number of objects that it has visited."""
    found: list[int] = []

    def look(phase: str, collection: dict[str, Any]) -> None:
        generation = collection["generation"]
        if phase == "start" and generation > 0:
            found.append(sum(len(gc.get_objects(number)) for number in range(generation + 1)))

    gc.callbacks.append(look)
    yield found
    gc.callbacks.remove(look)


@pytest.fixture(autouse=True)
def _thawed() -> Iterator[None]:
    yield
    gc.unfreeze()


def make_many() -> list[list[int]]:
    return [[number] for number in range(_ENOUGH)]


def test_a_new_cycle_ends_at_the_next_look_and_one_that_outlived_it_within_a_day() -> None:
    now = [0.0]
    with Garbage(lambda: now[0]) as collecting:
        cycle = Cycle()
        outlives, ends = weakref.ref(cycle), weakref.ref(Cycle())
        make_many()
        assert ends() is None
        del cycle
        make_many()
        assert outlives() is not None, "it is not looked at again"
        collecting.settle()
        assert outlives() is not None
        now[0] = 86_400.0
        collecting.settle()
        assert outlives() is None


@pytest.mark.promise("operator-garbage")
def test_a_collection_looks_at_few_new_objects_however_many_are_made_and_known(looks: list[int]) -> None:
    before = gc.get_threshold()
    with Garbage(lambda: 0.0):
        known = [make_many() for _ in range(5)]
        assert len(looks) > 5
        assert max(looks) < _ENOUGH, "survivors are not scanned again"
        assert sum(map(len, known)) == 5 * _ENOUGH
    assert gc.get_threshold() == before


@pytest.mark.promise("operator-garbage")
async def test_what_replaces_older_objects_is_looked_at_in_time(
    looks: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python counts created objects less freed ones, so this program never reaches the threshold of a collection.
    `_PERIOD_S` starts one."""
    monkeypatch.setattr(garbage, "_PERIOD_S", 0.0)
    with Garbage(lambda: 0.0) as collecting:
        known = make_many()
        gc.collect(1)
        running = asyncio.create_task(collecting.run())
        looks.clear()
        for number in range(10 * _ENOUGH):
            known[number % _ENOUGH] = [number]
            if not number % 500:
                await asyncio.sleep(0)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
    assert len(looks) > 5
    assert max(looks) < _ENOUGH
