"""Single promises of the token scheduler, at moments that simulations rarely reach."""

from __future__ import annotations

import pytest
from property.timeshare_simulation import held_grant_id
from sharepod.timeshare import Parameters, Preemption, Scheduler, Sharing, Suspension, TokenGrant, TokenRevocation

MS = 1_000_000
S = 1_000_000_000


def scheduler_with(*tenants: tuple[str, int, int], gpus: tuple[str, ...] = ("g0",)) -> Scheduler:
    scheduler = Scheduler()
    for name, request, limit in tenants:
        scheduler.set_tenant(0, name, gpus, request_milli=request, limit_milli=limit)
    return scheduler


def granted(scheduler: Scheduler, now: int) -> TokenGrant:
    [action] = scheduler.tick(now)
    assert isinstance(action, TokenGrant)
    return action


@pytest.mark.promise("time-alone-uninterrupted")
def test_alone_and_unlimited_is_granted_without_quantum_and_unmetered() -> None:
    scheduler = scheduler_with(("a", 500, 1000))
    scheduler.want(1, "a")
    grant = granted(scheduler, 1)
    assert (grant.quantum_ns, grant.metered) == (0, False)
    assert scheduler.next_deadline() is None


def test_what_was_launched_alone_drains_at_no_cost_for_the_grace_period() -> None:
    scheduler = scheduler_with(("a", 500, 1000), ("b", 500, 1000))
    scheduler.want(1, "a")
    granted(scheduler, 1)
    scheduler.want(10 * S, "b")
    scheduler.tick(10 * S)
    scheduler.drained(10 * S + 900 * MS, "a", wanting=True)
    usage = scheduler.usage(10 * S + 900 * MS, "a")
    assert usage.borrowed_ns >= usage.held_ns // 2
    assert granted(scheduler, 10 * S + 900 * MS).tenant == "b"
    scheduler.drained(11 * S, "b", wanting=True)
    assert granted(scheduler, 11 * S).tenant == "b", "it has had nothing for a second"
    scheduler.drained(11 * S + 100 * MS, "b", wanting=False)
    assert granted(scheduler, 11 * S + 100 * MS).tenant == "a", "no debt keeps it from its turn"


def test_a_grant_is_metered_while_another_tenant_is_present_although_nobody_waits() -> None:
    scheduler = scheduler_with(("a", 500, 1000), ("b", 500, 1000))
    scheduler.set_connected(0, "b", connected=True)
    scheduler.want(1, "a")
    grant = granted(scheduler, 1)
    assert (grant.quantum_ns, grant.metered) == (0, True)


def test_alone_under_a_limit_is_metered_and_has_a_quantum() -> None:
    scheduler = scheduler_with(("a", 500, 700))
    scheduler.want(1, "a")
    grant = granted(scheduler, 1)
    assert (grant.quantum_ns, grant.metered) == (100 * MS, True)


def test_a_holder_without_quantum_is_revoked_when_another_wants_the_gpu() -> None:
    scheduler = scheduler_with(("a", 500, 1000), ("b", 500, 1000))
    scheduler.want(1, "a")
    grant = granted(scheduler, 1)
    scheduler.want(5 * S, "b")
    assert scheduler.tick(5 * S) == [TokenRevocation("a", grant.grant_id)]
    scheduler.drained(5 * S + 2 * MS, "a", wanting=True)
    assert granted(scheduler, 5 * S + 2 * MS).tenant == "b"


def test_a_newcomer_gets_at_most_the_quantum_to_wait_for() -> None:
    scheduler = scheduler_with(("a", 500, 1000), ("b", 0, 1000))
    scheduler.want(1, "a")
    grant = granted(scheduler, 1)
    scheduler.want(30 * MS, "b")
    assert scheduler.tick(30 * MS) == [TokenGrant("a", grant.grant_id, 70 * MS + 1, True)], (
        "the holder gets the new end at once"
    )
    assert scheduler.next_deadline() == 97_000_001, "is it the holder's turn again?"
    assert scheduler.tick(97_000_001) == [TokenGrant("a", grant.grant_id, 103_000_000, True)]


