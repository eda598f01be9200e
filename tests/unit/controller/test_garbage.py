"""Garbage collection by what is new: cycles end, and what has survived once is not looked at again."""

from __future__ import annotations

import gc
import weakref

import pytest
from sharepod.controller.garbage import Garbage


class Cycle:
    """Object that only a collection ends."""

    def __init__(self) -> None:
        self.itself = self


def test_a_new_cycle_ends_at_the_next_look_and_one_that_outlived_it_within_a_day() -> None:
    now = [0.0]
    with Garbage(lambda: now[0]) as garbage:
        cycle = Cycle()
        outlives, ends = weakref.ref(cycle), weakref.ref(Cycle())
        garbage.settle(acting=True)
        assert ends() is None
        del cycle
        garbage.settle(acting=True)
        assert outlives() is not None, "it is not looked at again"
        now[0] = 86_400.0
        garbage.settle(acting=True)
        assert outlives() is None


@pytest.mark.promise("operator-garbage")
def test_what_has_survived_is_not_looked_at_again_and_no_full_collection_comes_of_itself() -> None:
    before = gc.get_threshold()
    with Garbage(lambda: 0.0) as garbage:
        alive = [[number] for number in range(10_000)]
        garbage.settle(acting=True)
        assert len(gc.get_objects()) < len(alive)
        garbage.settle(acting=False)
        collected = gc.get_stats()[2]["collections"]
        more = [[number] for number in range(200_000)]
        assert gc.get_stats()[2]["collections"] == collected
        assert len(alive) + len(more) == 210_000
    assert gc.get_threshold() == before
    assert gc.get_freeze_count() == 0
