"""The agent of the random life distinguishes a launch that outlasted the grace period from a launch without a token."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import pytest
from hook.conftest import Tenant
from hook.life.watched_agent import CAME_LATER, OUTLASTED, Counts, WatchedAgent
from hook.world.gate_state import Gate, caught_inside
from hook.world.held_thread import Hold, held, hook_thread
from sharepod.protocol import Drained, Want

GRACE_MS = 50
_Chosen = TypeVar("_Chosen")


class _Even(random.Random):
    """Replacement of the random numbers: each grant is for 50 ms, is not metered, and follows its request after
    20 ms."""

    def random(self) -> float:
        return 0.5

    def choice(self, seq: Sequence[_Chosen]) -> _Chosen:  # type: ignore[override]
        return seq[-1]


@pytest.fixture
def agent(tenant: Tenant, hook_file: Path) -> Iterator[WatchedAgent]:
    counts = Counts(tenant.state)
    agent = WatchedAgent(tenant, counts, _Even(), hook_file)
    agent.grace_ms = GRACE_MS
    yield agent
    agent.close()
    counts.close()


def _until(agent: WatchedAgent, condition: Callable[[], bool], seconds: float) -> bool:
    """Step the agent until the condition holds. Return False if it does not hold within so many seconds."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        agent.step()
        time.sleep(0.001)
    return True


def _asked(agent: WatchedAgent) -> int:
    """Return the number of requests for the token over the present connection."""
    return sum(
        isinstance(received.frame, Want) or (isinstance(received.frame, Drained) and received.frame.wanting)
        for client in agent.clients[-1:]
        for received in list(client.received)
    )


def _held_inside(agent: WatchedAgent, gate: Gate, deadline: float) -> Hold:
    """Hold a thread inside a launch while the agent continues. AssertionError if no thread was caught by `deadline`."""
    hold = None
    while hold is None:
        assert time.monotonic() < deadline, agent.seen
        hold = caught_inside(gate)
        agent.step()
    return hold


@pytest.mark.promise("program-outlasts")
@pytest.mark.parametrize("restarts", [False, True], ids=["drained", "agent restarted"])
def test_a_launch_that_outlasts_the_grace_is_none_without_a_token(
    tenant: Tenant, agent: WatchedAgent, hook_file: Path, restarts: bool
) -> None:
    """A debugger holds a thread inside a launch until the hook no longer waits for the thread. This is no launch
    without a token. A held thread that has the driver's lock blocks all calls; the test then releases it.
    """
    process = tenant.loop("--kernel-us", "0", "--threads", "3", "--event-every", "1000000")
    assert _until(agent, lambda: tenant.submitted() > 1000, 20)
    gate = Gate(process.pid, hook_file)
    deadline = time.monotonic() + 60
    while agent.seen[OUTLASTED] == 0:
        hold = _held_inside(agent, gate, deadline)
        if restarts:
            agent.vanish()
            agent.appear()
        asked = _asked(agent)
        _until(agent, lambda asked=asked: _asked(agent) > asked, 1)  # type: ignore[misc]
        while not hold.release():
            time.sleep(0.001)
        time.sleep(0.01)  # the agent, which sends the next grant after 20 ms, has not sent it yet
        agent.step()
    assert agent.seen["launches without a token"] == 0
    assert agent.seen["drained too early"] == 0


@pytest.mark.promise("program-outlasts")
def test_such_a_launch_may_come_between_a_later_grant_and_its_reading(
    tenant: Tenant, agent: WatchedAgent, hook_file: Path
) -> None:
    """The test holds the hook thread while the later grant is sent, as if that thread had no processor time. The driver
    accepts the held launch before the hook reads the grant, so the DRAINED of that grant does not count the launch."""
    process = tenant.loop("--kernel-us", "0", "--threads", "3", "--event-every", "1000000")
    assert _until(agent, lambda: tenant.submitted() > 1000, 20)
    gate = Gate(process.pid, hook_file)
    deadline = time.monotonic() + 60
    while agent.seen[CAME_LATER] == 0:
        hold = _held_inside(agent, gate, deadline)
        asked, granted = _asked(agent), agent.seen["grants"]
        if _until(agent, lambda asked=asked: _asked(agent) > asked, 1):  # type: ignore[misc]
            with held(hook_thread(process.pid)):
                _until(agent, lambda granted=granted: agent.seen["grants"] > granted, 1)  # type: ignore[misc]
                while not hold.release():
                    time.sleep(0.001)
                time.sleep(0.02)
        while not hold.release():
            time.sleep(0.001)
        asked = _asked(agent)
        _until(agent, lambda asked=asked: _asked(agent) > asked, 1)  # type: ignore[misc]
    assert agent.seen["launches without a token"] == 0
    assert agent.seen["drained too early"] == 0
