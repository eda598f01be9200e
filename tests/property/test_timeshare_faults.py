"""Tenants that hang or send false reports, and an agent that stalls, in simulated time: the other tenants keep their
shares.
"""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from property.timeshare_mixes import SOME, WARM_UP, parts
from property.timeshare_simulation import MS, US, Program, S, Simulation, pauses, peak_share
from sharepod.agent.devices.inventory import UtilizationSample
from sharepod.agent.findings.beyond_turns import BeyondTurnsMeter, TurnsOfTenant
from sharepod.agent.findings.surcharge import TOLERANCE, SurchargeMeter
from sharepod.timeshare import Parameters, Scheduler, TokenGrant


def test_a_hung_holder_is_preempted_and_pays_for_all_the_time_it_held() -> None:
    hung = Program("hung", request=500, hang_at_ns=5 * S, hang_until_ns=15 * S)
    other = Program("other", request=500)
    simulation = Simulation([hung, other])
    simulation.run(120 * S)
    assert simulation.preemptions_seen == 1
    assert max(other.waits) <= Parameters().grace_ns + Parameters().quantum_max_ns + 1 * MS
    charged = [simulation.scheduler.usage(120 * S, name).held_ns for name in ("hung", "other")]
    assert sum(charged) <= 120 * S  # each second of the GPU is charged once
    assert hung.share(0, 120 * S) == pytest.approx(other.share(0, 120 * S), abs=0.02)
    assert other.share(0, 120 * S) >= 0.5


@pytest.mark.promise("time-stall")
@SOME
@given(
    requests=parts(1000, 4),
    kernel=st.lists(st.sampled_from([1 * MS, 20 * MS, 70 * MS]), min_size=4, max_size=4),
    stalls=st.lists(st.tuples(st.integers(0, 60), st.sampled_from([30 * MS, 300 * MS, 10 * S])), max_size=4),
)
@example(requests=[500, 500], kernel=[1 * MS] * 4, stalls=[(0, 10 * S)])
def test_whatever_holds_the_agent_up_is_no_tenants_debt(
    requests: list[int], kernel: list[int], stalls: list[tuple[int, int]]
) -> None:
    programs = [
        Program(f"t{i}", request=r, kernel_ns=k) for i, (r, k) in enumerate(zip(requests, kernel, strict=False))
    ]
    simulation = Simulation(programs, announces=True)
    end = WARM_UP
    for begin, length in sorted(stalls):
        end = max(end, WARM_UP + begin * 100 * MS)
        simulation.stalls.append((end, end + length))
        end += length
    simulation.run(end + 30 * S)
    for program in programs:
        slack = program.kernel_ns + 2 * Parameters().target_latency_ns
        for window in (2 * S, 10 * S, 30 * S):
            assert program.held(end, end + window) >= program.request * window // 1000 - slack - program.kernel_ns
    usage = [simulation.scheduler.usage(end + 30 * S, program.id) for program in programs]
    time = simulation.scheduler.gpu_time(end + 30 * S, "g0")
    assert time is not None
    parts_ns = (time.held_ns, time.anticipated_ns, time.handed_over_ns, time.idle_ns, time.stalled_ns)
    assert sum(parts_ns) == end + 30 * S, "wall time"
    assert time.held_ns == sum(each.held_ns for each in usage)


