"""Keeping a GPU idle for a pausing tenant: when it begins, which tenant pays, when it ends."""

from __future__ import annotations

import pytest
from sharepod.timeshare import AccountSnapshot, Scheduler, TokenGrant

MS = 1_000_000
S = 1_000_000_000


class Pair:
    """Two tenants: `sleeper` (0.7) has paused for 5 ms ten times; `slow` (0.3) has overrun a turn by 40 ms and is ahead
    of its share. At `now`, `sleeper` has just drained with credit, and `slow` waits."""

    def __init__(self, *, preempted: bool = False, dies: str = "") -> None:
        self.scheduler = scheduler = Scheduler()
        scheduler.set_tenant(0, "sleeper", ("g0",), request_milli=700, limit_milli=1000)
        scheduler.set_tenant(0, "slow", ("g0",), request_milli=300, limit_milli=1000)
        self.now = 1
        self.holder: str | None = None
        for name in ("sleeper", "slow"):
            scheduler.set_connected(self.now, name, connected=True)
        scheduler.want(self.now, "slow")
        assert self.granted() == "slow"
        self.wait(1)
        scheduler.want(self.now, "sleeper")
        if preempted:
            self.wait(99)
            scheduler.want(self.now, "slow")
            self.now += 1 * S
            scheduler.tick(self.now)
            scheduler.want(self.now, "slow")
            self.holder = "sleeper"
        elif dies:
            self.wait(138)
            scheduler.silent(self.now, "slow", expected_ns=2 * MS)
            self.now += (1 if "before" in dies else 3) * MS
            self.granted()
            scheduler.draining(self.now, "slow", expected_ns=MS if "before" in dies else 0)
            self.now += MS if "before" in dies else 0
            scheduler.drained(self.now, "slow", wanting=True)
        else:
            self.wait(140)
            self.drained("slow", wanting=True)
        for step in range(11):
            assert self.granted() == "sleeper"
            self.wait(5)
            self.drained("sleeper", wanting=False)
            if step < 10:
                scheduler.unwant(self.now, "slow")
                self.wait(5)
                scheduler.want(self.now, "sleeper")
                scheduler.want(self.now, "slow")

    def wait(self, ms: float) -> None:
        """Let time pass. No other tenant may be granted in it."""
        self.now += int(ms * MS)
        holder = self.holder
        self.granted()
        assert self.holder == holder

    def granted(self) -> str | None:
        """Return the tenant that holds now. None if there is none."""
        for action in self.scheduler.tick(self.now):
            if isinstance(action, TokenGrant):
                self.holder = action.tenant
        return self.holder

    def drained(self, name: str, *, wanting: bool) -> None:
        """Let a tenant drain. `wanting`: it wants the token again."""
        self.holder = None
        self.scheduler.drained(self.now, name, wanting=wanting)


def test_a_short_pause_is_waited_through_and_paid_for_by_the_tenant_that_pauses() -> None:
    pair = Pair()
    assert pair.granted() is None
    before = pair.scheduler.snapshot(pair.now, "sleeper")
    pair.wait(5)
    pair.scheduler.want(pair.now, "sleeper")
    assert pair.granted() == "sleeper"
    after = pair.scheduler.snapshot(pair.now, "sleeper")
    assert after.assured == before.assured - 5 * MS * (1000 - 700)
    assert after.held_ns == before.held_ns, "idle time is not time held"
    assert pair.scheduler.usage(pair.now, "sleeper").anticipated_ns == 5 * MS


@pytest.mark.parametrize("back", ["before its work has ended", "after it was suspended"])
def test_a_tenant_that_plays_dead_while_its_last_kernel_runs_is_known_to_outstay_its_turns(back: str) -> None:
    pair = Pair(dies=back)
    assert pair.granted() is None, "the GPU is kept idle for the pausing tenant"


def test_a_tenant_that_stays_away_is_waited_for_until_the_window_ends() -> None:
    pair = Pair()
    assert pair.granted() is None
    until = pair.scheduler.next_deadline()
    assert until is not None
    assert 5 * MS < until - pair.now <= 50 * MS
    pair.now = until
    assert pair.granted() == "slow"
    idle = pair.scheduler.usage(pair.now, "sleeper").anticipated_ns
    pair.now += 20 * MS
    assert pair.scheduler.usage(pair.now, "sleeper").anticipated_ns == idle


def test_nobody_pays_for_a_gpu_that_nobody_waits_for() -> None:
    pair = Pair()
    assert pair.granted() is None
    pair.wait(1)
    pair.scheduler.unwant(pair.now, "slow")
    pair.wait(0)
    pair.wait(10)
    assert pair.scheduler.usage(pair.now, "sleeper").anticipated_ns == 1 * MS


def test_a_tenant_whose_processes_are_gone_is_not_waited_for() -> None:
    pair = Pair()
    assert pair.granted() is None
    pair.scheduler.set_connected(pair.now, "sleeper", connected=False)
    assert pair.granted() == "slow"


@pytest.mark.parametrize("what", ["removed", "resized"])
def test_a_tenant_that_changes_while_it_is_waited_for_leaves_no_gpu_idle(what: str) -> None:
    pair = Pair()
    assert pair.granted() is None
    if what == "removed":
        pair.scheduler.remove(pair.now, "sleeper")
    else:
        pair.scheduler.set_tenant(pair.now, "sleeper", ("g0",), request_milli=0, limit_milli=1000)
    assert pair.granted() == "slow"


def test_a_tenant_that_was_preempted_is_known_to_outstay_its_turns() -> None:
    """A hold of `slow` may never end, because it was preempted and may launch again before it has drained. So the GPU
    is kept idle instead.
    """
    pair = Pair(preempted=True)
    assert pair.granted() is None
    pair.wait(5)
    pair.scheduler.want(pair.now, "sleeper")
    assert pair.granted() == "sleeper"


@pytest.mark.promise("time-exact-books")
def test_nothing_is_charged_for_waiting_while_the_last_work_of_another_ends() -> None:
    pair = Pair()
    scheduler = pair.scheduler
    assert pair.granted() is None
    credit = AccountSnapshot(pair.now, 300, 100_000 * MS, 0, 0, 0, 0, 0, 0)
    scheduler.set_tenant(pair.now, "quick", ("g0",), request_milli=300, limit_milli=1000, resumed=credit)
    scheduler.want(pair.now, "quick")
    assert pair.granted() == "quick"
    pair.wait(1)
    before = scheduler.usage(pair.now, "sleeper").anticipated_ns
    scheduler.draining(pair.now, "quick", expected_ns=1 * MS)
    pair.wait(0)
    pair.wait(1)
    pair.drained("quick", wanting=False)
    assert pair.granted() is None
    assert scheduler.usage(pair.now, "sleeper").anticipated_ns == before
    pair.wait(1)
    assert scheduler.usage(pair.now, "sleeper").anticipated_ns == before + 1 * MS, "from then on it is waited for"
