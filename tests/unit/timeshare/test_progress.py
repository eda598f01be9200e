"""Progress: a tenant's work relative to its work alone, measured by the counters of its own hooks."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sharepod.timeshare import Samples
from sharepod.timeshare.progress import Progress, divide, foretell

MS = 1_000_000


def counted(progress: Progress, ms: int, in_flight: float, launches: int) -> None:
    """Let the hooks count two samples each millisecond."""
    before = progress._sampled or Samples(0, 0, 0)
    progress.sampled(before)
    flying = before.flying + round(2 * ms * in_flight)
    progress.sampled(Samples(before.looks + 2 * ms, flying, before.launches + launches))


def measured(in_flight: float, launches_per_s: int) -> Progress:
    """Return the progress of a tenant that has held alone for a second."""
    progress = Progress()
    for moment in range(100, 1100, 100):
        counted(progress, 100, in_flight, launches_per_s // 10)
        progress.alone(moment * MS, 100 * MS)
    return progress


def window(
    progress: Progress, ms: int, in_flight: float, launches: int, others: float = 0.5, request: int = 300
) -> float:
    """Let other tenants hold too for `ms`. Return the tenant's loss in that window, as a part of its work alone."""
    counted(progress, ms, in_flight, launches)
    progress.shared(ms * MS, progress.span())
    return progress.judge(2000 * MS, others, request)


def test_a_tenant_that_launches_as_fast_as_alone_loses_nothing() -> None:
    assert window(measured(0.25, 4000), 25, 0.4, 100) == 0


def test_a_busy_tenant_loses_what_time_slices_and_switches_take() -> None:
    assert window(measured(1.0, 1000), 25, 1.0, 12) == pytest.approx(0.52, abs=0.03)


def test_few_launches_say_nothing_and_the_bound_of_the_hardware_counts() -> None:
    assert window(measured(1.0, 50), 25, 1.0, 3) == pytest.approx(0.545)
    assert window(measured(1.0, 50), 25, 1.0, 3, others=2 / 3) == pytest.approx(0.727, abs=0.001)


def test_a_tenant_that_launches_much_faster_than_alone_is_in_another_phase_and_is_probed() -> None:
    progress = measured(0.25, 4000)
    assert window(progress, 25, 0.5, 200) == 0, "that ends no gain"
    assert progress.loss(2000 * MS) == pytest.approx(0.27, abs=0.01), "until then it is charged by the bound"
    assert progress.probe_at <= 2000 * MS


def test_a_probe_that_finds_a_faster_tenant_returns_the_loss_that_was_not_seen() -> None:
    """The tenant has become busier. Next to others it launches as fast as it did alone before. Only a probe (time
    alone) shows its loss.
    """
    progress = measured(0.5, 2000)
    for _ in range(8):
        window(progress, 25, 0.7, 50)
    counted(progress, 25, 1.0, 100)
    lost = progress.alone(2100 * MS, 25 * MS)
    assert lost == pytest.approx(0.38 * 200 * MS, rel=0.05), "what the hardware takes of seven tenths in flight"
    assert progress.alone(2100 * MS, 0) == 0, "returned once"


@pytest.mark.parametrize(("needs", "lost"), [(1.0, 0.54), (0.75, 0.39), (0.25, 0.0)])
def test_of_several_streams_launches_may_hide_a_loss_and_the_gpu_that_it_was_given_counts(
    needs: float, lost: float
) -> None:
    progress = measured(needs, 4000)
    before = progress._sampled or Samples(0, 0, 0)
    progress.sampled(replace(before, looks=before.looks + 50, flying=before.flying + 50, several=before.several + 50))
    progress.span()
    assert window(progress, 25, 1.0, 100) == pytest.approx(lost, abs=0.01)
    if lost == 0:
        assert window(progress, 25, 1.0, 0) > 0.2, "launches show a greater one"


def test_a_turn_that_is_too_short_is_no_measure_unless_there_is_none() -> None:
    progress = Progress()
    for begin in (0, 10):
        counted(progress, 4, 0.5, 8)
        progress.alone((begin + 4) * MS, 4 * MS)
        progress.joined((begin + 4) * MS)
    assert progress.alone_rate * MS == pytest.approx(2)
    counted(progress, 4, 0.5, 0)
    progress.alone(24 * MS, 4 * MS)
    progress.joined(24 * MS)
    counted(progress, 25, 0.5, 50)
    progress.alone(49 * MS, 25 * MS)
    assert progress.alone_rate * MS == pytest.approx(2)


def test_the_launches_of_a_program_that_waits_for_each_kernel_show_more_loss_than_slices_take() -> None:
    """After each kernel the program leaves the rest of its time slice unused, and waits for a slice of the other
    program.
    """
    assert window(measured(0.5, 25_000), 25, 0.98, 25) == pytest.approx(0.95, abs=0.03)


def test_counters_of_new_processes_are_a_beginning() -> None:
    progress = Progress()
    progress.sampled(Samples(1000, 500, 100))
    assert progress.span() == 0
    progress.sampled(Samples(10, 10, 7))
    progress.sampled(Samples(20, 20, 9))
    assert progress.span() == 2
    assert progress.in_flight == 1


def test_the_work_in_flight_of_several_processes_adds_up() -> None:
    progress = Progress()
    progress.sampled(Samples(0, 0, 0, processes=2))
    progress.sampled(Samples(100, 40, 0, processes=2))
    progress.span()
    assert progress.in_flight == pytest.approx(0.8)


@given(elapsed=st.integers(0, 10**10), parts=st.lists(st.floats(0, 1), min_size=1, max_size=6))
def test_parts_add_up_to_the_nanosecond(elapsed: int, parts: list[float]) -> None:
    divided = divide(elapsed, parts)
    assert all(part >= 0 for part in divided)
    flights = [min(elapsed, int(elapsed * part)) for part in parts]
    assert sum(divided) == min(elapsed, sum(flights))


@given(demands=st.lists(st.floats(0, 1), min_size=1, max_size=6))
def test_foretold_progress_is_that_of_max_min_division(demands: list[float]) -> None:
    progress = foretell(demands)
    assert all(0 < part <= 1 for part in progress)
    got = [part * demand for part, demand in zip(progress, demands, strict=True)]
    assert sum(got) <= 1 + 1e-9
    for one, demand in zip(got, demands, strict=True):
        assert one >= demand - 1e-9 or one >= max(got) - 1e-9, "a tenant that gets less than its demand gets the most"
