"""The node's ledger, applied on the node: directories, files, reports."""

from __future__ import annotations

import asyncio
import errno
import os
import threading
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import pytest_asyncio
from sharepod import protocol
from sharepod.agent.devices.inventory import Process
from sharepod.agent.settings import AgentSettings
from sharepod.agent.state.directory import StateDir, StateDirError
from sharepod.agent.state.tenant_files import FilesWanted, TenantFiles
from sharepod.agent.tenants.registry import TenantRegistry
from sharepod.api.gpunode import FindingReason, Mode, Tenant, TenantState, TenantStatus
from unit.agent.client import GI, GPU0, GPU1, Client, reading, row, served_in, settings_in, tenants_with, until, view_of


@pytest.fixture
def settings(tmp_path: Path) -> AgentSettings:
    return settings_in(tmp_path)


@pytest_asyncio.fixture
async def tenants(settings: AgentSettings) -> AsyncIterator[TenantRegistry]:
    async with tenants_with(settings, [row("a", 400, 700)]) as tenants:
        yield tenants


async def observe(
    tenants: TenantRegistry, *processes: Process, residue: str | None = None, owner: str | None = None
) -> None:
    await tenants.observe(reading(*processes), residue=lambda _: residue, owner_of=lambda _: owner)


def status_of(tenants: TenantRegistry, tenant_id: str) -> TenantStatus:
    return next(status for status in tenants.status() if status.id == tenant_id)


async def directory_goes(directory: Path) -> None:
    async with asyncio.timeout(10):
        while directory.exists():  # noqa: ASYNC110, ASYNC240 - removed by another task
            await asyncio.sleep(0.005)


async def test_a_tenants_directory_has_only_the_files_that_its_pod_needs(tenants: TenantRegistry) -> None:
    directory = tenants.directory("a")
    assert directory is not None
    assert sorted(path.name for path in directory.iterdir()) == [
        "agent.sock",
        "ld.so.preload",
        "libsharepod.so",
        "limits",
    ]
    assert directory.stat().st_mode & 0o777 == 0o755
    assert (directory / "agent.sock").stat().st_mode & 0o777 == 0o666
    assert (directory / "ld.so.preload").read_text() == "/run/sharepod/libsharepod.so\n"
    assert (directory / "limits").read_text() == f"gpu {GPU0} request 400 limit 700 memory {4 * GI} enforced 1\n"


async def test_a_tenant_joins_no_group_of_another_namespace(settings: AgentSettings) -> None:
    rows = [
        row("a", 200, group="train"),
        row("b", 200, group="train", gpus=(GPU1,)),
        row("foreign", 200, group="train", namespace="other"),
        row("single", 200),
    ]
    async with tenants_with(settings, rows) as tenants:
        groups = tenants._tokens._scheduler._occupancy.groups
        assert sorted(sorted(member.id for member in members) for members in groups.values()) == [
            ["a", "b"],
            ["foreign"],
        ]


async def test_leave_to_go_on_without_limits_is_the_administrators_and_ends_with_the_tenant(
    settings: AgentSettings,
) -> None:
    def marked(tenants: TenantRegistry) -> bool:
        directory = tenants.directory("a")
        assert directory is not None
        return (directory / "fail-open").exists()

    lenient = settings.model_copy(update={"fail_open": True})
    async with tenants_with(settings, [row("a")]) as tenants:
        assert not marked(tenants)
    async with tenants_with(lenient, [row("a")]) as tenants:
        assert marked(tenants)
        directory = tenants.directory("a")
        await tenants.apply([row("a", state=TenantState.RELEASING)])
        assert directory is not None
        assert not (directory / "fail-open").exists()
    async with tenants_with(lenient, [row("a")]) as tenants:
        assert marked(tenants)
    async with tenants_with(settings, [row("a")]) as tenants:
        assert not marked(tenants)


async def test_an_exclusive_tenant_gets_no_hook_and_no_socket(settings: AgentSettings) -> None:
    async with tenants_with(settings, [row("whole", mode=Mode.EXCLUSIVE)]) as tenants:
        directory = tenants.directory("whole")
        assert directory is not None
        assert [path.name for path in directory.iterdir()] == ["ld.so.preload"]
        assert (directory / "ld.so.preload").read_bytes() == b""


