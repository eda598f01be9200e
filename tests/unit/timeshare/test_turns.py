"""Order and length of turns in single situations."""

from __future__ import annotations

from collections import Counter

import pytest
from sharepod.timeshare import Preemption, Scheduler, TokenGrant

MS = 1_000_000
S = 1_000_000_000
TARGET = 300 * MS


def scheduler_with(**requests: int) -> Scheduler:
    scheduler = Scheduler()
    for name, request in requests.items():
        scheduler.set_tenant(0, name, ("g0",), request_milli=request, limit_milli=1000)
    return scheduler


def granted(scheduler: Scheduler, now: int) -> TokenGrant:
    [grant] = [action for action in scheduler.tick(now) if isinstance(action, TokenGrant)]
    return grant


def shares(scheduler: Scheduler, now: int, holder: str) -> dict[str, float]:
    """Return each tenant's share of the next ten seconds, by name. The holder drains every 50 ms and wants the token
    again.
    """
    turns = Counter[str]()
    for _ in range(200):
        turns[holder] += 1
        now += 50 * MS
        scheduler.drained(now, holder, wanting=True)
        holder = granted(scheduler, now).tenant
    return {name: count / 200 for name, count in turns.items()}


@pytest.mark.promise("time-turn-soon-beside")
@pytest.mark.parametrize(
    ("waited", "first", "quantum"),
    [(199 * MS, "waker", TARGET * 500 // 600), (200 * MS, "owed", TARGET * 100 // 600 // 3)],
)
def test_a_tenant_that_has_been_owed_time_for_long_goes_before_one_that_wakes_for_a_third_of_its_turn(
    waited: int, first: str, quantum: int
) -> None:
    scheduler = scheduler_with(holder=400, owed=100, waker=500)
    scheduler.want(0, "holder")
    granted(scheduler, 0)
    scheduler.want(0, "owed")
    scheduler.want(150 * MS, "waker")
    scheduler.drained(waited, "holder", wanting=False)
    grant = granted(scheduler, waited)
    assert (grant.tenant, grant.quantum_ns) == (first, min(quantum, 100 * MS))


@pytest.mark.promise("time-wake-up")
def test_one_that_has_waited_for_long_and_is_owed_little_goes_after_one_that_wakes() -> None:
    scheduler = scheduler_with(holder=400, lent=100, waker=500)
    scheduler.want(0, "holder")
    granted(scheduler, 0)
    scheduler.want(0, "lent")
    scheduler.drained(100 * MS, "holder", wanting=True)
    assert granted(scheduler, 100 * MS).tenant == "lent"
    scheduler.drained(200 * MS, "lent", wanting=True)  # it drains later than its turn ended, so it owes 0.8 s
    assert granted(scheduler, 200 * MS).tenant == "holder"
    scheduler.want(1_050 * MS, "waker")
    scheduler.drained(1_100 * MS, "holder", wanting=False)
    assert granted(scheduler, 1_100 * MS).tenant == "waker"


@pytest.mark.promise("time-turn-soon-beside")
def test_a_gang_that_has_been_owed_time_for_long_goes_before_one_that_wakes() -> None:
    scheduler = scheduler_with(holder=400, waker=500)
    scheduler.set_tenant(0, "gang", ("g0", "g1"), request_milli=100, limit_milli=1000)
    scheduler.want(0, "holder")
    granted(scheduler, 0)
    scheduler.want(0, "gang")
    scheduler.want(150 * MS, "waker")
    scheduler.drained(200 * MS, "holder", wanting=False)
    grant = granted(scheduler, 200 * MS)
    assert (grant.tenant, grant.quantum_ns) == ("gang", TARGET * 100 // 600 // 3)


@pytest.mark.promise("time-overdue-again")
def test_a_tenant_that_drained_after_its_rescue_waits_no_longer_for_the_next() -> None:
    scheduler = scheduler_with(hangs=500, busy=500)
    scheduler.want(1, "hangs")
    scheduler.want(1, "busy")
    assert granted(scheduler, 1).tenant == "busy"
    now, waits = 1, list[int]()
    for _ in range(2):
        # 1. The tenant has its turn, and hangs.
        holder = "busy"
        while holder != "hangs":
            now += 100 * MS
            scheduler.drained(now, "busy", wanting=True)
            holder = granted(scheduler, now).tenant
        while not any(isinstance(action, Preemption) for action in scheduler.tick(now)):
            now += 100 * MS
        # 2. It wants more time, and gets a turn although it owes.
        scheduler.want(now, "hangs")
        wanted = now
        holder = "busy"
        while holder != "hangs":
            now += 100 * MS
            scheduler.drained(now, "busy", wanting=True)
            holder = granted(scheduler, now).tenant
        waits.append(now - wanted)
        # 3. It drains.
        scheduler.drained(now, "hangs", wanting=True)
        scheduler.tick(now)
    assert waits[1] <= waits[0] + 100 * MS <= 10_300 * MS


@pytest.mark.promise("time-overdue-again", "time-debt")
@pytest.mark.parametrize("drains_s", [5, 12])
def test_a_tenant_that_waited_while_it_was_overdue_pays_what_it_owes_once_it_has_drained(drains_s: int) -> None:
    """A preempted tenant that does not drain gets a turn after 12 s in spite of its debt. `long` drains before that, so
    it must pay its debt.
    """
    scheduler = scheduler_with(long=50, busy=900)
    scheduler.want(1, "long")
    assert granted(scheduler, 1).tenant == "long"
    scheduler.want(1, "busy")
    assert Preemption("long", 1) in scheduler.tick(2 * S)
    scheduler.want(2 * S, "long")
    now, holders = 2 * S - 50 * MS, set[str]()
    while now < 40 * S:
        now += 100 * MS
        scheduler.drained(now, "busy", wanting=True)
        holders.add(granted(scheduler, now).tenant)
        if now < drains_s * S < now + 100 * MS:
            scheduler.tick(drains_s * S)
            scheduler.drained(drains_s * S, "long", wanting=True)
            scheduler.tick(drains_s * S)
    assert holders == {"busy"}, "three seconds at 0.05 are what it is guaranteed of a minute"


@pytest.mark.promise("time-borrowed-free")
@pytest.mark.parametrize("request_milli", [0, 300])
@pytest.mark.parametrize("asleep", [False, True])
def test_one_that_ran_alone_is_lent_as_much_as_one_that_comes(request_milli: int, asleep: bool) -> None:
    scheduler = scheduler_with(early=request_milli, late=request_milli)
    scheduler.want(0, "early")
    assert granted(scheduler, 0).quantum_ns == 0
    if asleep:  # the tenant is asleep when the other one arrives, and wakes soon after that
        scheduler.drained(60 * S, "early", wanting=False)
        scheduler.want(61 * S, "late")
        holder = granted(scheduler, 61 * S).tenant
        scheduler.want(62 * S, "early")
    else:
        scheduler.want(62 * S, "late")
        scheduler.tick(62 * S)
        holder = "early"
    assert shares(scheduler, 62 * S, holder) == pytest.approx({"early": 0.5, "late": 0.5}, abs=0.04)


@pytest.mark.promise("time-lent")
@pytest.mark.parametrize(("changed_from", "changed_to"), [(0, 300), (300, 0)])
def test_one_that_becomes_best_effort_or_ceases_to_be_is_lent_as_much_as_others_of_its_kind(
    changed_from: int, changed_to: int
) -> None:
    scheduler = scheduler_with(changed=changed_from, other=changed_to)
    alone, comes = ("changed", "other") if changed_from else ("other", "changed")
    scheduler.want(0, alone)
    granted(scheduler, 0)
    now = 60 * S
    scheduler.want(now, comes)
    scheduler.tick(now)
    scheduler.set_tenant(now, "changed", ("g0",), request_milli=changed_to, limit_milli=1000)
    assert shares(scheduler, now, alone) == pytest.approx({"changed": 0.5, "other": 0.5}, abs=0.04)


@pytest.mark.promise("time-lent")
@pytest.mark.parametrize("request_milli", [0, 300])
@pytest.mark.parametrize("answer", ["drained", "draining", "wants"])
def test_one_that_was_suspended_for_long_claims_nothing_of_what_was_lent_meanwhile(
    request_milli: int, answer: str
) -> None:
    scheduler = scheduler_with(stopped=request_milli, other=request_milli)
    scheduler.want(0, "stopped")
    granted(scheduler, 0)
    scheduler.want(1 * MS, "other")
    scheduler.tick(1 * MS)
    scheduler.silent(2 * MS, "stopped", expected_ns=0)
    assert granted(scheduler, 2 * MS).tenant == "other"
    scheduler.drained(50 * MS, "other", wanting=False)
    scheduler.want(2 * S, "other")
    assert granted(scheduler, 2 * S).quantum_ns == 0
    if answer == "draining":
        scheduler.draining(60 * S, "stopped", expected_ns=0)
    if answer == "wants":
        scheduler.want(60 * S, "stopped")
    else:
        scheduler.drained(60 * S, "stopped", wanting=True)
    scheduler.tick(60 * S)
    assert shares(scheduler, 60 * S, "other") == pytest.approx({"stopped": 0.5, "other": 0.5}, abs=0.04)
