"""Budgets: accounts are exact and idempotent, usage decays, and forecasts are right at an even rate."""

from __future__ import annotations

import datetime
from dataclasses import replace

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st
from sharepod.api.gpubudget import BudgetPeriod, ChargeBy, Refill
from sharepod.budgets.budget_account import (
    MICRO,
    BudgetAccount,
    Consumed,
    Terms,
    advanced,
    opened,
    refill_due_ms,
)
from sharepod.budgets.forecast import gone_at_ms
from sharepod.budgets.periods import span_of
from sharepod.budgets.standing import DecayedUsage, Standing, share_milli

TIMES = st.integers(0, 4_000_000_000_000)
STEPS = st.lists(
    st.tuples(st.integers(1, 40 * 86_400_000), st.integers(0, 10**13), st.integers(0, 10**13)), max_size=12
)


@st.composite
def terms(draw: st.DrawFn) -> Terms:
    amount = draw(st.integers(1, 10**15))
    return Terms(
        amount=amount,
        period=draw(st.sampled_from(BudgetPeriod)),
        refill=draw(st.sampled_from(Refill)),
        cap=draw(st.integers(1, 2 * amount)),
        charge_by=draw(st.sampled_from(ChargeBy)),
    )


def play(account: BudgetAccount, of: Terms, steps: list[tuple[int, int, int]]) -> list[BudgetAccount]:
    accounts = [account]
    for passed_ms, held, reserved in steps:
        accounts.append(advanced(accounts[-1], of, Consumed(held, reserved), accounts[-1].at_ms + passed_ms))
    return accounts


@given(st.sampled_from(BudgetPeriod), TIMES)
def test_a_period_is_a_calendar_period(period: BudgetPeriod, at_ms: int) -> None:
    span = span_of(period, at_ms)
    assert span.start_ms <= at_ms < span.end_ms
    assert span_of(period, span.end_ms).start_ms == span.end_ms
    assert span_of(period, span.end_ms - 1) == span
    start = datetime.datetime.fromtimestamp(span.start_ms / 1000, datetime.UTC)
    assert (start.hour, start.minute, start.second, start.microsecond) == (0, 0, 0, 0)
    if period is BudgetPeriod.MONTH:
        assert start.day == 1
        assert span.length_ms // 86_400_000 in (28, 29, 30, 31)
    if period is BudgetPeriod.WEEK:
        assert start.weekday() == 0
        assert span.length_ms == 7 * 86_400_000


@pytest.mark.promise("budgets-exact")
@given(terms(), TIMES, STEPS)
def test_repeating_a_step_changes_nothing(of: Terms, start_ms: int, steps: list[tuple[int, int, int]]) -> None:
    for account in play(opened(of, start_ms), of, steps):
        assert advanced(account, of, Consumed(), account.at_ms) == account


@given(terms(), TIMES, STEPS)
def test_the_remaining_hours_are_within_bounds(of: Terms, start_ms: int, steps: list[tuple[int, int, int]]) -> None:
    for account in play(opened(of, start_ms), of, steps):
        assert 0 <= account.left(of) <= of.full
        if account.left(of) == 0:
            assert account.spent
        assert refill_due_ms(account, of) >= account.at_ms
        assert account.period_start_ms == span_of(of.period, account.at_ms).start_ms


@pytest.mark.promise("budgets-exact")
@given(terms(), TIMES, STEPS, st.data())
def test_a_period_is_charged_its_own_consumption_however_it_is_divided(
    of: Terms, start_ms: int, steps: list[tuple[int, int, int]], data: st.DataObject
) -> None:
    """With an even rate of consumption, additional steps change the account only by rounding."""
    account = opened(of, start_ms)
    cut_account, cuts = account, 0
    for passed_ms, held, reserved in steps:
        until = account.at_ms + passed_ms
        cut_at = data.draw(st.integers(account.at_ms, until))
        whole = Consumed(held, reserved)
        first = whole.part(cut_at - account.at_ms, passed_ms)
        rest = Consumed(whole.held - first.held, whole.reserved - first.reserved)
        account = advanced(account, of, whole, until)
        cut_account = advanced(advanced(cut_account, of, first, cut_at), of, rest, until)
        cuts += 3
        for one, other in zip(
            (account.consumed.held, account.consumed.reserved),
            (cut_account.consumed.held, cut_account.consumed.reserved),
            strict=True,
        ):
            assert abs(one - other) <= cuts


@pytest.mark.parametrize("charge_by", ChargeBy)
def test_a_budget_changed_to_continuous_refill_keeps_its_remaining_hours(charge_by: ChargeBy) -> None:
    """The budget is in its fourth month, of which a quarter is spent. The first three months were spent completely."""
    before = Terms(amount=1000 * MICRO, cap=1000 * MICRO, charge_by=charge_by)
    account = opened(before, 0)
    for month in range(3):
        account = advanced(account, before, Consumed(1000 * MICRO, 1000 * MICRO), (month * 31 + 20) * 86_400_000)
    account = advanced(account, before, Consumed(), 100 * 86_400_000)
    account = advanced(account, before, Consumed(250 * MICRO, 250 * MICRO), 101 * 86_400_000)
    after = replace(before, refill=Refill.CONTINUOUS)
    changed = advanced(account, after, Consumed(), account.at_ms)
    assert (account.left(before), changed.left(after), changed.spent) == (750 * MICRO, 750 * MICRO, False)
    assert advanced(account, after, Consumed(), account.at_ms + 1000).left(after) >= 750 * MICRO


