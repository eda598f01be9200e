"""Samples: at random moments, a hook whose tenant may co-run with others checks whether its work is in flight."""

from __future__ import annotations

import pytest
from doubles.gpus import QUEUE_DEPTH, release_hung_kernels
from hook.conftest import Tenant
from hook.world.probe import SUCCESS, Probe
from hook.world.scripted_agent import Client, ScriptedAgent
from sharepod.protocol import CONCURRENT_VERSION, Drained, Pulse

FEW = 20
"""Samples that a hook takes in about 10 ms."""


def begun(tenant: Tenant, *, streams: tuple[str, ...] = ("s",), metered: bool = False) -> tuple[ScriptedAgent, Probe]:
    """Start a process whose gate a concurrent grant without end has opened."""
    agent = tenant.agent()
    agent.on_want = lambda client: agent.next_grant(metered=metered, concurrent=True)
    probe = tenant.probe()
    probe.start_cuda()
    for name in streams:
        probe.ok("stream", name)
    probe.ok("launch", "noop", streams[0])
    return agent, probe


def after(tenant: Tenant, client: Client, samples: int = FEW) -> Pulse:
    """Wait until so many more samples were taken. Return the pulse page at that time."""
    until = client.pulse().samples + samples
    tenant.until(lambda: client.pulse().samples >= until, f"{samples} samples")
    return client.pulse()


@pytest.mark.parametrize("stream", ["s", ""], ids=["a stream", "the default stream"])
def test_samples_see_work_in_flight_and_none_once_it_has_ended(tenant: Tenant, stream: str) -> None:
    agent, probe = begun(tenant)
    probe.ok("launch", "hang", stream)
    before = after(tenant, agent.client(), 2)
    busy = after(tenant, agent.client())
    assert busy.in_flight - before.in_flight == busy.samples - before.samples >= FEW
    release_hung_kernels(tenant.state)
    agent.next_frame(agent.client(), Drained)  # idle for 50 ms
    idle = agent.client().pulse()
    assert idle.samples - idle.in_flight > busy.samples - busy.in_flight
    assert idle.launches == 2


def test_work_of_a_per_thread_default_stream_is_in_flight_until_its_fence_has_passed(tenant: Tenant) -> None:
    agent, probe = begun(tenant, metered=True)
    probe.ok("launch", "hang", "", 1, "cuLaunchKernel_ptsz")
    before = after(tenant, agent.client(), 2)
    busy = after(tenant, agent.client())
    assert busy.in_flight - before.in_flight == busy.samples - before.samples
    release_hung_kernels(tenant.state)
    agent.next_frame(agent.client(), Drained)


def test_samples_are_taken_until_the_work_of_the_grant_has_drained(tenant: Tenant) -> None:
    agent, probe = begun(tenant)
    client = agent.client()
    probe.ok("launch", "hang", "s")
    agent.revoke(client, agent.last_grant)
    before = after(tenant, client, 2)
    drains = after(tenant, client)
    assert drains.in_flight - before.in_flight == drains.samples - before.samples
    release_hung_kernels(tenant.state)
    agent.next_frame(client, Drained)
    agent.on_want = lambda client: agent.next_grant()
    probe.ok("launch", "noop", "s")
    begun_at = client.pulse().samples
    probe.ok("launch", "spin_us_50000", "s")
    probe.ok("stream_sync", "s")
    assert client.pulse().samples == begun_at, "under a grant that is not concurrent"


def test_samples_show_work_in_flight_in_several_streams(tenant: Tenant) -> None:
    agent, probe = begun(tenant, streams=("s", "t"))
    client = agent.client()
    probe.ok("launch", "hang", "t")
    before = after(tenant, client, 2)
    single = after(tenant, client)
    assert single.several == before.several == 0
    probe.ok("launch", "hang", "s")
    before = after(tenant, client, 2)
    both = after(tenant, client)
    assert both.several - before.several == both.in_flight - before.in_flight >= FEW


