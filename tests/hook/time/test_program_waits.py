"""A program whose streams wait for its own later work ends next to another tenant as it does without the hook."""

from __future__ import annotations

import random
import subprocess
import time
from pathlib import Path

import pytest
from doubles.gpus import QUEUE_DEPTH
from hook.conftest import BUILD, GPU_0, Tenant
from hook.life.watched_agent import Counts, WatchedAgent
from hook.world.scripted_agent import Client, ScriptedAgent
from sharepod.protocol import Drained, Grant, Want

WAITS = str(BUILD / "programs" / "waits")


class Turns:
    """Agent that grants turns of 20 ms, one after the other. `overdue`: number of requests that arrived before the last
    turn had drained, which the hook sends after the grace period of 1 s.
    """

    def __init__(self, agent: ScriptedAgent) -> None:
        self._agent = agent
        self.granted = 0
        self.overdue = 0
        agent.on_want = self._turn

    def _turn(self, client: Client) -> Grant:
        drained = sum(isinstance(received.frame, Drained) for received in client.received)
        self.overdue += drained < self.granted
        self.granted = drained + 1
        return self._agent.next_grant(20, metered=True)


def run(tenant: Tenant, *arguments: str, hook: bool) -> None:
    """Run the program. CalledProcessError or TimeoutExpired if it fails or does not end."""
    bare = {} if hook else {"LD_PRELOAD": ""}
    subprocess.run([WAITS, *arguments], env=tenant.environment() | bare, check=True, timeout=60)


@pytest.mark.promise("program-own-order")
@pytest.mark.parametrize(
    "arguments",
    [
        "order value 300",
        "order event 300",
        "order mutex 300",
        "full value 1020 1",
        "full function 1024 1",
        "full value-mixed 1022 1",
        "full function-mixed 1024 1",
        "full value 1020 4",
        "full value-graph 1022 1",
        "full function-graph 1024 1",
        "full value-destroy 1020 1",
        "full function-destroy 1024 4",
        *(f"random {seed}" for seed in range(8)),
    ],
)
def test_a_program_that_waits_for_its_own_later_work_has_no_overdue_drain(tenant: Tenant, arguments: str) -> None:
    run(tenant, *arguments.split(), hook=False)
    turns = Turns(tenant.agent())
    run(tenant, *arguments.split(), hook=True)
    assert turns.granted > 0
    assert turns.overdue == 0


@pytest.mark.promise("program-left-work")
@pytest.mark.parametrize("way", ["value", "function", "event"])
def test_launches_behind_a_wait_are_drained_once_the_wait_is_over(tenant: Tenant, way: str) -> None:
    """The first drain does not wait for them. When they run, the hook requests a turn, whose drain waits for them."""
    agent = tenant.agent()
    agent.on_want = lambda client: agent.next_grant(metered=True)
    probe = tenant.probe()
    probe.start_cuda()
    probe.ok("stream", "s")
    probe.ok("ungated", way, "s")
    probe.ok("launch", "spin_us_100000", "s", 2)
    client = agent.client()
    assert agent.next_frame(client, Drained).launches == 2
    wants = len(agent.frames(client, Want))
    usage = tenant.read().client("tenant").usage[GPU_0]
    assert (usage.submitted, usage.kernels) == (2, 0)
    probe.ok("ungated_ends")
    agent.next_frame(client, Want, wants)
    agent.next_frame(client, Drained, 1)
    usage = tenant.read().client("tenant").usage[GPU_0]
    assert (usage.submitted, usage.kernels) == (2, 2)
    assert usage.last_end <= agent.times(client, Drained)[1]


@pytest.mark.promise("program-left-work")
@pytest.mark.parametrize("way", ["value", "function", "event"])
def test_a_drain_waits_for_launches_that_other_threads_make_next_to_a_wait(
    tenant: Tenant, hook_file: Path, way: str
) -> None:
    counts = Counts(tenant.state)
    agent = WatchedAgent(tenant, counts, random.Random(1), hook_file)
    program = subprocess.Popen([WAITS, "shared", way, "1500"], env=tenant.environment())
    try:
        while program.poll() is None:
            agent.step()
            time.sleep(0.0005)
    finally:
        program.kill()
        program.wait()
        agent.close()
        counts.close()
    assert program.returncode == 0
    assert agent.seen["grants"] > 10
    assert agent.seen["drained too early"] == 0


def test_one_place_of_a_stream_is_taken_behind_a_wait_for_a_value(tenant: Tenant) -> None:
    agent = tenant.agent()
    agent.on_want = lambda client: agent.next_grant(metered=True)
    probe = tenant.probe()
    probe.start_cuda()
    probe.ok("stream", "s")
    probe.ok("launch", "noop", "s", 3)
    probe.ok("ungated", "value", "s")
    probe.ok("launch", "noop", "s", QUEUE_DEPTH - 2, timeout=60)
    probe.ok("ungated_ends")
    probe.ok("stream_sync", "s")
