"""Habits: how long a GPU is kept idle for a tenant, by its pauses, its work, and the delay that others would cause."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from sharepod.timeshare.habits import Habits

MS = 1_000_000
TURN, MOST = 2 * MS, 100 * MS


def habits(pauses_ms: Iterable[float], work_ms: float) -> Habits:
    """Return the habits learned from steps of this work and these pauses."""
    learned, held = Habits(), 0
    learned.begin(held)
    for pause in pauses_ms:
        held += int(work_ms * MS)
        learned.paused(int(pause * MS), held)
    return learned


def window_ms(learned: Habits, overrun_ms: float) -> float:
    """Return the window, in ms, in which a GPU is kept idle instead of granting it to a tenant with this overrun."""
    return learned.window(int(overrun_ms * MS), TURN, MOST) / MS


@pytest.mark.parametrize("pause", [2, 5, 10])
def test_short_pauses_are_waited_through_for_any_work(pause: int) -> None:
    for overrun in (pause + 1, 30, 400):
        assert window_ms(habits([pause] * 100, 0.1), overrun) > pause


def test_long_pauses_are_waited_through_only_for_as_much_work() -> None:
    assert window_ms(habits([21] * 100, 1), 400) == 0
    assert window_ms(habits([21] * 100, 20), 400) == 0
    assert window_ms(habits([21] * 100, 25), 400) > 21


def test_long_pauses_are_waited_through_only_for_as_much_delay() -> None:
    assert window_ms(habits([21] * 100, 50), 20) == 0
    assert window_ms(habits([45] * 100, 50), 60) == 0
    assert window_ms(habits([21] * 100, 50), 60) > 21


def test_the_tail_of_long_pauses_is_not_waited_for_beyond_what_is_gained() -> None:
    """Half of the pauses are short. The other half are longer than any window, so waiting for them never gains
    anything.
    """
    assert 5 <= window_ms(habits([5, 500] * 60, 10), 100) < 10, "four times that would idle for 5 and 23 ms by turns"
    assert window_ms(habits([5] * 120, 10), 100) > 20


def test_only_work_that_outlasts_a_turn_is_learned_of_one_without_processor_time() -> None:
    learned = Habits()
    learned.overran_by_work(40 * MS)
    known = learned.overrun_ns, learned.mean_overrun_ns
    assert known[0] == 40 * MS
    for late_ns in (0, -5 * MS):
        learned.overran_by_work(late_ns)
    assert (learned.overrun_ns, learned.mean_overrun_ns) == known


def test_a_tenant_without_pauses_is_not_waited_for() -> None:
    assert window_ms(habits([], 1), 400) == 0
    assert window_ms(habits([5] * 3, 1), 400) == 0


def test_a_step_unlike_all_others_changes_little_of_what_a_tenant_tolerates() -> None:
    before = habits([5] * 100, 20).tolerated_ns(500)
    assert before > 0
    assert habits([*[5] * 100, 3_600_000], 20).tolerated_ns(500) <= before * 5 // 4
    assert habits([3_600_000, *[5] * 60], 20).tolerated_ns(500) <= before * 2
    assert habits([*[5] * 100, *[50] * 60], 200).tolerated_ns(500) >= 9 * before, "but all of them do"


def test_what_an_earlier_agent_counted_is_no_step_and_its_end_no_pause() -> None:
    learned = Habits()
    learned.paused(50 * MS, 3_600_000 * MS)
    learned.begin(3_600_000 * MS)
    assert learned.tolerated_ns(500) == 0
    learned.paused(5 * MS, 3_600_020 * MS)
    assert learned.tolerated_ns(500) == 25 * MS * 3 // 4


def test_a_tenant_that_ceases_to_pause_works_briefly_no_more() -> None:
    learned = habits([2] * 10, 8)
    assert learned.works_briefly(80 * MS, 20 * MS)
    assert learned.works_briefly(100 * MS, 20 * MS)
    assert not learned.works_briefly(101 * MS, 20 * MS)
    assert not habits([2] * 10, 21).works_briefly(210 * MS, 20 * MS)
    assert not Habits().works_briefly(0, 20 * MS)