async def test_files_that_mounts_pin_are_not_touched_by_a_restart(settings: AgentSettings) -> None:
    def pinned(tenants: TenantRegistry) -> tuple[int, ...]:
        directory = tenants.directory("a")
        assert directory is not None
        return tuple(
            path.stat().st_ino for path in (directory, directory / "ld.so.preload", directory / "libsharepod.so")
        )

    async with tenants_with(settings, [row("a")]) as tenants:
        before = pinned(tenants)
    async with tenants_with(settings, [row("a")]) as tenants:
        assert pinned(tenants) == before


@pytest.mark.promise("install-running-hook")
async def test_a_new_hook_replaces_the_old_by_rename_and_the_old_goes_with_the_tenants_that_had_it(
    settings: AgentSettings,
) -> None:
    hooks = settings.state_dir / "hooks"
    async with tenants_with(settings, [row("a")]) as tenants:
        directory = tenants.directory("a")
        assert directory is not None
        [old] = hooks.iterdir()
        assert (directory / "libsharepod.so").samefile(old)
        content = old.read_bytes()
    with (directory / "libsharepod.so").open("rb") as running:
        settings.hook_file.write_bytes(b"a newer hook")
        async with tenants_with(settings, [row("a")]):
            assert (directory / "libsharepod.so").read_bytes() == b"a newer hook"
            assert running.read() == content, "who has it open keeps what it had"
        async with tenants_with(settings, [row("a")]) as tenants:
            assert old.exists(), "a process of the tenant may have it mapped, and is known by it"
            await tenants.apply([])
            await observe(tenants)
            await until(lambda: not directory.exists())
            assert [path.read_bytes() for path in hooks.iterdir()] == [b"a newer hook"]


async def test_a_damaged_hook_is_put_right_at_the_start(settings: AgentSettings) -> None:
    async with tenants_with(settings, []):
        [installed] = (settings.state_dir / "hooks").iterdir()
    installed.write_bytes(b"half")
    async with tenants_with(settings, []):
        assert installed.read_bytes() == settings.hook_file.read_bytes()


async def test_a_missing_hook_is_reported(settings: AgentSettings) -> None:
    settings.hook_file.unlink()
    with pytest.raises(StateDirError, match="make shim"):
        await TenantRegistry(settings, changed=lambda: None).start()


@pytest.mark.promise("operator-released-means-gone")
async def test_drained_needs_no_process_no_client_and_no_residue(tenants: TenantRegistry) -> None:
    client = await Client.connect(tenants.directory("a"))
    await tenants.apply([row("a", 400, 700, state=TenantState.RELEASING)])
    assert tenants.directory("a") is None
    [alive] = [status.processes for status in tenants.status()]
    assert alive == 1, "this very process has connected and runs"
    await observe(tenants)
    assert not status_of(tenants, "a").drained
    client.close()


async def test_residue_keeps_a_tenant_from_being_drained(tenants: TenantRegistry) -> None:
    releasing = row("a", 400, 700, state=TenantState.RELEASING)
    await tenants.apply([releasing])
    assert not status_of(tenants, "a").drained, "not checked yet"
    await observe(tenants, residue="volume still published at /pods/x")
    assert not status_of(tenants, "a").drained
    await observe(tenants, Process(4242, GPU0, GI), owner="a")
    assert not status_of(tenants, "a").drained
    await observe(tenants)
    assert status_of(tenants, "a").drained
    await tenants.apply([releasing])
    assert status_of(tenants, "a").drained, "once seen it stays so"


async def test_a_repeated_reading_shows_no_tenant_drained(tenants: TenantRegistry) -> None:
    await tenants.apply([row("a", 400, 700, state=TenantState.RELEASING)])
    await tenants.observe(replace(reading(), fresh=False), residue=lambda _: None, owner_of=lambda _: None)
    assert not status_of(tenants, "a").drained
    await observe(tenants)
    assert status_of(tenants, "a").drained


async def test_a_gpu_with_unreadable_processes_shows_no_tenant_drained_and_no_memory_free(
    tenants: TenantRegistry,
) -> None:
    await observe(tenants, Process(4242, GPU0, 3 * GI), owner="a")
    blind = replace(reading(), unread=frozenset({GPU0}))
    await tenants.observe(blind, residue=lambda _: None, owner_of=lambda _: None)
    assert status_of(tenants, "a").memory == 3 * GI
    await tenants.apply([row("a", 400, 700, state=TenantState.RELEASING)])
    await tenants.observe(blind, residue=lambda _: None, owner_of=lambda _: None)
    assert not status_of(tenants, "a").drained
    assert "cannot be read" in (view_of(tenants, "a").left_behind or "")
    await observe(tenants)
    assert status_of(tenants, "a").drained


