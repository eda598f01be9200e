"""The hook makes no driver call with a handle of an ended context, and none while the driver ends."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hook.conftest import GPU_0, Tenant
from hook.world.driver_script import PRELUDE
from hook.world.probe import Probe
from hook.world.scripted_agent import Client
from sharepod.protocol import Drained, Grant, Want


def misused(tenant: Tenant, label: str = "tenant") -> int:
    return tenant.read().client(label).usage[GPU_0].misused


def waits_at_the_gate(probe: Probe, thread: str) -> bool:
    """Return whether a launch of a thread waits at the gate. At an open gate the driver refuses the launch, because the
    thread has no context.
    """
    try:
        probe.post("launch", "noop", thread=thread).result(1)
    except TimeoutError:
        return True
    return False


@pytest.mark.promise("program-ends")
def test_what_was_learned_of_a_graph_does_not_outlive_its_context(tenant: Tenant) -> None:
    """The hook measures the graph by events around its launches. They end with the context, so a launch into the next
    context must not use them."""
    agent = tenant.agent()
    agent.on_want = lambda client: agent.next_grant(metered=True)
    probe = tenant.probe()
    probe.start_cuda()
    probe.ok("stream", "s")
    probe.ok("capture_begin", "s")
    probe.ok("launch", "noop", "s")
    probe.ok("capture_end", "s", "graph")
    for _ in range(3):
        probe.ok("launch_graph", "graph", "s")
    probe.ok("stream_sync", "s")
    probe.ok("context_reset")
    probe.ok("context_create")
    probe.ok("stream", "s")
    probe.ok("launch_graph", "graph", "s")
    probe.ok("graph_destroy", "graph")
    assert misused(tenant) == 0


@pytest.mark.promise("program-ends")
def test_a_context_that_comes_about_while_the_last_one_ends_is_another(tenant: Tenant) -> None:
    """The driver gives the ended context's handle to a new context before the ending call has returned. The hook must
    drain the second context's work.
    """
    agent = tenant.agent()
    grants: list[Grant] = []

    def again(_client: Client) -> Grant:
        """Grant the token each time the process returns it because it has no work."""
        grants.append(agent.next_grant(metered=True))
        return grants[-1]

    agent.on_want = again
    probe = tenant.probe(FAKE_CUDA_END_MS="300")
    probe.start_cuda()
    assert probe.post("launch", "noop", "", 200).result(10).code == 0
    resetting = probe.post("context_reset", thread="resets")
    tenant.until(lambda: not probe.ok("context_active"), "the end of the context")
    probe.ok("context_create")
    probe.ok("launch", "hang")
    assert not resetting.done()
    assert resetting.result(10).code == 0
    agent.on_want = lambda _client: None
    client = agent.client()
    wants, drained = agent.frames(client, Want), agent.frames(client, Drained)
    agent.revoke(client, grants[-1])
    tenant.until(lambda: waits_at_the_gate(probe, "other"), "the gate to be closed")
    agent.next_frame(
        client, Want, len(wants), timeout=20
    )  # the drain is overdue, because it waits for the second context's work
    assert agent.frames(client, Drained) == drained
    assert misused(tenant) == 0


@pytest.mark.promise("program-ends")
def test_a_release_that_is_not_the_last_ends_nothing(tenant: Tenant) -> None:
    """Each cuDevicePrimaryCtxRelease drops one of two references and takes 100 ms. Launches continue during the call:
    the context must not count as ended.
    """
    agent = tenant.agent()
    agent.on_want = lambda client: agent.next_grant(metered=True)
    probe = tenant.probe(FAKE_CUDA_RELEASE_MS="100")
    probe.start_cuda()
    probe.ok("stream", "s")
    counts = []
    for _ in range(6):
        probe.ok("context_create")
        releasing = probe.post("context_release", thread="releases")
        while not releasing.done():
            probe.ok("launch", "noop", "s", 4)
        assert releasing.result(10).code == 0
        counts.append(probe.ok("live_events"))
    assert max(counts) <= counts[0] + 2, "one row, with its events; another for a drain"
    probe.ok("context_release")
    assert probe.ok("context_active") == 0
    assert misused(tenant) == 0


@pytest.mark.promise("program-ends")
def test_work_of_a_green_contexts_stream_is_drained_and_departs_with_it(tenant: Tenant) -> None:
    """The launching thread's current context is the primary context, not the stream's green context."""
    agent = tenant.agent()
    grants: list[Grant] = []

    def again(_client: Client) -> Grant:
        grants.append(agent.next_grant(metered=True))
        return grants[-1]

    agent.on_want = again
    probe = tenant.probe()
    probe.start_cuda()
    probe.ok("green_context", "green")
    probe.ok("green_stream", "s", "green")
    probe.ok("context_use")
    probe.ok("launch", "noop", "s", 3)
    client = agent.client()
    agent.wait(lambda: sum(frame.launches for frame in agent.frames(client, Drained)) == 3, "all launches drained")
    drained = len(agent.frames(client, Drained))
    probe.ok("launch", "spin_us_300000", "s")
    agent.on_want = lambda _client: None
    agent.revoke(client, grants[-1])
    agent.next_frame(client, Drained, drained)
    usage = tenant.read().client("tenant").usage[GPU_0]
    assert usage.kernels == usage.submitted == 4, "DRAINED comes when the work has ended"
    agent.on_want = again
    probe.ok("launch", "noop", "s", 3)
    probe.ok("green_context_destroy", "green")
    probe.ok("launch", "noop", "", 3)
    agent.wait(lambda: sum(frame.launches for frame in agent.frames(client, Drained)) == 10, "all launches drained")
    assert misused(tenant) == 0


SCRIPT = """
function = new("cuModuleGetFunction", new("cuModuleLoadData", b"x"), b"spin_us_400000")
ok("cuLaunchKernel", function, *[c_uint(1)] * 6, c_uint(0), stream, None, None)
"""


@pytest.mark.promise("program-ends")
@pytest.mark.parametrize("quantum_ms", [5, 0])
def test_the_hook_is_out_of_the_driver_before_it_ends(tenant: Tenant, quantum_ms: int) -> None:
    """The program exits with unfinished work, for which the hook waits. The driver's own exit then takes some time."""
    agent = tenant.agent()
    agent.on_want = lambda client: agent.next_grant(quantum_ms, metered=True)
    done = subprocess.run(
        [sys.executable, "-S", "-c", PRELUDE + SCRIPT],
        env=tenant.environment("ends", FAKE_CUDA_END_MS="300"),
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert tenant.submitted("ends") == 1
    assert misused(tenant, "ends") == 0


LAUNCHES_ON = """
import threading, time

def launches(context, stream):
    ok("cuCtxSetCurrent", context)
    function = new("cuModuleGetFunction", new("cuModuleLoadData", b"x"), b"spin_us_200")
    stream = stream and new("cuStreamCreate", 1)
    ready.wait()
    while call("cuLaunchKernel", function, *[c_uint(1)] * 6, c_uint(0), stream, None, None) == 0:
        pass

for round in range(6):
    resets = os.environ["HOW"] == "reset"
    ending = new("cuDevicePrimaryCtxRetain", 0) if resets else new("cuCtxCreate_v2", c_uint(0), 0)
    ok("cuCtxSetCurrent", context)
    ready = threading.Barrier(4)
    threads = [threading.Thread(target=launches, args=(ending, stream)) for stream in (False, True, True)]
    for thread in threads:
        thread.start()
    ready.wait()
    time.sleep(0.01 + 0.007 * round)
    ok("cuDevicePrimaryCtxReset_v2", 0) if resets else ok("cuCtxDestroy_v2", ending)
    for thread in threads:
        thread.join()
"""


@pytest.mark.promise("program-ends")
@pytest.mark.parametrize("how", ["destroy", "reset"])
def test_a_context_may_end_while_other_threads_launch_into_it(tenant: Tenant, how: str) -> None:
    """The other threads are inside launches, or wait for fences. They continue until the driver refuses, before the
    call that ends the context has returned.
    """
    agent = tenant.agent()
    agent.on_want = lambda client: agent.next_grant(7, metered=True)
    done = subprocess.run(
        [sys.executable, "-S", "-c", PRELUDE + LAUNCHES_ON],
        env=tenant.environment("ends", HOW=how, FAKE_CUDA_END_MS="30"),
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert tenant.submitted("ends") > 50
    assert misused(tenant, "ends") == 0
