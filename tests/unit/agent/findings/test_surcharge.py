"""Surcharge of busy time beyond a tenant's charged time: each second is surcharged once. test_beyond_turns.py shows
that honest tenants get none.
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sharepod.agent.findings.beyond_turns import LENGTHS
from sharepod.agent.findings.surcharge import CAUGHT_S, IRREGULAR, SLACK_S, TOLERANCE, SurchargeMeter, irregular


@pytest.mark.promise("time-liar")
def test_what_is_busy_beyond_what_was_charged_is_surcharged_once() -> None:
    """Once the time beyond exceeds the slack, the surcharge covers all of it, the slack included. After that each
    second is surcharged at once.
    """
    meter = SurchargeMeter()
    found = [meter.observe(now, (0.4 * now,) * len(LENGTHS)) for now in range(101)]
    assert found[:2] == [0, 0], "less than the slack"
    assert found[2:] == pytest.approx([0.8, *[0.4] * 98])
    assert meter.observe(101, (40.0,) * len(LENGTHS)) == 0


@pytest.mark.promise("time-liar")
def test_what_is_tolerated_is_not_surcharged_and_a_minute_after_a_surcharge_it_is_again() -> None:
    beyond, meter = 0.0, SurchargeMeter()
    for now in range(200):
        beyond += TOLERANCE
        assert meter.observe(now, (beyond,) * len(LENGTHS)) == 0
    beyond += 2 * SLACK_S
    assert meter.observe(200, (beyond,) * len(LENGTHS)) == pytest.approx(2 * SLACK_S)
    for now in range(201, 300):
        beyond += TOLERANCE
        surcharged = meter.observe(now, (beyond,) * len(LENGTHS))
        assert surcharged == pytest.approx(TOLERANCE if now < 200 + CAUGHT_S else 0)


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