def test_who_wakes_with_credit_waits_for_the_least_quantum_of_the_holder_only() -> None:
    scheduler = scheduler_with(("a", 500, 1000), ("b", 500, 1000))
    scheduler.want(1, "a")
    grant = granted(scheduler, 1)
    scheduler.want(3 * MS, "b")
    assert scheduler.tick(3 * MS) == [TokenGrant("a", grant.grant_id, 7 * MS + 1, True)]
    scheduler.unwant(4 * MS, "b")
    scheduler.want(30 * MS, "b")
    scheduler.tick(30 * MS)
    scheduler.drained(30 * MS, "a", wanting=True)
    assert granted(scheduler, 30 * MS).tenant == "b"


def test_borrowed_time_ends_soon_after_someone_with_credit_comes() -> None:
    scheduler = scheduler_with(("owner", 500, 1000), ("borrower", 100, 500))
    scheduler.want(1, "borrower")
    first = granted(scheduler, 1)
    scheduler.drained(100 * MS, "borrower", wanting=True)
    scheduler.tick(100 * MS)
    assert first.quantum_ns == 100 * MS
    second = granted(scheduler, 250 * MS)
    assert second.quantum_ns == 100 * MS
    scheduler.want(252 * MS, "owner")
    assert scheduler.tick(252 * MS) == [TokenGrant("borrower", second.grant_id, 8 * MS, True)]
    assert scheduler.tick(257_500_000) == []


@pytest.mark.promise("time-preempted")
def test_a_holder_is_preempted_after_the_grace_period_and_not_before() -> None:
    scheduler = scheduler_with(("a", 500, 1000), ("b", 500, 1000))
    scheduler.want(1, "a")
    grant = granted(scheduler, 1)
    scheduler.want(2, "b")
    end = 1 + 100 * MS
    assert scheduler.tick(2) == [TokenGrant("a", grant.grant_id, end - 2, True)]
    assert scheduler.tick(end) == []
    assert scheduler.tick(end + 1 * S - 1) == []
    preempted, grant_b = scheduler.tick(end + 1 * S)
    assert preempted == Preemption("a", grant.grant_id)
    assert isinstance(grant_b, TokenGrant)
    assert grant_b.tenant == "b"
    later = end + 2 * S
    assert scheduler.usage(later, "b").held_ns == 1 * S, "who holds the GPU uses it"
    assert scheduler.usage(later, "a").held_ns == end + 1 * S - 1
    scheduler.drained(later, "b", wanting=False)
    assert scheduler.usage(later + 5 * MS, "a").held_ns == end + 1 * S - 1 + 5 * MS, "no other tenant holds it"


def test_a_preempted_tenant_owes_the_time_that_another_uses_until_it_has_drained() -> None:
    scheduler = two_that_share()
    end = 1 + 100 * MS
    scheduler.tick(end + 1 * S)
    assert scheduler.displaced("a")
    before = scheduler.snapshot(end + 1 * S, "a")
    scheduler.drained(end + 3 * S, "a", wanting=False)
    after = scheduler.snapshot(end + 3 * S, "a")
    assert after.held_ns == before.held_ns, "the GPU was the other's"
    assert after.assured == before.assured - 2 * S * (1000 - 500)


def test_a_tenant_without_processor_time_is_suspended_when_its_work_ends_and_owes_nothing() -> None:
    scheduler = two_that_share()
    now = 1 + 20 * MS
    scheduler.silent(now, "a", expected_ns=30 * MS)
    ends = now + 30 * MS
    hand_off = ends - Parameters().hand_off_ns
    assert scheduler.tick(hand_off - 1) == []
    [next_grant] = scheduler.tick(hand_off)
    assert next_grant.tenant == "b"
    assert scheduler.tick(ends) == [Suspension("a", 1)]
    assert scheduler.displaced("a")
    later = ends + 2 * S
    assert scheduler.usage(later, "a").held_ns == ends - 1
    assert scheduler.usage(later, "a").overdue_ns == 0
    assert scheduler.usage(later, "a").preemptions == 0
    assert scheduler.usage(later, "b").held_ns == 2 * S
    scheduler.drained(later, "a", wanting=True)
    assert not scheduler.displaced("a")


