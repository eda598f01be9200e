"""What programs do with their lives harms neither them nor anybody else: they fork, exec, end, are interrupted, close
what is not theirs."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from sharepod.protocol import Drained, RefusedReason, Want

from hook.agent_node import running, wait_for
from hook.agent_node import tenant as agent_tenant
from hook.conftest import BUILD, GPU_0, GPU_1, MIB, MakeTenant, Tenant, last_report, terms
from hook.probe import OUT_OF_MEMORY, SYSTEM_NOT_READY
from hook.scripted_daemon import Client, ScriptedDaemon


class Life:
    """A run of the program lifecycle, and what it says."""

    def __init__(self, tenant: Tenant, *arguments: str, **more: str) -> None:
        self._process = subprocess.Popen(
            [BUILD / "programs" / "lifecycle", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=tenant.environment(**more),
        )
        self._said: list[str] = []
        self._complaints: list[str] = []
        self._readers = [
            threading.Thread(target=self._read, args=pair, daemon=True)
            for pair in ((self._process.stdout, self._said), (self._process.stderr, self._complaints))
        ]
        for reader in self._readers:
            reader.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def stderr(self) -> str:
        return "".join(self._complaints)

    def hears(self, word: str, timeout: float = 20) -> str:
        """The rest of the line that begins with that word, once it was said."""
        deadline = time.monotonic() + timeout
        while True:
            for line in list(self._said):
                if line.split()[0] == word:
                    return line.removeprefix(word).strip()
            assert "error" not in "".join(self._said), self._said
            assert time.monotonic() < deadline, f"{word} was not said within {timeout} s, but {self._said}"
            assert self._process.poll() is None or any(reader.is_alive() for reader in self._readers), self._said
            time.sleep(0.002)

    def tell(self) -> None:
        """Lets it go on."""
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()

    def ends(self, timeout: float = 20) -> int:
        code = self._process.wait(timeout)
        for reader in self._readers:
            reader.join(timeout)
        assert code != 1, self._said + self._complaints
        return code

    def close(self) -> None:
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        for reader in self._readers:
            reader.join(5)
        for stream in (self._process.stdin, self._process.stdout, self._process.stderr):
            if stream is not None:
                stream.close()

    @staticmethod
    def _read(stream: Iterator[str], lines: list[str]) -> None:
        with contextlib.suppress(ValueError):  # closed while reading
            lines.extend(stream)


@pytest.fixture
def lives() -> Iterator[list[Life]]:
    """Ended with the test."""
    started: list[Life] = []
    yield started
    for life in started:
        life.close()


def begin(lives: list[Life], tenant: Tenant, *arguments: str, **more: str) -> Life:
    lives.append(Life(tenant, *arguments, **more))
    return lives[-1]


def generous(tenant: Tenant, quantum_ms: float = 0) -> ScriptedDaemon:
    """A daemon that grants whatever is wanted."""
    daemon = tenant.daemon()
    daemon.on_want = lambda client: daemon.next_grant(quantum_ms)
    return daemon


def asked(daemon: ScriptedDaemon, client: Client) -> int:
    return len(daemon.frames(client, Want)) + sum(frame.wanting for frame in daemon.frames(client, Drained))


# ---- fork, exec, spawn


def test_spawned_programs_have_sessions_of_their_own_and_the_parent_goes_on(tenant: Tenant, lives: list[Life]) -> None:
    """posix_spawn and vfork share the parent's memory until the exec."""
    daemon = generous(tenant)
    life = begin(lives, tenant, "spawning")
    life.hears("done")
    assert life.ends() == 0
    assert len(daemon.clients) == 7, "one for each program that used CUDA"
    assert tenant.submitted() == 1 + 3 * (5 + 5 + 1) + 1


def test_a_program_that_replaces_itself_gives_all_back(tenant: Tenant, lives: list[Life]) -> None:
    daemon = generous(tenant)
    life = begin(lives, tenant, "exec_holding")
    life.hears("held")
    first, second = daemon.client(0), daemon.client(1)
    daemon.wait(lambda: first.gone, "the end of the first image's connection")
    assert second.handed_over == []
    assert daemon.used(0) >= 200 * MIB
    life.tell()
    assert life.ends() == 0


# ---- the end


@pytest.mark.parametrize(
    ("how", "code"), [("exit", 7), ("_exit", 7), ("quick_exit", 7), ("return", 7), ("abort", -signal.SIGABRT)]
)
def test_a_program_ends_although_a_thread_of_it_waits_for_its_turn(
    tenant: Tenant, lives: list[Life], how: str, code: int
) -> None:
    daemon = tenant.daemon()
    life = begin(lives, tenant, "end_waiting", how)
    client = daemon.client()
    daemon.next_frame(client, Want)
    life.tell()
    assert life.ends(5) == code
    daemon.wait(lambda: client.gone, "the end of the connection")
    assert tenant.submitted() == 0


