"""Without an agent the tenant keeps its request and its memory limit, and it connects to the agent when that is
back.
"""

from __future__ import annotations

import shutil
import time

import pytest
from hook.conftest import GPU_0, MIB, MakeTenant, Tenant, last_report, terms
from hook.world.probe import SYSTEM_NOT_READY
from sharepod.protocol import Drained, RefusedReason, Want


def share_alone(tenant: Tenant, expected: float, *arguments: str) -> float:
    """Return launchloop's share of GPU time: the best of three tries, because a busy machine only reduces it."""
    shares: list[float] = []
    while len(shares) < 3 and max(shares, default=0) < expected - 0.05:
        shares.append(last_report(tenant.loop("--seconds", "3", *arguments))["share"])
        assert shares[-1] < expected + 0.05
    return max(shares)


@pytest.mark.promise("time-agent-away", "install-agent-gap")
@pytest.mark.parametrize("request_milli", [200, 600, 1000])
def test_without_an_agent_the_request_is_the_share(make_tenant: MakeTenant, request_milli: int) -> None:
    tenant = make_tenant(terms(request=request_milli))
    expected = request_milli / 1000
    assert share_alone(tenant, expected, "--kernel-us", "1000") == pytest.approx(expected, abs=0.05)


def test_long_kernels_do_not_lift_the_share(make_tenant: MakeTenant) -> None:
    """Each kernel takes longer than the window of the duty cycle in which it is launched. So the gate stays closed in
    the following windows."""
    tenant = make_tenant(terms(request=100))
    assert share_alone(tenant, 0.1, "--kernel-us", "50000") == pytest.approx(0.1, abs=0.05)


@pytest.mark.promise("time-agent-away-best-effort")
def test_best_effort_waits_for_the_agent(make_tenant: MakeTenant) -> None:
    tenant = make_tenant(terms(request=0))
    process = tenant.loop("--kernel-us", "1000")
    time.sleep(0.3)
    assert tenant.submitted() == 0
    agent = tenant.agent()
    client = agent.client()
    agent.next_frame(client, Want)
    agent.grant(client)
    tenant.until(lambda: tenant.submitted() > 5, "launches")
    process.kill()


@pytest.mark.promise("time-agent-away")
def test_processes_of_a_tenant_run_at_the_same_time(make_tenant: MakeTenant) -> None:
    """Ranks wait for each other's kernels, so they must not run one after another."""
    tenant = make_tenant(terms(request=300))
    loops = [tenant.loop("--seconds", "3", "--kernel-us", "1000", label=f"rank{rank}") for rank in range(2)]
    shares = [last_report(loop)["share"] for loop in loops]
    assert sum(shares) == pytest.approx(0.3, abs=0.06)
    assert min(shares) > 0.08


@pytest.mark.promise("time-agent-away", "program-reconnects")
def test_when_the_agent_goes_the_token_goes_and_work_goes_on(tenant: Tenant) -> None:
    agent = tenant.agent()
    agent.on_want = lambda client: agent.next_grant()
    tenant.loop("--kernel-us", "500", "--sync-every", "4")
    tenant.until(lambda: tenant.submitted() > 20, "launches under the grant")
    agent.vanish()
    time.sleep(0.3)
    before, begun = tenant.read().busy_ns("tenant"), time.monotonic_ns()
    time.sleep(3)
    share = (tenant.read().busy_ns("tenant") - before) / (time.monotonic_ns() - begun)
    assert 0.3 < share < 0.55
    agent.on_want = lambda client: None
    agent.appear()
    client = agent.client()
    agent.next_frame(client, Want)
    settled = tenant.submitted()
    time.sleep(0.15)
    assert tenant.submitted() == settled, "with an agent the gate is the agent's again"
    agent.grant(client, 20)
    agent.next_frame(client, Drained)
    assert tenant.submitted() > settled


def test_a_silent_agent_counts_as_none(make_tenant: MakeTenant) -> None:
    tenant = make_tenant(hasty=True)
    agent = tenant.agent()
    tenant.loop("--kernel-us", "1000")
    client = agent.client()
    agent.next_frame(client, Want)
    time.sleep(1.2)
    assert tenant.submitted() == 0, "it answers pings: it only has not granted yet"
    agent.mute = True
    tenant.until(lambda: tenant.submitted() > 20, "launches by the file `limits`")