@pytest.mark.promise("time-liar")
@pytest.mark.parametrize("work_ms", [5, 30, 200])
@pytest.mark.parametrize(("others", "limit"), [(1, 1000), (3, 1000), (1, 100)])
def test_a_tenant_that_says_it_has_drained_while_its_kernels_run_gains_nothing(
    work_ms: int, others: int, limit: int
) -> None:
    """The liar launches for some milliseconds under each grant, reports at once that it has drained, and wants the
    token again when that work has ended. Each second the agent surcharges it for use outside its turns, by NVML."""
    liar = Program("liar", request=100, limit=limit, kernel_ns=10 * US, burst_ns=10 * US, pause_ns=work_ms * MS)
    busy = [Program(f"busy{i}", request=900 // others, kernel_ns=1 * MS) for i in range(others)]
    simulation = Simulation([liar, *busy], announces=True)
    beyond, meter = BeyondTurnsMeter(), SurchargeMeter()
    end = WARM_UP + 100 * S
    used: list[float] = []

    def read() -> None:
        used.append(len(liar.spans) * work_ms / 1e3)
        part = min(1.0, used[-1] - (used[-2] if len(used) > 1 else 0.0))
        now = simulation.now / 1e9
        turns = TurnsOfTenant(lambda: simulation.scheduler.turns(simulation.now, "liar"))
        sums = beyond.observe(now, [UtilizationSample(now, part)], part, turns)
        spilled = meter.observe(now, sums.charged)
        simulation.scheduler.surcharge(simulation.now, "liar", round(spilled * 1e9))

    for second in range(1, end // S):
        simulation.at(second * S, read)
    simulation.run(end)
    gained = (used[-1] - used[WARM_UP // S - 1]) / (len(used) - WARM_UP // S)
    assert gained <= 0.1 + TOLERANCE + 0.01
    for second, used_s in enumerate(used[3:], 1):
        assert used_s - used[2] <= (0.1 + 0.02) * second + 1, "but for the second until the next reading"
    usage = simulation.scheduler.usage(end, "liar")
    assert usage.held_ns == liar.held(0, end), "the books of held time stay exact"


@pytest.mark.promise("time-overdue-harmless")
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])
@given(
    requests=parts(900, 4),
    capped=st.lists(st.booleans(), min_size=4, max_size=4),
    hung_request=st.sampled_from([0, 100]),
    until=st.sampled_from([3 * S, 20 * S, 200 * S]),
)
def test_shares_and_ceilings_of_the_others_hold_while_one_is_hung(
    requests: list[int], capped: list[bool], hung_request: int, until: int
) -> None:
    begin = WARM_UP + 2 * S  # the tenant that hangs is preempted by this time
    end = begin + 60 * S
    hung = Program("hung", request=hung_request, hang_at_ns=WARM_UP, hang_until_ns=WARM_UP + until)
    others = [
        Program(f"t{i}", request=r, limit=r if cap else 1000)
        for i, (r, cap) in enumerate(zip(requests, capped, strict=False))
    ]
    simulation = Simulation([hung, *others])
    simulation.run(end)
    for program in others:
        share = program.share(begin, end)
        assert share >= program.request / 1000 - 0.015
        assert share <= program.limit / 1000 + 0.015
        # A tenant that was owed time makes up for it: at most 1 s at its limit, in 10 s.
        assert peak_share(program, 10 * S) <= program.limit / 1000 * 1.1 + 0.025
    names = [program.id for program in simulation.programs.values()]
    assert sum(simulation.scheduler.usage(end, name).held_ns for name in names) <= end, "each second once"


class PlaysDead(Simulation):
    """The tenant `dead` writes no heartbeat while its last kernel runs. It is found silent `found_ns` after the end
    of that kernel (negative: before), and runs again `back_ns` after it."""

    found_ns = 0
    back_ns = 0
    found = 0

    def _schedule_drain(self, program: Program, time: int, close: int | None = None) -> None:
        if program.id != "dead":
            super()._schedule_drain(program, time, close)
        elif program.ends_at is None or time < program.ends_at:
            assert program.grant is not None
            grant_id, program.ends_at = program.grant.grant_id, time
            self.at(max(self.now, time + self.found_ns), lambda: self._look(program, grant_id, time))

    def _look(self, program: Program, grant_id: int, time: int) -> None:
        if program.grant is None or program.grant.grant_id != grant_id or program.ends_at != time:
            return
        if program.id not in self.scheduler.waited_for():
            self.at(max(self.now, time), lambda: self._drain(program, grant_id, time))
            return
        self.found += 1
        program.announced = True
        self.busy_until["g0"] = time
        self.scheduler.silent(self.now, program.id, expected_ns=time - self.now)
        self.at(time + self.back_ns, lambda: self._come_back(program, grant_id, time))

    def _come_back(self, program: Program, grant_id: int, time: int) -> None:
        if program.grant is None or program.grant.grant_id != grant_id or program.ends_at != time:
            return
        self.scheduler.draining(self.now, program.id, expected_ns=max(0, time - self.now))
        self.at(max(self.now, time), lambda: self._drain(program, grant_id, time))


@pytest.mark.promise("time-pauses")
@pytest.mark.parametrize(("found_ns", "back_ns"), [(-2500 * US, -1 * MS), (-2500 * US, 1 * MS), (1 * MS, 3 * MS)])
@pytest.mark.parametrize(
    ("request_milli", "work", "pause", "kernel", "kind"),
    [(700, 20, 5, 245, "exponential"), (700, 3, 2, 50, "regular")],
)
def test_a_tenant_that_plays_dead_hides_no_long_kernels_from_one_that_pauses(
    request_milli: int, work: int, pause: int, kernel: int, kind: str, found_ns: int, back_ns: int
) -> None:
    pausing = Program(
        "pausing",
        request=request_milli,
        burst_ns=work * MS,
        pauses=pauses(kind, pause * MS),
        pause_ns=pause * MS,
        look_ns=500 * US,
    )
    dead = Program("dead", request=1000 - request_milli, kernel_ns=kernel * MS)
    simulation = PlaysDead([pausing, dead], announces=True)
    simulation.found_ns, simulation.back_ns = found_ns, back_ns
    simulation.run(60 * S)
    assert simulation.found > 50
    assert pausing.worked_ns / (60 * S) >= 0.93 * request_milli / 1000 * work / (work + pause), "with the warm-up"


class AnnouncesFarEnds(Simulation):
    """The tenant `liar` announces at each grant that its work ends in an hour, and drains at the end of its turn."""

    def _granted(self, program: Program, grant: TokenGrant) -> None:
        super()._granted(program, grant)
        if program.id == "liar":
            program.announced = True
            self.scheduler.draining(self.now, program.id, expected_ns=3600 * S)


@pytest.mark.promise("time-conflicting")
@pytest.mark.parametrize("request_milli", [300, 500])
def test_a_tenant_that_announces_an_end_far_away_keeps_no_gang_waiting(request_milli: int) -> None:
    gang = Program("gang", ("g0", "g1"), request=request_milli)
    liar = Program("liar", ("g0",), request=300)
    other = Program("other", ("g1",), request=300)
    AnnouncesFarEnds([gang, liar, other]).run(60 * S)
    for program in (gang, liar, other):
        assert program.share(WARM_UP, 60 * S) >= 0.9 * program.request / 1000
    assert max(gang.waits) <= 1 * S


class NeverDrains(Simulation):
    """Tenants that hang in each turn, and that want the next turn as soon as they are preempted."""

    def _carry_out(self) -> None:
        super()._carry_out()
        for tenant_id in list(self.preempted):
            self.preempted.discard(tenant_id)
            program = self.programs[tenant_id]
            program.grant, program.hang_at_ns = None, 0
            self.scheduler.want(self.now, tenant_id)


@pytest.mark.promise("time-overdue-harmless")
def test_tenants_that_never_drain_and_want_more_take_no_share_of_the_others() -> None:
    stuck = [Program(f"stuck{i}", request=20, hang_at_ns=0, hang_until_ns=3600 * S) for i in range(5)]
    others = [Program("one", request=500), Program("other", request=400)]
    simulation = NeverDrains([*stuck, *others])
    simulation.run(160 * S)
    assert simulation.preemptions_seen >= 10, "each has a turn again, and holds it to the end"
    for program in others:
        assert program.share(60 * S, 160 * S) >= program.request / 1000 - 0.015


class OutlastsItsRescue(Simulation):
    """The tenants named `long` want the token as soon as they are preempted. Their kernel ends in the turn that they
    then get."""

    def _carry_out(self) -> None:
        before = set(self.preempted)
        super()._carry_out()
        for tenant_id in self.preempted - before:
            self.scheduler.want(self.now, tenant_id)

    def _granted(self, program: Program, grant: TokenGrant) -> None:
        if program.id not in self.preempted:
            super()._granted(program, grant)
            return
        assert program.ends_at is not None, "its kernel runs"
        self.preempted.discard(program.id)
        program.spans.append((program.granted_at, self.now))
        program.grant, program.granted_at, ends_at, program.ends_at = grant, self.now, program.ends_at, None
        self._schedule_drain(program, max(self.now, ends_at))


@pytest.mark.promise("time-debt", "time-ceiling")
@pytest.mark.parametrize(("request_milli", "limit_milli"), [(20, 50), (20, 1000), (100, 100)])
def test_a_turn_in_the_midst_of_a_long_kernel_cancels_no_debt_of_it(request_milli: int, limit_milli: int) -> None:
    """Ten seconds after its preemption the tenant gets a turn, in which its kernel of 11.2 s ends. The debt of that
    kernel must remain.
    """
    long = Program("long", request=request_milli, limit=limit_milli, kernel_ns=11_200 * MS)
    other = Program("other", request=1000 - request_milli)
    OutlastsItsRescue([long, other]).run(400 * S)
    assert long.held(0, 400 * S) <= limit_milli * 400 * S // 1000 + 100 * MS + long.kernel_ns + S
    assert long.share(0, 400 * S) <= request_milli / 1000 + 2 * long.kernel_ns / (400 * S), "but for the last kernels"
    assert other.share(0, 400 * S) >= other.request / 1000 - 0.002


class GivesBackAtOnce(Simulation):
    """The tenants named `empty...` launch next to nothing under each grant, release the token, and want it again."""

    def _end(self, program: Program, close: int) -> None:
        if not program.id.startswith("empty"):
            super()._end(program, close)
            return
        program.kernels = 1
        self._schedule_drain(program, max(self.now, program.granted_at + program.kernel_ns), close)


@pytest.mark.promise("time-empty-turns")
@pytest.mark.parametrize(
    ("empty", "request_milli", "others"), [(1, 500, [250, 250]), (3, 20, [500, 440]), (10, 20, [800]), (1, 20, [980])]
)
@pytest.mark.parametrize("sleep_ns", [0, 1 * MS, 10 * MS])
def test_tenants_that_use_none_of_their_turns_cost_the_others_no_more_than_a_twentieth(
    empty: int, request_milli: int, others: list[int], sleep_ns: int
) -> None:
    """Each empty turn costs two hand-offs. A tenant that uses nothing of its turns is always owed time, but must not
    get turn after turn.
    """
    stuck = [
        Program(f"empty{i}", request=request_milli, kernel_ns=50 * US, burst_ns=sleep_ns and 50 * US, pause_ns=sleep_ns)
        for i in range(empty)
    ]
    busy = [Program(f"busy{i}", request=each) for i, each in enumerate(others)]
    GivesBackAtOnce([*stuck, *busy], gap_ns=200 * US, announces=True).run(WARM_UP + 20 * S)
    for program in busy:
        assert program.share(WARM_UP, WARM_UP + 20 * S) >= 0.95 * program.request / 1000


@pytest.mark.promise("time-liar-later")
@pytest.mark.parametrize("request_milli", [0, 100])
def test_time_that_is_hidden_for_a_minute_is_paid_under_the_limit_too(request_milli: int) -> None:
    """The liar launches a minute of work under one grant and releases the token at once. Each second the agent
    surcharges it for the use that NVML shows."""
    liar = Program("liar", request=request_milli, limit=100, kernel_ns=10 * US, burst_ns=10 * US, pause_ns=60 * S)
    simulation = Simulation([liar])

    def read() -> None:
        if liar.spans and simulation.now <= liar.spans[-1][1] + 60 * S:
            simulation.scheduler.surcharge(simulation.now, "liar", S)

    for second in range(1, 1200):
        simulation.at(second * S, read)
    simulation.run(1200 * S)
    assert len(liar.spans) * 60 <= 0.1 * 1200 + 1


@pytest.mark.promise("time-liar-later")
def test_a_surcharge_beyond_the_debt_cap_is_owed_to_the_next_agent_too() -> None:
    before, after = Scheduler(), Scheduler()
    before.set_tenant(0, "liar", ["g0"], request_milli=100, limit_milli=200)
    before.surcharge(0, "liar", 60 * S)
    left = before.snapshot(0, "liar")
    after.set_tenant(0, "liar", ["g0"], request_milli=100, limit_milli=200, resumed=left)
    paid = [scheduler.snapshot(100 * S, "liar") for scheduler in (before, after)]
    assert paid[0] == paid[1]
    assert paid[1].assured == -50 * S * 1000


def test_a_best_effort_tenant_owes_no_request_that_it_is_given_later() -> None:
    scheduler = Scheduler()
    scheduler.set_tenant(0, "late", ["g0"], request_milli=0, limit_milli=1000)
    scheduler.surcharge(0, "late", 60 * S)
    scheduler.set_tenant(70 * S, "late", ["g0"], request_milli=500, limit_milli=1000)
    assert scheduler.snapshot(71 * S, "late").assured == 500 * S