def test_handlers_of_exit_may_launch(tenant: Tenant, lives: list[Life]) -> None:
    daemon = tenant.daemon()
    life = begin(lives, tenant, "exit_handler")
    client = daemon.client()
    daemon.next_frame(client, Want)
    daemon.grant(client, 20)
    daemon.next_frame(client, Drained)
    life.tell()
    daemon.wait_asked(client, 2)  # for the launch of the handler
    daemon.grant(client, 20)
    life.hears("launched")
    assert life.ends() == 0
    assert tenant.submitted() == 2


# ---- waits that are left


@pytest.mark.parametrize("case", ["cancel_waiting", "jump_away"])
def test_a_wait_that_a_thread_has_left_asks_for_nothing_any_more(tenant: Tenant, lives: list[Life], case: str) -> None:
    """Else the process would keep the token from others for good: it seems to wait, so it is never idle."""
    daemon = tenant.daemon()
    life = begin(lives, tenant, case)
    client = daemon.client()
    daemon.next_frame(client, Want)
    if case == "cancel_waiting":
        life.tell()
    life.hears({"cancel_waiting": "cancelled", "jump_away": "jumped"}[case])
    daemon.grant(client)  # until it is revoked
    drained = daemon.next_frame(client, Drained)
    assert drained.idle
    assert drained.launches == 0
    assert asked(daemon, client) == 1
    life.tell()  # it launches again
    daemon.wait_asked(client, 2)
    daemon.grant(client)
    life.hears("launched")
    assert daemon.next_frame(client, Drained, 1).launches == 1
    assert asked(daemon, client) == 2


def test_waits_for_memory_that_were_left_take_no_places(tenant: Tenant, lives: list[Life]) -> None:
    daemon = generous(tenant)
    daemon.answer_memory = False
    life = begin(lives, tenant, "jump_away_from_memory")
    life.hears("jumped")
    daemon.answer_memory = True
    life.tell()
    life.hears("allocated")
    assert life.ends() == 0


def test_a_signal_handler_may_launch_while_its_thread_waits(tenant: Tenant, lives: list[Life]) -> None:
    daemon = tenant.daemon()
    life = begin(lives, tenant, "handler_calls_cuda")
    client = daemon.client()
    daemon.next_frame(client, Want)
    time.sleep(1.2)  # the handler waits by now, on top of its thread
    daemon.grant(client)
    life.hears("launched")
    assert tenant.submitted() == 2
    assert daemon.next_frame(client, Drained).launches == 2
    assert asked(daemon, client) == 1


def test_waits_outlast_signals(tenant: Tenant, lives: list[Life]) -> None:
    daemon = generous(tenant, quantum_ms=5)
    life = begin(lives, tenant, "interrupted")
    assert int(life.hears("interrupted", 60)) > 20
    assert life.ends() == 0
    passed = sum(drained.launches for drained in daemon.frames(daemon.client(), Drained))
    assert passed <= tenant.submitted() == 300


# ---- descriptors, threads, stacks, libraries


def test_a_program_that_closes_all_descriptors_keeps_its_files_and_finds_the_agent_again(
    tenant: Tenant, lives: list[Life]
) -> None:
    daemon = generous(tenant, quantum_ms=20)
    life = begin(lives, tenant, "close_all")
    first = daemon.client()
    daemon.next_frame(first, Drained)
    life.tell()
    cpu_ms = int(life.hears("cpu_ms"))
    assert int(life.hears("written")) == 0, "nothing of the hook's went into the program's files"
    assert cpu_ms < 400, "it does not spin on what is closed"
    second = daemon.client(1)
    assert not second.gone
    daemon.wait(lambda: first.gone, "the end of the first connection")
    assert tenant.submitted() == 51
    life.tell()
    assert life.ends() == 0


def test_where_no_thread_can_be_started_cuda_says_not_ready_and_nobody_hangs(tenant: Tenant, lives: list[Life]) -> None:
    tenant.daemon()
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


def test_a_process_without_room_for_a_socket_launches_nothing(tenant: Tenant, lives: list[Life]) -> None:
    """Else a tenant would get round its share by a low limit of open files."""
    daemon = generous(tenant, quantum_ms=20)
    life = begin(lives, tenant, "no_descriptors")
    life.hears("started")
    daemon.next_frame(daemon.client(), Drained)
    life.tell()
    life.hears("full")
    daemon.vanish()  # what is lost cannot be opened again
    tenant.until(lambda: "too many open files" in life.stderr or "going on by" in life.stderr, "word of it")
    life.tell()
    life.hears("launching")
    if "too many open files" in life.stderr:
        time.sleep(0.5)
        assert tenant.submitted() == 1
    daemon.appear()
    life.tell()
    life.hears("empty")
    tenant.until(lambda: tenant.submitted() == 2, "the launch")
    life.tell()
    assert life.ends() == 0


