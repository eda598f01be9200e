"""Edge cases: GPUs of other tenants, programs that wait for themselves, sandboxes, contexts that end."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

import pytest
from doubles.gpus import release_hung_kernels
from hook.conftest import GPU_0, MIB, TENANT_MEMORY, MakeTenant, Tenant, last_report, terms
from hook.world.scripted_agent import Client, ScriptedAgent
from sharepod.protocol import Drained, Release, Want


def test_a_gpu_that_is_not_the_tenants_has_no_memory_to_see(tenant: Tenant) -> None:
    """Frameworks query each device that they find."""
    tenant.agent()
    probe = tenant.probe()
    probe.start_cuda()
    assert probe.ok("total_memory", 1) == 0
    assert probe.ok("total_memory", 0) == TENANT_MEMORY
    probe.ok("own_context", "foreign", 1)
    assert probe.ok("memory_info") == [0, 0]


@pytest.mark.parametrize("quantum_ms", [0, 20], ids=["long quantum", "short quantum"])
def test_a_kernel_that_waits_for_the_program_does_not_stop_it(tenant: Tenant, quantum_ms: int) -> None:
    """The program launches behind a kernel that waits for an action of the program after these launches, so the hook
    must not block them.
    """
    agent = tenant.agent()
    probe = tenant.probe()
    probe.start_cuda()
    launching = probe.post("launch", "hang", "", 2)
    client = agent.client()
    agent.next_frame(client, Want)
    agent.grant(client, quantum_ms, metered=True)
    assert launching.result(10).code == 0
    assert tenant.read().client("tenant").usage[GPU_0].kernels == 0
    if quantum_ms == 0:
        assert probe.call("launch", "hang", "", 50).code == 0
    release_hung_kernels(tenant.state)
    assert agent.next_frame(client, Drained).launches == (2 if quantum_ms else 52)


RECALLS = 2000
"""Number of recalls that are sent: a connection has no room for so many unread answers."""


def recall_unread(agent: ScriptedAgent, client: Client) -> None:
    """Recall credits without reading the answers, until the hook cannot send any more."""
    agent.mute = True
    deadline = time.monotonic() + 10
    for _ in range(RECALLS):
        while True:
            try:
                agent.recall(client, 0, 512)
                break
            except BlockingIOError:
                assert time.monotonic() < deadline
                time.sleep(0.001)
    time.sleep(0.2)


def test_recalls_whose_answers_could_not_be_sent_are_answered_once_the_agent_reads(tenant: Tenant) -> None:
    """A recall stays unanswered if the connection is full. Until it is answered, the agent recalls nothing more from
    the process. No credit is lost, and none is returned twice.
    """
    agent = tenant.agent()
    probe = tenant.probe()
    probe.start_cuda()
    probe.ok("free", probe.ok("alloc", 20 * MIB))
    client = agent.client()
    recall_unread(agent, client)
    agent.mute = False

    def answers() -> int:
        return sum(frame.recalled for frame in agent.frames(client, Release))

    agent.wait(lambda: answers() == RECALLS, "an answer to each recall")
    agent.recall(client, 0, 1 << 40)
    agent.wait(lambda: answers() == RECALLS + 1, "an answer to the last recall")
    assert agent.used(0) == 0


def test_what_the_driver_took_is_told_once_the_agent_reads(tenant: Tenant) -> None:
    agent = tenant.agent()
    probe = tenant.probe()
    probe.start_cuda()
    address = probe.ok("alloc", 20 * MIB)
    client = agent.client()
    recall_unread(agent, client)
    probe.ok("free", address)
    probe.ok("alloc", 19 * MIB)  # this request and the next one are served from idle credits
    probe.ok("context_limit", 0, 1025)  # CU_LIMIT_STACK_SIZE, which the driver rounds up
    agent.mute = False
    agent.wait(lambda: bool(client.grown), "what the driver took beyond that")
    tenant.until(lambda: agent.used(0) == tenant.read().client("tenant").usage[GPU_0].memory, "idle credits to return")


def test_a_token_that_could_not_be_given_back_is_given_back_once_the_agent_reads(tenant: Tenant) -> None:
    """The connection is full of unread answers when the hook has to send DRAINED and the next request."""
    agent = tenant.agent()
    probe = tenant.probe()
    probe.start_cuda()
    first = probe.post("launch", "hang")
    client = agent.client()
    agent.next_frame(client, Want)
    grant = agent.grant(client)
    assert first.result(10).code == 0
    recall_unread(agent, client)
    agent.revoke(client, grant)
    release_hung_kernels(tenant.state)
    second = probe.post("launch", "noop")
    time.sleep(0.2)
    agent.mute = False
    assert agent.next_frame(client, Drained).grant_id == grant.grant_id
    agent.wait_asked(client, 2)
    agent.grant(client)
    assert second.result(10).code == 0


def test_without_an_agent_new_limits_do_not_part_the_ranks(make_tenant: MakeTenant) -> None:
    """The agent replaces the file `limits` at its start and at every change. Ranks that started before and after a
    change must run at the same time.
    """
    tenant = make_tenant(terms(request=300))
    ranks = []
    for rank in range(3):
        ranks.append(tenant.loop("--seconds", "3", "--kernel-us", "1000", label=f"rank{rank}"))
        tenant.until(lambda rank=rank: tenant.submitted(f"rank{rank}") > 0, "the rank to launch")  # type: ignore[misc]
        for _ in range(3):
            tenant.write_limits()
    assert sum(last_report(rank)["share"] for rank in ranks) == pytest.approx(0.3, abs=0.06)


def test_long_kernels_of_many_threads_do_not_lift_the_share(make_tenant: MakeTenant) -> None:
    """Threads arrive at a closed gate one by one. An arrival must not reduce the tenant's debt of earlier kernels."""
    tenant = make_tenant(terms(request=100))
    loop = tenant.loop(
        "--seconds", "5", "--kernel-us", "30000", "--threads", "6", "--streams", "1", "--sync-every", "1"
    )
    assert last_report(loop)["share"] == pytest.approx(0.1, abs=0.06)


