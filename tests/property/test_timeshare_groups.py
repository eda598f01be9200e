"""Groups of tenants in simulated time: trainings whose ranks are separate tenants, and arbitrary members next to other
tenants.
"""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from property.time_sliced_gpu import MS, US, Program, S, TimeSlicedGpu
from property.timeshare_mixes import FEW
from property.timeshare_simulation import Program as Busy
from property.timeshare_simulation import Simulation, peak_share
from sharepod.timeshare import Sharing

STEP_KERNELS = 20
STEP_NS = STEP_KERNELS * 2 * MS
WARM_UP = 2 * S


def training(name: str, request: int, *, ranks: int = 2, starts_ns: int = 0, grouped: bool = True) -> list[Program]:
    """Return the ranks of a training, each a tenant of one GPU. A step is 40 ms of kernels, then a collective. Before
    it, the hosts need about 0.3 ms."""
    made = [
        Program(
            f"{name}{rank}",
            gpu=f"g{rank}",
            group=name if grouped else None,
            request=request,
            gpu_ns=2 * MS,
            host_ns=50 * US,
            kernels=STEP_KERNELS,
            ahead=1,
            jitter_ns=300 * US,
            starts_ns=starts_ns + rank * 100 * US,
        )
        for rank in range(ranks)
    ]
    for program in made:
        program.ranks = made
    return made


def on_one_gpu(ranks: list[Program]) -> list[Program]:
    """Put all ranks of a training on the GPU of the first rank."""
    for rank in ranks:
        rank.gpu = ranks[0].gpu
    return ranks


def steps(program: Program, gpus: TimeSlicedGpu, seconds: int = 8) -> float:
    """Continue the simulation for `seconds`. Return the rank's steps in that time, relative to its steps in the same
    time alone.
    """
    gpus.run(WARM_UP)
    before = program.finished
    gpus.run(WARM_UP + seconds * S)
    return (program.finished - before) / (STEP_KERNELS + 1) * (STEP_NS + 500 * US) / (seconds * S)


@pytest.mark.promise("time-group")
@pytest.mark.parametrize("sharing", Sharing)
@pytest.mark.parametrize(
    ("others", "least"), [("ranks", 0.8), ("busy 1 ms", 0.8), ("busy 20 ms", 0.75), ("busy on one GPU", 0.8)]
)
def test_ranks_that_are_tenants_of_their_own_get_most_of_their_due(sharing: Sharing, others: str, least: float) -> None:
    """Ranks wait for each other, so with turns at different times on their GPUs they would get a fifth of their due or
    less.
    """
    kernel_ns = 20 * MS if others == "busy 20 ms" else 1 * MS
    others_run = [
        Program(f"c{rank}", gpu=f"g{rank}", request=500, gpu_ns=kernel_ns, starts_ns=37 * MS * (rank + 1))
        for rank in range(1 if others == "busy on one GPU" else 2)
    ]
    if others == "ranks":
        others_run = training("b", 500, starts_ns=3 * MS)
    programs = [*training("a", 500), *others_run]
    assert steps(programs[0], TimeSlicedGpu(programs, sharing=sharing)) >= least * 0.5


@pytest.mark.promise("time-group-one-gpu")
@pytest.mark.parametrize(("ranks", "request_milli"), [(2, 500), (2, 250), (3, 150), (4, 125)])
def test_ranks_on_one_gpu_get_their_due_and_cost_another_tenant_nothing(ranks: int, request_milli: int) -> None:
    """In exclusive turns each rank would spin while it waits for the others, and do a twentieth of its due steps. So
    ranks of a group co-run."""
    programs = [*on_one_gpu(training("a", request_milli, ranks=ranks))]
    free = 1000 - ranks * request_milli
    if free:
        programs.append(Program("c", request=free, gpu_ns=1 * MS, starts_ns=37 * MS))
    gpus = TimeSlicedGpu(programs)
    assert steps(programs[0], gpus) >= 0.9 * request_milli / 1000
    if free:
        busy_for = programs[-1].gpu_used_ns / (gpus.now - programs[-1].starts_ns)
        assert busy_for >= free / 1000 - 0.02
    assert gpus.scheduler is not None
    time = gpus.scheduler.gpu_time(gpus.now, "g0")
    assert time is not None
    assert time.held_ns == sum(gpus.scheduler.usage(gpus.now, program.id).held_ns for program in programs)


