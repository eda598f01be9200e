"""Programs may fork, exec, end, be interrupted, stopped and killed, and close descriptors of the hook. Neither they nor
their sibling processes are harmed.
"""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest
from doubles.gpus import QUEUE_DEPTH, release_hung_kernels
from hook.conftest import MIB, MakeTenant, Tenant, last_report
from hook.world.gate_state import Gate
from hook.world.held_thread import held, stop
from hook.world.lifecycle import Life, asked, begin, generous
from hook.world.probe import SYSTEM_NOT_READY
from hook.world.scripted_agent import Client
from sharepod.protocol import Drained, Grant, Want

# ---- fork, exec, spawn


def test_spawned_programs_have_sessions_of_their_own_and_the_parent_goes_on(tenant: Tenant, lives: list[Life]) -> None:
    """A child of posix_spawn or vfork uses the parent's memory until the exec, and must not use the parent's
    session.
    """
    agent = generous(tenant)
    life = begin(lives, tenant, "spawning")
    life.hears("done")
    assert life.ends() == 0
    assert len(agent.clients) == 7, "one for each program that used CUDA"
    assert tenant.submitted() == 1 + 3 * (5 + 5 + 1) + 1


def test_a_program_that_replaces_itself_gives_all_back(tenant: Tenant, lives: list[Life]) -> None:
    agent = generous(tenant)
    life = begin(lives, tenant, "exec_holding")
    life.hears("held")
    first, second = agent.client(0), agent.client(1)
    agent.wait(lambda: first.closed, "the end of the first image's connection")
    assert second.handed_over == []
    assert agent.used(0) >= 200 * MIB
    life.proceed()
    assert life.ends() == 0


# ---- the end


@pytest.mark.parametrize(
    ("how", "code"), [("exit", 7), ("_exit", 7), ("quick_exit", 7), ("return", 7), ("abort", -signal.SIGABRT)]
)
def test_a_program_ends_although_a_thread_of_it_waits_for_its_turn(
    tenant: Tenant, lives: list[Life], how: str, code: int
) -> None:
    agent = tenant.agent()
    life = begin(lives, tenant, "end_waiting", how)
    client = agent.client()
    agent.next_frame(client, Want)
    life.proceed()
    assert life.ends(5) == code
    agent.wait(lambda: client.closed, "the end of the connection")
    assert tenant.submitted() == 0


def test_handlers_of_exit_may_launch(tenant: Tenant, lives: list[Life]) -> None:
    agent = tenant.agent()
    life = begin(lives, tenant, "exit_handler")
    client = agent.client()
    agent.next_frame(client, Want)
    agent.grant(client, 20)
    agent.next_frame(client, Drained)
    life.proceed()
    agent.wait_asked(client, 2)  # the handler's launch requests the token
    agent.grant(client, 20)
    life.hears("launched")
    assert life.ends() == 0
    assert tenant.submitted() == 2


def test_each_turn_of_an_exit_handler_ends_once_its_launches_have(tenant: Tenant, lives: list[Life]) -> None:
    """The handler runs after the hook has left the driver. So the hook cannot query the driver whether the launches
    have ended."""
    agent = tenant.agent()
    grants: list[Grant] = []

    def again(_client: Client) -> Grant:
        grants.append(agent.next_grant(5, metered=True))
        return grants[-1]

    agent.on_want = again
    life = begin(lives, tenant, "late_exit_handler")
    life.hears("done")
    assert life.ends() == 0
    drained = [frame.grant_id for frame in agent.frames(agent.clients[0], Drained)]
    assert len(grants) > 3
    assert drained[: len(grants) - 1] == [grant.grant_id for grant in grants[:-1]], "each turn but the last at most"
    assert tenant.submitted() == 201


# ---- waits that are left