def test_threads_that_come_and_go_leave_nothing(tenant: Tenant, lives: list[Life]) -> None:
    """More of them than there are slots, one after the other: those of the dead are used again."""
    daemon = generous(tenant)
    life = begin(lives, tenant, "churn_threads")
    life.hears("done", 60)
    assert life.ends() == 0
    assert tenant.submitted() == 1600
    assert not any(client for client in daemon.clients if not client.gone)


# ---- stopped, killed


def test_a_stopped_holder_gives_back_when_it_goes_on(tenant: Tenant) -> None:
    daemon = tenant.daemon()
    process = tenant.loop("--kernel-us", "500", "--threads", "3", "--sync-every", "8")
    client = daemon.client()
    daemon.next_frame(client, Want)
    grant = daemon.grant(client)
    tenant.until(lambda: tenant.submitted() > 20, "launches")
    process.send_signal(signal.SIGSTOP)
    daemon.revoke(client, grant)
    stopped = tenant.submitted()
    time.sleep(0.2)
    assert daemon.frames(client, Drained) == []
    assert tenant.submitted() == stopped
    process.send_signal(signal.SIGCONT)
    drained = daemon.next_frame(client, Drained)
    assert drained.grant_id == grant.grant_id
    assert tenant.submitted() == drained.launches


@pytest.mark.parametrize("after", [0, 1, 3, 10])
def test_a_process_killed_at_any_time_leaves_its_siblings_alone(tenant: Tenant, after: int) -> None:
    daemon = generous(tenant, quantum_ms=10)
    sibling = tenant.loop("--kernel-us", "300", "--seconds", "1.5", label="sibling")
    victim = tenant.loop("--kernel-us", "300", "--threads", "4", label="victim")
    tenant.until(lambda: tenant.submitted("victim") >= after, "the victim to have come so far")
    victim.kill()
    victim.wait()
    assert last_report(sibling)["launches"] > 50
    daemon.wait(lambda: all(client.gone for client in daemon.clients), "the end of both")


# ---- the hints page


