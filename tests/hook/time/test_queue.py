"""The queue of unfinished work stays bounded, and all of it has finished before the token goes back."""

from __future__ import annotations

import time
from itertools import count

import pytest
from doubles.gpus import QUEUE_DEPTH
from hook.conftest import GPU_0, GPU_1, MakeTenant, Tenant, terms
from sharepod.protocol import Drained, Draining, Grant, Want

versions = pytest.mark.parametrize("version", ["libcuda", "libcuda-11.8"])


def finished_before_drained(tenant: Tenant, turn: int = 0) -> bool:
    agent = tenant.agents[-1]
    client = agent.client()
    agent.next_frame(client, Drained, turn)
    usage = tenant.read().client("tenant").usage[GPU_0]
    return usage.kernels == usage.submitted and usage.last_end <= agent.times(client, Drained)[turn]


@versions
def test_work_in_more_than_64_contexts_is_drained(tenant: Tenant, version: str) -> None:
    agent = tenant.agent()
    probe = tenant.probe(double=tenant.double.with_name(version))
    probe.start_cuda()
    agent.on_want = lambda client: agent.next_grant(60, metered=True)
    for index in range(90):
        probe.ok("own_context", f"c{index}")
        probe.ok("launch", "spin_us_100")
        if index < 89:
            probe.ok("context_pop")
    probe.ok("launch", "spin_us_80000")  # this launch goes into the last context
    launched, client = time.monotonic_ns(), agent.client()
    agent.wait(lambda: max(agent.times(client, Drained), default=0) > launched, "DRAINED after the last launch")
    usage = tenant.read().client("tenant").usage[GPU_0]
    assert usage.kernels == usage.submitted == 91
    assert usage.last_end <= max(agent.times(client, Drained))


@versions
def test_more_than_64_captures_at_once_stay_valid_under_drains(tenant: Tenant, version: str) -> None:
    agent = tenant.agent()
    agent.on_want = lambda client: agent.next_grant(5, metered=True)
    probe = tenant.probe(double=tenant.double.with_name(version))
    probe.start_cuda()
    names = [f"s{index}" for index in range(80)]
    for name in [*names, "busy"]:
        probe.ok("stream", name)
    for name in names:
        probe.ok("capture_begin", name)
    probe.ok("context_use", thread="busy")
    probe.ok("launch", "spin_us_500", "busy", 40, thread="busy")
    client = agent.client()
    agent.wait(lambda: len(agent.frames(client, Drained)) > 1, "drains")
    for name in names:
        probe.ok("launch", "noop", name)
        probe.ok("capture_end", name, f"graph {name}")
    before = tenant.submitted()
    for name in names:
        probe.ok("launch_graph", f"graph {name}", name)
    assert tenant.submitted() == before + len(names)


@versions
def test_what_a_stream_ran_before_it_captures_is_drained(tenant: Tenant, version: str) -> None:
    """Neither a capturing stream nor a stream that joins the capture can be queried."""
    agent = tenant.agent()
    probe = tenant.probe(double=tenant.double.with_name(version))
    probe.start_cuda()
    for name in ("origin", "joins"):
        probe.ok("stream", name)
    probe.ok("event", "fork")
    launched = [probe.post("launch", "spin_us_30000", name) for name in ("origin", "joins")]
    client = agent.client()
    agent.next_frame(client, Want)
    agent.grant(client, 5)
    assert [future.result(10).code for future in launched] == [0, 0]
    probe.ok("capture_begin", "origin")
    probe.ok("event_record", "fork", "origin")
    probe.ok("stream_wait", "joins", "fork")
    assert finished_before_drained(tenant)
    assert probe.call("capture_end", "origin").code != 901  # CUDA_ERROR_STREAM_CAPTURE_INVALIDATED


@pytest.mark.parametrize("metered", [False, True])
def test_streams_made_and_destroyed_for_ever_leave_no_events_behind(tenant: Tenant, metered: bool) -> None:
    """Under a metered grant each launch has a fence, which may be pending when its stream is destroyed."""
    agent = tenant.agent()
    agent.on_want = lambda client: agent.next_grant(metered=metered)
    probe = tenant.probe()
    probe.start_cuda()
    for _ in range(300):
        probe.ok("stream", "short-lived")
        probe.ok("launch", "noop", "short-lived")
        probe.ok("stream_destroy", "short-lived")
    assert probe.ok("live_events") < 100