@pytest.mark.promise("time-reading")
async def test_a_reading_is_taken_in_turns_of_the_loop_also_where_tenants_go_meanwhile(settings: AgentSettings) -> None:
    rows = [row(f"t{number}", 20) for number in range(50)]
    on_gpu = [Process(100_000 + number, GPU0, GI, 0.1) for number in range(50)]
    async with tenants_with(settings, rows) as tenants:
        turns = 0

        def owner_of(pid: int) -> str:
            return f"t{pid - 100_000}"

        task = asyncio.create_task(tenants.observe(reading(*on_gpu), residue=lambda _: None, owner_of=owner_of))
        going: asyncio.Task[None] | None = None
        while not task.done():
            await asyncio.sleep(0)
            turns += 1
            if turns == 2:
                going = asyncio.create_task(tenants.apply(rows[:25]))
        assert turns > 4
        assert (await task).foreign == {}
        assert going is not None
        await going
        assert [status.memory for status in tenants.status()] == [GI] * 25


async def test_a_row_that_cannot_be_written_harms_no_other_and_is_tried_again(
    settings: AgentSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    create = StateDir.create

    def full(state: StateDir, tenant_id: str, limits: str | None) -> Path:
        if tenant_id == "bad":
            raise OSError(errno.ENOSPC, "No space left on device")
        return create(state, tenant_id, limits)

    async with tenants_with(settings, [row("leaves")]) as tenants:
        rows = [row("bad"), row("good"), row("leaves", state=TenantState.RELEASING)]
        monkeypatch.setattr(StateDir, "create", full)
        with pytest.raises(OSError, match=r"No space left on device \(tenant bad, 1 of 3 rows\)"):
            await tenants.apply(rows)
        (await Client.connect(tenants.directory("good"))).close()
        assert tenants.directory("leaves") is None
        monkeypatch.setattr(StateDir, "create", create)
        await tenants.apply(rows)
        (await Client.connect(tenants.directory("bad"))).close()


async def test_many_tenants_are_opened_by_few_calls_some_while_those_before_them_are_started(
    settings: AgentSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_all, calls, served = StateDir.open_all, [], []
    serve, next_asked = TenantRegistry._serve, threading.Event()

    def counted(state: StateDir, wanted: Sequence[FilesWanted]) -> list[TenantFiles | OSError]:
        calls.append(len(wanted))
        served.append(len(registry.rows()))
        if len(calls) == 2:
            next_asked.set()
            raise OSError(errno.ENOTCONN, "the other process is away")
        return open_all(state, wanted)

    def serve_slowly(registry: TenantRegistry, one: Tenant, files: TenantFiles | OSError) -> None:
        if len(registry.rows()) == 1:
            next_asked.wait(10)  # in another thread, because a busy machine may delay it
        serve(registry, one, files)

    monkeypatch.setattr(StateDir, "open_all", counted)
    monkeypatch.setattr(TenantRegistry, "_serve", serve_slowly)
    rows = [row(f"t{number}", 10, gpus=((GPU0, GPU1)[number % 2],)) for number in range(40)]
    async with tenants_with(settings, []) as registry:
        with pytest.raises(OSError, match=r"away \(tenant t16, 16 of 40 rows\)"):
            await registry.apply(rows)
        assert calls == [16, 16, 8]
        assert served[1] < 16, "the next are asked for before the first are started"
        await registry.apply(rows)
        assert calls == [16, 16, 8, 16], "served tenants are not opened again"
        assert [each.id for each in registry.rows()] == [each.id for each in rows]
        for each in rows:
            (await Client.connect(registry.directory(each.id))).close()


async def test_a_removed_row_keeps_its_directory_until_nothing_of_its_tenant_is_left(tenants: TenantRegistry) -> None:
    directory = tenants.directory("a")
    assert directory is not None
    await tenants.apply([])
    assert tenants.status() == ()
    await observe(tenants, residue="volume still published")
    await asyncio.sleep(0)
    assert directory.exists()
    await observe(tenants)
    await directory_goes(directory)


async def test_directories_of_tenants_that_went_while_the_agent_was_away_are_removed(settings: AgentSettings) -> None:
    async with tenants_with(settings, [row("old"), row("kept")]) as tenants:
        old, kept = tenants.directory("old"), tenants.directory("kept")
    assert old is not None
    assert kept is not None
    async with tenants_with(settings, [row("kept")]) as tenants:
        await observe(tenants)
        await directory_goes(old)
        assert kept.exists()


async def test_a_tenant_that_comes_back_while_its_directory_is_being_removed_has_one(tenants: TenantRegistry) -> None:
    for _ in range(20):
        await tenants.apply([])
        await observe(tenants)
        await tenants.apply([row("a")])
        client = await Client.connect(tenants.directory("a"))
        client.close()


@pytest.mark.promise("operator-one-run-at-a-time")
@pytest.mark.parametrize("seen", [True, False], ids=["its row went in between", "that was not seen"])
async def test_the_next_run_of_a_tenant_is_served_and_drained_separately(tenants: TenantRegistry, seen: bool) -> None:
    await tenants.apply([row("a", 400, 700, state=TenantState.RELEASING)])
    await observe(tenants)
    assert status_of(tenants, "a").drained
    if seen:
        await tenants.apply([])
    await tenants.apply([row("a", 400, 900)])
    directory = tenants.directory("a")
    assert directory is not None
    assert "limit 900" in (directory / "limits").read_text()
    assert not status_of(tenants, "a").drained
    client = await Client.connect(directory)
    await tenants.apply([row("a", 400, 900, state=TenantState.RELEASING)])
    await observe(tenants, Process(os.getpid(), GPU0, GI), owner="a")
    assert not status_of(tenants, "a").drained, "the last run's end is not the end of this run"
    client.close()


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (row("../etc"), "is not a name"),
        (row("x" * 200), "is not a name"),
        (row("a", gpus=("GPU-7",)), "not the UUID of a GPU"),
        (row("a", gpus=(GPU0, GPU0)), "twice"),
        (row("a", 600, 500), "more than limitMilli"),
    ],
)
async def test_a_row_that_cannot_be_served_harms_no_other(settings: AgentSettings, bad: Tenant, words: str) -> None:
    async with tenants_with(settings, [bad, row("good")]) as tenants:
        assert tenants.directory(bad.id) is None
        assert words in (tenants.unservable(bad.id) or "")
        client = await Client.connect(tenants.directory("good"))
        client.close()
        assert [status.id for status in tenants.status()] == [bad.id, "good"]


