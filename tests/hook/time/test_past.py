"""The drain waits only for launches, not for ungated work next to them or behind them."""

from __future__ import annotations

import subprocess

import pytest
from hook.conftest import BUILD, GPU_0, Tenant
from sharepod.protocol import Drained

NOT_READY = 600
RELAXED = 2
BLOCKING = 0
"""Flags of a stream that waits for the legacy stream, and that the legacy stream waits for."""

versions = pytest.mark.parametrize("version", ["libcuda", "libcuda-11.8"])


WAYS = ("value", "function", "callback", "event", "batch", "copy")


@pytest.mark.promise("program-drain-launches")
@versions
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("where", ["behind", "beside"])
def test_work_that_is_not_gated_holds_no_drain_up(tenant: Tenant, version: str, way: str, where: str) -> None:
    """The ungated work ends only at the test's command, or a long time after the launches."""
    agent = tenant.agent()
    agent.on_want = lambda client: agent.next_grant(metered=True)
    probe = tenant.probe(double=tenant.double.with_name(version))
    probe.start_cuda()
    probe.ok("stream", "computes")
    probe.ok("stream", "loads")
    probe.ok("launch", "spin_us_500", "computes", 3)
    probe.ok("ungated", way, "computes" if where == "behind" else "loads")
    client = agent.client()
    assert agent.next_frame(client, Drained, timeout=20).launches == 3
    usage = tenant.read().client("tenant").usage[GPU_0]
    assert usage.kernels == usage.submitted == 3
    assert probe.call("stream_query", "computes" if where == "behind" else "loads").code == NOT_READY
    probe.ok("ungated_ends")


@pytest.mark.promise("program-drain-launches")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("stream", "thread"), [("", "main"), ("", "other"), ("computes", "other")])
def test_so_it_is_in_the_legacy_stream_and_by_another_thread(
    tenant: Tenant, way: str, stream: str, thread: str
) -> None:
    """Streams without the flag CU_STREAM_NON_BLOCKING wait for the legacy stream. Three short launches fill no window,
    so they have no fence yet. The hook must record one before the ungated work.
    """
    agent = tenant.agent()
    agent.on_want = lambda client: agent.next_grant(metered=True)
    probe = tenant.probe()
    probe.start_cuda()
    probe.ok("context_use", thread="other")
    probe.ok("stream", "computes", BLOCKING)
    probe.ok("launch", "noop", "computes", 3)
    probe.ok("ungated", way, stream, thread=thread)
    client = agent.client()
    agent.wait(lambda: sum(frame.launches for frame in agent.frames(client, Drained)) == 3, "all launches drained", 20)
    usage = tenant.read().client("tenant").usage[GPU_0]
    assert usage.kernels == usage.submitted == 3
    assert probe.call("stream_query", stream).code == NOT_READY
    probe.ok("ungated_ends")


@pytest.mark.promise("program-drain-launches")
def test_a_wait_that_is_over_ties_no_drain_to_other_streams(tenant: Tenant) -> None:
    """Launches behind a wait are fenced by an event of the whole context, which waits for every stream. After the wait,
    fences must be in the launch's own stream again.
    """
    agent = tenant.agent()
    agent.on_want = lambda client: agent.next_grant(metered=True)
    probe = tenant.probe()
    probe.start_cuda()
    probe.ok("context_use", thread="other")
    probe.ok("stream", "computes")
    probe.ok("stream", "loads")
    probe.ok("launch", "noop", "computes", 3)
    probe.ok("ungated", "value", "computes")
    probe.ok("ungated_ends")
    probe.ok("stream_sync", "computes")
    client = agent.client()
    agent.wait(lambda: sum(frame.launches for frame in agent.frames(client, Drained)) == 3, "the first launches", 20)
    probe.ok("hold", "later", "loads")
    probe.ok("launch", "noop", "computes", 3)
    probe.ok("ungated", "copy", "computes", thread="other")
    agent.wait(lambda: sum(frame.launches for frame in agent.frames(client, Drained)) == 6, "all launches", 20)
    assert probe.call("stream_query", "loads").code == NOT_READY
    probe.ok("release", "later")


