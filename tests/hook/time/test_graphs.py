"""Graphs under a metered grant: the hook measures their duration. A graph that does not fit into the quantum waits for
the next quantum.
"""

from __future__ import annotations

import time

import pytest
from hook.conftest import GPU_0, Tenant
from hook.world.probe import Probe
from hook.world.scripted_agent import Client, ScriptedAgent
from sharepod.protocol import Drained, Want


def with_graph(tenant: Tenant, milliseconds: float) -> tuple[ScriptedAgent, Client, Probe]:
    """Start a process whose graph has run three times, so the hook has measured its duration."""
    agent = tenant.agent()
    probe = tenant.probe()
    probe.start_cuda()
    probe.ok("stream", "s")
    capture(probe, milliseconds)
    launched = [probe.post("launch_graph", "graph", "s") for _ in range(3)]
    client = agent.client()
    agent.next_frame(client, Want)
    grant = agent.grant(client, metered=True)
    assert [future.result(20).code for future in launched] == [0, 0, 0]
    probe.ok("stream_sync", "s")
    agent.revoke(client, grant)
    agent.next_frame(client, Drained)
    return agent, client, probe


def capture(probe: Probe, milliseconds: float) -> None:
    probe.ok("capture_begin", "s")
    probe.ok("launch", f"spin_us_{int(milliseconds * 1000)}", "s")
    probe.ok("capture_end", "s", "graph")


def submitted(tenant: Tenant) -> int:
    return tenant.read().client("tenant").usage[GPU_0].submitted


@pytest.mark.promise("program-graphs")
def test_a_graph_that_does_not_fit_the_quantum_waits_for_the_next(tenant: Tenant) -> None:
    agent, client, probe = with_graph(tenant, 60)
    asked = len(agent.frames(client, Want)) + 1
    launched = [probe.post("launch_graph", "graph", "s") for _ in range(3)]
    agent.wait(lambda: len(agent.frames(client, Want)) >= asked, "WANT")
    before, sent = submitted(tenant), time.monotonic_ns()
    agent.grant(client, 170, metered=True)
    drained = agent.next_frame(client, Drained, 1)
    assert drained.wanting
    assert not drained.idle
    assert submitted(tenant) == before + 2, "the third would have ended after the quantum"
    assert not launched[2].done()
    assert agent.times(client, Drained)[1] - sent < 170e6, "the rest of the quantum was of no use"
    agent.grant(client, 2000, metered=True)  # on a busy machine a short grant may end before the graph is launched
    assert launched[2].result(10).code == 0


@pytest.mark.promise("program-graphs")
def test_a_graph_longer_than_any_quantum_runs_at_the_beginning_of_each(tenant: Tenant) -> None:
    agent, client, probe = with_graph(tenant, 60)
    before = submitted(tenant)
    for turn in range(1, 4):
        launched = probe.post("launch_graph", "graph", "s")
        agent.wait_asked(client, turn + 1)
        agent.grant(client, 20, metered=True)
        assert launched.result(10).code == 0
        agent.next_frame(client, Drained, turn)
        usage = tenant.read().client("tenant").usage[GPU_0]
        assert usage.submitted == before + turn
        assert usage.last_end <= agent.times(client, Drained)[turn]


def test_a_graph_that_waits_goes_on_when_the_grant_is_prolonged(tenant: Tenant) -> None:
    agent, client, probe = with_graph(tenant, 60)
    launched = [probe.post("launch_graph", "graph", "s") for _ in range(2)]
    agent.wait_asked(client, 2)
    before = submitted(tenant)
    grant = agent.grant(client, 100, metered=True)
    tenant.until(lambda: submitted(tenant) == before + 1, "the first graph")
    assert not launched[1].done()
    agent.send(client, type(grant)(grant.grant_id, 1_000_000_000, grant.gpu_mask, metered=True))
    assert launched[1].result(10).code == 0
    assert len(agent.frames(client, Drained)) == 1


@pytest.mark.parametrize("change", ["destroy", "update"])
def test_what_was_learned_is_forgotten_with_the_graph(tenant: Tenant, change: str) -> None:
    """Another graph with the same handle has no known duration."""
    agent, client, probe = with_graph(tenant, 60)
    if change == "destroy":
        probe.ok("graph_destroy", "graph")
        capture(probe, 1)
    else:
        probe.ok("capture_begin", "s")
        probe.ok("launch", "spin_us_1000", "s")
        probe.ok("capture_end", "s", "", "graph of 1 ms")
        probe.ok("graph_update", "graph", "graph of 1 ms")
    agent.wait_asked(client, 1)
    probe.ok("stream", "fresh")  # a new stream: of the other one the hook already knows the duration of launches
    posted = [probe.post("launch", "noop", "fresh"), *(probe.post("launch_graph", "graph", "fresh") for _ in range(3))]
    agent.wait_asked(client, 2)
    agent.grant(client, 50, metered=True)
    assert [future.result(10).code for future in posted] == [0, 0, 0, 0]
    assert len(agent.frames(client, Drained)) <= 2


def test_unmetered_graphs_are_not_measured(tenant: Tenant) -> None:
    """A tenant without neighbours, with limit 1, has fences behind windows of launches, but none around its graphs."""
    agent = tenant.agent()
    agent.on_want = lambda client: agent.next_grant()
    probe = tenant.probe()
    probe.start_cuda()
    probe.ok("stream", "s")
    capture(probe, 0.1)
    before = probe.ok("live_events")
    for _ in range(20):
        probe.ok("launch_graph", "graph", "s")
    assert probe.ok("live_events") <= before + 2 + 1, "two fences, and that of a drain where the program seems idle"


def test_events_of_a_graph_go_with_it(tenant: Tenant) -> None:
    agent = tenant.agent()
    agent.on_want = lambda client: agent.next_grant(metered=True)
    probe = tenant.probe()
    probe.start_cuda()
    probe.ok("stream", "s")
    for _ in range(50):
        capture(probe, 0.05)
        for _ in range(3):
            probe.ok("launch_graph", "graph", "s")
        probe.ok("graph_destroy", "graph")
    assert probe.ok("live_events") < 10