async def test_a_row_that_was_mended_is_served(settings: AgentSettings) -> None:
    async with tenants_with(settings, [row("a", 600, 500)]) as tenants:
        await tenants.apply([row("a", 500, 500)])
        client = await Client.connect(tenants.directory("a"))
        client.close()


async def test_a_bad_row_can_still_be_released(settings: AgentSettings) -> None:
    async with tenants_with(settings, [row("a", 600, 500)]) as tenants:
        await tenants.apply([row("a", 600, 500, state=TenantState.RELEASING)])
        await observe(tenants)
        assert status_of(tenants, "a").drained


async def test_a_process_that_never_connected_means_not_enforced(tmp_path: Path) -> None:
    async with tenants_with(settings_in(tmp_path, unhooked_after_s=0), [row("a")]) as tenants:
        assert status_of(tenants, "a").enforced is None
        await observe(tenants, Process(4242, GPU0, GI), owner="a")
        status = status_of(tenants, "a")
        assert (status.enforced, status.processes, status.connected) == (False, 1, False)
        assert [finding.reason for finding in status.findings] == [FindingReason.PROCESS_WITHOUT_HOOK]
        await observe(tenants)
        status = status_of(tenants, "a")
        assert (status.enforced, status.findings) == (None, ())


@pytest.mark.promise("node-unhooked")
async def test_to_connect_without_a_hooks_hello_does_not_make_a_process_enforced(tmp_path: Path) -> None:
    async with tenants_with(settings_in(tmp_path, unhooked_after_s=0), [row("a")]) as tenants:
        [served] = served_in(tenants)
        silent = await Client.connect(tenants.directory("a"), hello=False)
        looking = await Client.connect(tenants.directory("a"), hello=False)
        looking.send(protocol.Hello(1, 1, observes=True))
        await looking.expect(protocol.Welcome)
        assert os.getpid() in served.processes
        await observe(tenants, Process(os.getpid(), GPU0, GI))
        assert status_of(tenants, "a").enforced is False
        hook = await Client.connect(tenants.directory("a"))
        hook.close()
        silent.close()
        looking.close()
        await until(lambda: served.connected == 0)
        await observe(tenants, Process(os.getpid(), GPU0, GI))
        assert status_of(tenants, "a").enforced is True, "a hook that has lost its connection is still one"


