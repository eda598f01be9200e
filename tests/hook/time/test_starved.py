"""A process without processor time leaves the GPU to other tenants. Its tenant is charged for the time that its work
takes.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
from doubles.gpus import release_hung_kernels
from harness.host import Stolen
from hook.conftest import Tenant
from hook.world.agent_node import Node, Program, built, running, tenant, wait_for
from hook.world.held_thread import held, hook_thread, stop
from hook.world.scripted_agent import Client, ScriptedAgent
from hook.world.stopping import AHEAD, regular, stopping
from sharepod.protocol import Drained, Draining, Grant, Want

pytestmark = pytest.mark.skipif(not built(), reason="hook or double not built: run `make shim doubles`")

PERIOD_S = 0.1
"""Seconds: period of the kernel's CPU quotas, unless a container sets another one."""
SETTLE_S = 1.5
MEASURED_S = 6.0
CGROUPS = (Path("/sys/fs/cgroup/cpu"), Path("/sys/fs/cgroup"))
"""Paths at which a cgroup with a CPU quota can be created: cgroup version 1, version 2."""


@contextlib.contextmanager
def stopped_half_of_the_time(program: Program) -> Iterator[None]:
    """Stop a program for half of each period, and let it continue at the end."""
    with stopping(program.process, regular(PERIOD_S * 500, PERIOD_S * 500)):
        yield


@contextlib.contextmanager
def half_a_processor(program: Program) -> Iterator[None]:
    """Give a program half a processor by a CPU quota. A neighbour in its cgroup uses all of that half."""
    cgroup = _cgroup(f"sharepod-test-{os.getpid()}")
    if cgroup is None:
        pytest.skip("no cgroup with a CPU quota can be made here: that takes root and the controller cpu")
    busy = subprocess.Popen(["/bin/sh", "-c", "while :; do :; done"])
    try:
        for pid in (program.process.pid, busy.pid):
            (cgroup / "cgroup.procs").write_text(str(pid))
        yield
    finally:
        (cgroup.parent / "cgroup.procs").write_text(str(program.process.pid))
        busy.kill()
        busy.wait()
        wait_for(lambda: not (cgroup / "cgroup.procs").read_text(), "the cgroup to be empty")
        cgroup.rmdir()


def _cgroup(name: str) -> Path | None:
    """Return a new cgroup whose processes have half a processor; None: this process cannot create one."""
    period_us = round(PERIOD_S * 1e6)
    for root in CGROUPS:
        made = root / name
        with contextlib.suppress(OSError):
            made.mkdir()
            for file, quota in (
                ("cpu.cfs_quota_us", f"{period_us // 2}"),
                ("cpu.max", f"{period_us // 2} {period_us}"),
            ):
                if (made / file).exists():
                    (made / file).write_text(quota)
                    return made
            made.rmdir()
    return None


@contextlib.contextmanager
def stopped_each_twenty_ms(program: Program) -> Iterator[None]:
    """Stop a program for 10 ms of every 20 ms, and let it continue at the end."""
    with stopping(program.process, regular(10, 10)):
        yield


Starve = Callable[[Program], AbstractContextManager[None]]


@pytest.mark.promise("time-starved")
@pytest.mark.parametrize("starve", [stopped_half_of_the_time, stopped_each_twenty_ms, half_a_processor])
def test_a_tenant_without_processor_time_does_not_idle_the_gpu(tmp_path: Path, starve: Starve) -> None:
    """Together the two tenants get as much GPU time as without the stops, as far as other work on the machine
    allows."""
    with running(tmp_path, tenant("starved", 0.5), tenant("fed", 0.5)) as node:
        program = ("--kernel-us", "1000", "--sync-every", "16")
        starved, _ = (node.launch(label, *program, extra=AHEAD) for label in ("starved", "fed"))
        wait_for(lambda: all(node.devices().busy_ns(label) > 0 for label in ("starved", "fed")), "device time")
        time.sleep(SETTLE_S)
        at_best = sum(node.shares(MEASURED_S / 2, "starved", "fed").values())
        with starve(starved):
            time.sleep(SETTLE_S)
            before, stolen = _held(node), Stolen()
            shares = node.shares(MEASURED_S, "starved", "fed")
            held = (_held(node) - before) / MEASURED_S
            taken = stolen.part()
    assert sum(shares.values()) >= 0.91 * at_best - taken, (shares, at_best, taken)
    assert shares["fed"] >= 0.45 * at_best - taken, (shares, at_best, taken)
    assert held - shares["starved"] <= 0.1, "it is charged what its work takes, and what a hand-off takes"


