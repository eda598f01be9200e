"""Log of turns: the entries that the tokens add, and its bound."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from sharepod import protocol
from sharepod.agent.shares import turn_log
from sharepod.agent.shares.tokens import Tokens
from sharepod.agent.shares.turn_log import LoggedTurn, TurnLog
from sharepod.timeshare import Parameters
from unit.agent.shares.test_tokens import GPU, MS, Clock, Process, add


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def tokens(clock: Clock) -> Iterator[Tokens]:
    tokens = Tokens(Parameters(), clock)
    yield tokens
    tokens.close()


async def test_a_turn_is_logged_with_its_wait_and_its_drain(tokens: Tokens, clock: Clock) -> None:
    add(tokens, "a", "b")
    first, second = Process(1), Process(2)
    tokens.want("a", first)
    begun = clock.now
    clock.now += 5 * MS
    tokens.want("b", second)
    wanted = clock.now
    clock.now += 5 * MS
    [held] = set(first.grants())
    tokens.draining("a", first, protocol.Draining(held, 2 * MS))
    draining = clock.now
    clock.now += 2 * MS
    tokens.drained("a", first, protocol.Drained(held, wanting=False))
    turns, since = tokens.turns_on(GPU, 0)
    assert since == 0
    ended = LoggedTurn("a", (GPU,), None, begun, draining, None, clock.now)
    [holds] = [turn for turn in turns if turn.tenant == "b"]
    assert [turn for turn in turns if turn.tenant == "a"] == [ended._replace(waited_since=turns[0].waited_since)]
    assert (holds.waited_since, holds.end) == (wanted, None)
    assert holds.begin is not None
    assert draining <= holds.begin <= clock.now
    assert tokens.turns_on("GPU-other", 0)[0] == []


async def test_a_preempted_turn_is_logged_with_the_moment_at_which_it_lost_the_gpu(
    tokens: Tokens, clock: Clock
) -> None:
    add(tokens, "a", "b")
    first, second = Process(1), Process(2)
    tokens.want("a", first)
    tokens.want("b", second)
    for _ in range(1000):
        clock.now += 5 * MS
        tokens._pump()
        if second.grants():
            break
    lost = clock.now
    clock.now += 5 * MS
    [held] = set(first.grants())
    tokens.drained("a", first, protocol.Drained(held, wanting=False))
    [turn] = [turn for turn in tokens.turns_on(GPU, 0)[0] if turn.tenant == "a"]
    assert (turn.lost, turn.end) == (lost, clock.now)


def test_the_log_is_bounded_and_knows_since_when_it_is_complete(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turn_log, "_KEPT", 3)
    log = TurnLog()
    assert log.complete_since() == 0
    for end in range(1, 6):
        log.add(LoggedTurn("a", (GPU,), None, end - 1, None, None, end))
    assert [turn.end for turn in log.on(GPU, 0)] == [3, 4, 5]
    assert log.complete_since() == 3