@pytest.mark.promise("time-group-guarantee")
@settings(deadline=None, max_examples=30, suppress_health_check=[HealthCheck.too_slow])
@given(
    kinds=st.lists(st.sampled_from(["busy", "long", "gaps", "service"]), min_size=2, max_size=3),
    tenths=st.integers(1, 3),
    other=st.sampled_from(["busy", "long"]),
)
def test_members_on_one_gpu_leave_another_tenant_its_request(kinds: list[str], tenths: int, other: str) -> None:
    """In four seconds the other tenant may miss its request by the tolerated debt, one window of measurement and one
    turn; more next to services, which join while it runs."""
    made = {
        "busy": {"gpu_ns": 1 * MS},
        "long": {"gpu_ns": 20 * MS},
        "gaps": {"gpu_ns": 250 * US, "host_ns": 700 * US, "kernels": 12, "pause_ns": 1500 * US},
        "service": {"gpu_ns": 1 * MS, "host_ns": 100 * US, "kernels": 3, "pause_ns": 31 * MS, "waits": True},
    }
    members = [
        Program(f"a{place}", group="a", request=100 * tenths, starts_ns=place * MS, **made[kind])  # type: ignore[arg-type]
        for place, kind in enumerate(kinds)
    ]
    rest = 1000 - 100 * tenths * len(members)
    single = Program("c", request=rest, starts_ns=5 * MS, **made[other])  # type: ignore[arg-type]
    gpus = TimeSlicedGpu([*members, single])
    gpus.run(WARM_UP)
    before = [program.finished * program.gpu_ns for program in (*members, single)]
    gpus.run(WARM_UP + 4 * S)
    single_did = (single.finished * single.gpu_ns - before[-1]) / (4 * S)
    assert single_did >= rest / 1000 - 0.04
    for member, kind, done in zip(members, kinds, before, strict=False):
        if kind in ("busy", "long"):
            assert (member.finished * member.gpu_ns - done) / (4 * S) >= 0.092 * tenths - 0.04


members = st.tuples(
    st.sampled_from(["g0", "g1", "g2"]),
    st.sampled_from([None, "a", "b"]),
    st.integers(0, 8),
    st.sampled_from([1 * MS, 5 * MS, 20 * MS]),
    st.sampled_from(["busy", "busy", "pauses", "leaves", "stops"]),
    st.integers(0, 1000),
)


@pytest.mark.promise("time-group-guarantee")
@FEW
@given(tenants=st.lists(members, min_size=3, max_size=8))
def test_a_group_costs_no_tenant_its_request_and_no_member_holds_up_the_others(
    tenants: list[tuple[str, str | None, int, int, str, int]],
) -> None:
    """Requests of a group's members may differ. Members pause, end in the middle of a step, or do not drain for
    seconds. By all this a busy tenant loses at most the credit that one member can take from the group, once."""
    requested: dict[str, int] = {}
    programs: list[tuple[Busy, str]] = []
    for i, (gpu, group, request, kernel_ns, life, at) in enumerate(tenants):
        if requested.get(gpu, 0) + 50 * request > 1000:
            continue
        requested[gpu] = requested.get(gpu, 0) + 50 * request
        program = Busy(f"t{i}", (gpu,), group=group, request=50 * request, kernel_ns=kernel_ns, start_ns=at * MS)
        if life == "pauses":
            program.burst_ns, program.pause_ns = 30 * MS, at // 20 * MS + MS
        elif life == "stops":
            program.hang_at_ns, program.hang_until_ns = (4000 + at) * MS, (5000 + 2 * at) * MS
        programs.append((program, life))
    simulation = Simulation([program for program, _ in programs], announces=True)
    for program, life in programs:
        if life == "leaves":
            simulation.replace(program.start_ns + 1 * S + 7 * MS, program.start_ns + 3 * S, program)
    end = 40 * S
    simulation.run(end)
    hung = any(life == "stops" for _, life in programs)
    for program, life in programs:
        assert max(program.waits, default=0) <= (14 * S if hung else 4 * S), program.id
        if life in ("busy", "leaves"):
            share = program.share(20 * S, end)
            assert share >= 0.94 * program.request / 1000 - 0.01, (program.id, share)


@pytest.mark.promise("time-group-guarantee")
@pytest.mark.parametrize("mate_milli", [100, 900])
def test_a_best_effort_member_takes_nothing_from_the_request_of_others(mate_milli: int) -> None:
    """A best-effort member has no guaranteed time, so turns of other members must not give it turns before the
    victim.
    """
    victim = Busy("victim", ("g0",), request=900, kernel_ns=2 * MS)
    programs = [
        Busy("m0", ("g0",), group="a", request=0, kernel_ns=5 * MS),
        Busy("m1", ("g1",), group="a", request=mate_milli, kernel_ns=5 * MS),
        Busy("other", ("g1",), request=1000 - mate_milli, kernel_ns=2 * MS),
    ]
    Simulation([victim, *programs], announces=True).run(20 * S)
    assert victim.share(5 * S, 20 * S) >= 0.9