@pytest.mark.promise("program-signals")
@pytest.mark.parametrize("case", ["cancel_waiting", "jump_away"])
def test_a_wait_that_a_thread_has_left_asks_for_nothing_any_more(tenant: Tenant, lives: list[Life], case: str) -> None:
    """A thread leaves its wait at the gate by longjmp, or is cancelled. If the hook still counted that wait, the
    process would never be idle and would keep the token.
    """
    agent = tenant.agent()
    life = begin(lives, tenant, case)
    client = agent.client()
    agent.next_frame(client, Want)
    if case == "cancel_waiting":
        life.proceed()
    life.hears({"cancel_waiting": "cancelled", "jump_away": "jumped"}[case])
    agent.grant(client)  # this grant has no end
    drained = agent.next_frame(client, Drained)
    assert drained.idle
    assert drained.launches == 0
    assert asked(agent, client) == 1
    life.proceed()  # the program launches again
    agent.wait_asked(client, 2)
    agent.grant(client)
    life.hears("launched")
    assert agent.next_frame(client, Drained, 1).launches == 1
    assert asked(agent, client) == 2


def test_waits_for_memory_that_were_left_take_no_places(tenant: Tenant, lives: list[Life]) -> None:
    agent = generous(tenant)
    agent.answer_memory = False
    life = begin(lives, tenant, "jump_away_from_memory")
    life.hears("jumped")
    agent.answer_memory = True
    life.proceed()
    life.hears("allocated")
    assert life.ends() == 0


@pytest.mark.promise("program-signals")
def test_a_signal_handler_may_launch_while_its_thread_waits(tenant: Tenant, lives: list[Life]) -> None:
    agent = tenant.agent()
    life = begin(lives, tenant, "handler_calls_cuda")
    client = agent.client()
    agent.next_frame(client, Want)
    time.sleep(1.2)  # the signal handler now waits, on the stack of the thread whose wait it interrupted
    agent.grant(client)
    life.hears("launched")
    assert tenant.submitted() == 2
    assert agent.next_frame(client, Drained).launches == 2
    assert asked(agent, client) == 1


@pytest.mark.promise("program-signals")
def test_waits_outlast_signals(tenant: Tenant, lives: list[Life]) -> None:
    agent = generous(tenant, quantum_ms=5)
    life = begin(lives, tenant, "interrupted")
    assert int(life.hears("interrupted", 60)) > 20
    assert life.ends() == 0
    passed = sum(drained.launches for drained in agent.frames(agent.client(), Drained))
    assert passed <= tenant.submitted() == 300


# ---- descriptors, threads, stacks, libraries


@pytest.mark.promise("program-closed-descriptors")
def test_a_program_that_closes_all_descriptors_keeps_its_files_and_finds_the_agent_again(
    tenant: Tenant, lives: list[Life]
) -> None:
    agent = generous(tenant, quantum_ms=20)
    life = begin(lives, tenant, "close_all")
    first = agent.client()
    agent.next_frame(first, Drained)
    life.proceed()
    cpu_ms = int(life.hears("cpu_ms"))
    assert int(life.hears("written")) == 0, "nothing of the hook's went into the program's files"
    assert cpu_ms < 400, "it does not spin on a closed descriptor"
    second = agent.client(1)
    assert not second.closed
    agent.wait(lambda: first.closed, "the end of the first connection")
    assert tenant.submitted() == 51
    life.proceed()
    assert life.ends() == 0


@pytest.mark.promise("program-closed-descriptors")
def test_a_program_that_puts_a_file_over_every_descriptor_keeps_it_and_finds_the_agent_again(
    tenant: Tenant, lives: list[Life]
) -> None:
    """The program replaces every descriptor by dup2. So each number stays open, unlike after close(2), but refers to
    another file.
    """
    agent = generous(tenant, quantum_ms=20)
    life = begin(lives, tenant, "write_over")
    first = agent.client()
    agent.next_frame(first, Drained)
    life.proceed()
    assert int(life.hears("over")) >= 3
    assert int(life.hears("written")) == 0, "nothing of the hook's went into the program's file"
    second = agent.client(1)
    assert not second.closed
    agent.wait(lambda: first.closed, "the end of the first connection")
    assert tenant.submitted() == 51
    life.proceed()
    assert life.ends() == 0