@pytest.mark.promise("node-finding-restart", "install-continues")
async def test_unenforced_limits_stay_unenforced_over_a_restart_of_the_agent(tmp_path: Path) -> None:
    async with tenants_with(settings_in(tmp_path, unhooked_after_s=0), [row("a")]) as tenants:
        await observe(tenants, Process(4242, GPU0, GI), owner="a")
        found = status_of(tenants, "a").findings
    async with tenants_with(settings_in(tmp_path, unhooked_after_s=60), [row("a")]) as tenants:
        assert status_of(tenants, "a").enforced is False
        await observe(tenants, Process(4242, GPU0, GI), owner="a")
        assert status_of(tenants, "a").findings == found
        await observe(tenants)
        assert status_of(tenants, "a").findings == ()


async def test_the_next_run_of_a_tenant_begins_without_the_findings_of_the_one_before(tmp_path: Path) -> None:
    async with tenants_with(settings_in(tmp_path, unhooked_after_s=0), [row("a")]) as tenants:
        await observe(tenants, Process(4242, GPU0, GI), owner="a")
        assert status_of(tenants, "a").enforced is False
        await tenants.apply([row("a", state=TenantState.RELEASING)])
        await tenants.apply([row("a")])
        status = status_of(tenants, "a")
        assert (status.enforced, status.findings) == (None, ())


async def test_a_process_that_has_just_come_is_given_the_time_to_connect(tenants: TenantRegistry) -> None:
    await observe(tenants, Process(4242, GPU0, GI), owner="a")
    assert status_of(tenants, "a").enforced is None


async def test_without_a_process_list_of_the_driver_enforcement_is_unknown(tenants: TenantRegistry) -> None:
    client = await Client.connect(tenants.directory("a"))
    await observe(tenants)
    assert status_of(tenants, "a").enforced is True
    await tenants.observe(replace(reading(), unread=frozenset({GPU0})), residue=lambda _: None, owner_of=lambda _: None)
    status = status_of(tenants, "a")
    assert status.enforced is None
    assert [finding.reason for finding in status.findings] == [FindingReason.PROCESSES_NOT_TOLD]
    client.close()


async def test_an_exclusive_tenant_is_measured_by_the_driver(settings: AgentSettings) -> None:
    async with tenants_with(settings, [row("whole", mode=Mode.EXCLUSIVE)]) as tenants:
        for _ in range(2):
            await tenants.observe(
                replace(reading(Process(4242, GPU0, 3 * GI)), utilization={GPU0: 0.5}),
                residue=lambda _: None,
                owner_of=lambda _: None,
            )
        status = status_of(tenants, "whole")
        assert (status.memory, status.held_milli, status.processes) == (3 * GI, 500, 1)
        assert (status.enforced, status.findings) == (None, ())


async def test_memory_that_no_allocation_explains_is_reported(tmp_path: Path) -> None:
    async with tenants_with(settings_in(tmp_path, memory_gap_mib=100), [row("a")]) as tenants:
        watch = tenants._entries["a"].rules
        watch._config = replace(watch._config, gap_after_s=0)
        await observe(tenants, Process(4242, GPU0, 3 * GI), owner="a")
        [finding] = status_of(tenants, "a").findings
        assert finding.reason == FindingReason.MEMORY_BEYOND_TRACKED
        assert "3072 MiB" in finding.message


@pytest.mark.promise("memory-counted-without-hook")
async def test_memory_that_the_driver_counts_beyond_credits_counts(tenants: TenantRegistry) -> None:
    await observe(tenants, Process(4242, GPU0, 3 * GI), owner="a")
    assert status_of(tenants, "a").memory == 3 * GI
    client = await Client.connect(tenants.directory("a"))
    assert await client.reserve(2 * GI) == 0
    assert await client.reserve(1 * GI) == 1 * GI
    client.close()


async def test_a_process_of_no_tenant_is_recognised(settings: AgentSettings) -> None:
    async with tenants_with(settings, [row("whole", gpus=(GPU1,), mode=Mode.EXCLUSIVE)]) as tenants:
        seen = reading(Process(4242, GPU0, 0), Process(4243, GPU1, 0))
        attribution = await tenants.observe(seen, residue=lambda _: None, owner_of=lambda _: None)
        assert attribution.foreign == {GPU0: (4242,)}
        assert attribution.of("whole").pids == {4243}, "on a GPU of an Exclusive tenant it can only be the tenant's"


async def test_a_long_state_directory_is_no_obstacle(tmp_path: Path) -> None:
    deep = tmp_path / ("d" * 90) / ("e" * 90)
    deep.mkdir(parents=True)
    async with tenants_with(settings_in(deep), [row("a")]) as tenants:
        client = await Client.connect(tenants.directory("a"))
        client.close()