@pytest.mark.promise("time-group-guarantee")
@FEW
@given(limits=st.tuples(st.integers(3, 9), st.integers(3, 9)), requests=st.tuples(st.integers(1, 3), st.integers(1, 3)))
def test_limits_of_a_groups_members_stay_their_own(limits: tuple[int, int], requests: tuple[int, int]) -> None:
    programs = [
        Busy(f"m{i}", (f"g{i}",), group="a", request=100 * request, limit=100 * limit, kernel_ns=2 * MS)
        for i, (limit, request) in enumerate(zip(limits, requests, strict=True))
    ]
    Simulation([*programs, Busy("other", ("g0",), request=300, kernel_ns=5 * MS)], announces=True).run(20 * S)
    for program in programs:
        assert peak_share(program, 10 * S) <= 1.1 * program.limit / 1000 + 0.03, "a second of it was owed"
        assert program.share(2 * S, 20 * S) >= program.request / 1000 - 0.02


@pytest.mark.promise("time-group-guarantee")
@pytest.mark.parametrize("request_milli", [500, 700, 900])
@pytest.mark.parametrize("kernel_ns", [1 * MS, 20 * MS])
def test_members_whose_requests_differ_take_no_more_than_each_is_due(request_milli: int, kernel_ns: int) -> None:
    """The credit belongs to the member with the large request. The other must not use it beyond its own request."""
    parts = (request_milli, 1000 - request_milli)
    members = [Busy(f"m{i}", (f"g{i}",), group="a", request=part, kernel_ns=kernel_ns) for i, part in enumerate(parts)]
    others = [Busy(f"c{i}", (f"g{i}",), request=1000 - part, kernel_ns=3 * MS) for i, part in enumerate(parts)]
    Simulation([*members, *others], announces=True).run(30 * S)
    for program in (*members, *others):
        assert program.share(10 * S, 30 * S) >= program.request / 1000 - 0.02, program.id


@pytest.mark.promise("time-group")
def test_members_of_a_group_begin_and_end_their_turns_together() -> None:
    members = [Busy(f"m{i}", (f"g{i}",), group="a", request=400, kernel_ns=1 * MS) for i in range(2)]
    others = [Busy(f"c{i}", (f"g{i}",), request=600, kernel_ns=(3, 7)[i] * MS, start_ns=i * 31 * MS) for i in range(2)]
    Simulation([*members, *others], announces=True).run(20 * S)
    one, other = (member.spans for member in members)
    assert all(begin < end for begin, end in pairwise(begin for begin, _ in one))
    together = sum(
        max(0, min(end, ends) - max(begin, begins)) for begin, end in one for begins, ends in other if begins < end
    )
    assert together >= 0.95 * members[0].held(0, 20 * S)


trainings = st.tuples(
    st.sampled_from([1, 3, 5, 10]),
    st.sampled_from([1 * MS, 5 * MS, 30 * MS]),
    st.sampled_from([300 * US, 1 * MS, 3 * MS]),
    st.booleans(),
)


@pytest.mark.promise("time-group-guarantee")
@FEW
@given(gpus=st.integers(2, 3), groups=st.lists(trainings, min_size=2, max_size=4), request=st.sampled_from([100, 250]))
@example(gpus=2, groups=[(5, 10 * MS, 1 * MS, True), (3, 3 * MS, 300 * US, False)], request=250)
def test_groups_that_pause_next_to_each_other_keep_the_invariants_on_gpus_that_are_shared_concurrently(
    gpus: int, groups: list[tuple[int, int, int, bool]], request: int
) -> None:
    """When a group becomes the lead, a member may already co-run on a GPU that is kept idle for another tenant."""
    programs: list[Program] = []
    for i, (kernels, pause_ns, kernel_ns, collective) in enumerate(groups):
        ranks = [
            Program(
                f"t{i}{rank}",
                gpu=f"g{rank}",
                group=f"t{i}",
                request=request,
                gpu_ns=kernel_ns,
                host_ns=50 * US,
                kernels=kernels,
                ahead=1,
                waits=True,
                pause_ns=pause_ns,
                jitter_ns=300 * US,
                starts_ns=rank * 100 * US,
            )
            for rank in range(gpus)
        ]
        for program in ranks if collective else ():
            program.ranks = ranks
        programs += ranks
    spare = 1000 - request * len(groups)
    programs += [Program(f"o{rank}", gpu=f"g{rank}", request=spare, gpu_ns=3 * MS) for rank in range(gpus)]
    TimeSlicedGpu(programs, sharing=Sharing.CONCURRENT).run(4 * S)