def test_a_suspended_tenant_pays_for_a_gpu_that_nobody_holds_only_once_it_runs_again() -> None:
    scheduler = two_that_share()
    scheduler.silent(2, "a", expected_ns=0)
    scheduler.tick(2)
    scheduler.drained(10 * MS, "b", wanting=False)
    scheduler.tick(10 * MS)
    assert scheduler.usage(50 * MS, "a").held_ns == 1
    scheduler.draining(50 * MS, "a", expected_ns=0)
    assert scheduler.usage(70 * MS, "a").held_ns == 1 + 20 * MS


def test_a_tenant_that_runs_again_before_its_work_has_ended_is_not_suspended() -> None:
    scheduler = two_that_share()
    scheduler.silent(2, "a", expected_ns=30 * MS)
    scheduler.draining(3, "a", expected_ns=40 * MS)
    actions = scheduler.tick(35 * MS)
    assert actions == []
    assert not scheduler.displaced("a")


def test_a_preempted_tenant_without_processor_time_owes_until_its_work_ends() -> None:
    scheduler = two_that_share()
    end = 1 + 100 * MS
    scheduler.silent(end, "a", expected_ns=1500 * MS)
    assert Preemption("a", 1) in scheduler.tick(end + 1 * S)
    ends = end + 1500 * MS
    assert Suspension("a", 1) in scheduler.tick(ends)
    assert scheduler.usage(ends, "a").overdue_ns == 500 * MS
    assert scheduler.usage(ends + 1 * S, "a").overdue_ns == 500 * MS


def test_a_tenant_that_is_removed_frees_its_gpu_at_once() -> None:
    scheduler = scheduler_with(("a", 500, 1000), ("b", 500, 1000))
    scheduler.want(1, "a")
    granted(scheduler, 1)
    scheduler.want(2, "b")
    scheduler.tick(2)
    scheduler.remove(3, "a")
    assert granted(scheduler, 3).tenant == "b"


def test_a_lowered_limit_takes_effect_on_who_holds_without_quantum() -> None:
    scheduler = scheduler_with(("a", 300, 1000))
    scheduler.want(1, "a")
    grant = granted(scheduler, 1)
    scheduler.set_tenant(2 * S, "a", ("g0",), request_milli=300, limit_milli=500)
    assert scheduler.tick(2 * S) == [TokenRevocation("a", grant.grant_id)]


def test_a_raised_limit_takes_effect_on_who_waits_for_it() -> None:
    scheduler = scheduler_with(("a", 0, 100))
    scheduler.want(1, "a")
    granted(scheduler, 1)
    scheduler.drained(1 + 100 * MS, "a", wanting=True)
    assert scheduler.tick(1 + 100 * MS) == []
    scheduler.set_tenant(1 + 100 * MS, "a", ("g0",), request_milli=0, limit_milli=1000)
    assert granted(scheduler, 1 + 100 * MS).tenant == "a"


def test_limit_zero_never_runs_and_needs_no_timer() -> None:
    scheduler = scheduler_with(("a", 0, 0))
    scheduler.want(1, "a")
    assert scheduler.tick(100 * S) == []
    assert scheduler.next_deadline() is None


@pytest.mark.promise("time-gang")
def test_a_gang_is_granted_all_its_gpus_or_none() -> None:
    scheduler = Scheduler()
    scheduler.set_tenant(0, "single", ("g1",), request_milli=500, limit_milli=1000)
    scheduler.set_tenant(0, "gang", ("g0", "g1"), request_milli=500, limit_milli=1000)
    scheduler.want(1, "single")
    assert granted(scheduler, 1).tenant == "single"
    scheduler.want(2, "gang")
    assert {action.tenant for action in scheduler.tick(2)} == {"single"}
    assert held_grant_id(scheduler, "gang") is None
    scheduler.tick(100 * MS + 1)
    scheduler.drained(101 * MS, "single", wanting=True)
    assert granted(scheduler, 101 * MS).tenant == "gang"


def test_a_gpu_kept_for_a_gang_is_lent_to_who_is_done_in_time() -> None:
    scheduler = Scheduler()
    scheduler.set_tenant(0, "gang", ("g0", "g1"), request_milli=500, limit_milli=1000)
    scheduler.set_tenant(0, "right", ("g1",), request_milli=500, limit_milli=1000)
    scheduler.set_tenant(0, "left", ("g0",), request_milli=0, limit_milli=1000)
    scheduler.want(1, "right")
    granted(scheduler, 1)
    scheduler.want(2, "gang")
    scheduler.tick(2)
    scheduler.want(4 * MS, "left")
    lent = granted(scheduler, 4 * MS)
    assert lent.tenant == "left"
    assert 4 * MS + lent.quantum_ns <= 10 * MS + 1, "the holder that the gang waits for keeps a shortest quantum"


