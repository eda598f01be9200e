"""Idle debt: GPUs are reserved again only after the idle time of earlier reservations was paid off."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sharepod.controller.placing.idle_debt import LONGEST_PAUSE_S, IdleDebt


def test_what_stands_idle_within_the_ratio_is_no_debt() -> None:
    debt = IdleDebt(0.02, 0.0)
    debt.gpus = 100
    debt.count(1000.0, 2.0)
    assert debt.paid_in_s() == 0


def test_what_stands_idle_beyond_it_is_paid_off_at_that_rate() -> None:
    debt = IdleDebt(0.02, 0.0)
    debt.gpus = 100
    debt.count(1000.0, 8.0)
    assert debt.paid_in_s() == pytest.approx(3000)
    debt.count(3000.0, 0.0)
    assert debt.paid_in_s() == pytest.approx(1000)
    debt.count(4000.0, 0.0)
    assert debt.paid_in_s() == 0


def test_without_gpus_and_for_a_clock_that_stands_still_nothing_is_owed() -> None:
    debt = IdleDebt(0.02, 5.0)
    debt.count(9.0, 1.0)
    debt.gpus = 1
    debt.count(9.0, 1.0)
    assert debt.paid_in_s() == 0


@pytest.mark.promise("placement-head-idle")
@given(st.lists(st.tuples(st.floats(1, 1e5), st.booleans()), max_size=50), st.sampled_from([0.02, 0.1, 1.0]))
def test_no_pause_is_longer_than_a_day_and_in_the_long_run_no_more_stands_idle(
    steps: list[tuple[float, bool]], ratio: float
) -> None:
    debt, now, idle, last = IdleDebt(ratio, 0.0), 0.0, 0.0, 0.0
    debt.gpus = 10
    for seconds, wants in steps:
        kept = wants and debt.paid_in_s() == 0
        # a step whose idle time can be paid off within the longest pause; the ratio does not bound longer ones
        seconds = min(seconds, LONGEST_PAUSE_S * ratio)
        now += seconds
        debt.count(now, 10.0 if kept else 0.0)
        idle += 10.0 * seconds if kept else 0.0
        last = max(last, 10.0 * seconds) if kept else last
        assert debt.paid_in_s() <= LONGEST_PAUSE_S
    assert idle <= ratio * 10 * now + last + 1e-3
