"""Co-running, simulated on a GPU with time slices: arbitrary programs with gaps, busy programs and services."""

from __future__ import annotations

from dataclasses import astuple, replace
from random import Random
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from property.time_sliced_gpu import GPU, MS, US, Program, S, TimeSlicedGpu, alone
from sharepod.timeshare import Parameters, Samples, Sharing
from sharepod.timeshare.trials import TRIAL_NS

QUICK = settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.too_slow])
WARM_UP = 1 * S
"""Simulated time after which each tenant has been measured alone."""

EAGER: dict[str, Any] = {"gpu_ns": 250 * US, "host_ns": 700 * US, "kernels": 12, "pause_ns": 1500 * US}
"""A training without graphs: its kernels are in flight for three tenths of the time."""
DENSE: dict[str, Any] = {"gpu_ns": 400 * US, "host_ns": 700 * US, "kernels": 12, "pause_ns": 1500 * US}
"""A training whose kernels are in flight for half of the time."""
SERVICE: dict[str, Any] = {"gpu_ns": 1 * MS, "host_ns": 100 * US, "kernels": 3, "pause_ns": 31 * MS, "waits": True}


def busy(kernel_ns: int) -> dict[str, Any]:
    """Return a program that launches kernels of this length without gaps."""
    return {"gpu_ns": kernel_ns}


kinds = st.sampled_from([EAGER, DENSE, SERVICE, busy(1 * MS), busy(5 * MS), busy(20 * MS)])
requests = st.integers(1, 9).map(lambda tenths: 100 * tenths)


def work(programs: list[Program], begin: int, end: int, gpu: TimeSlicedGpu) -> list[float]:
    """Simulate until `end`. Return, for each program, its work from `begin` to `end`, divided by the work that it does
    in this time on a GPU of its own."""
    gpu.run(begin)
    before = [program.finished for program in programs]
    gpu.run(end)
    return [
        (program.finished - done) / (alone(program, end) - alone(program, begin))
        for program, done in zip(programs, before, strict=True)
    ]


def books_are_exact(gpu: TimeSlicedGpu, removed_held_ns: int = 0) -> None:
    """Assert that each nanosecond of the GPU is in its account once, and charged to at most one tenant."""
    scheduler = gpu.scheduler
    assert scheduler is not None
    time = scheduler.gpu_time(gpu.now, GPU)
    assert time is not None
    assert sum(astuple(time)) == gpu.now - min(program.starts_ns for program in gpu.programs.values())
    held = sum(scheduler.usage(gpu.now, name).held_ns for name in gpu.programs)
    assert held + removed_held_ns == time.held_ns


@pytest.mark.promise("time-gaps-filled")
@pytest.mark.parametrize("request_milli", [100, 300, 500])
def test_two_programs_that_leave_gaps_fill_each_others_whatever_their_requests(request_milli: int) -> None:
    """If the driver's time slices alone divide the GPU, each program does 0.95 of its work. Under the scheduler it must
    do 0.8.
    """
    programs = [
        Program("a", request=request_milli, **EAGER),
        Program("b", request=1000 - request_milli, starts_ns=MS, **EAGER),
    ]
    gpu = TimeSlicedGpu(programs)
    assert min(work(programs, WARM_UP, WARM_UP + 2 * S, gpu)) >= 0.8
    books_are_exact(gpu)


@pytest.mark.promise("time-gaps")
@QUICK
@given(request=requests, kernel=st.sampled_from([1, 5, 20]), leaves_gaps=st.sampled_from([EAGER, DENSE]))
def test_next_to_a_busy_program_each_gets_its_request_done(
    request: int, kernel: int, leaves_gaps: dict[str, Any]
) -> None:
    """In two seconds, each program may miss its request by the tolerated debt, one window of measurement and one
    turn."""
    programs = [
        Program("a", request=request, **leaves_gaps),
        Program("b", request=1000 - request, starts_ns=MS, **busy(kernel * MS)),
    ]
    gpu = TimeSlicedGpu(programs)
    done = work(programs, WARM_UP, WARM_UP + 2 * S, gpu)
    for program, part in zip(programs, done, strict=True):
        assert part >= min(program.request / 1000, 0.88) - 0.06
    assert sum(done) >= 1
    books_are_exact(gpu)


