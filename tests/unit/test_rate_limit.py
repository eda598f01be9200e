"""Tests of the token-bucket rate limiter."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sharepod.rate_limit import RateLimiter


@given(st.lists(st.floats(0, 0.1), max_size=300), st.integers(1, 1000), st.integers(1, 50))
def test_no_more_goes_than_the_rate_allows(pauses: list[float], per_s: int, burst: int) -> None:
    limiter, now, went = RateLimiter(0.0, per_s=per_s, burst=burst), 0.0, 0
    for pause in pauses:
        now += pause
        went += limiter.take(now)
        assert went <= burst + per_s * now + 2e-6


def test_a_burst_of_one_gives_one_at_a_time() -> None:
    limiter = RateLimiter(0.0, per_s=6 / 60, burst=1)
    assert limiter.take(0.0)
    assert not limiter.take(0.0)
    assert limiter.wait_s(0.0) == 10
    assert limiter.wait_s(9.5) == pytest.approx(0.5)
    assert [limiter.take(1000.0), limiter.take(1000.0)] == [True, False], "unused tokens do not add up"
    assert limiter.wait_s(1000.0) == 10


@given(st.floats(0, 1e6), st.floats(0.01, 1000), st.lists(st.floats(0, 30), max_size=30))
def test_a_caller_that_sleeps_for_the_wait_is_admitted(start: float, per_s: float, pauses: list[float]) -> None:
    limiter, now = RateLimiter(start, per_s=per_s, burst=1), start
    for pause in pauses:
        now += pause
        wait = limiter.wait_s(now)
        assert limiter.take(now) == (wait == 0)
        if wait:
            now += wait
            assert limiter.take(now)


def test_a_charge_is_paid_off_before_the_next_event() -> None:
    limiter = RateLimiter(0.0, per_s=10, burst=5)
    assert limiter.take(0.0)
    limiter.charge(6)
    assert not limiter.take(0.29)
    assert limiter.take(0.31)


def test_a_new_rate_holds_from_now_on() -> None:
    limiter = RateLimiter(0.0, per_s=1, burst=2)
    assert limiter.take(0.0)
    assert limiter.take(0.0)
    limiter.set_rate(0.5, 100)
    assert not limiter.take(0.5)
    assert limiter.take(0.506)


def test_a_returned_token_counts_as_never_taken() -> None:
    limiter = RateLimiter(0.0, per_s=0.1, burst=1)
    assert limiter.take(0.0)
    limiter.give_back(2.0, 0.0)
    assert limiter.take(2.0)
    assert limiter.wait_s(2.0) == pytest.approx(10)


def test_a_token_that_is_given_back_late_makes_no_burst() -> None:
    limiter = RateLimiter(0.0, per_s=0.1, burst=1)
    assert limiter.take(0.0)
    assert limiter.take(10.0)
    limiter.give_back(11.0, 0.0)
    assert limiter.wait_s(11.0) == pytest.approx(9)
