"""Stream capture: the hook does not gate launches that are only recorded, and its own calls disturb no capture."""

from __future__ import annotations

import time

import pytest
from hook.conftest import Tenant
from hook.world.probe import CAPTURE_INVALIDATED, CAPTURE_UNSUPPORTED, NOT_READY
from hook.world.scripted_agent import Client
from sharepod.protocol import Drained, Grant, Want

GLOBAL, THREAD_LOCAL, RELAXED = range(3)
versions = pytest.mark.parametrize("version", ["libcuda", "libcuda-11.8"])


@pytest.mark.promise("program-captured")
@versions
@pytest.mark.parametrize("mode", [GLOBAL, THREAD_LOCAL, RELAXED])
def test_what_is_captured_is_not_gated(tenant: Tenant, version: str, mode: int) -> None:
    agent = tenant.agent()
    probe = tenant.probe(double=tenant.double.with_name(version))
    probe.start_cuda()
    probe.ok("stream", "s")
    probe.ok("capture_begin", "s", mode)
    probe.ok("launch", "spin_us_1000", "s", 3)
    probe.ok("capture_end", "s", "graph")
    assert tenant.submitted() == 0
    launched = probe.post("launch_graph", "graph", "s")
    client = agent.client()
    agent.next_frame(client, Want)
    assert tenant.submitted() == 0
    agent.grant(client)
    assert launched.result(10).code == 0
    tenant.until(lambda: tenant.read().busy_ns("tenant") == 3_000_000, "the graph's work")


@pytest.mark.promise("program-captures")
@versions
@pytest.mark.parametrize("metered", [True, False])
@pytest.mark.parametrize("mode", [GLOBAL, THREAD_LOCAL, RELAXED])
def test_a_capture_outlives_grants_fences_and_drains(tenant: Tenant, version: str, metered: bool, mode: int) -> None:
    """One thread captures while another thread launches under several grants."""
    agent = tenant.agent()
    agent.on_want = lambda client: agent.next_grant(10, metered=metered)
    probe = tenant.probe(double=tenant.double.with_name(version))
    probe.start_cuda()
    for name in ("captured", "busy"):
        probe.ok("stream", name)
    probe.ok("context_use", thread="busy")
    busy = probe.post("launch", "spin_us_200", "busy", 250, thread="busy")
    probe.ok("capture_begin", "captured", mode)
    for _ in range(10):
        probe.ok("launch", "spin_us_100", "captured")
        time.sleep(0.005)
    assert busy.result(10).code == 0
    client = agent.client()
    agent.wait(lambda: any(drained.launches > 0 for drained in agent.frames(client, Drained)), "a drain")
    probe.ok("capture_end", "captured", "graph")


@versions
def test_unfinished_work_is_drained_beside_a_capture(tenant: Tenant, version: str) -> None:
    agent = tenant.agent()
    probe = tenant.probe(double=tenant.double.with_name(version))
    probe.start_cuda()
    for name in ("captured", "busy"):
        probe.ok("stream", name)
    launched = probe.post("launch", "spin_us_40000", "busy")
    client = agent.client()
    agent.next_frame(client, Want)
    agent.grant(client, 5)
    assert launched.result(10).code == 0
    probe.ok("capture_begin", "captured")
    agent.next_frame(client, Drained)
    (usage,) = [usage for usage in tenant.read().client("tenant").usage.values() if usage.kernels]
    assert usage.last_end <= agent.times(client, Drained)[0]
    probe.ok("capture_end", "captured", "graph")


def test_other_streams_stay_gated_while_one_captures(tenant: Tenant) -> None:
    agent = tenant.agent()
    probe = tenant.probe()
    probe.start_cuda()
    for name in ("captured", "other"):
        probe.ok("stream", name)
    probe.ok("context_use", thread="other")
    probe.ok("capture_begin", "captured")
    launched = probe.post("launch", "noop", "other", thread="other")
    client = agent.client()
    agent.next_frame(client, Want)
    assert not launched.done()
    assert tenant.submitted() == 0
    probe.ok("launch", "noop", "captured")
    agent.grant(client)
    assert launched.result(10).code == 0
    probe.ok("capture_end", "captured", "graph")