@pytest.mark.promise("program-drain-launches")
@versions
@pytest.mark.parametrize("way", ["value", "function", "callback", "event", "batch"])
@pytest.mark.parametrize("thread", ["main", "other"])
def test_so_it_is_while_a_capture_is_open(tenant: Tenant, version: str, way: str, thread: str) -> None:
    """The capture is in another stream and thread, and stays open after the fences."""
    agent = tenant.agent()
    agent.on_want = lambda client: agent.next_grant(metered=True)
    probe = tenant.probe(double=tenant.double.with_name(version))
    probe.start_cuda()
    for name in ("captures", "other"):
        probe.ok("context_use", thread=name)
    for name in ("captured", "computes"):
        probe.ok("stream", name)
    probe.ok("capture_begin", "captured", RELAXED, thread="captures")
    probe.ok("launch", "noop", "captured", thread="captures")
    probe.ok("launch", "spin_us_500", "computes", 3)
    probe.ok("ungated", way, "computes", thread=thread)
    client = agent.client()
    agent.wait(lambda: sum(frame.launches for frame in agent.frames(client, Drained)) == 3, "all launches drained", 20)
    assert probe.call("stream_query", "computes").code == NOT_READY
    probe.ok("ungated_ends")
    probe.ok("capture_end", "captured", "graph", thread="captures")


@pytest.mark.promise("program-drain-launches")
@pytest.mark.parametrize("thread", ["main", "other"])
@pytest.mark.parametrize("way", ["context", "green"])
def test_a_wait_of_a_whole_context_holds_no_drain_up(tenant: Tenant, way: str, thread: str) -> None:
    """The last launches before the wait have no fence behind them yet, because a window contains many short
    launches.
    """
    agent = tenant.agent()
    agent.on_want = lambda client: agent.next_grant(metered=True)
    probe = tenant.probe()
    probe.start_cuda()
    if way == "green":
        probe.ok("green_context", "computes-context")
        probe.ok("green_stream", "computes", "computes-context")
        probe.ok("context_use")
    else:
        probe.ok("stream", "computes")
    probe.ok("context_use", thread="other")
    probe.ok("launch", "noop", "computes", 403)
    probe.ok("ungated", way, "computes", thread=thread)
    client = agent.client()
    agent.wait(lambda: sum(frame.launches for frame in agent.frames(client, Drained)) == 403, "all launches drained")
    assert probe.call("stream_query", "computes").code == NOT_READY
    probe.ok("ungated_ends")


def test_so_it_is_on_each_of_many_streams(tenant: Tenant) -> None:
    """The thread has more streams than its slot can store, so some are only in the registry of all streams."""
    agent = tenant.agent()
    agent.on_want = lambda client: agent.next_grant(metered=True)
    probe = tenant.probe()
    probe.start_cuda()
    names = [f"s{index}" for index in range(40)]
    for name in names:
        probe.ok("stream", name)
    for name in names:
        probe.ok("launch", "noop", name)
    for name in names:
        probe.ok("ungated", "value", name)
    client = agent.client()
    agent.wait(lambda: sum(frame.launches for frame in agent.frames(client, Drained)) == 40, "all launches drained")
    assert probe.call("stream_query", names[0]).code == NOT_READY
    probe.ok("ungated_ends")


def test_a_program_that_loads_its_next_batch_keeps_its_rate(tenant: Tenant) -> None:
    """Turns of 30 ms follow each other. At all times 50 ms of copies, a function and a wait are in other streams."""
    agent = tenant.agent()
    agent.on_want = lambda client: agent.next_grant(30, metered=True)

    def kernels(way: str) -> int:
        done = subprocess.run(
            [str(BUILD / "programs" / "prefetch"), "1.5", way],
            env=tenant.environment(way),
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        )
        return int(done.stdout)

    computes = kernels("computes")
    assert kernels("loads") > 0.7 * computes


