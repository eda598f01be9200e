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


def add(tokens: Tokens, *names: str, limit_milli: int = 1000) -> None:
    for name in names:
        tokens.set_tenant(
            name, ("GPU-0",), request_milli=min(400, limit_milli), limit_milli=limit_milli, contended=lambda _: None
        )


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


async def test_the_next_tenant_is_granted_once_every_process_has_announced_its_last_work(
    tokens: Tokens, clock: Clock
) -> None:
    add(tokens, "a", "b")
    one, sibling, other = Process(1), Process(2), Process(3)
    tokens.want("a", one)
    tokens.want("a", sibling)
    tokens.want("b", other)
    [grant] = set(one.grants())
    clock.now += 50 * MS
    tokens.draining("a", one, protocol.Draining(grant, expected_ns=0))
    assert other.grants() == [], "the sibling may launch still"
    tokens.draining("a", sibling, protocol.Draining(grant, expected_ns=0))
    assert len(other.grants()) == 1


async def test_announced_last_work_hands_nothing_off_while_a_sibling_is_disconnected(
    tokens: Tokens, clock: Clock
) -> None:
    add(tokens, "a", "b")
    one, sibling, other = Process(1), Process(2), Process(3)
    tokens.want("a", one)
    tokens.want("a", sibling)
    tokens.want("b", other)
    [grant] = set(one.grants())
    tokens.connection_lost("a", sibling, alive=True)
    clock.now += 50 * MS
    tokens.draining("a", one, protocol.Draining(grant, expected_ns=0))
    assert other.grants() == [], "nobody knows when the sibling's work ends"
    tokens.exited("a", sibling.pid)
    tokens.drained("a", one, protocol.Drained(grant))
    assert len(other.grants()) == 1


async def test_a_preempted_tenant_waits_no_longer_for_its_disconnected_processes(tokens: Tokens, clock: Clock) -> None:
    add(tokens, "a", "b")
    lost, sibling, other = Process(1), Process(2), Process(3)
    tokens.want("a", lost)
    tokens.want("b", other)
    tokens.connection_lost("a", lost, alive=True)
    for pause_ns in (Parameters().quantum_max_ns, 20 * MS, Parameters().grace_ns - 20 * MS):
        clock.now += pause_ns
        tokens.set_connected("b", connected=True)
    [first] = other.grants()
    tokens.want("a", sibling)
    tokens.drained("b", other, protocol.Drained(first))
    [again] = sibling.grants()
    tokens.want("b", other)
    tokens.drained("a", sibling, protocol.Drained(again))
    assert other.grants()[-1] != first, "all that was told of a's second grant has drained"


async def test_a_lowered_limit_bounds_the_turn_of_the_holder_at_once(tokens: Tokens) -> None:
    add(tokens, "a")
    one = Process(1)
    tokens.want("a", one)
    [unlimited] = one.frames
    assert isinstance(unlimited, protocol.Grant)
    assert unlimited.quantum_ns == 0
    add(tokens, "a", limit_milli=500)
    bounded = one.frames[-1]
    assert isinstance(bounded, protocol.Grant)
    assert bounded.grant_id == unlimited.grant_id
    assert 0 < bounded.quantum_ns <= Parameters().quantum_max_ns


async def test_a_raised_limit_grants_to_a_tenant_that_waits_at_once(tokens: Tokens) -> None:
    add(tokens, "a", limit_milli=0)
    one = Process(1)
    tokens.want("a", one)
    assert one.grants() == [], "its limit leaves it no time"
    add(tokens, "a", limit_milli=1000)
    assert len(one.grants()) == 1


@pytest.mark.promise("time-stall")
async def test_an_agent_that_was_held_up_charges_nobody_for_it(tokens: Tokens, clock: Clock) -> None:
    add(tokens, "a", "b")
    one, other = Process(1), Process(2)
    tokens.want("a", one)
    tokens.want("b", other)
    clock.now += 10_000 * MS
    tokens.drained("a", one, protocol.Drained(one.grants()[0], wanting=True))
    assert tokens.usage("a").held_ns == Parameters().quantum_max_ns, "its hook closed the gate by its own clock"
    assert tokens.usage("a").preemptions == 0
    assert len(other.grants()) == 1
    clock.now += 50 * MS
    time = tokens.gpu_time("GPU-0")
    assert time is not None
    assert time.held_ns == Parameters().quantum_max_ns + 50 * MS
    assert time.stalled_ns == 10_000 * MS - Parameters().quantum_max_ns
    assert tokens.gpu_time("GPU-1") is None
