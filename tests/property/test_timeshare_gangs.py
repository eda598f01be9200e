"""Tenants with several GPUs next to tenants with one, in simulated time."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st
from property.timeshare_mixes import FEW, SOME, WARM_UP
from property.timeshare_simulation import MS, US, Program, S, Simulation, pauses
from sharepod.timeshare import Parameters


def test_a_gang_and_singles_share_as_they_asked() -> None:
    gang = Program("gang", ("g0", "g1"), request=500, kernel_ns=3 * MS)
    left = Program("left", ("g0",), request=500, kernel_ns=20 * MS)
    right = Program("right", ("g1",), request=500, kernel_ns=7 * MS)
    Simulation([gang, left, right]).run(120 * S)
    for program in (gang, left, right):
        assert program.share(WARM_UP, 120 * S) == pytest.approx(0.5, abs=0.03)


@pytest.mark.promise("time-gang-cost")
@SOME
@given(
    kernel=st.sampled_from([1 * MS, 3 * MS, 20 * MS]),
    kernels=st.tuples(*[st.sampled_from([1 * MS, 5 * MS, 20 * MS, 70 * MS])] * 2),
    request=st.integers(2, 8),
)
@example(kernel=20 * MS, kernels=(70 * MS, 1 * MS), request=5)
def test_a_gang_beside_singles_costs_little_of_the_gpus_time(
    kernel: int, kernels: tuple[int, int], request: int
) -> None:
    gang = Program("gang", ("g0", "g1"), request=100 * request, kernel_ns=kernel)
    left, right = (
        Program(gpu, (gpu,), request=1000 - 100 * request, kernel_ns=kernel_ns)
        for gpu, kernel_ns in zip(("g0", "g1"), kernels, strict=True)
    )
    end = WARM_UP + 60 * S
    Simulation([gang, left, right], gap_ns=200 * US, announces=True).run(end)
    used = 2 * gang.share(WARM_UP, end) + left.share(WARM_UP, end) + right.share(WARM_UP, end)
    assert used / 2 >= 0.96


@pytest.mark.promise("time-pauses")
@pytest.mark.parametrize("kernel", [40 * MS, 250 * MS, 900 * MS])
@pytest.mark.parametrize("shared", [True, False], ids=["two-shared", "one-shared"])
def test_a_tenant_that_pauses_keeps_its_share_beside_a_gang(kernel: int, shared: bool) -> None:
    pausing = Program(
        "pausing",
        ("g0",),
        request=700,
        kernel_ns=20 * MS,
        burst_ns=20 * MS,
        pauses=pauses("exponential", 5 * MS),
    )
    neighbour = Program("neighbour", ("g0",), request=100, kernel_ns=kernel)
    gang = Program("gang", ("g0", "g1"), request=200, kernel_ns=kernel)
    others = [Program("single", ("g1",), request=800, kernel_ns=5 * MS)] if shared else []
    end = WARM_UP + 60 * S
    Simulation([pausing, neighbour, gang, *others], gap_ns=200 * US, announces=True).run(end)
    assert pausing.share(WARM_UP, end) >= 0.95 * 0.7 * 20 / 25
    for program in (neighbour, gang, *others):
        assert program.share(WARM_UP, end) >= program.request / 1000 - 0.03, "but for hand-offs and one kernel"


@SOME
@given(
    tenants=st.lists(
        st.tuples(
            st.sets(st.sampled_from(["g0", "g1", "g2"]), min_size=1), st.integers(1, 8), st.sampled_from([1, 10])
        ),
        min_size=2,
        max_size=7,
    )
)
def test_gangs_neither_starve_nor_are_starved(tenants: list[tuple[set[str], int, int]]) -> None:
    requests: dict[str, int] = {}
    programs = []
    for i, (gpus, request, kernel) in enumerate(tenants):
        if all(requests.get(gpu, 0) + 50 * request <= 800 for gpu in gpus):
            for gpu in gpus:
                requests[gpu] = requests.get(gpu, 0) + 50 * request
            programs.append(Program(f"t{i}", tuple(sorted(gpus)), request=50 * request, kernel_ns=kernel * MS))
    end = WARM_UP + 60 * S
    Simulation(programs).run(end)
    for program in programs:
        assert program.share(WARM_UP, end) >= 0.85 * program.request / 1000


GANG_SHARE = 0.9
GANG_WAIT_NS = 4 * S


def fits(tenants: list[tuple[set[str], int]]) -> bool:
    """Return whether each set of tenants that all share GPUs with each other requests at most 0.8 of the time."""
    groups = (some for count in range(1, len(tenants) + 1) for some in combinations(tenants, count))
    together = (some for some in groups if all(a & b for (a, _), (b, _) in combinations(some, 2)))
    return all(sum(request for _, request in some) <= 800 for some in together)


lives = st.sampled_from(["busy", "busy", "sporadic", "resized", "replaced"])


@pytest.mark.promise("time-conflicting")
@FEW
@given(
    tenants=st.lists(
        st.tuples(
            st.sets(st.sampled_from(["g0", "g1", "g2", "g3"]), min_size=1),
            st.integers(1, 10),
            st.sampled_from([100 * US, 1 * MS, 10 * MS, 50 * MS]),
            lives,
            st.integers(0, 10 * S),
        ),
        min_size=3,
        max_size=8,
    )
)
@example(
    tenants=[
        ({"g0"}, 7, 100 * US, "sporadic", 0),
        ({"g1"}, 1, 100 * US, "busy", 0),
        ({"g0", "g1"}, 1, 100 * US, "busy", 0),
    ]
)  # the gang must run although a tenant that pauses after each step wakes with credit again and again
@example(
    tenants=[
        ({"g3"}, 4, 1 * MS, "resized", 2_877_380_956),
        ({"g0"}, 6, 1 * MS, "replaced", 941_655_988),
        ({"g2"}, 6, 1 * MS, "resized", 998_945_921),
        ({"g0", "g1", "g2", "g3"}, 4, 100 * US, "resized", 1_700_121_969),
        ({"g1"}, 5, 1 * MS, "busy", 7_688_510_557),
        ({"g0", "g1", "g2", "g3"}, 6, 1 * MS, "busy", 7_456_097_125),
    ]
)  # the gangs must run although their GPUs could be lent again and again, each until another moment
def test_gangs_and_singles_that_come_go_and_change_neither_starve_nor_deadlock(
    tenants: list[tuple[set[str], int, int, str, int]],
) -> None:
    """A gang must not hold some of its GPUs while it waits for others: two gangs could then wait for each other.

    Some tenants request in bursts, some end in the middle of a step and return, some get another request. No tenant
    waits longer than GANG_WAIT_NS (plus the time that can be owed, if kernels outlast quanta). After the last change
    each tenant gets GANG_SHARE of its request.
    """
    asked: list[tuple[set[str], int]] = []
    programs, steady = [], 25 * S
    for i, (gpus, request, kernel, life, at) in enumerate(tenants):
        if not fits([*asked, (gpus, 50 * request)]):
            continue
        asked.append((gpus, 50 * request))
        program = Program(f"t{i}", tuple(sorted(gpus)), request=50 * request, kernel_ns=kernel, start_ns=at)
        if life == "sporadic":
            program.burst_ns, program.pause_ns, program.busy_from_ns = 30 * MS, at // 20 + MS, 10 * S
        programs.append((program, life, at))
    assume(any(len(program.gpus) > 1 for program, _, _ in programs))
    simulation = Simulation([program for program, _, _ in programs], announces=True)
    for program, life, at in programs:
        if life == "resized":
            simulation.change(at + 2 * S, program, program.request)
            program.request //= 2
        elif life == "replaced":
            simulation.replace(at + 1 * S + 7 * MS, at + 3 * S, program)
    end = steady + 20 * S
    simulation.run(end)
    owing = any(program.kernel_ns > 1 * MS for program, _, _ in programs)  # work beyond a quantum becomes debt
    longest = GANG_WAIT_NS + (Parameters().debt_ns if owing else 0)
    for program, life, _ in programs:
        assert max(program.waits, default=0) <= longest, f"{life} {program.id}"
        assert program.wanted_at is None or end - program.wanted_at <= longest
        assert program.share(steady, end) >= GANG_SHARE * program.request / 1000, f"{life} {program.id}"


GPUS = ("g0", "g1", "g2", "g3")


@pytest.mark.promise("time-pauses")
@pytest.mark.parametrize(
    ("kernel", "work", "pause"), [(20 * MS, 5 * MS, 2 * MS), (100 * MS, 20 * MS, 5 * MS), (900 * MS, 5 * MS, 5 * MS)]
)
@pytest.mark.parametrize("neighbour", ["singles", "gang"])
def test_a_gang_that_pauses_keeps_its_share(kernel: int, work: int, pause: int, neighbour: str) -> None:
    """During the gang's short pauses all its GPUs are kept idle for it, and the gang is charged for that time."""
    gang = Program("gang", GPUS, request=400, kernel_ns=work, burst_ns=work, pause_ns=pause)
    others = [Program("other", GPUS, request=600, kernel_ns=kernel)]
    if neighbour == "singles":
        others = [Program(f"s{i}", (gpu,), request=600, kernel_ns=kernel) for i, gpu in enumerate(GPUS)]
    end = WARM_UP + 18 * S
    simulation = Simulation([gang, *others], gap_ns=200 * US, announces=True)
    simulation.run(end)
    assert gang.share(WARM_UP, end) >= 0.95 * 0.4 * work / (work + pause)
    for program in others:
        assert program.share(WARM_UP, end) >= 0.6 - 0.02 - kernel / (18 * S), "but for hand-offs and one kernel"
    books = [simulation.scheduler.gpu_time(simulation.now, gpu).anticipated_ns for gpu in GPUS]
    assert set(books) == {simulation.scheduler.usage(simulation.now, "gang").anticipated_ns}, "it pays for all of it"