def test_contexts_that_end_leave_no_events_behind(tenant: Tenant) -> None:
    agent = tenant.agent()
    agent.on_want = lambda client: agent.next_grant(metered=True)
    probe = tenant.probe()
    probe.start_cuda()
    counts = []
    for _ in range(20):
        probe.ok("own_context", "short-lived")
        probe.ok("context_destroy", "short-lived")
        probe.ok("context_use")
        probe.ok("launch", "noop", "", 4)
        counts.append(probe.ok("live_events"))
    assert max(counts[2:]) <= counts[1] + 1


def test_a_context_ends_with_its_last_reference(tenant: Tenant) -> None:
    agent = tenant.agent()
    agent.on_want = lambda client: agent.next_grant(metered=True)
    probe = tenant.probe()
    probe.start_cuda()
    probe.ok("own_context", "own")
    probe.ok("alloc", 100 * MIB)
    probe.ok("launch", "spin_us_100", "", 10)
    probe.ok("context_attach")
    probe.ok("context_detach", "own")
    assert probe.ok("memory_info")[0] == TENANT_MEMORY - 100 * MIB
    probe.ok("context_detach", "own")
    probe.ok("context_use")
    assert probe.ok("memory_info")[0] == TENANT_MEMORY
    probe.ok("launch", "spin_us_100", "", 10)


def test_a_release_that_is_not_the_last_keeps_the_charge(tenant: Tenant) -> None:
    tenant.agent()
    probe = tenant.probe()
    probe.start_cuda()
    probe.ok("context_create")  # retains the primary context a second time
    address = probe.ok("alloc", 100 * MIB)
    probe.ok("context_release")
    assert probe.ok("memory_info")[0] == TENANT_MEMORY - 100 * MIB
    probe.ok("free", address)
    assert probe.ok("memory_info")[0] == TENANT_MEMORY


@pytest.mark.promise("program-no-membarrier")
def test_a_sandbox_entered_after_the_start_does_not_open_the_gate(tenant: Tenant) -> None:
    agent = tenant.agent()
    probe = tenant.probe()
    probe.start_cuda()
    client = agent.client()
    assert probe.call("forbid_membarrier").code == 0
    passed = 0
    for turn in range(20):
        launched = probe.post("launch", "spin_us_200", "", 20)
        agent.wait_asked(client, turn + 1)
        agent.grant(client, 1000)
        assert launched.result(10).code == 0
        passed += agent.next_frame(client, Drained, turn).launches
        assert tenant.submitted() == passed
    assert passed == 400


def test_its_thread_answers_the_c_librarys_own_signals(tenant: Tenant) -> None:
    """A program's setuid and pthread_cancel wait until all threads have handled these signals."""
    agent = tenant.agent()
    probe = tenant.probe()
    probe.start_cuda()
    agent.client()
    blocked = int(probe.ok("signals_of_agent"), 16)
    assert not blocked >> 31 & 3
    assert blocked >> 33 & 1


def test_a_second_driver_gives_nothing_that_is_gated(tenant: Tenant, tmp_path: Path) -> None:
    """The second driver is a compatibility package, which the program opens by its path."""
    tenant.agent()
    probe = tenant.probe()
    probe.start_cuda()
    (tmp_path / "compat").mkdir()
    second = str(shutil.copy2(tenant.double / "libcuda.so.1", tmp_path / "compat" / "libcuda.so.1"))
    assert probe.ok("symbol_of", second, "cuLaunchKernel") == ""
    assert probe.ok("symbol_of", second, "cuEventQuery") == second
    assert probe.ok("symbol_of", str(tenant.double / "libcuda.so.1"), "cuLaunchKernel").endswith("libsharepod.so")