def _held(node: Node) -> float:
    """Return the seconds charged to the starved tenant so far."""
    return sum(
        sample.value
        for sample in node.metrics()
        if sample.name == "sharepod_tenant_held_seconds_total" and sample.labels["pod"] == "starved"
    )


@pytest.mark.promise("time-starved")
def test_a_stopped_holder_is_suspended_and_goes_on_later(tmp_path: Path) -> None:
    with running(tmp_path, tenant("a", 0.5), tenant("b", 0.5)) as node:
        stopped, _ = (node.launch(label, "--sync-every", "16") for label in ("a", "b"))
        # First let both tenants have turns. While a tenant is alone, its hook reports no end of its work, so the agent
        # would not find it silent.
        wait_for(lambda: all(node.devices().busy_ns(label) > 200_000_000 for label in ("a", "b")), "turns of both")
        stop(stopped.process)
        time.sleep(0.5)
        try:
            assert node.shares(2, "b")["b"] >= 0.9
        finally:
            stopped.process.send_signal(signal.SIGCONT)
        assert "preempted" not in node.log(), "it owes nothing"
        wait_for(lambda: node.shares(1, "a")["a"] > 0.3, "the stopped program's share")


def metered(tenant: Tenant, agent: ScriptedAgent, launches: int = 20) -> tuple[Client, Grant]:
    """Let the tenant's program launch under a metered grant of a minute."""
    client = agent.client()
    agent.next_frame(client, Want)
    grant = agent.grant(client, 60_000, metered=True)
    tenant.until(lambda: tenant.submitted() > launches, "launches")
    return client, grant


@pytest.mark.promise("program-barred")
def test_no_launch_begins_under_a_barred_grant_while_the_hook_has_no_processor(tenant: Tenant) -> None:
    """The hook thread is held and cannot close the gate. The program's threads run on and find the grant barred."""
    agent = tenant.agent()
    process = tenant.loop("--kernel-us", "200", "--threads", "3", "--event-every", "1000000")
    client, grant = metered(tenant, agent)
    with held(hook_thread(process.pid)):
        before = tenant.submitted()
        tenant.until(lambda: tenant.submitted() > before + 20, "launches go on: the gate is open")
        agent.hints.bar(grant.grant_id)
        time.sleep(0.1)  # threads that were inside a launch have left it
        barred = tenant.submitted()
        time.sleep(0.3)
        assert tenant.submitted() == barred
        assert agent.frames(client, Drained) == []
    drained = agent.next_frame(client, Drained)
    assert drained.grant_id == grant.grant_id
    assert drained.wanting
    assert drained.launches == barred
    agent.grant(client, 60_000, metered=True)
    tenant.until(lambda: tenant.submitted() > barred + 20, "launches under a later grant")


def test_a_barred_grant_is_drained_at_once(tenant: Tenant) -> None:
    """The drain begins at once. It waits neither for the end of the work nor for the end of the grant."""
    agent = tenant.agent()
    probe = tenant.probe()
    probe.start_cuda()
    launched = probe.post("launch", "hang")
    client = agent.client()
    agent.next_frame(client, Want)
    grant = agent.grant(client, 60_000, metered=True)
    assert launched.result(10).code == 0
    agent.hints.bar(grant.grant_id)
    assert agent.next_frame(client, Draining).grant_id == grant.grant_id
    assert agent.frames(client, Drained) == []
    release_hung_kernels(tenant.state)
    assert agent.next_frame(client, Drained).grant_id == grant.grant_id


def test_a_process_says_that_it_runs_again_before_it_has_drained(tenant: Tenant) -> None:
    agent = tenant.agent()
    process = tenant.loop("--kernel-us", "100000", "--event-every", "1000000")
    client, grant = metered(tenant, agent, launches=4)
    with held(hook_thread(process.pid)):
        agent.hints.bar(grant.grant_id)
    draining = agent.next_frame(client, Draining)
    assert draining.grant_id == grant.grant_id
    assert agent.next_frame(client, Drained).grant_id == grant.grant_id
    assert agent.times(client, Draining)[0] < agent.times(client, Drained)[0]


