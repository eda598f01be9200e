"""Turn history: it has no gap, and keeps spans for as long as samples are read."""

from __future__ import annotations

from sharepod.timeshare import Scheduler, TurnSpan
from sharepod.timeshare.turn_history import TurnHistory

MS = 1_000_000
S = 1000 * MS


def test_spans_that_touch_are_one_and_what_was_told_is_not_told_again() -> None:
    history = TurnHistory(0)
    history.add(10, 20, overdue=False)
    history.add(15, 30, overdue=False)
    history.add(30, 40, overdue=True)
    history.add(35, 40, overdue=True)
    assert history.spans(50).spans == (TurnSpan(10, 30, overdue=False), TurnSpan(30, 40, overdue=True))


def test_what_no_sample_can_cover_any_more_is_forgotten() -> None:
    history = TurnHistory(0)
    history.add(0, 1 * S, overdue=False)
    history.add(20 * S, 21 * S, overdue=False)
    turns = history.spans(21 * S)
    assert turns.since > 1 * S
    assert turns.spans == (TurnSpan(20 * S, 21 * S, overdue=False),)


def due(scheduler: Scheduler) -> int:
    moment = scheduler.next_deadline()
    assert moment is not None
    return moment


def both(scheduler: Scheduler) -> None:
    for name in ("a", "b"):
        scheduler.set_tenant(0, name, ["g0"], request_milli=500, limit_milli=1000)
        scheduler.set_connected(0, name, connected=True)
        scheduler.want(0, name)
    scheduler.tick(0)


def test_turns_are_from_grant_to_drain_and_overdue_once_others_hold() -> None:
    scheduler = Scheduler()
    both(scheduler)
    now = 0
    while not scheduler.displaced("a"):
        now = due(scheduler)
        scheduler.tick(now)
    scheduler.drained(now + 50 * MS, "a", wanting=False)
    held, overdue = scheduler.turns(now + 90 * MS, "a").spans
    assert (held.begin, held.end, held.overdue) == (0, now, False)
    assert (overdue.begin, overdue.end, overdue.overdue) == (now, now + 50 * MS, True)
    (of_the_other,) = scheduler.turns(now + 90 * MS, "b").spans
    assert (of_the_other.begin, of_the_other.overdue) == (now, False)


def test_a_holder_may_work_on_while_the_agent_is_held_up() -> None:
    scheduler = Scheduler()
    both(scheduler)
    deadline = due(scheduler)
    scheduler.stalled(deadline + 5 * S)
    assert scheduler.turns(deadline + 5 * S, "a").spans == (TurnSpan(0, deadline + 5 * S, overdue=False),)
