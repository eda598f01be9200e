"""Launches pass only with the token, in every form of a launch. All work has finished before the token is returned."""

from __future__ import annotations

import time

import pytest
from doubles.gpus import QUEUE_DEPTH, release_hung_kernels
from hook.conftest import GPU_0, GPU_1, MakeTenant, Tenant, last_report, terms
from sharepod.protocol import Drained, Hello, Want


@pytest.mark.promise("program-gate")
@pytest.mark.parametrize("resolve", ["symbol", "dlsym", "getproc", "getproc11"])
@pytest.mark.parametrize("call", ["kernel", "ex", "cooperative", "graph"])
@pytest.mark.parametrize("per_thread", [False, True], ids=["legacy", "per-thread"])
def test_no_launch_passes_without_the_token(tenant: Tenant, resolve: str, call: str, per_thread: bool) -> None:
    agent = tenant.agent()
    more = ["--per-thread-stream"] if per_thread else []
    process = tenant.loop("--seconds", "0.3", "--kernel-us", "500", "--resolve", resolve, "--call", call, *more)
    client = agent.client()
    assert agent.next_frame(client, Want).gpu_mask == 1
    assert last_report(process)["launches"] == 0
    assert tenant.submitted() == 0


@pytest.mark.parametrize("resolve", ["symbol", "dlsym", "getproc", "getproc11"])
@pytest.mark.parametrize("call", ["kernel", "ex", "cooperative", "graph"])
def test_launches_pass_while_the_token_is_held(tenant: Tenant, resolve: str, call: str) -> None:
    agent = tenant.agent()
    agent.on_want = lambda client: agent.next_grant()
    process = tenant.loop("--seconds", "0.2", "--kernel-us", "500", "--resolve", resolve, "--call", call)
    assert last_report(process)["launches"] > 10


def test_nothing_is_launched_between_drained_and_the_next_grant(tenant: Tenant) -> None:
    agent = tenant.agent()
    tenant.loop("--kernel-us", "300", "--threads", "3", "--streams", "2")
    client = agent.client()
    passed = 0
    for turn in range(8):
        agent.wait_asked(client, turn + 1)
        before = tenant.submitted()
        grant = agent.grant(client, 20, metered=turn % 2 == 0)
        drained = agent.next_frame(client, Drained, turn)
        came = agent.times(client, Drained)[turn]
        usage = tenant.read().client("tenant").usage[GPU_0]
        passed += drained.launches
        assert drained.grant_id == grant.grant_id
        assert usage.submitted == passed == before + drained.launches
        assert usage.kernels == usage.submitted, "work of the grant is unfinished"
        assert usage.last_end <= came
    assert passed > 50


def test_revoke_takes_the_token_back(tenant: Tenant) -> None:
    agent = tenant.agent()
    tenant.loop("--kernel-us", "1000", "--sync-every", "1")
    client = agent.client()
    agent.next_frame(client, Want)
    grant = agent.grant(client)
    tenant.until(lambda: tenant.submitted() > 5, "launches")
    agent.revoke(client, grant)
    drained = agent.next_frame(client, Drained)
    assert drained.grant_id == grant.grant_id
    assert tenant.submitted() == drained.launches


def test_a_revoke_of_an_earlier_grant_is_ignored(tenant: Tenant) -> None:
    agent = tenant.agent()
    tenant.loop("--kernel-us", "500", "--sync-every", "1")
    client = agent.client()
    agent.next_frame(client, Want)
    first = agent.grant(client, 10)
    agent.next_frame(client, Drained)
    agent.wait_asked(client, 2)
    agent.grant(client)
    agent.revoke(client, first)
    before = tenant.submitted()
    tenant.until(lambda: tenant.submitted() > before + 50, "launches after the stale REVOKE")
    assert len(agent.frames(client, Drained)) == 1


@pytest.mark.parametrize(("threads", "streams"), [(1, 1), (1, 16), (3, 5)])
def test_a_metered_grant_keeps_the_queue_short(tenant: Tenant, threads: int, streams: int) -> None:
    """Under an unmetered grant the program queues up to 100 ms of work, and the drain takes that long."""
    agent = tenant.agent()
    tenant.loop("--kernel-us", "2000", "--threads", str(threads), "--streams", str(streams))
    client = agent.client()
    agent.next_frame(client, Want)
    overruns = []
    for turn in range(4):
        sent = time.monotonic_ns()
        agent.grant(client, 50, metered=True)
        agent.next_frame(client, Drained, turn)
        overruns.append((agent.times(client, Drained)[turn] - sent) / 1e6 - 50)
    assert min(overruns) < 40, overruns