@pytest.mark.promise("program-no-threads")
def test_where_no_thread_can_be_started_cuda_says_not_ready_and_nobody_hangs(tenant: Tenant, lives: list[Life]) -> None:
    tenant.agent()
    life = begin(lives, tenant, "no_threads")
    assert life.hears("results", 5).split() == [str(SYSTEM_NOT_READY)] * 3
    assert life.ends() == 0
    assert "cannot start a thread" in life.stderr


def test_the_smallest_stacks_are_large_enough(tenant: Tenant, lives: list[Life]) -> None:
    generous(tenant)
    life = begin(lives, tenant, "small_stacks")
    life.hears("done")
    assert life.ends() == 0


def test_a_driver_that_the_program_closes_goes_on_for_the_hook(tenant: Tenant, lives: list[Life]) -> None:
    generous(tenant, quantum_ms=30)
    life = begin(lives, tenant, "close_library")
    life.hears("done")
    assert life.ends() == 0


@pytest.mark.promise("program-no-descriptor")
def test_a_process_without_room_for_a_socket_launches_nothing(tenant: Tenant, lives: list[Life]) -> None:
    """If the process could launch, a tenant could exceed its share by setting a low limit of open files."""
    agent = generous(tenant, quantum_ms=20)
    life = begin(lives, tenant, "no_descriptors")
    life.hears("started")
    agent.next_frame(agent.client(), Drained)
    life.proceed()
    life.hears("full")
    agent.vanish()  # the process loses its connection, and has no descriptor for another
    tenant.until(lambda: "too many open files" in life.stderr or "going on by" in life.stderr, "word of it")
    life.proceed()
    life.hears("launching")
    if "too many open files" in life.stderr:
        time.sleep(0.5)
        assert tenant.submitted() == 1
    agent.appear()
    life.proceed()
    life.hears("empty")
    tenant.until(lambda: tenant.submitted() == 2, "the launch")
    life.proceed()
    assert life.ends() == 0


def test_threads_that_come_and_go_leave_nothing(tenant: Tenant, lives: list[Life]) -> None:
    """More threads than slots run one after another, so they use the slots of ended threads."""
    agent = generous(tenant)
    life = begin(lives, tenant, "churn_threads")
    life.hears("done", 60)
    assert life.ends() == 0
    assert tenant.submitted() == 1600
    assert not any(client for client in agent.clients if not client.closed)


# ---- stopped, killed


def test_a_thread_without_a_slot_that_is_gone_inside_a_launch_holds_up_no_turn(
    make_tenant: MakeTenant, lives: list[Life]
) -> None:
    """The closing gate does not wait for this thread. If it did, it would wait for the grace period, which is ten
    minutes here."""
    tenant = make_tenant(hasty=True)
    agent = tenant.agent(grace_ms=600_000)
    life = begin(lives, tenant, "gone_inside")
    client = agent.client()
    agent.next_frame(client, Want)
    grant = agent.grant(client)
    life.hears("exited")
    agent.revoke(client, grant)
    release_hung_kernels(tenant.state)
    assert agent.next_frame(client, Drained).grant_id == grant.grant_id
    life.proceed()
    assert life.ends() == 0


@pytest.mark.promise("program-stopped")
def test_a_stopped_holder_gives_back_when_it_goes_on(tenant: Tenant) -> None:
    agent = tenant.agent()
    process = tenant.loop("--kernel-us", "500", "--threads", "3", "--sync-every", "8")
    client = agent.client()
    agent.next_frame(client, Want)
    grant = agent.grant(client)
    tenant.until(lambda: tenant.submitted() > 20, "launches")
    stop(process)
    agent.revoke(client, grant)
    stopped = tenant.submitted()
    time.sleep(0.2)
    assert agent.frames(client, Drained) == []
    assert tenant.submitted() == stopped
    process.send_signal(signal.SIGCONT)
    drained = agent.next_frame(client, Drained)
    assert drained.grant_id == grant.grant_id
    assert tenant.submitted() == drained.launches


