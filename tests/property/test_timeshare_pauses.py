"""Tenants that pause between their steps, next to tenants with kernels of any length, in simulated time."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis import strategies as st
from property.timeshare_simulation import MS, US, Program, S, Simulation, pauses
from sharepod.timeshare import AccountSnapshot

WARM_UP = 20 * S
END = WARM_UP + 100 * S
SOME = settings(
    max_examples=15,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    phases=[Phase.explicit, Phase.reuse, Phase.generate],  # without shrinking, because a play takes a second
)


def run_pair(
    neighbour: Program, *, request: int, work: int, pause: int, kind: str = "regular"
) -> tuple[Program, Simulation, list[float]]:
    """Simulate a pausing tenant next to `neighbour`. Return the pausing tenant, the simulation, and for both the part
    of the time after warm-up in which they worked."""
    pausing = Program(
        "pausing",
        request=request,
        burst_ns=work,
        pauses=pauses(kind, pause),
        pause_ns=pause,
        look_ns=500 * US,
        kernel_ns=1 * MS,
    )
    simulation = Simulation([pausing, neighbour], announces=True)
    before: list[int] = []
    simulation.at(WARM_UP, lambda: before.extend(one.worked_ns for one in (pausing, neighbour)))
    simulation.run(END)
    shares = [(one.worked_ns - was) / (END - WARM_UP) for one, was in zip((pausing, neighbour), before, strict=True)]
    return pausing, simulation, shares


@pytest.mark.promise("time-pauses")
@SOME
@given(
    request=st.integers(4, 18),
    work=st.integers(3, 40),
    pause=st.integers(2, 10),
    longer=st.sampled_from([1, 3, 30, 400]),
    kind=st.sampled_from(["regular", "exponential"]),
    best_effort=st.booleans(),
)
@example(request=14, work=20, pause=5, longer=35, kind="regular", best_effort=False)
@example(request=14, work=20, pause=5, longer=245, kind="exponential", best_effort=False)
@example(request=18, work=5, pause=2, longer=898, kind="exponential", best_effort=True)
@example(request=14, work=3, pause=2, longer=1, kind="regular", best_effort=False)
def test_pauses_cost_a_tenant_nothing_but_themselves(
    request: int, work: int, pause: int, longer: int, kind: str, best_effort: bool
) -> None:
    """With pauses of up to 10 ms, next to kernels of up to 1 s, the tenant loses no more than its own pauses
    explain.
    """
    kernel = min(990, pause + longer) * MS
    neighbour = Program("neighbour", request=0 if best_effort else 1000 - 50 * request, kernel_ns=kernel)
    _, simulation, (share, other) = run_pair(
        neighbour, request=50 * request, work=work * MS, pause=pause * MS, kind=kind
    )
    assert share >= 0.95 * request / 20 * work / (work + pause)
    assert other >= neighbour.request / 1000 - 0.015
    usage = simulation.scheduler.usage(END, "pausing")
    paid = usage.held_ns - usage.borrowed_ns + usage.anticipated_ns
    assert paid <= END * request // 20 + 1 * S, "idle time is a part of the sleeper's own share"


HOUR = 3600 * S
NIGHT = 120 * S


@pytest.mark.promise("time-pauses", "install-exact-again")
@pytest.mark.parametrize("kernel_ms", [40, 250])
@pytest.mark.parametrize("served_ns", [10 * S, 1 * HOUR, 1000 * HOUR])
def test_pauses_cost_nothing_soon_after_another_agent_has_taken_over(kernel_ms: int, served_ns: int) -> None:
    """A new agent reads from the handover how long the tenant has held. The scheduler must not learn that time as one
    long step.
    """
    pausing = Program("pausing", request=700, burst_ns=20 * MS, pause_ns=5 * MS, look_ns=500 * US, start_ns=80 * MS)
    neighbour = Program("neighbour", request=300, kernel_ns=kernel_ms * MS, start_ns=80 * MS)
    simulation = Simulation([pausing, neighbour], announces=True)
    for program in (pausing, neighbour):
        simulation.scheduler.set_tenant(
            0,
            program.id,
            program.gpus,
            request_milli=program.request,
            limit_milli=1000,
            resumed=AccountSnapshot(0, 0, 100_000 * MS, served_ns, 0, 0, 500, 0, 0),
        )
    simulation.run(20 * S)
    expected = 0.7 * 20 / 25
    assert pausing.held(5 * S, 20 * S) >= 0.95 * expected * 15 * S


@pytest.mark.promise("time-pauses")
@pytest.mark.parametrize("kernel_ms", [40, 250])
@pytest.mark.parametrize("steps_before", [0, 200])
@pytest.mark.parametrize("what", ["night", "training"])
def test_pauses_cost_nothing_soon_after_a_step_unlike_all_others(kernel_ms: int, steps_before: int, what: str) -> None:
    """The exceptional step is a night without requests, or long work without a pause. The scheduler must not forget the
    other steps for it.
    """
    pausing = Program("pausing", request=700, burst_ns=20 * MS, look_ns=500 * US)
    lengths = iter([5 * MS] * steps_before + [NIGHT])
    marks: list[int] = []

    def mark_soon() -> None:
        for moment in (10 * S, 30 * S):
            simulation.at(simulation.now + moment, lambda: marks.append(pausing.worked_ns))

    def after() -> int:
        mark_soon()
        pausing.pauses = None
        return pausing.pause_ns

    def pause() -> int:
        length = next(lengths)
        if length == NIGHT:
            pausing.pauses = after
            if what == "training":
                simulation.at(simulation.now + 5 * MS + 1, lambda: setattr(pausing, "work_ns", 60 * S))
                length = 5 * MS
        return length

    pausing.pauses, pausing.pause_ns = pause, 5 * MS
    neighbour = Program("neighbour", request=300, kernel_ns=kernel_ms * MS)
    simulation = Simulation([pausing, neighbour], announces=True)
    simulation.run(180 * S)
    assert marks[1] - marks[0] >= 0.95 * 0.7 * 20 / 25 * 20 * S


@pytest.mark.promise("time-pauses-short-kernels")
@SOME
@given(
    request=st.integers(4, 16),
    work=st.integers(10, 40),
    pause=st.integers(7, 20),
)
def test_beside_short_kernels_no_time_is_kept_idle(request: int, work: int, pause: int) -> None:
    neighbour = Program("neighbour", request=1000 - 50 * request, kernel_ns=1 * MS)
    pausing, simulation, shares = run_pair(neighbour, request=50 * request, work=work * MS, pause=pause * MS)
    assert simulation.scheduler.usage(END, "pausing").anticipated_ns <= END // 200
    assert sum(shares) >= 0.95
    expected = 50 * request / 1000 * work / (work + pause)
    assert shares[0] >= 0.95 * expected
    assert pausing.pauses_made


@pytest.mark.promise("time-pauses-worth")
@SOME
@given(
    request=st.integers(2, 18),
    work=st.integers(1, 40),
    pause=st.integers(20, 90),
    kernel=st.sampled_from([5, 20, 60, 400, 900]),
    kind=st.sampled_from(["regular", "exponential"]),
)
@example(request=12, work=1, pause=21, kernel=20, kind="regular")
@example(request=12, work=1, pause=21, kernel=400, kind="exponential")
def test_long_pauses_idle_no_longer_than_the_work_that_follows(
    request: int, work: int, pause: int, kernel: int, kind: str
) -> None:
    """Regular pauses of at least half a kernel of the neighbour, the mean time that a wake waits for that kernel, do
    not idle the GPU once the agent knows their length.
    """
    neighbour = Program("neighbour", request=1000 - 50 * request, kernel_ns=kernel * MS)
    _, simulation, (_, other) = run_pair(neighbour, request=50 * request, work=work * MS, pause=pause * MS, kind=kind)
    assert other >= neighbour.request / 1000 - 0.015
    idle = simulation.scheduler.usage(END, "pausing").anticipated_ns
    first = 20 * 100 * MS  # by then the tenant's pauses are known
    assert idle <= 1.2 * simulation.scheduler.usage(END, "pausing").held_ns + first
    if kind == "regular" and 2 * pause >= kernel:
        assert idle <= first


def test_nothing_is_kept_idle_for_a_tenant_that_has_gone_to_sleep_for_long() -> None:
    """A long pause idles the GPU for one window at most, which the tenant pays; without credit, not at all."""
    sleeper = Program("sleeper", request=500, burst_ns=20 * MS, pause_ns=3 * MS, kernel_ns=1 * MS)
    drawn = iter([3 * MS] * 200 + [60 * S] * 10)
    sleeper.pauses = lambda: next(drawn)
    busy = Program("busy", request=500, kernel_ns=100 * MS)
    simulation = Simulation([sleeper, busy], announces=True)
    simulation.run(60 * S)
    idle_before = simulation.scheduler.usage(60 * S, "sleeper").anticipated_ns
    assert busy.share(30 * S, 60 * S) >= 0.99
    assert idle_before <= 200 * 3 * MS + 100 * MS


def test_kept_idle_time_ends_when_the_tenant_returns_the_window_is_over_or_nobody_waits() -> None:
    """Every nanosecond of the GPU must count once: as held, kept idle, or free."""
    sleeper = Program("sleeper", request=700, burst_ns=20 * MS, pause_ns=5 * MS, kernel_ns=1 * MS)
    busy = Program("busy", request=300, kernel_ns=40 * MS)
    simulation = Simulation([sleeper, busy])
    simulation.run(60 * S)
    usage = [simulation.scheduler.usage(60 * S, name) for name in ("sleeper", "busy")]
    assert usage[1].anticipated_ns == 0
    assert sum(each.held_ns + each.anticipated_ns for each in usage) == 60 * S
    time = simulation.scheduler.gpu_time(60 * S, "g0")
    assert time is not None
    assert (time.held_ns, time.anticipated_ns) == (
        sum(each.held_ns for each in usage),
        usage[0].anticipated_ns,
    )