@pytest.mark.promise("program-callbacks")
def test_what_a_recapture_calls_back_may_launch(tenant: Tenant) -> None:
    """A launch from the callback waits for the token. While it waits, it delays no beginning or end of another
    capture.
    """
    agent = tenant.agent()
    probe = tenant.probe()
    probe.start_cuda()
    for name in ("s", "t", "u"):
        probe.ok("stream", name)
    probe.ok("context_use", thread="other")
    probe.ok("capture_begin", "s")
    probe.ok("launch", "spin_us_100", "s")
    probe.ok("capture_end", "s", "", "graph")
    recaptured = probe.post("recapture", "s", "graph", "spin_us_200", "t")
    client = agent.client()
    agent.next_frame(client, Want)
    probe.ok("capture_begin", "u", RELAXED, thread="other")
    probe.ok("launch", "noop", "u", thread="other")
    probe.ok("capture_end", "u", "other graph", thread="other")
    assert not recaptured.done()
    assert tenant.submitted() == 0
    agent.grant(client)
    assert (recaptured.result(10).code, recaptured.result(10).value) == (0, [0])
    assert tenant.submitted() == 1


def test_after_a_captured_stream_is_destroyed_the_gate_goes_on(tenant: Tenant) -> None:
    agent = tenant.agent()
    probe = tenant.probe()
    probe.start_cuda()
    probe.ok("stream", "s")
    probe.ok("capture_begin", "s")
    probe.ok("stream_destroy", "s")
    probe.ok("stream", "s")
    launched = probe.post("launch", "noop", "s")
    client = agent.client()
    agent.next_frame(client, Want)
    assert tenant.submitted() == 0
    agent.grant(client)
    assert launched.result(10).code == 0


def test_the_double_invalidates_captures_as_the_driver_does(tenant: Tenant) -> None:
    """The tests above depend on this: without care, the hook's own calls would break a capture."""
    tenant.agent()
    probe = tenant.probe()
    probe.start_cuda()
    probe.ok("stream", "s")
    probe.ok("event", "e")
    probe.ok("context_use", thread="other")
    probe.ok("capture_begin", "s", GLOBAL)
    assert probe.call("event_query", "e", thread="other").code == CAPTURE_UNSUPPORTED
    assert probe.call("capture_end", "s").code == CAPTURE_INVALIDATED
    for mode in (GLOBAL, THREAD_LOCAL, RELAXED):
        probe.ok("capture_begin", "s", mode)
        assert probe.call("context_sync", thread="other").code == CAPTURE_UNSUPPORTED
        assert probe.call("capture_end", "s").code == CAPTURE_INVALIDATED
    probe.ok("capture_begin", "s", THREAD_LOCAL)
    assert probe.call("event_query", "e", thread="other").code in (0, NOT_READY)
    probe.ok("capture_end", "s")


@pytest.mark.parametrize("metered", [True, False])
@pytest.mark.parametrize("way", ["begins", "joins", "joins from another context"])
def test_a_stream_that_comes_to_a_capture_is_drained_of_what_it_ran_before(
    tenant: Tenant, metered: bool, way: str
) -> None:
    """A busy stream begins or joins a capture (`way`), so no event can be recorded behind its earlier launches. With
    `joins` these came after the capture had begun."""
    agent = tenant.agent()
    probe = tenant.probe()
    probe.start_cuda()
    probe.ok("stream", "captured")
    probe.ok("event", "joins")
    if way == "joins from another context":
        probe.ok("own_context", "another")
        probe.ok("stream", "busy")
        probe.ok("context_use")
        probe.ok("capture_begin", "captured", RELAXED)
        probe.ok("context_use", "another")
    else:
        probe.ok("stream", "busy")
    if way == "joins":
        probe.ok("capture_begin", "captured", RELAXED)
    grants: list[Grant] = []

    def granted(client: Client) -> Grant:
        grants.append(agent.next_grant(10_000, metered=metered))
        return grants[-1]

    agent.on_want = granted
    # Many short launches lengthen the window of launches between fences, so the long launch has no fence
    for _ in range(8):
        probe.ok("launch", "spin_us_1", "busy")
    probe.ok("launch", "spin_us_100000", "busy")
    if way == "begins":
        probe.ok("capture_begin", "busy", RELAXED)
    else:
        probe.ok("context_use")
        probe.ok("event_record", "joins", "captured")
        probe.ok("stream_wait", "busy", "joins")
    client, last = agent.client(), grants[-1].grant_id
    agent.revoke(client, grants[-1])
    agent.wait(lambda: any(drained.grant_id == last for drained in agent.frames(client, Drained)), "the drain")
    (usage,) = [usage for usage in tenant.read().client("tenant").usage.values() if usage.kernels]
    # not strict: another DRAINED may arrive between the two reads
    drains = zip(agent.frames(client, Drained), agent.times(client, Drained), strict=False)
    assert usage.last_end <= next(at for drained, at in drains if drained.grant_id == last)