def test_a_second_process_may_join_with_what_is_left_of_the_quantum() -> None:
    scheduler = scheduler_with(("a", 500, 700))
    scheduler.want(1, "a")
    grant = granted(scheduler, 1)
    assert scheduler.remaining_grant(40 * MS + 1, "a") == TokenGrant("a", grant.grant_id, 60 * MS, True)
    assert scheduler.remaining_grant(100 * MS + 1, "a") is None


def test_others_count_as_contending_for_a_while_after_they_left() -> None:
    scheduler = scheduler_with(("a", 500, 1000), ("b", 500, 1000))
    scheduler.want(1, "b")
    granted(scheduler, 1)
    scheduler.drained(10 * MS, "b", wanting=False)
    assert scheduler.contended(10 * MS, "a")
    assert not scheduler.contended(10 * MS + Parameters().quiet_ns, "a")


def test_time_that_goes_back_counts_as_no_time() -> None:
    scheduler = scheduler_with(("a", 500, 1000))
    scheduler.want(5 * S, "a")
    granted(scheduler, 5 * S)
    scheduler.drained(1 * S, "a", wanting=False)
    assert scheduler.usage(0, "a").held_ns == 0


@pytest.mark.parametrize(("request_milli", "limit_milli"), [(-1, 5), (600, 500), (500, 1001)])
def test_impossible_rates_are_refused(request_milli: int, limit_milli: int) -> None:
    with pytest.raises(ValueError, match="request <= limit <= 1000"):
        Scheduler().set_tenant(0, "a", ("g0",), request_milli=request_milli, limit_milli=limit_milli)


def test_a_tenant_never_moves() -> None:
    scheduler = scheduler_with(("a", 500, 1000))
    with pytest.raises(ValueError, match="never moves"):
        scheduler.set_tenant(1, "a", ("g1",), request_milli=500, limit_milli=1000)


def test_a_config_that_contradicts_itself_is_refused() -> None:
    with pytest.raises(ValueError, match="quantum_min_ns"):
        Parameters(quantum_min_ns=2, quantum_max_ns=1)
    with pytest.raises(ValueError, match="grace_ns is 0"):
        Parameters(grace_ns=0)


def test_a_holder_whose_turn_it_is_again_goes_on_without_draining() -> None:
    scheduler = scheduler_with(("a", 900, 1000), ("b", 100, 1000))
    scheduler.want(1, "b")
    scheduler.want(1, "a")
    assert granted(scheduler, 1).tenant == "a"
    scheduler.drained(100 * MS, "a", wanting=True)
    assert granted(scheduler, 100 * MS).tenant == "b"
    scheduler.drained(200 * MS, "b", wanting=True)
    first = granted(scheduler, 200 * MS)
    assert first.tenant == "a"
    look = 297 * MS
    assert scheduler.next_deadline() == look
    assert scheduler.tick(look) == [TokenGrant("a", first.grant_id, 103_000_000, True)]
    assert scheduler.remaining_grant(350 * MS, "a") == TokenGrant("a", first.grant_id, 50 * MS, True)
    assert scheduler.tick(350 * MS) == []


@pytest.mark.promise("time-alone-uninterrupted")
def test_a_holder_whose_neighbour_has_gone_goes_on_without_end() -> None:
    scheduler = scheduler_with(("a", 500, 1000), ("b", 500, 1000))
    scheduler.want(1, "a")
    granted(scheduler, 1)
    scheduler.want(2, "b")
    scheduler.tick(2)
    scheduler.drained(10 * MS, "a", wanting=True)
    assert granted(scheduler, 10 * MS).tenant == "b"
    scheduler.drained(20 * MS, "b", wanting=False)
    renewed: list[TokenGrant] = [granted(scheduler, 20 * MS)]
    while (due := scheduler.next_deadline()) is not None and due < 30 * S:
        renewed += [action for action in scheduler.tick(due) if isinstance(action, TokenGrant)]
    assert {(grant.tenant, grant.grant_id) for grant in renewed} == {("a", renewed[0].grant_id)}
    assert len(renewed) < 20
    assert renewed[-1].quantum_ns == 0
    scheduler.want(30 * S, "b")
    assert scheduler.tick(30 * S), "its grant has an end again"
    scheduler.drained(30 * S + 100 * MS, "a", wanting=True)
    assert granted(scheduler, 30 * S + 100 * MS).tenant == "b"