def test_a_process_gives_signs_of_life_while_it_runs(tenant: Tenant) -> None:
    agent = tenant.agent()
    process = tenant.loop("--kernel-us", "20000", "--event-every", "1000000")
    client, grant = metered(tenant, agent, launches=4)
    tenant.until(lambda: client.pulse().ends_at > 0, "the duration of its kernels to be known")
    beats: set[int] = set()

    def alive() -> bool:
        beats.add(client.pulse().beat_at)
        return len(beats) > 20

    tenant.until(alive, "heartbeats")
    pulse = client.pulse()
    assert pulse.grant_id == grant.grant_id
    assert 0 <= pulse.ends_at - pulse.beat_at <= 3 * 20_000_000 + 20_000_000, "two kernels and what a busy machine adds"
    stop(process)
    stopped = client.pulse()
    time.sleep(0.05)
    assert client.pulse() == stopped
    process.send_signal(signal.SIGCONT)
    agent.revoke(client, grant)
    agent.next_frame(client, Drained)
    tenant.until(lambda: client.pulse().grant_id == 0, "its word that it holds nothing")


@pytest.mark.promise("time-starved")
def test_time_for_which_a_process_was_stopped_does_not_put_off_the_end_that_it_foretells(tenant: Tenant) -> None:
    """A stop of the process does not delay its launched work, so the reported end of that work must not include the
    stop.
    """
    agent = tenant.agent()
    process = tenant.loop("--kernel-us", "2000", "--event-every", "1000000", FAKE_CUDA_AHEAD_MS="200")
    client, _ = metered(tenant, agent, launches=100)
    agent.on_want = lambda client: agent.next_grant(metered=True)  # grant again: a delayed program may return the token

    def beyond() -> int:
        """Stop the process for a while. Return by how many ns its work ended before the end that it had reported."""
        stop(process)
        ended_at = max(usage.last_end for usage in tenant.read().client("tenant").usage.values())
        stopped, launched = client.pulse(), tenant.submitted()
        time.sleep(0.06)
        process.send_signal(signal.SIGCONT)
        tenant.until(lambda: tenant.submitted() > launched + 2 and client.pulse() != stopped, "it to go on")
        return stopped.ends_at - ended_at

    beyond_ns = sorted(beyond() for _ in range(20))
    assert beyond_ns[len(beyond_ns) // 2] <= 10_000_000, "two windows of 5 ms, not the 60 ms of a stop"


@pytest.mark.promise("time-starved")
def test_a_process_that_was_barred_shows_that_it_runs_while_it_waits(tenant: Tenant) -> None:
    agent = tenant.agent()
    tenant.loop("--kernel-us", "200", "--event-every", "1000000")
    client, grant = metered(tenant, agent)
    agent.revoke(client, grant)
    agent.next_frame(client, Drained)
    tenant.until(lambda: client.pulse().grant_id == 0, "its word that it holds nothing")
    assert client.pulse().ends_at == 0, "it was never barred"
    second = agent.grant(client, 60_000, metered=True)
    agent.hints.bar(second.grant_id)
    agent.next_frame(client, Drained)
    beats: set[int] = set()

    def shown() -> bool:
        pulse = client.pulse()
        if pulse.grant_id == 0 and pulse.ends_at != 0:
            beats.add(pulse.beat_at)
        return len(beats) > 20

    tenant.until(shown, "heartbeats while it waits")
    tenant.until(lambda: client.pulse().ends_at == 0, "the end of them: it was not barred for a while")


def test_the_end_of_work_that_was_launched_without_metering_is_not_known(tenant: Tenant) -> None:
    agent = tenant.agent()
    tenant.loop("--kernel-us", "5000", "--event-every", "1000000")
    client = agent.client()
    agent.next_frame(client, Want)
    agent.grant(client, 100, metered=True)  # the hook measures the duration of its kernels under this grant
    agent.next_frame(client, Drained, timeout=30)
    agent.wait_asked(client, 2)
    agent.on_want = lambda client: agent.next_grant()  # grant again: a delayed program may return the token
    agent.grant(client)
    tenant.until(lambda: tenant.submitted() > 400, "two seconds of work")
    agent.send(client, Grant(agent.last_grant.grant_id, 60_000_000_000, 1, metered=True, renews=True))
    begun = client.pulse().beat_at

    seen = []

    def beats() -> bool:
        seen.append(client.pulse())
        return seen[-1].beat_at > begun + 300_000_000 and seen[-1].grant_id == agent.last_grant.grant_id

    tenant.until(beats, "heartbeats under the new terms")
    assert seen[-1].ends_at == 0


@pytest.mark.promise("install-running-hook")
def test_a_hook_speaks_version_1_with_an_agent_of_version_1(tenant: Tenant) -> None:
    agent = tenant.agent()
    agent.version = 1
    tenant.loop("--kernel-us", "200", "--event-every", "1000000")
    client, grant = metered(tenant, agent)
    agent.revoke(client, grant)
    agent.next_frame(client, Drained)
    assert {received.version for received in client.received} == {1}