@pytest.mark.parametrize(
    ("metered", "contended", "within_ms"), [(True, False, 5), (False, True, 5), (False, False, 200)]
)
def test_an_idle_holder_gives_the_token_back(tenant: Tenant, metered: bool, contended: bool, within_ms: int) -> None:
    agent = tenant.agent()
    agent.hints.contended = contended
    probe = tenant.probe()
    probe.start_cuda()
    delays = []
    for turn in range(5):  # the machine may be busy, so the best of five turns counts
        launched = probe.post("launch", "spin_us_3000", "", 2)
        client = agent.client()
        agent.next_frame(client, Want, turn)
        agent.grant(client, metered=metered)
        assert launched.result(10).code == 0
        drained = agent.next_frame(client, Drained, turn)
        finished = tenant.read().client("tenant").usage[GPU_0].last_end
        assert drained.idle
        assert drained.launches == 2
        delays.append((agent.times(client, Drained)[turn] - finished) / 1e6)
    assert 0 <= min(delays) < within_ms


def test_a_holder_with_unfinished_work_is_not_idle(tenant: Tenant) -> None:
    agent = tenant.agent()
    probe = tenant.probe()
    probe.start_cuda()
    launched = probe.post("launch", "hang")
    client = agent.client()
    agent.next_frame(client, Want)
    agent.grant(client, metered=True)
    assert launched.result(10).code == 0
    time.sleep(0.1)
    assert agent.frames(client, Drained) == []
    release_hung_kernels(tenant.state)
    assert agent.next_frame(client, Drained).idle


def test_a_hung_kernel_keeps_the_token_until_it_ends(tenant: Tenant) -> None:
    agent = tenant.agent(grace_ms=20)
    probe = tenant.probe()
    probe.start_cuda()
    launched = probe.post("launch", "hang")
    client = agent.client()
    agent.next_frame(client, Want)
    agent.grant(client, 10, metered=True)
    assert launched.result(10).code == 0
    time.sleep(0.15)
    assert agent.frames(client, Drained) == []
    release_hung_kernels(tenant.state)
    assert agent.next_frame(client, Drained).launches == 1


@pytest.mark.promise("program-waiting-work")
def test_work_that_waits_for_a_thread_at_the_gate_gets_another_turn(tenant: Tenant) -> None:
    """A kernel spins until another kernel has run, and so ends only if that kernel may be launched. When the drain is
    overdue, the hook requests the token again. A new grant opens the gate while the work of the old grant still runs.
    """
    agent = tenant.agent(grace_ms=50)
    probe = tenant.probe()
    probe.start_cuda()
    for name in ("s", "t"):
        probe.ok("stream", name)
    probe.ok("context_use", thread="other")
    launched = probe.post("launch", "hang", "s")
    client = agent.client()
    agent.next_frame(client, Want)
    agent.grant(client, 10, metered=True)
    assert launched.result(10).code == 0
    others = [probe.post("launch", "noop", "t", thread="other")]

    def asked() -> bool:
        if others[-1].done():  # the gate was still open
            others.append(probe.post("launch", "noop", "t", thread="other"))
        return len(agent.frames(client, Want)) > 1

    tenant.until(asked, "WANT")
    assert not others[-1].done()
    second = agent.grant(client, 10, metered=True)
    assert others[-1].result(10).code == 0
    assert agent.frames(client, Drained) == []
    release_hung_kernels(tenant.state)
    drained = agent.next_frame(client, Drained)
    assert (drained.grant_id, drained.launches) == (second.grant_id, 1 + len(others))


def test_without_an_agent_too_work_may_wait_for_a_thread_at_the_gate(make_tenant: MakeTenant) -> None:
    tenant = make_tenant(terms(request=950))
    probe = tenant.probe()
    probe.start_cuda()
    for name in ("s", "t"):
        probe.ok("stream", name)
    probe.ok("launch", "hang", "s")
    probe.ok("context_use", thread="other")
    for _ in range(3):  # one of these launches arrives at a closed gate
        probe.ok("launch", "noop", "t", thread="other")
        time.sleep(0.04)
    release_hung_kernels(tenant.state)


