"""Busy time beyond turns: for any length of samples, the meter finds none for a tenant that keeps to its turns, and all
of it for a tenant without turns.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from property.utilization_driver import Driver
from sharepod.agent.devices.inventory import UtilizationSample
from sharepod.agent.findings.beyond_turns import (
    CLOCK_ERROR_S,
    LENGTHS,
    NOTHING,
    ROUNDING,
    SHORTEST_S,
    BeyondSums,
    BeyondTurnsMeter,
    Turns,
    TurnsOfTenant,
    beyond_turns,
)
from sharepod.agent.findings.rules import FindingRules, FindingThresholds
from sharepod.agent.findings.surcharge import SurchargeMeter, irregular
from sharepod.timeshare import TurnSpan, TurnSpans
from unit.agent.client import GPU0


@dataclass
class Rounds:
    """Alternating turns of two tenants. `turn` and `others`: length in seconds of the first tenant's turns and of the
    time between them. `busy` and `spans` describe the first tenant."""

    turn: float
    others: float

    def busy(self, begin: float, end: float) -> float:
        return self._until(end) - self._until(begin)

    def _until(self, moment: float) -> float:
        rounds, rest = divmod(moment, self.turn + self.others)
        return rounds * self.turn + min(rest, self.turn)

    def spans(self, now: float) -> TurnSpans:
        length = self.turn + self.others
        first = max(0, int((now - 6) / length))
        begins = [number * length for number in range(first, int(now / length) + 1)]
        spans = [TurnSpan(round(at * 1e9), round(min(now, at + self.turn) * 1e9), overdue=False) for at in begins]
        return TurnSpans(round(max(0.0, now - 6) * 1e9), tuple(spans))


def turns_of(spans: TurnSpans) -> TurnsOfTenant:
    return TurnsOfTenant(lambda: spans)


def sampled(sample_s: float) -> Driver:
    return Driver(sample_s, 0.03, False, 0.0, 0.0, 0.0, random.Random(1))


def watched(rounds: Rounds, driver: Driver, until: float, beyond: float = 0.0) -> tuple[float | None, float]:
    """Return (moment of the finding, surcharge) for a tenant that is busy in its turns and for a part of the
    other time."""
    rules, meter, surcharge = FindingRules(FindingThresholds()), BeyondTurnsMeter(), SurchargeMeter()
    now = since = busy = surcharged = 0.0

    def ran(begin: float, end: float) -> float:
        held = rounds.busy(begin, end)
        return held + beyond * (end - begin - held)

    while now < until:
        since, now = now, now + irregular(1.0, driver.draw.random())
        samples = driver.samples(ran, since, now)
        part = sum(each.part for each in samples) / len(samples) if samples else 0.0
        busy += part * (now - since)
        sums = meter.observe(now, samples, part, turns_of(rounds.spans(now)))
        rules.observe_time(now, {GPU0: busy}, rounds.busy(0, now), {GPU0: sums.held})
        surcharged += surcharge.observe(now, sums.charged)
        if rules.findings:
            return now, surcharged
    return None, surcharged


@pytest.mark.promise("node-busy-honest", "time-honest")
@pytest.mark.parametrize("sample_s", [1 / 6, 0.5, 1.0])
@pytest.mark.parametrize(
    ("turn", "others"), [(0.25, 0.25), (0.3, 0.3), (0.5, 0.5), (0.25, 0.1), (0.3, 0.7), (0.1, 0.1), (0.9, 0.1)]
)
def test_turns_that_are_longer_than_samples_are_no_offence(turn: float, others: float, sample_s: float) -> None:
    assert watched(Rounds(turn, others), sampled(sample_s), 300) == (None, 0), (
        "by sums over 10 s up to 45 findings in 2,000 s"
    )


@pytest.mark.promise("security-over-time")
@pytest.mark.parametrize("sample_s", [1 / 6, 0.5, 1.0])
@pytest.mark.parametrize(("turn", "others"), [(0.01, 0.09), (0.03, 0.07), (0.1, 0.3), (0.3, 0.5)])
def test_a_tenant_that_runs_on_after_its_turns_is_reported_in_time(turn: float, others: float, sample_s: float) -> None:
    found_at, surcharged = watched(Rounds(turn, others), sampled(sample_s), 60, beyond=0.9)
    assert found_at is not None
    assert found_at <= 12 + 1.2
    assert surcharged > 0


@settings(max_examples=200, deadline=None)
@given(
    holds=st.lists(st.tuples(st.floats(0.001, 1), st.floats(0.001, 1)), min_size=4, max_size=12),
    sample_s=st.floats(1 / 6, 1.5),
    off_s=st.floats(-CLOCK_ERROR_S, CLOCK_ERROR_S),
    where=st.floats(0, 1),
)
def test_no_sample_of_work_in_turns_is_beyond_them_for_its_own_length(
    holds: list[tuple[float, float]], sample_s: float, off_s: float, where: float
) -> None:
    moment, spans = 3.0, []
    for turn, rest in holds:
        spans.append(TurnSpan(round(moment * 1e9), round((moment + turn) * 1e9), overdue=False))
        moment += turn + rest
    end = 3.0 + where * (moment - 3.0)
    held = sum(max(0.0, min(end, s.end / 1e9) - max(end - sample_s, s.begin / 1e9)) for s in spans)
    turns = Turns(TurnSpans(0, tuple(spans)), overdue=False)
    beyond = beyond_turns(UtilizationSample(end + off_s, min(1.0, held / sample_s + ROUNDING)), turns)
    assert beyond is not None
    own = max(index for index, length in enumerate(LENGTHS) if length <= sample_s + 1e-9)
    assert beyond[own] <= 1e-6


def test_all_of_a_sample_is_beyond_where_there_is_no_turn() -> None:
    turns = Turns(TurnSpans(0, ()), overdue=False)
    assert beyond_turns(UtilizationSample(10.0, 0.2), turns) == pytest.approx([0.2 - ROUNDING] * len(LENGTHS))


def test_turns_are_asked_for_once_and_only_where_something_ran() -> None:
    asked: list[TurnSpans] = []

    def read() -> TurnSpans:
        asked.append(TurnSpans(0, ()))
        return asked[-1]

    meters = [BeyondTurnsMeter(), BeyondTurnsMeter()]
    for meter in meters:
        meter.observe(9.0, (), 0.0, TurnsOfTenant(read))
    assert asked == []
    turns = TurnsOfTenant(read)
    for meter in meters:
        meter.observe(10.0, [UtilizationSample(9.9, 1.0)], 1.0, turns)
    assert len(asked) == 1


def test_a_sample_of_a_time_with_unknown_turns_is_ignored() -> None:
    meter, unknown = BeyondTurnsMeter(), turns_of(TurnSpans(100 * 10**9, ()))
    meter.observe(100.0, (), 0.0, unknown)
    assert meter.observe(101.0, [UtilizationSample(100.9, 1.0)], 1.0, unknown) == BeyondSums()
    assert min(meter.observe(103.0, [UtilizationSample(102.9, 1.0)], 1.0, unknown).held) > 1.9


def test_time_that_others_held_before_it_had_drained_is_charged_already() -> None:
    spans = (TurnSpan(0, 5 * 10**9, overdue=False), TurnSpan(5 * 10**9, 20 * 10**9, overdue=True))
    turns = turns_of(TurnSpans(0, spans))
    meter = BeyondTurnsMeter()
    meter.observe(9.0, (), 0.0, turns)
    sums = meter.observe(10.0, [UtilizationSample(9.9, 1.0)], 1.0, turns)
    assert min(sums.held) == pytest.approx(1 - ROUNDING)
    assert sums.charged == NOTHING


def test_samples_of_several_processes_that_end_together_are_one() -> None:
    meter, nothing = BeyondTurnsMeter(), turns_of(TurnSpans(0, ()))
    meter.observe(9.0, (), 0.0, nothing)
    samples = [UtilizationSample(9.5, 0.3), UtilizationSample(9.501, 0.3), UtilizationSample(9.7, 0.2)]
    assert meter.observe(10.0, samples, 0.4, nothing).held[0] == pytest.approx(0.4 - ROUNDING)


@pytest.mark.parametrize("until", [10.0 + 5, 10.0 + 3600, -(10.0**9)])
def test_time_stamps_that_no_sample_can_have_count_as_none(until: float) -> None:
    meter, nothing = BeyondTurnsMeter(), turns_of(TurnSpans(0, ()))
    meter.observe(9.0, (), 0.0, nothing)
    assert min(meter.observe(10.0, [UtilizationSample(until, 0.5)], 0.5, nothing).held) == pytest.approx(0.49)


def test_a_figure_without_a_time_stamp_may_be_as_old_as_a_sample_is_long() -> None:
    held = turns_of(TurnSpans(0, (TurnSpan(5 * 10**9, round(9.1 * 1e9), overdue=False),)))
    meter = BeyondTurnsMeter()
    meter.observe(9.0, (), 0.0, held)
    assert meter.observe(10.0, (), 1.0, held).held[0] == 0, f"{SHORTEST_S:.2f} s that ended at 9.1 at the latest"