def test_a_tenant_that_was_preempted_and_is_suspended_since_does_not_starve() -> None:
    scheduler = scheduler_with(("a", 400, 1000), ("b", 400, 1000))
    for name in "ab":
        scheduler.set_connected(0, name, connected=True)
        scheduler.want(1, name)
        scheduler.tick(1)
    scheduler.silent(50 * MS, "a", expected_ns=3 * S)
    for moment in range(100 * MS, 3_200 * MS, 10 * MS):
        if moment == 2 * S:
            scheduler.want(moment, "a")
            assert list(scheduler._waiting._preempted) == ["a"]
        for action in scheduler.tick(moment):
            if isinstance(action, TokenGrant):
                scheduler.drained(moment, action.tenant, wanting=True)
    assert scheduler._waiting._preempted == {}


def test_a_tenant_that_is_no_longer_interactive_hurries_no_more() -> None:
    scheduler = scheduler_with(("a", 400, 1000), ("b", 400, 1000))
    scheduler.set_tenant(0, "a", ("g0",), request_milli=400, limit_milli=1000, interactive=True)
    scheduler.set_connected(0, "a", connected=True)
    scheduler.want(0, "b")
    granted(scheduler, 0)
    scheduler.want(500 * MS, "a")
    assert scheduler._tenants["a"].hurries
    scheduler.set_tenant(500 * MS, "a", ("g0",), request_milli=400, limit_milli=1000, interactive=False)
    assert not scheduler._tenants["a"].hurries
    scheduler.tick(500 * MS)
    scheduler.drained(600 * MS, "b", wanting=True)
    assert not granted(scheduler, 600 * MS).prompt


def two_that_share(request: int = 500) -> Scheduler:
    """Return a scheduler in which `a` holds until 100 ms after moment 1, and `b` waits for its GPU."""
    scheduler = scheduler_with(("a", request, 1000), ("b", 1000 - request, 1000))
    for name in "ab":
        scheduler.want(1, name)
        scheduler.tick(1)
    return scheduler


def test_a_holder_that_announces_its_end_yields_before_it_and_pays_until_it_has_drained() -> None:
    scheduler = two_that_share()
    scheduler.draining(100 * MS, "a", expected_ns=3 * MS)
    assert scheduler.tick(100 * MS) == []
    assert scheduler.next_deadline() == 101_500_000
    assert granted(scheduler, 101_500_000).tenant == "b"
    scheduler.draining(102_600_000, "b", expected_ns=0)
    assert scheduler.tick(102_600_000) == [], "one at a time"
    assert scheduler.usage(105 * MS, "b").held_ns == 0
    scheduler.drained(105 * MS, "a", wanting=True)
    assert scheduler.usage(105 * MS, "a").held_ns == 105 * MS - 1
    assert scheduler.tick(105 * MS) == [], "its own turn is the next"
    assert scheduler.usage(110 * MS, "b").held_ns == 5 * MS


@pytest.mark.promise("time-one-yields")
def test_only_one_tenant_at_a_time_yields_a_gpu() -> None:
    scheduler = scheduler_with(*((name, 300, 1000) for name in "abc"))
    for name in "abc":
        scheduler.want(1, name)
        scheduler.tick(1)
    scheduler.draining(100 * MS, "a", expected_ns=0)
    assert granted(scheduler, 100 * MS).tenant == "b"
    scheduler.draining(101 * MS, "b", expected_ns=0)
    assert scheduler.tick(101 * MS) == [], "the work of a and b is on the GPU"
    scheduler.drained(102 * MS, "a", wanting=True)
    assert granted(scheduler, 102 * MS).tenant == "c"


def test_nobody_joins_one_whose_last_work_is_ending() -> None:
    scheduler = two_that_share()
    assert scheduler.remaining_grant(50 * MS, "a") is not None
    scheduler.draining(50 * MS, "a", expected_ns=20 * MS)
    assert scheduler.remaining_grant(50 * MS, "a") is None


