"""The hook knows a stream by its handle. The driver uses the handle again after the stream is destroyed. A thread may
know thousands of streams.
"""

from __future__ import annotations

import pytest
from hook.conftest import GPU_0, Tenant
from hook.world.scripted_agent import Client, ScriptedAgent
from sharepod.protocol import Drained, Grant

MANY = 300
"""Number of streams: more than a thread's first table can store."""


def held_for_ever(agent: ScriptedAgent, *, metered: bool = False) -> list[Grant]:
    """Answer every WANT with a grant without end. Return the grants."""
    grants: list[Grant] = []

    def on_want(_client: Client) -> Grant:
        grants.append(agent.next_grant(metered=metered))
        return grants[-1]

    agent.on_want = on_want
    return grants


def drained_launches(agent: ScriptedAgent, tenant: Tenant, grants: list[Grant]) -> int:
    """Revoke the token. Return the number of launches of all grants. AssertionError if a launch of the last grant is
    unfinished when DRAINED arrives.
    """
    client = agent.client()
    before = len(agent.frames(client, Drained))
    agent.on_want = lambda _client: None
    agent.revoke(client, grants[-1])
    agent.next_frame(client, Drained, before)
    usage = tenant.read().client("tenant").usage[GPU_0]
    assert usage.kernels == usage.submitted, "DRAINED comes when the work has ended"
    return sum(frame.launches for frame in agent.frames(client, Drained))


@pytest.mark.promise("program-every-stream")
@pytest.mark.parametrize("metered", [False, True])
def test_a_stream_under_the_handle_of_a_destroyed_one_is_another_for_every_thread(
    tenant: Tenant, metered: bool
) -> None:
    """One thread launches into all streams, another one destroys the first of them. The next stream gets its handle."""
    agent = tenant.agent()
    grants = held_for_ever(agent, metered=metered)
    probe = tenant.probe()
    probe.start_cuda()
    probe.ok("context_use", thread="launches")
    for name in ("first", "other"):
        probe.ok("stream", name)
        probe.ok("launch", "noop", name, 3, thread="launches")
    probe.ok("context_sync")
    handle = probe.ok("handle", "first")
    probe.ok("stream_destroy", "first")
    probe.ok("stream", "second")
    assert probe.ok("handle", "second") == handle
    probe.ok("launch", "noop", "other", 3, thread="launches")
    probe.ok("launch", "spin_us_200000", "second", thread="launches")
    assert drained_launches(agent, tenant, grants) == 10


@pytest.mark.promise("program-every-stream")
def test_a_queue_that_was_given_back_to_another_thread_is_not_remembered(tenant: Tenant) -> None:
    """A thread remembers its streams' queues by address. One of them is freed, and another thread's queue gets the
    address. The first thread must not use that queue.
    """
    agent = tenant.agent()
    grants = held_for_ever(agent)
    probe = tenant.probe()
    probe.start_cuda()
    for thread in ("one", "other"):
        probe.ok("context_use", thread=thread)
        probe.ok("stream", thread)
        probe.ok("launch", "noop", thread, thread=thread)
    for name in ("first", "third", "fourth"):
        probe.ok("stream", name)
    probe.ok("launch", "noop", "first", 3, thread="one")
    probe.ok("context_sync")
    handle = probe.ok("handle", "first")
    probe.ok("stream_destroy", "first")
    probe.ok("launch", "noop", "third", thread="one")  # frees the queue
    probe.ok("launch", "noop", "fourth", thread="other")  # gets the freed queue
    probe.ok("stream", "second")
    assert probe.ok("handle", "second") == handle
    probe.ok("launch", "spin_us_200000", "second", thread="one")
    assert drained_launches(agent, tenant, grants) == 8


@pytest.mark.promise("program-every-stream")
def test_a_default_stream_of_a_context_that_comes_again_is_another_for_every_thread(tenant: Tenant) -> None:
    agent = tenant.agent()
    grants = held_for_ever(agent)
    probe = tenant.probe(CUDA_VISIBLE_DEVICES="0")
    probe.start_cuda()
    probe.ok("context_use", thread="launches")
    probe.ok("launch", "noop", "", 3, thread="launches")
    probe.ok("context_reset")
    probe.ok("context_create")
    probe.ok("context_use", thread="launches")
    probe.ok("launch", "spin_us_200000", thread="launches")
    assert drained_launches(agent, tenant, grants) == 4


@pytest.mark.promise("program-every-stream")
@pytest.mark.parametrize("metered", [False, True])
def test_every_one_of_many_streams_of_a_thread_is_drained(tenant: Tenant, metered: bool) -> None:
    """Streams are created and destroyed. Under each of two grants, the thread launches into all streams that remain."""
    agent = tenant.agent()
    grants = held_for_ever(agent, metered=metered)
    probe = tenant.probe()
    probe.start_cuda()
    probe.ok("streams", "s", MANY)
    probe.ok("launch_each", "noop", "s", MANY)
    probe.ok("context_sync")
    probe.ok("streams_destroy", "s", MANY, 3)
    probe.ok("streams", "t", MANY // 3)
    expected = MANY
    for _ in range(2):
        probe.ok("launch_each", "noop", "t", MANY // 3)
        probe.ok("launch", "spin_us_200000", f"t{MANY // 3 - 1}")
        expected += MANY // 3 + 1
        assert drained_launches(agent, tenant, grants) == expected
        grants = held_for_ever(agent, metered=metered)
