"""The hook adds no order between streams of a program (D4): an event in the legacy stream would be a barrier."""

from __future__ import annotations

import pytest
from doubles.gpus import QUEUE_DEPTH
from hook.conftest import Tenant
from hook.world.probe import SUCCESS, Probe
from hook.world.scripted_agent import Client, ScriptedAgent
from sharepod.protocol import Drained

BLOCKING = 0
"""Flags of a stream that the legacy stream waits for, and that waits for it."""


def blocked(tenant: Tenant, symbol: str, *, metered: bool = False) -> tuple[ScriptedAgent, Client, Probe]:
    """Start a process that has launched into a default stream, and whose stream X waits for the program."""
    agent = tenant.agent()
    agent.on_want = lambda client: agent.next_grant(metered=metered)
    probe = tenant.probe()
    probe.start_cuda()
    for name in "XY":
        probe.ok("stream", name, BLOCKING)
    probe.ok("event", "e")
    probe.ok("launch", "noop", "", 3, symbol)  # the last one is behind no fence
    probe.ok("context_sync")
    probe.ok("ungated", "function", "X")
    return agent, agent.client(), probe


def works(tenant: Tenant, probe: Probe, stream: str) -> None:
    """Put work on a stream, and wait until it is over."""
    probe.ok("event_record", "e", stream)
    tenant.until(lambda: probe.call("event_query", "e").code == SUCCESS, f"work of stream {stream}")


def beats(tenant: Tenant, client: Client) -> None:
    """Wait until the hook's thread has run once more."""
    before = client.pulse().beat_at
    tenant.until(lambda: client.pulse().beat_at > before, "the hook's thread")


@pytest.mark.parametrize("metered", [False, True])
def test_an_idle_token_goes_back_and_orders_nothing_while_a_stream_waits_for_the_program(
    tenant: Tenant, metered: bool
) -> None:
    agent, client, probe = blocked(tenant, "cuLaunchKernel", metered=metered)
    assert agent.next_frame(client, Drained).idle
    works(tenant, probe, "Y")
    probe.ok("ungated_ends")
    works(tenant, probe, "X")


def test_a_drain_of_a_per_thread_default_stream_orders_nothing(tenant: Tenant) -> None:
    agent, client, probe = blocked(tenant, "cuLaunchKernel_ptsz")
    before = probe.ok("live_events")
    tenant.until(lambda: probe.ok("live_events") > before, "the event of an idle look")
    works(tenant, probe, "Y")
    probe.ok("ungated_ends")
    assert agent.next_frame(client, Drained).idle


def test_a_drain_waits_for_launches_into_the_legacy_stream_that_are_behind_no_fence(tenant: Tenant) -> None:
    agent = tenant.agent()
    agent.on_want = lambda client: agent.next_grant()
    probe = tenant.probe()
    probe.start_cuda()
    for _ in range(3):
        probe.ok("launch", "spin_us_100000")
    client = agent.client()
    agent.revoke(client, agent.last_grant)
    agent.next_frame(client, Drained)
    [usage] = [usage for usage in tenant.read().client("tenant").usage.values() if usage.submitted]
    assert usage.kernels == usage.submitted == 3
    assert usage.last_end <= agent.times(client, Drained)[0]


def test_a_drain_that_asks_the_legacy_stream_waits_for_per_thread_default_streams_too(tenant: Tenant) -> None:
    agent = tenant.agent()
    agent.on_want = lambda client: agent.next_grant()
    probe = tenant.probe()
    probe.start_cuda()
    probe.ok("launch", "noop", "", 3)  # the last one is behind no fence
    probe.ok("launch", "spin_us_300000", "", 1, "cuLaunchKernel_ptsz")
    client = agent.client()
    agent.revoke(client, agent.last_grant)
    agent.next_frame(client, Drained)
    [usage] = [usage for usage in tenant.read().client("tenant").usage.values() if usage.submitted]
    assert usage.kernels == usage.submitted == 4
    assert usage.last_end <= agent.times(client, Drained)[0]


def test_an_idle_look_waits_for_no_room_in_a_full_stream(tenant: Tenant) -> None:
    """A thread sleeps in the driver, in a stream that is full of work past the gate behind a launch."""
    agent = tenant.agent()
    agent.on_want = lambda client: agent.next_grant()
    probe = tenant.probe()
    probe.start_cuda()
    for name in ("full", "other"):
        probe.ok("stream", name)
    probe.ok("event", "e")
    probe.ok("context_use", thread="sleeper")
    probe.ok("launch", "noop", "full", 3)  # the last one is behind no fence
    probe.ok("ungated", "function", "full")
    sleeps = probe.post("event_record", "e", "full", 2 * QUEUE_DEPTH, thread="sleeper")
    client = agent.client()
    for _ in range(4):
        beats(tenant, client)
    assert not sleeps.done()
    probe.ok("launch", "noop", "other")
    probe.ok("ungated_ends")
    assert sleeps.result(20).code == SUCCESS