def test_a_holder_that_announces_its_end_and_never_drains_is_preempted_and_pays() -> None:
    scheduler = two_that_share()
    scheduler.draining(50 * MS, "a", expected_ns=0)
    assert granted(scheduler, 50 * MS).tenant == "b"
    end = 100 * MS + 1 + 1 * S
    assert scheduler.next_deadline() is not None
    assert Preemption("a", 1) in scheduler.tick(end)
    assert scheduler.usage(end + 1 * S, "b").held_ns == 1 * S


@pytest.mark.promise("time-one-yields")
def test_a_draining_holder_whose_turn_is_next_again_does_not_yield() -> None:
    scheduler = two_that_share(900)
    scheduler.drained(100 * MS, "a", wanting=True)
    assert granted(scheduler, 100 * MS).tenant == "b"
    scheduler.drained(200 * MS, "b", wanting=True)
    assert granted(scheduler, 200 * MS).tenant == "a"
    scheduler.draining(210 * MS, "a", expected_ns=0)
    assert scheduler.tick(210 * MS) == []


def test_a_holder_that_runs_alone_is_metered_once_another_tenant_is_present() -> None:
    scheduler = scheduler_with(("a", 500, 1000), ("b", 500, 1000))
    scheduler.want(1, "a")
    grant = granted(scheduler, 1)
    scheduler.set_connected(5 * MS, "b", connected=True)
    assert scheduler.tick(5 * MS) == [TokenGrant("a", grant.grant_id, 0, True)]
    scheduler.set_connected(6 * MS, "b", connected=True)
    assert scheduler.tick(6 * MS) == []


@pytest.mark.parametrize("limit", [1000, 700])
def test_a_preempted_holder_that_wants_more_gets_what_is_idle(limit: int) -> None:
    scheduler = scheduler_with(("a", 500, limit), ("b", 500, 1000))
    for name in "ab":
        scheduler.want(1, name)
        scheduler.tick(1)
    now = 2 * S
    assert Preemption("a", 1) in scheduler.tick(now)
    scheduler.want(now, "a")
    assert scheduler.tick(now) == []
    scheduler.drained(now + 5 * S, "b", wanting=False)
    now += 5 * S if limit == 1000 else 11 * S  # so long its debt keeps it above its ceiling
    assert granted(scheduler, now).tenant == "a"
    assert not scheduler.displaced("a")
    scheduler.want(now + 1 * MS, "b")
    scheduler.drained(now + 1 * MS, "a", wanting=False)
    assert granted(scheduler, now + 1 * MS).tenant == "b"


@pytest.mark.promise("time-overdue-again")
def test_a_preempted_tenant_that_wants_more_is_not_starved_by_busy_neighbours() -> None:
    scheduler = two_that_share()
    now = 2 * S
    assert Preemption("a", 1) in scheduler.tick(now)
    scheduler.want(now, "a")
    for _ in range(103):
        now += 100 * MS
        scheduler.drained(now, "b", wanting=True)
        if "a" in {action.tenant for action in scheduler.tick(now) if isinstance(action, TokenGrant)}:
            break
    assert held_grant_id(scheduler, "a") not in (None, 1), "within the ten seconds that can be owed and a quantum"
    assert not scheduler.displaced("a")


def test_a_holder_whose_gate_is_closed_is_told_no_new_terms_when_another_tenant_connects() -> None:
    """After other tenants were granted, a hook could mistake new terms for a renewal."""
    scheduler = scheduler_with(("a", 500, 1000), ("b", 500, 1000))
    scheduler.want(1, "a")
    granted(scheduler, 1)
    scheduler.draining(2, "a", expected_ns=20 * MS)
    scheduler.set_connected(3, "b", connected=True)
    assert scheduler.tick(3) == []


