"""Handover from an agent that was killed at any moment: the next agent gets the bytes and the time account."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
from asyncio.subprocess import PIPE
from dataclasses import fields
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from sharepod import protocol
from sharepod.agent.state.directory import StateDir
from sharepod.agent.state.handover import NOTHING_INHERITED, Handover, read, start_time
from sharepod.agent.tenants.registry import TenantRegistry
from sharepod.timeshare import Account, AccountSnapshot, Parameters
from sharepod.timeshare.account import Charge
from structlog.testing import capture_logs
from unit.agent.client import GI, GPU0, GPU1, Client, memory_used, row, settings_in, tenants_with, view_of

ME = os.getpid()
SECOND = 1_000_000_000


@pytest.fixture
def other() -> int:
    """Return the pid of a process that runs as long as the test."""
    return os.getppid()


@pytest.mark.promise("memory-written-first")
@given(
    st.lists(st.tuples(st.sampled_from([ME, os.getppid()]), st.integers(0, 1), st.integers(0, 1 << 47)), max_size=20)
)
@settings(max_examples=50, deadline=None)
def test_whenever_the_agent_is_killed_the_file_has_what_was_written_last(
    tmp_path_factory: pytest.TempPathFactory, writes: list[tuple[int, int, int]]
) -> None:
    path = tmp_path_factory.mktemp("handover") / "a"
    kept, left = Handover.open(path, (GPU0, GPU1), 4)
    assert left == NOTHING_INHERITED
    expected: dict[int, list[int]] = {}
    for pid, gpu, size in writes:
        kept.add(pid)
        kept.keep(pid, gpu, size)
        expected.setdefault(pid, [0, 0])[gpu] = size
        found = {survivor.pid: list(survivor.bytes) for survivor in read(path, (GPU0, GPU1)).survivors}
        assert found == expected
    kept.forget(ME)
    expected.pop(ME, None)
    # The last argument: the new file has one slot for a process, fewer than the earlier file
    again, left = Handover.open(path, (GPU0, GPU1), 1)
    assert {survivor.pid: list(survivor.bytes) for survivor in left.survivors} == expected
    assert read(path, (GPU0, GPU1)) == left, "the new file has it as well"
    kept.close()
    again.close()


def test_only_the_same_process_is_restored(tmp_path: Path, other: int) -> None:
    path = tmp_path / "a"
    kept, _left = Handover.open(path, (GPU0,), 4)
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        kept.add(process.pid)
        kept.keep(process.pid, 0, GI)
        assert [survivor.pid for survivor in read(path, (GPU0,)).survivors] == [process.pid]
        process.communicate(b"\n")
    assert read(path, (GPU0,)).survivors == ()
    started = start_time(other)
    assert started is not None
    kept._occupy(other, started - 1)  # a slot of an earlier process with the same pid, which the start time shows
    assert read(path, (GPU0,)).survivors == ()
    kept.close()


@pytest.mark.parametrize("damage", [b"", b"\0" * 4096, b"x" * 123])
def test_a_damaged_file_is_as_none(tmp_path: Path, damage: bytes) -> None:
    (tmp_path / "a").write_bytes(damage)
    kept, left = Handover.open(tmp_path / "a", (GPU0,), 4)
    assert left == NOTHING_INHERITED
    kept.close()


def test_a_damaged_slot_never_gives_other_bytes(tmp_path: Path) -> None:
    """The test changes single bytes of the slot to many other values. A reader must find the right bytes or none."""
    path = tmp_path / "a"
    kept, _left = Handover.open(path, (GPU0,), 1)
    kept.add(ME)
    kept.keep(ME, 0, GI)
    kept.keep_untracked(0, 3 * GI)
    kept.close()
    whole = path.read_bytes()
    assert [survivor.bytes for survivor in read(path, (GPU0,)).survivors] == [(GI,)]
    wrong = 0
    for at in [*range(len(whole) - 3 * 8, len(whole)), *range(6 * 8, 7 * 8)]:
        for value in range(0, 256, 3):
            path.write_bytes(whole[:at] + bytes([value]) + whole[at + 1 :])
            left = read(path, (GPU0,))
            wrong += any(survivor.bytes != (GI,) for survivor in left.survivors)
            wrong += left.untracked[0] not in (0, 3 * GI)
    assert wrong == 0


@given(st.lists(st.tuples(st.integers(0, 300), st.integers(0, 255)), max_size=3), st.none() | st.integers(0, 311))
@example(damaged=[(175, 64)], cut=None)
@settings(max_examples=80, deadline=None)
def test_whatever_a_disk_makes_of_the_file_nothing_impossible_is_taken_from_it(
    tmp_path_factory: pytest.TempPathFactory, damaged: list[tuple[int, int]], cut: int | None
) -> None:
    path = tmp_path_factory.mktemp("handover") / "a"
    written = AccountSnapshot(*range(SECOND, SECOND + len(fields(AccountSnapshot))))
    kept, _left = Handover.open(path, (GPU0,), 4)
    kept.add(ME)
    kept.keep(ME, 0, GI)
    kept.keep_account(written)
    kept.close()
    content = bytearray(path.read_bytes())
    for at, value in damaged:
        content[at] = value
    path.write_bytes(content[:cut])
    left = read(path, (GPU0,))
    assert left.account in (None, written)
    assert all(survivor.pid == ME and 0 <= survivor.bytes[0] <= 1 << 47 for survivor in left.survivors)
    assert all(0 <= size <= 1 << 47 for size in left.untracked)


def test_a_file_of_an_agent_that_keeps_accounts_otherwise_is_as_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept, _left = Handover.open(tmp_path / "a", (GPU0,), 4)
    kept.keep_greeted()
    assert read(tmp_path / "a", (GPU0,)).greeted
    monkeypatch.setattr("sharepod.agent.state.handover._layout", lambda: 1)
    assert read(tmp_path / "a", (GPU0,)) == NOTHING_INHERITED
    kept.close()


def test_a_file_that_was_made_long_is_as_none(tmp_path: Path) -> None:
    handover, _left = Handover.open(tmp_path / "a", (GPU0,), 4)
    handover.close()
    os.truncate(tmp_path / "a", 1 << 40)
    assert read(tmp_path / "a", (GPU0,)) == NOTHING_INHERITED


def test_a_process_that_stands_in_all_places_is_one_process(tmp_path: Path) -> None:
    handover, _left = Handover.open(tmp_path / "a", (GPU0,), 4)
    for _ in range(4):
        handover.add(os.getpid())
        handover._slot_of.clear()
    handover.close()
    handover, left = Handover.open(tmp_path / "a", (GPU0,), 4)
    handover.close()
    assert len(left.survivors) == 1


def test_memory_left_on_other_gpus_is_not_taken(tmp_path: Path) -> None:
    kept, _left = Handover.open(tmp_path / "a", (GPU0,), 4)
    kept.add(ME)
    kept.keep(ME, 0, GI)
    assert read(tmp_path / "a", (GPU1,)) == NOTHING_INHERITED
    assert read(tmp_path / "a", (GPU0,)).survivors[0].bytes == (GI,)
    kept.close()


def test_a_full_disk_stops_no_tenant(tmp_path: Path) -> None:
    (tmp_path / "handover").write_text("not a directory")
    with capture_logs() as logs:
        kept, left = Handover.open(tmp_path / "handover" / "a", (GPU0,), 4)
    assert left == NOTHING_INHERITED
    assert "cannot keep" in logs[-1]["event"]
    kept.add(ME)
    kept.keep(ME, 0, GI)
    kept.close()


@pytest.mark.promise("memory-returned", "install-continues")
async def test_bytes_count_from_the_first_moment_of_the_next_agent_and_go_with_their_process(tmp_path: Path) -> None:
    given_settings, rows = settings_in(tmp_path), [row("a", memory=4 * GI)]
    program = (
        "import socket, sys\n"
        "from sharepod import protocol\n"
        "s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET); s.connect(sys.argv[1])\n"
        "s.send(protocol.encode(protocol.Hello(1, 1))); s.recv(2000)\n"
        f"s.send(protocol.encode(protocol.Reserve(1, 0, {3 * GI}))); s.recv(2000)\n"
        "print('has it', flush=True); input()\n"
    )
    first = TenantRegistry(given_settings, changed=lambda: None)
    await first.start()
    await first.apply(rows)
    there = first.directory("a")
    assert there is not None
    holder = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", program, str(there / "agent.sock")), stdin=PIPE, stdout=PIPE
    )
    try:
        assert holder.stdout is not None
        assert await asyncio.wait_for(holder.stdout.readline(), 20) == b"has it\n"
        async with tenants_with(given_settings, rows) as second:  # the first agent is still open, as after a kill
            assert memory_used(second, "a") == {GPU0: 3 * GI}
            assert second.status()[0].connected, "a hook has connected, if to another agent"
            client = await Client.connect(second.directory("a"))
            assert await client.reserve(2 * GI) == 0
            assert await client.reserve(1 * GI) == 1 * GI
            holder.kill()
            async with asyncio.timeout(10):
                while memory_used(second, "a") != {GPU0: 1 * GI}:  # noqa: ASYNC110 - the loop has to turn
                    await asyncio.sleep(0.01)
            assert await client.reserve(3 * GI) == 3 * GI
            client.close()
    finally:
        with contextlib.suppress(ProcessLookupError):
            holder.kill()
        await holder.communicate()
        await first.close()


@pytest.mark.promise("install-continues")
async def test_the_time_account_goes_on(tmp_path: Path) -> None:
    given_settings, rows = settings_in(tmp_path), [row("a", 400, 700), row("b", 600)]
    async with tenants_with(given_settings, rows) as first:
        client = await Client.connect(first.directory("a"))
        grant = await client.granted()
        client.send(protocol.Drained(grant.grant_id))
        await client.granted()
        before = view_of(first, "a").usage
        client.close()
    async with tenants_with(given_settings, rows) as second:
        after = view_of(second, "a").usage
    assert before is not None
    assert after is not None
    assert after.grants == before.grants == 2
    assert after.held_ns >= before.held_ns > 0


async def test_a_released_tenant_leaves_nothing_behind(tmp_path: Path) -> None:
    given_settings = settings_in(tmp_path)
    left = StateDir(given_settings.state_dir, given_settings.hook_file).handover("a")
    async with tenants_with(given_settings, [row("a")]) as tenants:
        assert left.exists()
        await tenants.apply([row("a", state="Releasing")])
        assert not left.exists()


def account(request: int, limit: int) -> Account:
    return Account(10 * SECOND, Parameters(), request_milli=request, limit_milli=limit)


@pytest.mark.promise("node-handover")
@given(st.integers(0, 1000), st.integers(0, 1000), st.integers(0, 20 * SECOND), st.integers(0, 100 * SECOND))
def test_an_account_that_is_resumed_is_owed_what_it_was_owed(one: int, two: int, held: int, away: int) -> None:
    request, limit = sorted((one, two))
    before = account(request, limit)
    before.advance(30 * SECOND, held, Charge.GUARANTEED)
    state = before.snapshot()
    after = Account(30 * SECOND + away, Parameters(), request_milli=request, limit_milli=limit)
    after.resume(state)
    resumed = after.snapshot()
    assert resumed.assured == state.assured
    assert state.ceiling <= resumed.ceiling or limit == 0
    assert resumed.ceiling - state.ceiling <= away * (limit - request)
    assert (after.held_ns, after.grants) == (before.held_ns, before.grants)
    assert abs(after.usage().held_milli - before.usage().held_milli) <= (10 if away == 0 else 1000)


def test_an_account_of_the_future_is_taken_as_of_now() -> None:
    after = account(500, 1000)
    after.resume(AccountSnapshot(10**18, 5, 7, 1, 2, 3, 4, 5, 6))
    assert (after.assured, after.ceiling, after.usage().grants) == (5, 7, 4)