def test_a_launch_of_another_thread_behind_such_work_is_waited_for(tenant: Tenant) -> None:
    """Another thread's ungated work makes the hook record an event behind the earlier launches. The last launch comes
    after that event and has no fence, because its window of launches is not full.
    """
    agent = tenant.agent()
    agent.on_want = lambda client: agent.next_grant(metered=True)
    probe = tenant.probe()
    probe.start_cuda()
    probe.ok("context_use", thread="other")
    probe.ok("stream", "s")
    probe.ok("launch", "noop", "s", 403)
    probe.ok("ungated", "value", "s", thread="other")
    probe.ok("ungated_ends")
    probe.ok("launch", "spin_us_300000", "s")
    client = agent.client()
    agent.on_want = lambda client: None
    agent.revoke(client, agent.last_grant)
    agent.wait(lambda: sum(frame.launches for frame in agent.frames(client, Drained)) == 404, "all launches drained")
    usage = tenant.read().client("tenant").usage[GPU_0]
    assert usage.kernels == usage.submitted == 404, "DRAINED comes when the work has ended"


def test_a_drain_waits_for_launches_that_only_another_threads_event_is_behind(tenant: Tenant) -> None:
    """Launches in the legacy stream have no fence of their thread yet. The drain must use the event that the hook has
    recorded behind them for another thread.
    """
    agent = tenant.agent()
    agent.on_want = lambda client: agent.next_grant(metered=True)
    probe = tenant.probe()
    probe.start_cuda()
    probe.ok("context_use", thread="other")
    probe.ok("launch", "noop", "", 403)
    probe.ok("launch", "spin_us_300000", "")
    agent.on_want = lambda client: None
    probe.ok("ungated", "value", "", thread="other")
    probe.ok("ungated_ends")
    client = agent.client()
    agent.revoke(client, agent.last_grant)
    agent.wait(lambda: sum(frame.launches for frame in agent.frames(client, Drained)) == 404, "all launches drained")
    usage = tenant.read().client("tenant").usage[GPU_0]
    assert usage.kernels == usage.submitted == 404, "DRAINED comes when the work has ended"


def test_a_drain_waits_for_a_destroyed_stream_next_to_a_wait_that_is_over(tenant: Tenant) -> None:
    """Nothing was launched behind the other stream's wait, so no event of the hook shows that it is over."""
    agent = tenant.agent()
    agent.on_want = lambda client: agent.next_grant(metered=True)
    probe = tenant.probe()
    probe.start_cuda()
    for name in ("computes", "loads", "third"):
        probe.ok("stream", name)
    for name in ("loads", "computes"):
        probe.ok("launch", "noop", name)
        probe.ok("stream_sync", name)
        probe.ok("hold", name, name)
    probe.ok("launch", "spin_us_300000", "computes")
    client = agent.client()
    agent.wait(lambda: sum(frame.launches for frame in agent.frames(client, Drained)) == 3, "a drain next to the waits")
    probe.ok("stream_destroy", "computes")
    probe.ok("release", "loads")
    probe.ok("stream_sync", "loads")
    probe.ok("launch", "spin_us_300000", "third")
    probe.ok("release", "computes")
    agent.wait(lambda: sum(frame.launches for frame in agent.frames(client, Drained)) == 4, "all launches drained")
    usage = tenant.read().client("tenant").usage[GPU_0]
    assert usage.kernels == usage.submitted == 4
    assert usage.last_end <= agent.times(client, Drained)[-1], "DRAINED comes when the work has ended"


def test_a_drain_waits_for_a_stream_that_is_destroyed_next_to_a_capture(tenant: Tenant) -> None:
    """The capture forbids an event behind the stream's work, so the drain ends only after the capture."""
    agent = tenant.agent()
    agent.on_want = lambda client: agent.next_grant(metered=True)
    probe = tenant.probe()
    probe.start_cuda()
    for name in ("computes", "captured"):
        probe.ok("stream", name)
    probe.ok("hold", "computes", "computes")
    probe.ok("launch", "spin_us_300000", "computes")
    client = agent.client()
    agent.wait(lambda: sum(frame.launches for frame in agent.frames(client, Drained)) == 1, "a drain next to the wait")
    probe.ok("capture_begin", "captured", RELAXED)
    probe.ok("stream_destroy", "computes")
    probe.ok("launch", "noop", "")
    probe.ok("release", "computes")
    probe.ok("capture_end", "captured", "graph")
    agent.wait(lambda: sum(frame.launches for frame in agent.frames(client, Drained)) == 2, "all launches drained")
    usage = tenant.read().client("tenant").usage[GPU_0]
    assert usage.kernels == usage.submitted == 2
    assert usage.last_end <= agent.times(client, Drained)[-1], "DRAINED comes when the work has ended"
