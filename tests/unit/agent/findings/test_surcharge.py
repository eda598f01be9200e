"""Busy time beyond what a tenant was charged: surcharged once. Never to an honest one: test_beyond_turns.py."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sharepod.agent.findings.beyond_turns import LENGTHS
from sharepod.agent.findings.surcharge import IRREGULAR, SLACK_S, TOLERANCE, SurchargeMeter, irregular


@pytest.mark.promise("time-liar")
def test_what_is_busy_beyond_what_was_charged_is_surcharged_once() -> None:
    meter = SurchargeMeter()
    total = sum(meter.observe(now, (0.4 * now,) * len(LENGTHS)) for now in range(101))
    assert total == pytest.approx((0.4 - TOLERANCE) * 100 - SLACK_S)
    assert meter.observe(101, (40.0,) * len(LENGTHS)) == 0


@given(st.lists(st.floats(0, 1), max_size=50), st.integers(0, len(LENGTHS) - 1))
def test_a_tenant_that_one_length_of_samples_clears_has_no_surcharge(parts: list[float], clears: int) -> None:
    meter, beyond = SurchargeMeter(), 0.0
    for now, part in enumerate(parts):
        beyond += part
        assert meter.observe(now, tuple(0 if index == clears else beyond for index in range(len(LENGTHS)))) == 0


def test_readings_do_not_fall_into_step_with_turns() -> None:
    assert irregular(1.0, 0) < irregular(1.0, 0.5) < irregular(1.0, 1)


@given(st.floats(0.05, 60), st.floats(0, 1))
def test_readings_are_never_much_later_or_sooner_than_asked(interval_s: float, drawn: float) -> None:
    assert (1 - IRREGULAR) * interval_s <= irregular(interval_s, drawn) * (1 + 1e-9)
    assert irregular(interval_s, drawn) <= (1 + IRREGULAR) * interval_s * (1 + 1e-9)