def test_a_drain_next_to_a_capture_waits_for_launches_of_ended_threads_into_default_streams(tenant: Tenant) -> None:
    """While the capture is open, no event can be recorded behind these launches. So the drain waits until the capture
    is over.
    """
    agent = tenant.agent(grace_ms=5000)
    agent.on_want = lambda client: agent.next_grant(10_000)
    probe = tenant.probe()
    probe.start_cuda()
    for name in ("captured", "s"):
        probe.ok("stream", name)
    probe.ok("context_use", thread="ends")
    probe.ok("launch", "noop", "s", thread="ends")
    probe.ok("launch", "spin_us_300000", "", 2, thread="ends")
    probe.ok("thread_ends", thread="ends")
    probe.ok("context_use", thread="next")
    probe.ok("launch", "noop", "s", thread="next")  # this thread gets the slot of the ended thread
    probe.ok("capture_begin", "captured", RELAXED)
    client = agent.client()
    agent.revoke(client, agent.last_grant)
    time.sleep(0.1)
    probe.ok("capture_end", "captured", "graph")
    agent.next_frame(client, Drained)
    (usage,) = [usage for usage in tenant.read().client("tenant").usage.values() if usage.kernels]
    assert usage.last_end <= agent.times(client, Drained)[0]


@pytest.mark.promise("program-captures")
@pytest.mark.parametrize("stream", ["captured", "legacy"])
def test_a_drain_leaves_a_stream_alone_that_is_about_to_capture(tenant: Tenant, stream: str) -> None:
    """The driver answers late that no stream captures. By the drain's next call a stream captures. An event of the
    drain in that stream, or in the legacy stream, which orders it, would break the capture.
    """
    agent = tenant.agent()
    agent.on_want = lambda client: agent.next_grant(10_000)
    probe = tenant.probe(FAKE_CUDA_CAPTURE_MS="100")
    probe.start_cuda()
    probe.ok("stream", "captured", 0 if stream == "legacy" else 1)
    where = "captured" if stream == "captured" else ""
    launches = ["launch", "spin_us_1", where, 9]  # nine launches, so no fence is due after the last launches
    probe.ok("in_turn", launches, ["capture_begin", "captured", RELAXED])
    client = agent.client()
    agent.next_frame(client, Drained)
    probe.ok("capture_end", "captured")


@pytest.mark.promise("program-captures")
def test_drains_leave_a_stream_alone_that_is_about_to_join_a_capture(tenant: Tenant) -> None:
    agent = tenant.agent()
    agent.on_want = lambda client: agent.next_grant(12)
    probe = tenant.probe(FAKE_CUDA_CAPTURE_MS="1")
    probe.start_cuda()
    for name in ("captured", "joining"):
        probe.ok("stream", name)
    probe.ok("event", "joins")
    for _ in range(15):
        probe.ok("capture_begin", "captured", RELAXED)
        probe.ok(
            "in_turn",
            ["event_record", "joins", "captured"],
            ["launch", "spin_us_1", "joining", 9],
            ["stream_wait", "joining", "joins"],
            ["event_record", "joins", "joining"],
            ["stream_wait", "captured", "joins"],
            ["capture_end", "captured"],
        )


def test_a_woken_thread_keeps_its_grant_while_it_asks_whether_its_stream_captures(tenant: Tenant) -> None:
    """The woken thread first queries the driver for 20 ms whether its stream captures. A grant of an idle process is
    returned after 1 ms; this process is not idle.
    """
    agent = tenant.agent()
    agent.on_want = lambda client: agent.next_grant()
    probe = tenant.probe(FAKE_CUDA_CAPTURE_MS="20")
    probe.start_cuda()
    for name in ("captured", "s"):
        probe.ok("stream", name)
    probe.ok("capture_begin", "captured", RELAXED)
    client, rounds = agent.client(), 10

    def used() -> list[Drained]:
        return [drained for drained in agent.frames(client, Drained) if drained.launches]

    for number in range(rounds):
        probe.ok("launch", "spin_us_1", "s")
        agent.wait(lambda number=number: len(used()) > number, "the end of the turn")  # type: ignore[misc]
    unused = len(agent.frames(client, Drained)) - len(used())
    assert unused < rounds, "most turns were used at once"