@pytest.mark.promise("time-conflicting")
@pytest.mark.parametrize(
    ("count", "kernel", "work", "pause"), [(4, 5 * MS, 3 * MS, 4 * MS), (2, 20 * MS, 10 * MS, 5 * MS)]
)
@pytest.mark.parametrize("grouped", [False, True], ids=["gang", "group"])
def test_tenants_that_work_and_pause_keep_no_gang_from_its_request(
    *, count: int, kernel: int, work: int, pause: int, grouped: bool
) -> None:
    """On each GPU of the gang another tenant works and pauses. These tenants wake at different moments, with all the
    credit that they can save.
    """
    gpus = GPUS[:count]
    gang = [Program("gang", gpus, request=400, kernel_ns=kernel)]
    if grouped:
        gang = [Program(f"m{i}", (gpu,), group="a", request=400, kernel_ns=kernel) for i, gpu in enumerate(gpus)]
    pausing = [
        Program(
            f"p{i}",
            (gpu,),
            request=600,
            burst_ns=work,
            pauses=pauses("exponential", pause, seed=i + 1),
            look_ns=500 * US,
            start_ns=3 * MS * i,
        )
        for i, gpu in enumerate(gpus)
    ]
    begin, end = 4 * S, 14 * S
    Simulation([*gang, *pausing], gap_ns=200 * US, announces=True).run(end)
    for program in gang:
        assert program.share(begin, end) >= 0.95 * 0.4
    for program in pausing:
        assert program.share(begin, end) >= 0.95 * 0.6 * work / (work + pause)