def test_a_tenant_that_is_being_released_runs_nothing(tenant: Tenant) -> None:
    agent = tenant.agent()
    agent.refuse = RefusedReason.RELEASING
    tenant.loop("--kernel-us", "1000")
    time.sleep(0.6)
    assert tenant.submitted() == 0


def test_an_agent_of_no_common_version_leaves_the_request(tenant: Tenant) -> None:
    agent = tenant.agent()
    agent.refuse = RefusedReason.VERSION
    tenant.loop("--kernel-us", "1000")
    tenant.until(lambda: tenant.submitted() > 20, "launches by the file `limits`")


def test_a_changed_limits_file_is_followed(make_tenant: MakeTenant) -> None:
    tenant = make_tenant(terms(request=0))
    tenant.loop("--kernel-us", "1000")
    time.sleep(0.2)
    assert tenant.submitted() == 0
    tenant.gpus = (terms(request=800),)
    tenant.write_limits()
    tenant.until(lambda: tenant.submitted() > 20, "launches at the new request")


@pytest.mark.promise("program-fail-closed")
def test_without_limits_the_first_call_waits_and_then_fails(make_tenant: MakeTenant) -> None:
    tenant = make_tenant(hasty=True, limits=False)
    probe = tenant.probe()
    begun = time.monotonic()
    assert probe.call("init").code == SYSTEM_NOT_READY
    assert time.monotonic() - begun > 0.9
    begun = time.monotonic()
    assert probe.call("init").code == SYSTEM_NOT_READY
    assert time.monotonic() - begun < 0.5, "later calls fail at once"
    assert "sharepod" not in probe.ok("facts")["threads"]


def test_limits_that_come_late_are_waited_for(make_tenant: MakeTenant) -> None:
    tenant = make_tenant(limits=False)
    tenant.agent()
    probe = tenant.probe()
    initialized = probe.post("init")
    time.sleep(0.2)
    assert not initialized.done()
    tenant.write_limits()
    assert initialized.result(10).code == 0


@pytest.mark.parametrize(
    "content", ["", "gpu\n", "gpu GPU-0 request 1 limit 1 memory 1 enforced 1\n", "nonsense\n" * 5000]
)
def test_limits_that_say_nothing_do_not_open_anything(make_tenant: MakeTenant, content: str) -> None:
    tenant = make_tenant(hasty=True, limits=False)
    (tenant.directory / "limits").write_text(content)
    assert tenant.probe().call("init").code == SYSTEM_NOT_READY


def test_a_new_agent_learns_what_every_process_holds(tenant: Tenant) -> None:
    agent = tenant.agent()
    probes = [tenant.probe(f"p{n}") for n in range(3)]
    for size, probe in enumerate(probes, start=1):
        probe.start_cuda()
        probe.ok("alloc", size * 20 * MIB)
    agent.vanish()
    agent.appear()
    for index in range(3):
        agent.client(index)
    agent.wait(lambda: agent.used(0) == 120 * MIB, "three handovers")
    assert sorted(sum(client.handed_over) for client in agent.clients) == [20 * MIB, 40 * MIB, 60 * MIB]
    assert tenant.read().client("p0").usage[GPU_0].memory == 20 * MIB


@pytest.mark.promise("install-running-hook")
def test_a_new_hook_file_does_not_move_a_running_program(tenant: Tenant) -> None:
    """The agent replaces the file by rename. A running program keeps the old file."""
    agent = tenant.agent()
    agent.on_want = lambda client: agent.next_grant(20)
    process = tenant.loop("--kernel-us", "500", "--seconds", "0.6")
    tenant.until(lambda: tenant.submitted() > 5, "launches")
    shutil.copy2(tenant.directory / "libsharepod.so", tenant.directory / "new.so")
    (tenant.directory / "new.so").replace(tenant.directory / "libsharepod.so")
    assert last_report(process)["launches"] > 100