@pytest.mark.promise("program-debugger")
def test_a_thread_stopped_inside_a_launch_does_not_keep_its_siblings(tenant: Tenant) -> None:
    """A debugger stops a thread. Its process returns the token after the grace period and gets it again. The stopped
    thread's launch passes after the thread continues.
    """
    agent = tenant.agent(grace_ms=300)
    probe = tenant.probe()
    probe.start_cuda()
    stopped = probe.ok("thread_id", thread="stopped")
    for thread in ("stopped", "sibling"):
        probe.ok("context_use", thread=thread)
    probe.ok("stream", "s")
    probe.ok("event", "e")
    started = probe.post("launch", "spin_us_400000", "s", thread="stopped")
    client = agent.client()
    agent.next_frame(client, Want)
    grant = agent.grant(client)
    assert started.result(10).code == 0
    # QUEUE_DEPTH operations fill the stream's queue, which already contains the kernel and its fence
    probe.ok("event_record", "e", "s", QUEUE_DEPTH - 2, thread="stopped")
    # the fifth launch sleeps in the driver, because the stream's queue is full
    launching = probe.post("launch", "spin_us_500", "s", 5, thread="stopped")
    tenant.until(lambda: tenant.submitted() == 2, "the launch that sleeps")
    with held(stopped):
        agent.revoke(client, grant)
        first = agent.next_frame(client, Drained)
        before = tenant.submitted()
        assert before == 2
        sibling = probe.post("launch", "noop", thread="sibling")
        agent.wait_asked(client, 2)
        assert tenant.submitted() == before
        agent.grant(client, 50)
        assert sibling.result(10).code == 0
        agent.next_frame(client, Drained, 1)
        settled = tenant.submitted()
    agent.wait_asked(client, 3)
    assert tenant.submitted() - settled <= 1, "the launch that it was stopped in"
    agent.grant(client)
    assert launching.result(10).code == 0
    assert first.launches == 2
    assert tenant.submitted() == 1 + 5 + 1


def test_a_launch_that_outlasts_the_grace_is_drained_with_the_next_grant(tenant: Tenant, hook_file: Path) -> None:
    """The driver accepts the launch while the next grant is held. The drain of that grant waits for its kernel too."""
    agent = tenant.agent(grace_ms=100)
    probe = tenant.probe()
    probe.start_cuda()
    for thread in ("late", "sibling"):
        probe.ok("context_use", thread=thread)
    probe.ok("stream", "s")
    late = probe.post("launch", "load_us_1500000", "s", thread="late")
    client = agent.client()
    agent.next_frame(client, Want)
    grant = agent.grant(client)
    gate = Gate(probe.pid, hook_file)
    tenant.until(lambda: bool(gate.inside()), "the launch that takes long in the driver")
    agent.revoke(client, grant)
    assert agent.next_frame(client, Drained).launches == 1
    assert tenant.submitted() == 0, "the grace was over before the driver had accepted it"
    sibling = probe.post("launch", "noop", thread="sibling")
    agent.wait_asked(client, 2)
    grant = agent.grant(client, 60_000, metered=True)
    assert sibling.result(10).code == 0
    assert late.result(10).code == 0
    agent.revoke(client, grant)
    agent.next_frame(client, Drained, 1)
    drained_at = agent.times(client, Drained)[1]
    probe.ok("stream_sync", "s", thread="late")
    assert drained_at >= max(usage.last_end for usage in tenant.read().client("tenant").usage.values())


@pytest.mark.parametrize("after", [0, 1, 3, 10])
def test_a_process_killed_at_any_time_leaves_its_siblings_alone(tenant: Tenant, after: int) -> None:
    agent = generous(tenant, quantum_ms=10)
    sibling = tenant.loop("--kernel-us", "300", "--seconds", "1.5", label="sibling")
    victim = tenant.loop("--kernel-us", "300", "--threads", "4", label="victim")
    tenant.until(lambda: tenant.submitted("victim") >= after, "the victim to have come so far")
    victim.kill()
    victim.wait()
    assert last_report(sibling)["launches"] > 50
    agent.wait(lambda: all(client.closed for client in agent.clients), "the end of both")