def test_a_turn_that_ends_for_a_gang_has_ended_when_the_actions_are_known() -> None:
    """After tick() nothing may be due at its moment, also if it shortens a turn for a gang. Otherwise the caller's
    timer fires again at once.
    """
    scheduler = scheduler_with(("single", 300, 1000))
    scheduler.set_tenant(0, "other", ("g1",), request_milli=300, limit_milli=1000)
    for name in ("single", "other"):
        scheduler.want(1, name)
    scheduler.tick(1)
    scheduler.set_tenant(2 * S, "gang", ("g0", "g1"), request_milli=300, limit_milli=1000)
    for name in ("single", "other"):
        scheduler.drained(2 * S, name, wanting=True)
    scheduler.tick(2 * S)
    scheduler.want(2 * S, "gang")
    scheduler.tick(2 * S)
    now = 2 * S + 30 * MS  # by now the gang has some credit, and the drain below frees one of its GPUs
    scheduler.drained(now, "single", wanting=False)
    actions = scheduler.tick(now)
    assert [action.tenant for action in actions if isinstance(action, TokenRevocation)] == ["other"]
    due = scheduler.next_deadline()
    assert due is not None
    assert due > now


@pytest.mark.promise("time-stall")
@pytest.mark.parametrize("first_row", ["a", "b"])
def test_when_the_agent_stalls_one_that_yields_pays_to_its_end_and_the_next_for_its_own_turn(first_row: str) -> None:
    scheduler = scheduler_with(("0", 900, 1000), ("1", 100, 1000), gpus=("g1",))
    for name in sorted("ab", key=first_row.__ne__):
        scheduler.set_tenant(0, name, ("g0",), request_milli={"a": 900, "b": 100}[name], limit_milli=1000)
    for name in "ab":
        scheduler.want(1, name)
    assert granted(scheduler, 1).tenant == "a"
    now = 1 + 100 * MS
    for name in "01":
        scheduler.want(now, name)
    assert granted(scheduler, now).tenant == "0", "whose turn on another GPU outlasts the stall"
    scheduler.draining(now, "a", expected_ns=1 * MS)
    assert granted(scheduler, now).tenant == "b"
    late = now + 60 * MS
    scheduler.stalled(late)
    assert scheduler.usage(late, "a").held_ns == 101 * MS
    assert scheduler.usage(late, "b").held_ns == 29 * MS
    for name in "ab":
        scheduler.drained(late + 1 * MS, name, wanting=False)
    assert scheduler.usage(late + 1 * MS, "a").held_ns == 102 * MS, "its end was unknown before"
    books = scheduler.gpu_time(late + 1 * MS, "g0")
    assert books is not None
    assert (books.held_ns, books.stalled_ns) == (131 * MS, 30 * MS)


@pytest.mark.promise("time-interactive")
def test_of_interactive_tenants_that_wake_the_first_to_wake_goes_first() -> None:
    scheduler = scheduler_with(("busy", 200, 1000))
    for name in "ab":
        scheduler.set_tenant(0, name, ("g0",), request_milli=400, limit_milli=1000, interactive=True)
    scheduler.want(1 * S, "busy")
    granted(scheduler, 1 * S)
    scheduler.want(1 * S + 1, "b")
    scheduler.want(1 * S + 2, "a")
    scheduler.tick(1 * S + 2)
    scheduler.drained(1 * S + 3, "busy", wanting=True)
    assert granted(scheduler, 1 * S + 3).tenant == "b"


@pytest.mark.promise("time-surcharged-turns")
def test_a_tenant_that_was_surcharged_takes_exclusive_turns_for_a_minute() -> None:
    """NVML reported more busy time than the tenant's hooks did. So the hooks' counters, by which co-running is
    measured, are not trusted.
    """
    scheduler = Scheduler(Parameters(sharing=Sharing.CONCURRENT))

    def concurrent_at(now: int) -> bool:
        scheduler.want(now, "a")
        [grant] = scheduler.tick(now)
        assert isinstance(grant, TokenGrant)
        scheduler.drained(now, "a", wanting=False)
        return grant.concurrent

    for name in ("a", "b"):
        scheduler.set_tenant(0, name, ("gpu",), request_milli=500, limit_milli=1000)
        scheduler.set_concurrent(0, name, concurrent=True)
        scheduler.set_connected(0, name, connected=True)
    assert concurrent_at(S)
    scheduler.surcharge(2 * S, "a", MS)
    assert not concurrent_at(3 * S)
    assert scheduler.next_deadline() == 62 * S
    assert not concurrent_at(62 * S - 1)
    assert concurrent_at(63 * S)
