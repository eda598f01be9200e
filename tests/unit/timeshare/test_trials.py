"""Trials of co-running: whether tenants get more work done at the same time than in turns."""

from __future__ import annotations

from sharepod.timeshare import Account, Parameters
from sharepod.timeshare.tenant import TokenTenant
from sharepod.timeshare.trials import TRIAL_NS, Trials

MS = 1_000_000
S = 1_000 * MS
LEAST, GAINS = 1.05, 1.15


def tenant(name: str) -> TokenTenant:
    """Return a tenant with half of a GPU."""
    account = Account(0, Parameters(), request_milli=500, limit_milli=1000)
    return TokenTenant(name, ("g",), account)


def worked(each: TokenTenant, launches: int, held_ns: int, *, together: bool = False) -> None:
    """Let a tenant hold for `held_ns` and make `launches`. `together`: while another tenant holds too."""
    each.progress.launches += launches
    each.account.held_ns += held_ns
    if together:
        each.progress.shared_launches += launches
        each.progress.shared_ns += 2 * held_ns
        each.account.co_run_ns += held_ns


def tried(launches: int) -> tuple[Trials, list[TokenTenant]]:
    """Return a trial that begins after one second of turns, in which each of two tenants held for 0.5 s and made
    `launches` launches."""
    pair, trials = [tenant("a"), tenant("b")], Trials()
    trials.turns(0, pair)
    for each in pair:
        worked(each, launches, 500 * MS)
    assert not trials.may_begin(S - 1, pair)
    assert trials.may_begin(S, pair)
    trials.begin(S, pair)
    return trials, pair


def test_tenants_that_launch_as_fast_at_once_as_while_they_held_hold_on_at_once() -> None:
    trials, pair = tried(100)
    for each in pair:
        worked(each, 53, TRIAL_NS // 2, together=True)
    assert trials.goes_on(S + TRIAL_NS - 1, pair, LEAST, GAINS), "not over yet"
    assert trials.goes_on(S + TRIAL_NS, pair, LEAST, GAINS)
    assert trials.proven


def test_busy_tenants_take_turns_again_and_the_next_trial_is_later_each_time() -> None:
    trials, pair = tried(100)
    for each in pair:
        worked(each, 26, TRIAL_NS // 2, together=True)
    now, waits = S + TRIAL_NS, []
    assert not trials.goes_on(now, pair, LEAST, GAINS)
    for _ in range(8):
        trials.end(now, pair)
        trials.turns(now, pair)
        for each in pair:
            worked(each, 100, 500 * MS)
        due_at = trials.due_at()
        assert due_at is not None
        waits.append(due_at - now)
        now = due_at
        trials.begin(now, pair)
    assert waits[0] >= 8 * TRIAL_NS
    assert waits == sorted(waits)
    assert waits[-1] == 80 * S


def test_a_gain_that_has_changed_by_a_third_ends() -> None:
    trials, pair = tried(100)
    for each in pair:
        worked(each, 53, TRIAL_NS // 2, together=True)
    now = S + TRIAL_NS
    assert trials.goes_on(now, pair, LEAST, GAINS)
    for each in pair:
        worked(each, 128, S // 2, together=True)
    assert not trials.goes_on(now + S, pair, LEAST, GAINS), "1.25 of 2.0"


def test_tenants_that_have_held_for_short_times_or_launched_nothing_are_not_tried() -> None:
    pair, trials = [tenant("a"), tenant("b")], Trials()
    trials.turns(0, pair)
    worked(pair[0], 100, 500 * MS)
    worked(pair[1], 100, 99 * MS)
    assert not trials.may_begin(S, pair)
    worked(pair[1], 0, 1 * MS)
    assert trials.may_begin(S, pair)
    assert not trials.may_begin(S, [*pair, tenant("c")])