def test_a_thread_that_sleeps_in_a_full_queue_does_not_stop_the_hand_over(tenant: Tenant) -> None:
    """A stream's queue in the driver is full of events behind a kernel, so the next launch sleeps in the driver. The
    drain must not wait for that thread.
    """
    agent = tenant.agent(grace_ms=50)
    probe = tenant.probe()
    probe.start_cuda()
    probe.ok("stream", "s")
    probe.ok("event", "e")
    first = probe.post("launch", "hang", "s")
    client = agent.client()
    agent.next_frame(client, Want)
    grant = agent.grant(client, 60_000, metered=True)  # the fence behind the first launch shows when that launch ends
    assert first.result(10).code == 0
    probe.ok("event_record", "e", "s", QUEUE_DEPTH - 2)  # the stream's queue also contains the kernel and its fence
    launching = probe.post("launch", "spin_us_200000", "s", 3)
    tenant.until(lambda: tenant.submitted() == 2, "the launch that sleeps")
    agent.revoke(client, grant)
    time.sleep(0.3)  # the grace period is over, and all other work has ended
    release_hung_kernels(tenant.state)
    drained = agent.next_frame(client, Drained)
    usage = tenant.read().client("tenant").usage[GPU_0]
    assert usage.submitted == usage.kernels == drained.launches == 2
    assert usage.last_end <= agent.times(client, Drained)[0]
    agent.wait_asked(client, 2)
    agent.grant(client)
    assert launching.result(10).code == 0


@pytest.mark.promise("time-one-token")
def test_processes_of_a_tenant_share_one_token(tenant: Tenant) -> None:
    agent = tenant.agent()
    probes = [tenant.probe(f"rank{rank}") for rank in range(2)]
    for probe in probes:
        probe.start_cuda()
    launched = [probe.post("launch", "spin_us_1000") for probe in probes]
    clients = [agent.client(index) for index in range(2)]
    for client in clients:
        agent.next_frame(client, Want)
    grant = agent.next_grant(20)
    for client in clients:
        agent.send(client, grant)
    assert [future.result(10).code for future in launched] == [0, 0]
    assert {agent.next_frame(client, Drained).grant_id for client in clients} == {grant.grant_id}


def test_a_killed_holder_is_seen_gone(tenant: Tenant) -> None:
    agent = tenant.agent()
    process = tenant.loop("--kernel-us", "1000", "--memory", "8M")
    client = agent.client()
    agent.next_frame(client, Want)
    agent.grant(client)
    tenant.until(lambda: tenant.submitted() > 5, "launches")
    process.kill()
    agent.wait(lambda: client.closed, "the end of the connection", 2)
    tenant.until(lambda: not tenant.read().client("tenant").alive, "the end of the process")


def test_work_on_several_gpus_is_drained_on_all_of_them(make_tenant: MakeTenant) -> None:
    tenant = make_tenant(terms(GPU_0), terms(GPU_1))
    agent = tenant.agent()
    probe = tenant.probe()
    probe.start_cuda()
    probe.ok("own_context", "second", 1)
    probe.ok("stream", "on second")
    probe.ok("context_use")
    probe.ok("stream", "on first")
    for name, context in (("on first", ""), ("on second", "second")):
        probe.ok("context_use", context, thread=name)
    launching = [probe.post("launch", "spin_us_20000", name, thread=name) for name in ("on first", "on second")]
    client = agent.client()
    assert agent.next_frame(client, Want).gpu_mask == 3
    agent.grant(client, 5)
    assert [future.result(10).code for future in launching] == [0, 0]
    agent.next_frame(client, Drained)
    came = agent.times(client, Drained)[0]
    usage = tenant.read().client("tenant").usage
    assert [usage[gpu].kernels for gpu in (GPU_0, GPU_1)] == [1, 1]
    assert max(usage[gpu].last_end for gpu in (GPU_0, GPU_1)) <= came


@pytest.mark.parametrize("version", ["libcuda", "libcuda-11.8"])
def test_one_thread_may_use_the_default_streams_of_several_gpus(make_tenant: MakeTenant, version: str) -> None:
    """One handle means a different stream on each GPU. Each of these streams is drained."""
    tenant = make_tenant(terms(GPU_0), terms(GPU_1))
    agent = tenant.agent()
    probe = tenant.probe(double=tenant.double.with_name(version))
    probe.start_cuda()
    probe.ok("own_context", "second", 1)
    agent.on_want = lambda client: agent.next_grant(30, metered=True)
    for _ in range(5):
        for context in ("", "second"):
            probe.ok("context_use", context)
            probe.ok("launch", "spin_us_2000")
    probe.ok("launch", "spin_us_100000")  # on the second GPU
    launched, client = time.monotonic_ns(), agent.client()
    agent.wait(lambda: max(agent.times(client, Drained), default=0) > launched, "DRAINED after the last launch")
    came = max(agent.times(client, Drained))
    usage = tenant.read().client("tenant").usage
    assert [usage[gpu].kernels for gpu in (GPU_0, GPU_1)] == [5, 6]
    assert max(usage[gpu].last_end for gpu in (GPU_0, GPU_1)) <= came


