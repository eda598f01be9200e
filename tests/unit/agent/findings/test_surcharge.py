"""Busy time beyond what a tenant was charged: surcharged once, and never to an honest one."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sharepod.agent.findings.surcharge import SLACK_S, TOLERANCE, SurchargeMeter


@pytest.mark.promise("time-liar")
def test_what_is_busy_beyond_what_was_charged_is_surcharged_once() -> None:
    meter = SurchargeMeter()
    total = sum(meter.observe(now, busy_s=0.5 * now, charged_s=0.1 * now) for now in range(101))
    assert total == pytest.approx((0.5 - 0.1 - TOLERANCE) * 100 - SLACK_S)
    assert meter.observe(101, busy_s=50.0, charged_s=11.0) == 0


@given(st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1)), max_size=50))
def test_a_tenant_that_is_busy_no_more_than_it_is_charged_has_no_surcharge(parts: list[tuple[float, float]]) -> None:
    meter, busy, charged = SurchargeMeter(), 0.0, 0.0
    for now, (part, more) in enumerate(parts):
        busy += part
        charged += part + more * (1 - part)
        assert meter.observe(now, busy, charged) == 0
