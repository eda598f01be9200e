"""Interactive tenants in simulated time: their waits are short while they have credit, and no neighbour loses time by
them.
"""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis import strategies as st
from property.timeshare_simulation import MS, US, Program, S, Simulation, pauses
from sharepod.timeshare import Parameters

WARM_UP = 5 * S
END = WARM_UP + 40 * S
HAND_OFF = 200 * US
LEAST_TURN = Parameters().turn_min_ns
SOME = settings(
    max_examples=15,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    phases=[Phase.explicit, Phase.reuse, Phase.generate],  # without shrinking, because a play takes a second
)


def service(work_ms: int, pause_ms: int, *, request: int, interactive: bool = True) -> Program:
    """Return a program that answers requests, each with one kernel."""
    return Program(
        "service",
        request=request,
        interactive=interactive,
        kernel_ns=work_ms * MS,
        burst_ns=work_ms * MS,
        look_ns=500 * US,
        prompt_look_ns=150 * US,
        pauses=pauses("exponential", pause_ms * MS),
    )


@pytest.mark.promise("time-interactive")
@SOME
@given(
    work=st.integers(1, 5),
    load=st.integers(20, 70),
    kernels=st.lists(st.integers(1, 40), min_size=1, max_size=3),
)
@example(work=2, load=50, kernels=[20])
@example(work=5, load=70, kernels=[1, 30])
def test_an_interactive_tenant_waits_for_the_kernel_that_runs(work: int, load: int, kernels: list[int]) -> None:
    """The bound holds while the tenant stays within its request and wakes at most 125 times a second. `load`: its load
    in percent of its request."""
    pause = max(9, work * 1000 // (3 * load) - work)
    asking = service(work, pause, request=300)
    busy = [Program(f"n{n}", request=700 // len(kernels), kernel_ns=ms * MS) for n, ms in enumerate(kernels)]
    simulation = Simulation([asking, *busy], gap_ns=HAND_OFF, announces=True)
    simulation.run(END)
    first = next(n for n, at in enumerate(asking.granted) if at >= WARM_UP)
    assert len(asking.waits) > first + 100
    # The wait is at most the holder's least turn, one kernel that outlasts it, and two hand-offs for the neighbour and
    # the tenant.
    assert max(asking.waits[first:]) <= LEAST_TURN + max(kernels) * MS + 4 * HAND_OFF
    for each in busy:
        assert each.share(WARM_UP, END) >= each.request / 1000 * 0.97, "but for the time of hand-offs"


@pytest.mark.promise("time-interactive-share")
@SOME
@given(work=st.integers(1, 5), kernel=st.integers(1, 20), others=st.integers(1, 4))
def test_an_interactive_tenant_that_is_always_busy_gets_its_request_and_no_more(
    work: int, kernel: int, others: int
) -> None:
    """A tenant that is always busy never wakes, so it gets no early turns (turns before its time)."""
    asking = Program("service", request=300, interactive=True, kernel_ns=work * MS)
    busy = [Program(f"n{n}", request=700 // others, kernel_ns=kernel * MS) for n in range(others)]
    simulation = Simulation([asking, *busy], announces=True)
    simulation.run(END)
    assert asking.share(WARM_UP, END) == pytest.approx(0.3, abs=0.01)
    assert sum(one.share(WARM_UP, END) for one in (asking, *busy)) >= 0.99


def test_wakes_without_end_cost_the_neighbour_a_bounded_part() -> None:
    """A tenant that wakes about 2,000 times a second gets at most 125 early turns a second, and the neighbour its
    request.
    """
    asking = service(1, 1, request=300)
    asking.kernel_ns = asking.burst_ns = 100 * US
    asking.pauses = lambda: 400 * US
    busy = Program("busy", request=700, kernel_ns=1 * MS)
    simulation = Simulation([asking, busy], gap_ns=HAND_OFF, announces=True)
    simulation.run(END)
    assert busy.share(WARM_UP, END) >= 0.7
    seconds = (END - WARM_UP) / S
    assert sum(at >= WARM_UP for at in asking.granted) / seconds <= 250


def test_two_interactive_tenants_share_as_they_asked() -> None:
    programs = [
        service(2, 18, request=300),
        service(2, 18, request=300),
        Program("busy", request=400, kernel_ns=5 * MS),
    ]
    programs[1].id = "other"
    simulation = Simulation(programs, gap_ns=HAND_OFF, announces=True)
    simulation.run(END)
    for one in programs[:2]:
        waits = sorted(one.waits[100:])
        assert waits[len(waits) // 2] <= 5 * MS
    assert programs[2].share(WARM_UP, END) >= 0.4


@pytest.mark.promise("time-turn-soon-beside")
@pytest.mark.parametrize(("count", "request_milli"), [(10, 90), (5, 180)])
def test_among_many_interactive_tenants_one_that_is_owed_time_waits_for_the_target_latency(
    count: int, request_milli: int
) -> None:
    """The tenants repeat forty steps and a second of sleep in which they save credit. All of them are interactive and
    so ask for early turns, some more often than early turns are granted."""
    many = [
        Program(
            f"i{i}",
            request=request_milli,
            interactive=True,
            burst_ns=5 * MS,
            pauses=iter(([5 * MS] * 40 + [1 * S]) * 1000).__next__,
            start_ns=7 * i * MS,
        )
        for i in range(count)
    ]
    busy = Program("busy", request=100)
    Simulation([*many, busy], gap_ns=HAND_OFF, announces=True).run(30 * S)
    for one in (*many, busy):
        owed = [owed for owed, at in zip(one.owed, one.granted, strict=True) if at > WARM_UP]
        assert max(owed) <= Parameters().target_latency_ns + Parameters().quantum_max_ns + one.kernel_ns


@pytest.mark.promise("time-interactive")
@pytest.mark.parametrize(("work", "pause"), [(3, 4), (10, 5)])
def test_an_interactive_tenant_waits_for_no_members_of_groups_that_join_each_other(work: int, pause: int) -> None:
    """A member that wakes while other members of its group run joins them at once, before all tenants except
    interactive tenants that wake with credit.
    """
    asking = service(1, 20, request=100)
    members = [
        Program(
            f"m{group}{rank}",
            (f"g{rank}",),
            group=f"a{group}",
            request=150,
            burst_ns=work * MS,
            pauses=pauses("exponential", pause * MS, seed=2 * group + rank),
            start_ns=(3 * group + rank) * MS,
        )
        for group in range(6)
        for rank in range(2)
    ]
    Simulation([asking, *members], gap_ns=HAND_OFF, announces=True).run(10 * S)
    waits = sorted(asking.waits[20:])
    assert waits[len(waits) * 99 // 100] <= LEAST_TURN + MS + 4 * HAND_OFF
