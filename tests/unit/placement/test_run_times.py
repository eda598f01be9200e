"""Run times: the expected end of a tenant by its kind and age."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from sharepod.placement.run_times import Kind, RunTimes

BATCH: Kind = ("team", 1, 1000)
SERVICE: Kind = ("web", 1, 300)


def learned(*runs: float, kind: Kind = BATCH) -> RunTimes:
    run_times = RunTimes()
    for seconds in runs:
        run_times.ended(kind, seconds)
    return run_times


@pytest.mark.promise("placement-head-soonest")
@given(st.lists(st.floats(1, 1e6), min_size=10, max_size=300), st.floats(0, 2e6))
# here age + (run - age) is less than the run, by rounding
@example([968552.9934972384] * 12, 274085.69597705343)
def test_four_fifths_of_the_runs_that_lasted_longer_end_within_what_is_expected(runs: list[float], age: float) -> None:
    left = learned(*runs).left(BATCH, age)
    longer = [seconds for seconds in runs[-128:] if seconds > age]
    within = sum(seconds - age <= left for seconds in longer)
    assert left >= 0
    assert not longer or within + 1 >= 0.8 * (len(longer) + 1)
    if not longer:
        assert left == age


def test_a_service_is_expected_to_stay_and_a_kind_without_runs_goes_by_all() -> None:
    run_times = learned(*(600.0 + number for number in range(20)))
    assert run_times.left(SERVICE, 30 * 86_400.0) == 30 * 86_400.0
    assert run_times.left(SERVICE, 0.0) == run_times.left(BATCH, 0.0)
    assert RunTimes().left(SERVICE, 5.0) == 5.0


def test_old_runs_and_kinds_without_new_runs_are_forgotten() -> None:
    run_times = learned(*[9000.0] * 500, *[60.0] * 128)
    assert run_times.left(BATCH, 0.0) == 60.0
    for number in range(1000):
        run_times.ended((f"team-{number}", 1, 1000), 1.0)
    assert run_times.left(BATCH, 0.0) == 1.0