@pytest.mark.promise("time-gain")
@QUICK
@given(request=requests, kernels=st.tuples(st.sampled_from([1, 5, 20]), st.sampled_from([1, 5, 20])))
def test_busy_programs_take_turns(request: int, kernels: tuple[int, int]) -> None:
    programs = [
        Program("a", request=request, **busy(kernels[0] * MS)),
        Program("b", request=1000 - request, starts_ns=MS, **busy(kernels[1] * MS)),
    ]
    gpu = TimeSlicedGpu(programs)
    done = work(programs, WARM_UP, WARM_UP + 2 * S, gpu)
    assert gpu.together_ns <= TRIAL_NS + 0.02 * gpu.now
    assert sum(done) >= 0.97
    for program, part in zip(programs, done, strict=True):
        assert part == pytest.approx(program.request / 1000, abs=0.06), "within one turn of two seconds"


@pytest.mark.promise("time-trials")
def test_a_gain_that_is_not_foretold_is_found_by_a_trial() -> None:
    """Both programs seem always busy, like ranks that spin while they wait for each other. So only a trial can show
    that co-running is faster.
    """
    programs = [
        Program(name, request=500, starts_ns=start, lie=lambda samples: replace(samples, flying=samples.looks), **DENSE)
        for name, start in (("a", 0), ("b", MS))
    ]
    gpu = TimeSlicedGpu(programs)
    assert sum(work(programs, 3 * S, 5 * S, gpu)) >= 1.5, "turns leave 1.2"
    books_are_exact(gpu)


@pytest.mark.promise("time-contended")
@pytest.mark.parametrize("request_milli", [100, 300, 500])
@pytest.mark.parametrize("kernel_ns", [1 * MS, 20 * MS])
def test_programs_that_cease_to_leave_gaps_take_turns_and_are_paid_back(request_milli: int, kernel_ns: int) -> None:
    programs = [
        Program("a", request=request_milli, **EAGER),
        Program("b", request=1000 - request_milli, starts_ns=MS, **EAGER),
    ]
    gpu = TimeSlicedGpu(programs)

    def become_busy() -> None:
        for program in programs:
            program.gpu_ns, program.host_ns, program.kernels, program.pause_ns = kernel_ns, 5 * US, 1, 0

    gpu.at(3 * S, become_busy)
    gpu.run(3 * S)
    before, together = [program.gpu_used_ns for program in programs], gpu.together_ns
    gpu.run(3 * S + 300 * MS)
    assert gpu.together_ns - together <= 100 * MS, "exclusive turns begin after a window and its samples"
    gpu.run(8 * S)
    assert gpu.together_ns - together <= 500 * MS, "windows and trials"
    for program, used in zip(programs, before, strict=True):
        behind = program.request * 5 * S // 1000 - (program.gpu_used_ns - used)
        assert behind <= 250 * MS, "a window, a trial, and a turn"


@pytest.mark.promise("time-excess")
def test_idle_time_goes_first_to_a_tenant_that_has_used_little_of_its_request() -> None:
    """A notebook with request 0.1, which runs cells of 300 ms every 4 s, takes turns with a training of 0.5; the
    requests leave 0.4 of the GPU. For 60 s the scheduler remembers that the notebook has used little of its request,
    and lends it idle time first."""

    def play(horizon_ns: int) -> tuple[list[int], float]:
        notebook = Program("a", request=100, gpu_ns=5 * MS, kernels=60, pause_ns=4 * S, waits=True)
        training = Program("b", request=500, starts_ns=MS, **busy(5 * MS))
        parameters = Parameters(sharing=Sharing.CONCURRENT, excess_horizon_ns=horizon_ns)
        done = work([notebook, training], 4 * S, 16 * S, TimeSlicedGpu([notebook, training], parameters=parameters))
        return notebook.latencies[1:], done[1]

    latencies, training_done = play(60 * S)
    assert max(latencies) <= 750 * MS, "twice its work, one turn of the training, and hand-offs"
    assert training_done >= 0.5
    assert min(play(1)[0]) > max(latencies)