@given(
    st.integers(1, 10**15), st.sampled_from(BudgetPeriod), TIMES, st.lists(st.integers(1, 9 * 86_400_000), max_size=20)
)
def test_a_continuous_refill_loses_nothing_by_frequent_readings(
    amount: int, period: BudgetPeriod, start_ms: int, looks: list[int]
) -> None:
    of = Terms(amount=amount, period=period, refill=Refill.CONTINUOUS, cap=100 * amount + 1)
    empty = replace(opened(of, start_ms), credit=0)
    seen = play(empty, of, [(passed, 0, 0) for passed in looks])[-1]
    assert seen.credit == advanced(empty, of, Consumed(), seen.at_ms).credit


@pytest.mark.promise("budgets-clock")
@given(terms(), TIMES, STEPS, st.integers(1, 10**12))
def test_a_clock_set_back_refills_no_budget(
    of: Terms, start_ms: int, steps: list[tuple[int, int, int]], back_ms: int
) -> None:
    account = play(opened(of, start_ms), of, steps)[-1]
    assert advanced(account, of, Consumed(), account.at_ms - back_ms) == account
    charged = advanced(account, of, Consumed(7, 7), account.at_ms - back_ms)
    assert charged.at_ms == account.at_ms
    assert charged.left(of) == max(0, account.left(of) - 7)


@given(terms(), TIMES)
@example(  # the budget is used up in a February, so the refill falls into the longer March
    Terms(amount=49_775_044_314, cap=99_550_088_624, period=BudgetPeriod.MONTH, refill=Refill.CONTINUOUS),
    99_308_169_333,
)
@example(  # a budget with the smallest possible cap, one unit
    Terms(amount=1_000_000, cap=1, period=BudgetPeriod.MONTH, refill=Refill.CONTINUOUS, charge_by=ChargeBy.HELD), 0
)
def test_a_spent_budget_refills_at_the_announced_time(of: Terms, start_ms: int) -> None:
    assume(of.refill is Refill.PERIOD_START or of.amount >= MICRO)
    spent = advanced(opened(of, start_ms), of, Consumed(10**18, 10**18), start_ms + 1)
    if of.refill is Refill.CONTINUOUS:
        spent = replace(spent, credit=0, spent=True)
    due = refill_due_ms(spent, of)
    assert not advanced(spent, of, Consumed(), max(due, spent.at_ms) + 1000).spent


@pytest.mark.promise("budgets-order")
def test_the_order_moves_in_steps_of_a_half() -> None:
    assert [Standing(share_milli=share).step for share in (0, 499, 500, 999, 1000, 1499)] == [0, 0, 1, 1, 2, 2]


@pytest.mark.promise("budgets-forecast")
@given(terms(), TIMES, st.integers(1, 100_000), st.integers(1, 10**6))
def test_a_forecast_comes_true_at_an_even_rate(of: Terms, start_ms: int, rate: int, further_s: int) -> None:
    account = opened(of, start_ms)
    spent_at = gone_at_ms(account, of, rate * MICRO / 1000)
    until = account.at_ms + further_s * 1000 if spent_at is None else spent_at
    spent = rate * (MICRO // 1000) * (until - account.at_ms) // 1000
    same_period = span_of(of.period, until).start_ms == account.period_start_ms
    later = advanced(account, of, Consumed(spent, spent), until)
    slack = rate * MICRO // 500 + of.amount // 1000
    if spent_at is None and of.refill is Refill.PERIOD_START and same_period:
        assert later.left(of) > 0
    if spent_at is not None and same_period:
        assert later.left(of) <= slack


@given(
    st.floats(1.0, 1e9),
    st.floats(60, 1e6),
    st.lists(st.integers(1, 86_400_000), min_size=1, max_size=12),
    st.booleans(),
)
def test_usage_decays_alike_however_often_it_is_read(
    rate: float, half_life_s: float, looks: list[int], uses: bool
) -> None:
    """At an even rate of consumption the decayed usage stays at the value for that rate, however often it is read.
    Without consumption it only falls."""
    usage = once = DecayedUsage(0.0 if uses else 1e12, 0, 0)
    total = sum(looks)
    for passed in looks:
        before = usage.amount
        usage = usage.at(usage.at_ms + passed, half_life_s, round(rate * passed) if uses else 0)
        if not uses:
            assert usage.amount <= before
    once = once.at(total, half_life_s, round(rate * total) if uses else 0)
    assert abs(usage.amount - once.amount) <= 1e-3 * max(1.0, once.amount) + len(looks)
    if uses:
        assert abs(usage.rate(half_life_s) - rate * 1000) <= 0.02 * rate * 1000 + 1e3
        assert share_milli(usage, rate * 1000, half_life_s) <= 1001


@pytest.mark.promise("budgets-never-raised")
@given(st.integers(-(2**31), 2**31), st.one_of(st.none(), st.integers(-(2**31), 2**31)))
def test_a_standing_never_raises_a_priority(priority: int, lowered_to: int | None) -> None:
    effective = Standing(lowered_to=lowered_to).effective_priority(priority)
    assert effective <= priority
    assert effective == min(priority, lowered_to if lowered_to is not None else priority)
