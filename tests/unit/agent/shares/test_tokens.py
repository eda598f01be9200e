"""The token scheduler on the event loop, driven without sockets on a clock that stands still."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from sharepod import protocol
from sharepod.agent.shares.tokens import Tokens
from sharepod.timeshare import Parameters

MS = 1_000_000


class Process:
    """A client that keeps the frames that it is sent."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.frames: list[protocol.AgentFrame] = []

    def send(self, frame: protocol.AgentFrame) -> None:
        self.frames.append(frame)

    def grants(self) -> list[int]:
        """Return the ids of the grants that it was told of; a renewal repeats one."""
        return [frame.grant_id for frame in self.frames if isinstance(frame, protocol.Grant)]


class Clock:
    """Nanoseconds that a test moves."""

    def __init__(self) -> None:
        self.now = 1

    def __call__(self) -> int:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def tokens(clock: Clock) -> Iterator[Tokens]:
    tokens = Tokens(Parameters(), clock)
    yield tokens
    tokens.close()


def add(tokens: Tokens, *names: str) -> None:
    for name in names:
        tokens.set_tenant(name, ("GPU-0",), request_milli=400, limit_milli=1000, contended=lambda _: None)


async def test_drained_of_an_earlier_grant_does_not_end_the_present_one(tokens: Tokens, clock: Clock) -> None:
    add(tokens, "a", "b")
    one, other = Process(1), Process(2)
    tokens.want("a", one)
    [first] = one.grants()
    clock.now += MS
    tokens.drained("a", one, protocol.Drained(first))
    tokens.want("a", one)
    second = one.grants()[-1]
    assert second != first
    tokens.want("b", other)
    tokens.drained("a", one, protocol.Drained(first))
    assert other.grants() == [], "the frame crossed with the grant: a holds the token"
    tokens.drained("a", one, protocol.Drained(second))
    assert len(other.grants()) == 1


async def test_a_tenant_has_drained_once_all_its_processes_have(tokens: Tokens, clock: Clock) -> None:
    add(tokens, "a", "b")
    one, sibling, other = Process(1), Process(2), Process(3)
    tokens.want("a", one)
    tokens.want("a", sibling)
    tokens.want("b", other)
    [grant] = set(one.grants())
    clock.now += MS
    tokens.drained("a", one, protocol.Drained(grant))
    assert other.grants() == []
    tokens.connection_lost("a", sibling, alive=True)
    assert other.grants() == [], "its work may be on the GPU still"
    tokens.exited("a", sibling.pid)
    assert len(other.grants()) == 1