@pytest.mark.promise("program-wide-queue")
@pytest.mark.parametrize(("kernel_us", "most"), [(5_000, 3 * 100 // 5), (70_000, 3), (200_000, 3)])
def test_a_tenant_that_is_alone_has_no_more_than_a_tenth_of_a_second_in_its_queue(
    tenant: Tenant, kernel_us: int, most: int
) -> None:
    """If a launch takes longer than 50 ms, at most two launches are queued and a third one is under way. `most`:
    largest number of unfinished launches.
    """
    agent = tenant.agent()
    agent.on_want = lambda client: agent.next_grant()
    tenant.loop("--kernel-us", str(kernel_us), "--event-every", "1000000")
    tenant.until(lambda: tenant.submitted() * kernel_us > 1_500_000, "launches of which the hook learns")
    begun, unfinished = time.monotonic(), []
    while time.monotonic() < begun + 1:
        usage = tenant.read().client("tenant").usage
        unfinished.append(usage[GPU_0].submitted - usage[GPU_0].kernels)
        time.sleep(0.005)
    assert max(unfinished) <= most, unfinished


@pytest.mark.promise("program-held-launches")
@pytest.mark.parametrize("thread", ["main", "other"])
@pytest.mark.parametrize("way", ["value", "batch", "function", "callback", "event", "context"])
def test_a_tenant_that_is_alone_launches_behind_a_wait_without_waiting(tenant: Tenant, way: str, thread: str) -> None:
    """The launching thread may have to end the wait, so it must be able to fill the driver's queue of 1,024 operations.
    The count of driver calls shows that the hook polls no fence.
    """
    agent = tenant.agent()
    agent.on_want = lambda client: agent.next_grant()
    probe = tenant.probe()
    probe.start_cuda()
    probe.ok("context_use", thread="other")
    probe.ok("stream", "s")
    for turn in range(3):
        probe.ok("ungated", way, "s", thread=thread)
        before = probe.ok("driver_calls")
        probe.ok("launch", "spin_us_10", "s", QUEUE_DEPTH - 2, timeout=60)
        assert probe.ok("driver_calls") - before < QUEUE_DEPTH + 150, turn
        probe.ok("ungated_ends")
        probe.ok("stream_sync", "s")
        probe.ok("ungated_again")


@pytest.mark.promise("program-held-launches")
@pytest.mark.parametrize("way", ["value", "function"])
def test_a_metered_tenant_waits_briefly_for_a_fence_behind_a_wait(tenant: Tenant, way: str) -> None:
    """The hook polls a fence about once each ms, and after each unsuccessful wait doubles the launches that may pass.
    So 200 launches cause few waits.
    """
    agent = tenant.agent()
    agent.on_want = lambda client: agent.next_grant(metered=True)
    probe = tenant.probe()
    probe.start_cuda()
    probe.ok("stream", "s")
    for turn in range(2):
        probe.ok("ungated", way, "s")
        before = probe.ok("driver_calls")
        probe.ok("launch", "spin_us_10", "s", 200, timeout=60)
        assert probe.ok("driver_calls") - before < 900, turn
        probe.ok("ungated_ends")
        probe.ok("stream_sync", "s")
        probe.ok("ungated_again")


def test_before_other_work_nothing_is_fenced_alone(tenant: Tenant) -> None:
    """A tenant with limit 1 and without neighbours has fences only behind windows of launches; with a neighbour also
    before ungated work.
    """
    agent = tenant.agent()
    agent.on_want = lambda client: agent.next_grant()
    probe = tenant.probe()
    probe.start_cuda()
    probe.ok("launch", "noop", "", 500)
    agent.next_frame(agent.client(), Drained)  # the events of a drain and of windows have been created by now
    before = int(probe.ok("live_events"))

    def launch_and_load() -> int:
        probe.ok("launch", "noop", "", 3)
        probe.ok("copy_nowhere")
        return int(probe.ok("live_events")) - before

    assert launch_and_load() == 0
    agent.hints.contended = True
    tenant.until(lambda: launch_and_load() > 0, "fences")


@pytest.mark.promise("program-callbacks")
def test_a_destroyed_context_holds_nothing_up(tenant: Tenant) -> None:
    """While a thread destroys a context with unfinished work, the process answers its agent and launches into other
    contexts.
    """
    agent = tenant.agent()
    probe = tenant.probe()
    probe.start_cuda()
    probe.ok("stream", "other")
    agent.on_want = lambda client: agent.next_grant(metered=True)
    probe.ok("own_context", "ends", thread="ends")
    probe.ok("launch", "spin_us_400000", thread="ends")
    ending = probe.post("context_destroy", "ends", thread="ends")
    probe.ok("launch", "noop", "other", 50)
    assert ending.result(10).code == 0
    client = agent.client()
    agent.wait(lambda: sum(drained.launches for drained in agent.frames(client, Drained)) == 51, "all drained")


def test_a_grant_that_turns_metered_bounds_the_queue(tenant: Tenant) -> None:
    """A neighbour arrives on the GPU of a tenant that ran alone."""
    agent = tenant.agent()
    tenant.loop("--kernel-us", "1000", "--sync-every", "1000000")
    client = agent.client()
    agent.next_frame(client, Want)
    grant = agent.grant(client)

    def unfinished() -> int:
        usage = tenant.read().client("tenant").usage[GPU_0]
        return usage.submitted - usage.kernels

    tenant.until(lambda: unfinished() > 30, "a wide queue")
    agent.send(client, type(grant)(grant.grant_id, 0, grant.gpu_mask, metered=True))
    for _ in range(20):
        tenant.until(lambda: unfinished() < 13, "a short queue")
        time.sleep(0.005)
    settled = max(unfinished() for _ in range(100))
    assert settled < 30, "two windows of 5 ms, and some that a late thread leaves"
    agent.send(client, type(grant)(grant.grant_id, 0, grant.gpu_mask, metered=False))
    tenant.until(lambda: unfinished() > 30, "a wide queue again")
    agent.revoke(client, grant)
    assert agent.next_frame(client, Drained, timeout=30).grant_id == grant.grant_id


@pytest.mark.promise("program-every-stream")
@pytest.mark.parametrize("streams", [3, 40])
def test_each_of_a_threads_streams_has_a_short_queue(tenant: Tenant, streams: int) -> None:
    """This also holds if a thread has more streams than its slot can store."""
    agent = tenant.agent()
    agent.on_want = lambda client: agent.next_grant(metered=True)
    probe = tenant.probe()
    probe.start_cuda()
    names = [f"s{index}" for index in range(streams)]
    for name in names:
        probe.ok("stream", name)
    most = 0
    for _ in range(200 // streams):
        for name in names:
            probe.ok("launch", "spin_us_20000", name)  # each launch takes much longer than the call
        usage = tenant.read().client("tenant").usage[GPU_0]
        most = max(most, usage.submitted - usage.kernels)
    assert 0 < most <= 3 * streams, "two windows of a launch each, and one under way"


def test_a_queue_that_is_kept_short_has_one_launch_until_that_is_about_to_end(tenant: Tenant) -> None:
    """The grant's flag `short` is for turns next to an interactive tenant. Without the flag, two launches are queued,
    and one more while the thread waits.
    """
    agent = tenant.agent()
    tenant.loop("--kernel-us", "100000")
    client = agent.client()
    agent.next_frame(client, Want)
    agent.send(client, Grant(1, 0, 1, metered=True, short=True))

    def usage() -> tuple[int, int]:
        now = tenant.read().client("tenant").usage[GPU_0]
        return now.kernels, now.submitted - now.kernels

    tenant.until(lambda: usage()[0] > 4, "some kernels of which the hook learns")
    begun = usage()[0]
    unfinished = []
    while usage()[0] < begun + 10:
        unfinished.append(usage()[1])
        time.sleep(0.007)
    assert sum(each <= 1 for each in unfinished) >= 0.9 * len(unfinished), unfinished


def place(stream: int) -> int:
    """Return the index in a thread's table of streams, as shim/src/time/gate/remembered.h computes it. `stream`: its
    handle."""
    return (stream * 0x9E3779B97F4A7C15 & (1 << 64) - 1) >> 59


@pytest.mark.promise("program-every-stream")
def test_two_streams_of_one_context_that_a_thread_remembers_in_one_place_have_short_queues(tenant: Tenant) -> None:
    agent = tenant.agent()
    agent.on_want = lambda client: agent.next_grant(metered=True)
    probe = tenant.probe()
    probe.start_cuda()
    at: dict[int, str] = {}
    pair: tuple[str, str] | None = None
    # A table has 32 places, so at least two of 33 streams have the same place.
    for name in (f"s{index}" for index in range(33)):
        probe.ok("stream", name)
        other = at.setdefault(place(probe.ok("handle", name)), name)
        if other != name:
            pair = other, name
    assert pair is not None
    most = 0
    for _ in range(40):
        for name in pair:
            probe.ok("launch", "spin_us_5000", name)
        usage = tenant.read().client("tenant").usage[GPU_0]
        most = max(most, usage.submitted - usage.kernels)
    assert 0 < most <= 3 * 2, "two windows of a launch each, and one under way"


def test_one_thread_on_two_gpus_has_short_queues(make_tenant: MakeTenant) -> None:
    tenant = make_tenant(terms(GPU_0), terms(GPU_1))
    agent = tenant.agent()
    agent.on_want = lambda client: agent.next_grant(metered=True)
    probe = tenant.probe()
    probe.start_cuda()
    names = [f"c{index}" for index in range(24)]
    for index, name in enumerate(names):
        probe.ok("own_context", name, index % 2)
        probe.ok("context_pop")
    for _ in range(20):
        for name in names:
            probe.ok("context_use", name)
            probe.ok("launch", "spin_us_2000")
    usage = tenant.read().client("tenant").usage
    assert all(usage[gpu].submitted - usage[gpu].kernels <= 3 * 12 for gpu in (GPU_0, GPU_1))


def test_a_hint_that_others_want_the_gpu_bounds_the_queue(tenant: Tenant) -> None:
    agent = tenant.agent()
    tenant.loop("--kernel-us", "1000", "--sync-every", "1000000")
    client = agent.client()
    agent.next_frame(client, Want)
    agent.grant(client)

    def unfinished() -> int:
        usage = tenant.read().client("tenant").usage[GPU_0]
        return usage.submitted - usage.kernels

    tenant.until(lambda: unfinished() > 30, "a wide queue")
    agent.hints.contended = True
    tenant.until(lambda: unfinished() < 13, "a short queue")
    assert max(unfinished() for _ in range(100)) < 30


@pytest.mark.promise("program-short-queue")
@pytest.mark.parametrize(("kernel_us", "streams"), [(300, 1), (1500, 1), (1500, 4)])
def test_the_queue_is_short_when_the_quantum_ends(tenant: Tenant, kernel_us: int, streams: int) -> None:
    """Launches that would begin after the quantum wait for the next quantum. So the tenant overruns its quantum by less
    than one kernel of each stream.
    """
    agent = tenant.agent()
    tenant.loop("--kernel-us", str(kernel_us), "--streams", str(streams), "--event-every", "1000000")
    client = agent.client()
    agent.next_frame(client, Want)
    overruns = []
    for turn in range(8):  # the machine may be busy, so the best turn counts
        sent = time.monotonic_ns()
        agent.grant(client, 60, metered=True)
        agent.next_frame(client, Drained, turn)
        overruns.append((agent.times(client, Drained)[turn] - sent) / 1e6 - 60)
        agent.wait_asked(client, turn + 2)
    assert min(overruns) < streams * kernel_us / 1000 + 1.5, overruns


@pytest.mark.promise("program-overtaken-queue")
def test_a_turn_before_the_drain_adds_nothing_to_the_queue(tenant: Tenant) -> None:
    agent = tenant.agent(grace_ms=20)
    probe = tenant.probe()
    probe.start_cuda()
    probe.ok("stream", "s")
    launches = probe.post("launch", "spin_us_500000", "s", 4)
    client = agent.client()
    agent.next_frame(client, Want)
    agent.grant(client, 10, metered=True)
    agent.next_frame(client, Want, 1)  # the drain is overdue
    agent.grant(client, 10, metered=True)
    agent.next_frame(client, Drained)
    assert tenant.submitted() == 2
    agent.on_want = lambda client: agent.next_grant()
    agent.grant(client)
    assert launches.result(20).code == 0


def test_a_hook_says_when_its_last_work_will_have_ended_if_the_agent_listens(tenant: Tenant) -> None:
    agent = tenant.agent()
    tenant.loop("--kernel-us", "50000")
    client = agent.client()
    agent.next_frame(client, Want)
    agent.grant(client, 300, metered=True)
    agent.next_frame(client, Drained)
    assert agent.frames(client, Draining) == []
    ids = count(7)

    # Several grants, because a delayed thread may have no work left at the end of a turn
    def again(_: object = None) -> Grant:
        return Grant(next(ids), 300_000_000, 1, metered=True, announce=True)

    agent.on_want = again
    agent.send(client, again())
    draining = agent.next_frame(client, Draining, timeout=20)
    agent.wait(
        lambda: any(frame.grant_id == draining.grant_id for frame in agent.frames(client, Drained)), "its DRAINED"
    )
    ended = [at for at, frame in enumerate(agent.frames(client, Drained)) if frame.grant_id == draining.grant_id]
    assert 0 < draining.expected_ns <= 100_000_000 + 100_000_000, (
        "two kernels, of which a busy machine sees the end late"
    )
    took = agent.times(client, Drained)[ended[0]] - agent.times(client, Draining)[0]
    assert draining.expected_ns <= took + 50_000_000, "at most one of them too much"


def test_new_terms_of_a_grant_that_is_drained_open_nothing(tenant: Tenant) -> None:
    agent = tenant.agent()
    tenant.loop("--kernel-us", "1000")
    client = agent.client()
    agent.next_frame(client, Want)
    grant = agent.grant(client, 20, metered=True)
    agent.next_frame(client, Drained)
    agent.send(client, Grant(grant.grant_id, 20_000_000, 1, metered=True, renews=True))
    following = agent.grant(client, 20, metered=True)
    assert agent.next_frame(client, Drained, 1).grant_id == following.grant_id