@pytest.mark.promise("time-trials")
def test_trials_that_fail_cost_little() -> None:
    programs = [Program("a", request=500, **busy(20 * MS)), Program("b", request=500, starts_ns=MS, **busy(20 * MS))]
    gpu = TimeSlicedGpu(programs)
    assert sum(work(programs, WARM_UP, WARM_UP + 20 * S, gpu)) >= 0.985
    assert gpu.together_ns >= TRIAL_NS // 2


@pytest.mark.promise("time-joins")
@QUICK
@given(kernel=st.sampled_from([5, 20, 100, 400]), request=st.integers(3, 7))
def test_a_service_that_wakes_with_credit_waits_for_slices_and_no_kernel(kernel: int, request: int) -> None:
    service = Program("a", request=100 * request, starts_ns=20 * MS, **SERVICE)
    programs = [service, Program("b", request=1000 - 100 * request, **busy(kernel * MS))]
    gpu = TimeSlicedGpu(programs)
    gpu.run(3 * S)
    waits = sorted(service.latencies[10:])
    assert waits[len(waits) // 2] <= 8 * MS, (
        "three kernels of 1 ms, each next to one slice of the other, and two frames"
    )
    assert waits[len(waits) * 9 // 10] <= 12 * MS
    assert gpu.scheduler is not None
    assert gpu.scheduler.usage(gpu.now, "a").anticipated_ns == 0


@pytest.mark.promise("time-joins")
def test_a_service_that_was_held_up_catches_up() -> None:
    """A service whose requests queue up works without pauses for a second. The scheduler must not treat it as a
    training afterwards.
    """
    service = Program("a", request=300, starts_ns=20 * MS, **{**SERVICE, "pause_ns": 25 * MS})
    programs = [service, Program("b", request=700, **busy(250 * MS))]
    gpu = TimeSlicedGpu(programs)
    gpu.at(1 * S, lambda: setattr(service, "pause_ns", 0))
    gpu.at(2 * S, lambda: setattr(service, "pause_ns", 25 * MS))
    gpu.run(5 * S)
    latest = sorted(service.latencies[-40:])
    assert latest[20] <= 8 * MS


@pytest.mark.promise("time-co-run-limits")
@QUICK
@given(limit=st.integers(2, 8), part=st.integers(3, 10), kind=kinds, other=kinds)
def test_limits_hold_whatever_runs_at_the_same_time(
    limit: int, part: int, kind: dict[str, Any], other: dict[str, Any]
) -> None:
    limited = Program("a", request=10 * limit * part, limit=100 * limit, **kind)
    programs = [limited, Program("b", request=1000 - 10 * limit * part, starts_ns=MS, **other)]
    gpu = TimeSlicedGpu(programs)
    gpu.run(3 * S)
    longest = 2 * kind["gpu_ns"] * kind.get("ahead", 3)
    assert limited.open_ns <= limit * gpu.now // 10 + 100 * MS + 2 * longest + 20 * MS
    books_are_exact(gpu)


@pytest.mark.promise("time-leads-alone")
def test_a_tenant_that_refuses_leads_alone_next_to_tenants_that_co_run() -> None:
    programs = [
        Program("a", request=300, **EAGER),
        Program("b", request=300, starts_ns=MS, **EAGER),
        Program("c", request=400, concurrent=False, starts_ns=2 * MS, **busy(5 * MS)),
    ]
    gpu = TimeSlicedGpu(programs)
    scheduler = gpu.scheduler
    assert scheduler is not None
    co_ran = set[str]()

    def check() -> None:
        lead, runners = scheduler._occupancy.holder.get(GPU), scheduler._occupancy.co_runners.get(GPU, {})
        co_ran.update(runners)
        assert lead is None or lead.id != "c" or not runners

    gpu.check = check
    done = work(programs, WARM_UP, WARM_UP + 2 * S, gpu)
    assert co_ran == {"a", "b"}
    assert done[2] >= 0.34


lives = st.lists(
    st.tuples(
        kinds,
        requests,
        st.integers(3, 10),
        st.booleans(),
        st.booleans(),
        st.integers(0, 1000),
        st.sampled_from([None, None, "x", "y"]),
    ),
    min_size=2,
    max_size=4,
)
changes = st.lists(
    st.tuples(
        st.sampled_from(["leave", "resize", "refuse", "allow", "exclusive", "concurrent"]),
        st.integers(0, 3),
        st.integers(100, 1900),
    ),
    max_size=6,
)


@pytest.mark.promise("time-exact-books", "time-leads-alone")
@settings(QUICK, max_examples=15)
@given(lives=lives, changes=changes)
def test_whatever_happens_accounts_are_exact_and_tenants_that_refuse_hold_alone(
    lives: list[tuple[dict[str, Any], int, int, bool, bool, int, str | None]], changes: list[tuple[str, int, int]]
) -> None:
    programs = [
        Program(
            f"t{i}",
            request=request // len(lives),
            limit=max(100 * limit, request // len(lives)),
            interactive=interactive,
            concurrent=not refuses,
            starts_ns=start * MS if i else 0,
            group=group,
            **kind,
        )
        for i, (kind, request, limit, interactive, refuses, start, group) in enumerate(lives)
    ]
    gpu = TimeSlicedGpu(programs)
    scheduler = gpu.scheduler
    assert scheduler is not None
    removed = 0
    flipped = False

    def change(what: str, program: Program) -> None:
        nonlocal removed, flipped
        if program.id not in gpu.programs or program.starts_ns > gpu.now:
            return
        if what == "leave" and len(gpu.programs) > 1:
            if program is not programs[0]:  # the first tenant stays, because the GPU's account begins with it
                removed += scheduler.usage(gpu.now, program.id).held_ns
                gpu.leave(program)
        elif what == "resize":
            program.request = 0
            scheduler.set_tenant(gpu.now, program.id, (GPU,), request_milli=0, limit_milli=1000)
        elif what in ("refuse", "allow"):
            flipped = True
            scheduler.set_concurrent(gpu.now, program.id, concurrent=what == "allow")
        elif what in ("exclusive", "concurrent"):
            flipped = True
            scheduler.set_sharing(gpu.now, GPU, Sharing.EXCLUSIVE if what == "exclusive" else Sharing.CONCURRENT)

    def check() -> None:
        leads = scheduler._occupancy.holder.get(GPU)
        runners = scheduler._occupancy.co_runners.get(GPU, {})
        assert leads is None or leads.id not in runners, "S1"
        if leads is not None and not scheduler._occupancy.may_co_run(leads) and not flipped:
            assert not runners, "a tenant that refuses leads alone"

    gpu.check = check
    for what, place, moment in changes:
        gpu.at(moment * MS, lambda what=what, place=place: change(what, programs[place % len(programs)]))  # type: ignore[misc]
    gpu.run(2 * S)
    books_are_exact(gpu, removed)
    for program in gpu.programs.values():
        waited = scheduler._tenants[program.id].waiting_since
        assert waited is None or program.request == 0 or gpu.now - waited <= 1 * S, "no tenant is forgotten"


@pytest.mark.promise("time-liar")
@QUICK
@given(request=st.sampled_from([500, 700, 900]), lie=st.sampled_from(["idle", "always", "slowed", "random"]))
def test_what_a_tenant_reports_of_itself_costs_another_nothing_of_its_request(request: int, lie: str) -> None:
    """The loss of the honest tenant is measured only by its own counters (S11)."""

    noise = Random(request)

    def report(samples: Samples) -> Samples:
        if lie == "idle":
            return Samples(samples.looks, 0, samples.launches)
        if lie == "always":
            return Samples(samples.looks, samples.looks, samples.launches)
        if lie == "slowed":
            return Samples(samples.looks, samples.looks, samples.launches // 5)
        return Samples(samples.looks, samples.looks * noise.randint(0, 9) // 9, samples.launches * noise.randint(1, 31))

    honest = Program("a", request=request, **busy(1 * MS))
    liar = Program("b", request=1000 - request, starts_ns=MS, lie=report, **busy(1 * MS))
    gpu = TimeSlicedGpu([honest, liar])
    assert work([honest, liar], WARM_UP, WARM_UP + 2 * S, gpu)[0] >= request / 1000 - 0.03
    books_are_exact(gpu)