def test_all_launches_of_a_hold_are_counted_when_it_has_drained(tenant: Tenant) -> None:
    agent, probe = begun(tenant)
    client = agent.client()
    for launched in range(1, 21):
        agent.revoke(client, agent.last_grant)
        agent.next_frame(client, Drained, after=launched - 1)
        assert client.pulse().launches == launched
        probe.ok("launch", "noop", "s")


@pytest.mark.promise("install-skew-hooks")
@pytest.mark.parametrize("version", [CONCURRENT_VERSION - 1, CONCURRENT_VERSION])
@pytest.mark.parametrize("concurrent", [True, False])
def test_samples_are_taken_if_the_grant_says_so_and_the_agent_speaks_the_version(
    tenant: Tenant, version: int, concurrent: bool
) -> None:
    agent = tenant.agent()
    agent.version = version
    agent.on_want = lambda client: agent.next_grant(metered=True, concurrent=concurrent)
    probe = tenant.probe()
    probe.start_cuda()
    probe.ok("launch", "spin_us_100000")
    probe.ok("stream_sync")
    pulse = agent.client().pulse()
    assert pulse.beat_at > 0
    sampled = concurrent and version == CONCURRENT_VERSION
    assert (pulse.samples > 0, pulse.in_flight > 0, pulse.launches > 0) == (sampled,) * 3


def test_a_new_connection_counts_from_zero(tenant: Tenant) -> None:
    agent, probe = begun(tenant)
    probe.ok("launch", "hang", "s", 3)
    assert after(tenant, agent.client()).launches == 4
    agent.vanish()
    release_hung_kernels(tenant.state)
    probe.ok("stream_sync", "s")
    agent.appear()
    agent.client()
    probe.ok("launch", "noop", "s")
    pulse = after(tenant, agent.client(), 1)
    assert pulse.samples < FEW
    assert pulse.launches <= 1


@pytest.mark.promise("program-captures")
@pytest.mark.parametrize("captured", ["s", "blocking"])
@pytest.mark.parametrize("mode", [0, 1, 2], ids=["global", "thread local", "relaxed"])
def test_samples_disturb_no_capture(tenant: Tenant, captured: str, mode: int) -> None:
    agent, probe = begun(tenant, streams=("busy", "s"))
    client = agent.client()
    probe.ok("stream", "blocking", 0)
    probe.ok("launch", "hang", "busy")
    for stream in ("s", "blocking", ""):  # a sample queries other streams before the busy one
        probe.ok("launch", "spin_us_20000", stream)
    probe.ok("capture_begin", captured, mode)
    for _ in range(5):
        probe.ok("launch", "spin_us_100", captured)
        after(tenant, client)
    probe.ok("capture_end", captured, "graph")
    probe.ok("launch_graph", "graph", captured)
    release_hung_kernels(tenant.state)
    probe.ok("stream_sync", captured)


def test_samples_go_on_while_a_launch_waits_for_room_in_the_driver(tenant: Tenant) -> None:
    agent, probe = begun(tenant, metered=True)
    client = agent.client()
    probe.ok("launch", "hang", "s")
    probe.ok("event", "e")
    probe.ok("event_record", "e", "s", QUEUE_DEPTH - 2)  # the stream's queue also contains the kernel and its fence
    submitted = tenant.submitted()
    waiting = probe.post("launch", "noop", "s", 3)
    tenant.until(lambda: tenant.submitted() > submitted, "a launch that waits")
    before = after(tenant, client, 2)
    full = after(tenant, client)
    assert not waiting.done()
    assert full.in_flight - before.in_flight == full.samples - before.samples
    release_hung_kernels(tenant.state)
    assert waiting.result(20).code == SUCCESS


def test_samples_go_on_while_a_function_of_the_program_holds_up_a_stream(tenant: Tenant) -> None:
    agent, probe = begun(tenant)
    probe.ok("ungated", "function", "s")
    probe.ok("launch", "noop", "s")
    before = after(tenant, agent.client(), 2)
    blocked = after(tenant, agent.client())
    assert blocked.in_flight - before.in_flight == blocked.samples - before.samples
    probe.ok("ungated_ends")
    probe.ok("stream_sync", "s")