def test_a_hints_page_in_hostile_hands_harms_nobody(tenant: Tenant) -> None:
    """Whoever has the descriptor can neither shorten nor write it, by whatever way it is opened again."""
    daemon = generous(tenant)
    victim = tenant.loop("--kernel-us", "500")
    tenant.until(lambda: tenant.submitted() > 5, "launches")
    page = os.dup(daemon.hints.fd)  # as it comes to every client
    try:
        with pytest.raises(PermissionError):
            os.ftruncate(page, 0)
        with pytest.raises(PermissionError):
            os.pwrite(page, b"\1" * 64, 0)
        with pytest.raises(PermissionError):
            mmap.mmap(page, mmap.PAGESIZE, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        for flags in (os.O_RDWR | os.O_TRUNC, os.O_WRONLY | os.O_TRUNC):
            with pytest.raises(PermissionError):
                os.open(f"/proc/self/fd/{page}", flags)
        again = os.open(f"/proc/self/fd/{page}", os.O_RDWR)
        try:
            with pytest.raises(PermissionError):
                os.pwrite(again, b"\1", 8)
            with pytest.raises(PermissionError):
                os.ftruncate(again, 1 << 20)
        finally:
            os.close(again)
        with mmap.mmap(page, mmap.PAGESIZE, mmap.MAP_SHARED, mmap.PROT_READ) as mine:
            libc = ctypes.CDLL(None, use_errno=True)
            libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
            maps = next(
                line
                for line in Path("/proc/self/maps").read_text().splitlines()
                if "sharepod-hints" in line and line.split()[1].startswith("r--s")
            )
            address = int(maps.split("-")[0], 16)
            assert libc.mprotect(address, mmap.PAGESIZE, mmap.PROT_READ | mmap.PROT_WRITE) == -1
            daemon.hints.contended = True
            assert int.from_bytes(mine[8:12], "little") == 1, "the daemon writes on"
    finally:
        os.close(page)
    before = tenant.submitted()
    tenant.until(lambda: tenant.submitted() > before + 20, "the victim's launches to go on")
    assert victim.poll() is None


# ---- devices


def test_memory_is_booked_on_the_device_whatever_its_number(make_tenant: MakeTenant) -> None:
    """The order that the program sees is its own choice."""
    tenant = make_tenant(terms(GPU_0, memory=64 * MIB), terms(GPU_1, memory=128 * MIB))
    daemon = tenant.daemon()
    probe = tenant.probe(FAKE_CUDA_VISIBLE=f"{GPU_1},{GPU_0}")
    probe.start_cuda()
    assert probe.ok("total_memory", 0) == 128 * MIB
    assert probe.ok("total_memory", 1) == 64 * MIB
    probe.ok("alloc", 100 * MIB)
    assert [daemon.used(0), daemon.used(1)] == [0, 100 * MIB]


# ---- one process too many


def test_one_process_too_many_launches_nothing_says_why_and_comes_in_later(tenant: Tenant, lives: list[Life]) -> None:
    daemon = generous(tenant)
    daemon.refuse = RefusedReason.FULL
    life = begin(lives, tenant, "run")
    tenant.until(lambda: "refuses this process" in life.stderr, "word of it")
    time.sleep(1.5)
    assert tenant.submitted() == 0
    assert life.stderr.count("refuses") == 1
    daemon.refuse = None
    life.hears("ran")
    assert life.ends() == 0


def test_one_process_too_many_goes_by_the_file_when_the_daemon_goes(tenant: Tenant, lives: list[Life]) -> None:
    daemon = tenant.daemon()
    daemon.refuse = RefusedReason.FULL
    life = begin(lives, tenant, "run")
    tenant.until(lambda: "refuses this process" in life.stderr, "word of it")
    assert tenant.submitted() == 0
    daemon.vanish()
    life.hears("ran")
    assert life.ends() == 0


def test_one_that_is_turned_away_unheard_reads_why(tenant: Tenant, lives: list[Life]) -> None:
    """The daemon closes without having read HELLO: the kernel then reports a reset before what was sent."""
    daemon = tenant.daemon()
    daemon.turn_away = RefusedReason.FULL
    life = begin(lives, tenant, "run")
    tenant.until(lambda: "refuses this process" in life.stderr, "word of it")
    time.sleep(0.5)
    assert tenant.submitted() == 0


# ---- without `limits`


def test_with_the_agents_leave_programs_go_on_without_limits(make_tenant: MakeTenant, lives: list[Life]) -> None:
    tenant = make_tenant(hasty=True, limits=False)
    (tenant.directory / "fail-open").touch()
    begun = time.monotonic()
    life = begin(lives, tenant, "hold")
    life.hears("held")
    assert time.monotonic() - begun > 0.9, "it has waited for the file first"
    assert "fail_open" in life.stderr
    loop = tenant.loop("--seconds", "1", "--kernel-us", "1000", "--memory", "600M", "--chunk", "100M")
    report = last_report(loop)
    assert report["refused_allocations"] == 0
    assert report["share"] > 0.6, "nothing is gated"


def test_leave_to_go_on_ends_with_the_first_limits(make_tenant: MakeTenant) -> None:
    tenant = make_tenant(terms(request=200), hasty=True, limits=False)
    (tenant.directory / "fail-open").touch()
    tenant.loop("--kernel-us", "1000")
    tenant.until(lambda: tenant.submitted() > 50, "launches")
    tenant.write_limits()
    time.sleep(2.5)
    before, begun = tenant.read().busy_ns("tenant"), time.monotonic_ns()
    time.sleep(2)
    assert (tenant.read().busy_ns("tenant") - before) / (time.monotonic_ns() - begun) < 0.27


@pytest.mark.parametrize("name", ["FAIL_OPEN", "SHAREPOD_FAIL_OPEN", "SHAREPOD_AGENT_FAIL_OPEN", "SHAREPOD_LIMITS"])
def test_no_variable_gives_that_leave(make_tenant: MakeTenant, name: str) -> None:
    tenant = make_tenant(hasty=True, limits=False)
    probe = tenant.probe(**{name: "1"})
    assert probe.call("init").code == SYSTEM_NOT_READY


def test_leave_is_of_no_use_where_there_are_limits(make_tenant: MakeTenant) -> None:
    tenant = make_tenant()
    tenant.daemon()
    (tenant.directory / "fail-open").touch()
    probe = tenant.probe()
    probe.start_cuda()
    assert probe.call("alloc", 300 * MIB).code == OUT_OF_MEMORY


def test_under_the_agent_processes_beyond_its_bound_do_not_add_to_the_share(tmp_path: Path, double: Path) -> None:
    """Four processes, of which two may connect: together they get what the tenant was granted."""
    assert double.is_dir()
    with running(tmp_path, agent_tenant("a", 0.3, 0.3), connections_max="2") as node:
        for rank in range(4):
            node.launch("a", "--kernel-us", "1000", "--sync-every", "4", label=f"rank{rank}")
        ranks = [f"rank{rank}" for rank in range(4)]
        wait_for(lambda: sum(node.devices().busy_ns(rank) > 0 for rank in ranks) == 2, "two ranks to run")
        shares = node.shares(2, *ranks)
        assert sum(share > 0 for share in shares.values()) == 2, shares
        assert sum(shares.values()) < 0.36, shares
