"""Busy time beyond what a tenant was charged: surcharged once, and never to an honest one."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sharepod.agent.findings.surcharge import IRREGULAR, SLACK_S, TOLERANCE, SurchargeMeter, irregular


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


def test_time_that_an_earlier_account_of_the_tenant_was_charged_is_no_surcharge() -> None:
    meter = SurchargeMeter()
    for now in range(10):
        assert meter.observe(now, busy_s=0.5 * now, charged_s=1000 + 0.5 * now) == 0
    # Its row was released and made again between two readings: the new account begins at 0.
    for now in range(10, 20):
        assert meter.observe(now, busy_s=0.5 * now, charged_s=0.5 * (now - 9.5)) == 0


def _held(until: float, turn: float, others: float) -> float:
    """Seconds up to `until` that the first of two tenants had, who take turns without end."""
    rounds, rest = divmod(until, turn + others)
    return rounds * turn + min(rest, turn)


@pytest.mark.promise("time-honest")
@pytest.mark.parametrize("sample_s", [1 / 6, 0.5, 1.0])
@pytest.mark.parametrize(
    ("turn", "others"), [(0.1, 0.1), (0.1, 0.1001), (0.1, 0.15), (0.09, 0.21), (0.03, 0.1), (0.1, 0.03)]
)
def test_samples_that_show_only_the_end_of_each_second_surcharge_nobody(
    turn: float, others: float, sample_s: float
) -> None:
    draw, now, said, spilled = random.Random(1), 0.0, [0.0, 0.0], 0.0
    meters = [SurchargeMeter(), SurchargeMeter()]
    while now < 2000:
        elapsed = irregular(1.0, draw.random())
        now += elapsed
        seen = (_held(now, turn, others) - _held(now - sample_s, turn, others)) / sample_s
        charged = _held(now, turn, others)
        for each, (part, had) in enumerate(((seen, charged), (1 - seen, now - charged))):
            said[each] += part * elapsed
            spilled += meters[each].observe(now, said[each], had)
    assert spilled <= 0.001 * now, "0.03 with readings once a second, a tolerance of 0.05 and half a second of slack"


@given(st.floats(0.05, 60), st.floats(0, 1))
def test_readings_are_never_much_later_or_sooner_than_asked(interval_s: float, drawn: float) -> None:
    assert (1 - IRREGULAR) * interval_s <= irregular(interval_s, drawn) * (1 + 1e-9)
    assert irregular(interval_s, drawn) <= (1 + IRREGULAR) * interval_s * (1 + 1e-9)