def test_the_default_stream_of_a_context_that_comes_later_is_drained_too(tenant: Tenant) -> None:
    """With one context, the hook does not query which context is current. No fence is behind the last launch into the
    first context, so the drain must query its legacy stream.
    """
    agent = tenant.agent()
    probe = tenant.probe(double=tenant.double.with_name("libcuda-11.8"), CUDA_VISIBLE_DEVICES="0")
    probe.start_cuda()
    grant = agent.next_grant()
    agent.on_want = lambda client: grant
    before = probe.ok("live_events")
    for _ in range(3):
        probe.ok("launch", "noop")
    probe.ok("own_context", "second")
    probe.ok("launch", "spin_us_20000")
    client = agent.client()
    agent.revoke(client, grant)
    agent.next_frame(client, Drained)
    assert probe.ok("live_events") - before == 2 + 1, "two fences of the first, and one of the second"
    usage = tenant.read().client("tenant").usage[GPU_0]
    assert usage.kernels == usage.submitted == 4
    assert usage.last_end <= agent.times(client, Drained)[0]


@pytest.mark.parametrize("version", ["libcuda", "libcuda-11.8"])
def test_work_of_a_destroyed_stream_is_drained_too(tenant: Tenant, version: str) -> None:
    agent = tenant.agent()
    probe = tenant.probe(double=tenant.double.with_name(version))
    probe.start_cuda()
    probe.ok("stream", "short-lived")
    launched = probe.post("launch", "spin_us_30000", "short-lived")
    client = agent.client()
    agent.next_frame(client, Want)
    agent.grant(client, 5)
    assert launched.result(10).code == 0
    probe.ok("stream_destroy", "short-lived")
    agent.next_frame(client, Drained)
    assert tenant.read().client("tenant").usage[GPU_0].last_end <= agent.times(client, Drained)[0]


def test_more_threads_than_slots_all_pass_and_all_count(make_tenant: MakeTenant) -> None:
    """A thread without processor time may be inside a launch for long. The hook must wait for that thread, or its
    launch would pass after the launches were counted."""
    tenant = make_tenant(hasty=True)
    agent = tenant.agent(grace_ms=60000)
    process = tenant.loop("--threads", "100", "--kernel-us", "0", "--idle-us", "20000", "--event-every", "1000000")
    client = agent.client()
    agent.next_frame(client, Want)
    passed = turn = 0
    while passed < 2200:
        agent.wait_asked(client, turn + 1)
        agent.grant(client, 100)
        passed += agent.next_frame(client, Drained, turn).launches
        assert tenant.submitted() == passed
        turn += 1
    process.kill()


@pytest.mark.promise("program-gate", "program-no-membarrier")
@pytest.mark.parametrize(
    ("under", "hasty"), [((), False), (("nomembarrier",), False), ((), True)], ids=["membarrier", "fences", "shared"]
)
def test_no_launch_slips_through_a_closing_gate(make_tenant: MakeTenant, under: tuple[str, ...], hasty: bool) -> None:
    """Hundreds of grants end in the middle of launches. Every launch is counted before DRAINED. `hasty`: most threads
    have no slot of their own.
    """
    tenant = make_tenant(hasty=hasty)
    agent = tenant.agent(grace_ms=60000)
    tenant.loop("--threads", "6", "--streams", "3", "--function", "noop", "--event-every", "1000000", under=under)
    client = agent.client()
    agent.next_frame(client, Want)
    assert agent.frames(client, Hello)[0].no_membarrier == bool(under)
    passed = 0
    for turn in range(300):
        agent.grant(client, 1, metered=turn % 3 == 0)
        passed += agent.next_frame(client, Drained, turn).launches
        assert tenant.submitted() == passed
    assert passed > 300


def test_hello_names_the_build(tenant: Tenant) -> None:
    agent = tenant.agent()
    probe = tenant.probe()
    probe.ok("init")
    hello = agent.next_frame(agent.client(), Hello)
    assert len(hello.build) == 32
    assert not hello.no_membarrier
