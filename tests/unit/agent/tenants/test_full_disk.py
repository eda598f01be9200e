"""A state directory on a full or read-only disk: tenants are served from memory, and the problem is reported."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio
from sharepod import protocol
from sharepod.agent.settings import AgentSettings
from sharepod.agent.state.succession import Succession
from sharepod.agent.tenants.registry import TenantRegistry, UntakenRowsError
from sharepod.api.gpunode import TenantState
from unit.agent.client import Client, reading, row, settings_in, tenants_with, view_of
from unit.agent.small_disk import SmallDisk, small_disk


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[SmallDisk]:
    with small_disk(tmp_path / "state") as disk:
        yield disk


@pytest.fixture
def settings(disk: SmallDisk) -> AgentSettings:
    return settings_in(disk.path.parent)


@pytest_asyncio.fixture
async def tenants(settings: AgentSettings) -> AsyncIterator[TenantRegistry]:
    async with tenants_with(settings, [row("a", 400, 700), row("b", 300)]) as tenants:
        yield tenants


def limits(tenants: TenantRegistry, tenant_id: str) -> str:
    directory = tenants.directory(tenant_id)
    assert directory is not None
    return (directory / "limits").read_text()


@pytest.mark.promise("node-full-disk")
async def test_on_a_full_disk_a_changed_row_is_in_force_and_is_written_once_there_is_room(
    disk: SmallDisk, tenants: TenantRegistry
) -> None:
    client = await Client.connect(tenants.directory("a"))
    disk.fill()
    changed = [row("a", 500, 700), row("b", 300)]
    with pytest.raises(OSError, match=r"No space left on device \(tenant a, 1 of 2 rows\)"):
        await tenants.apply(changed)
    frame = await client.expect(protocol.Limits)
    assert frame.gpus[0].request_milli == 500
    assert "request 400" in limits(tenants, "a")
    with pytest.raises(OSError, match="No space left on device"):
        await tenants.apply(changed)
    disk.empty()
    await tenants.apply(changed)
    assert "request 500" in limits(tenants, "a")
    client.close()


@pytest.mark.promise("node-full-disk")
async def test_an_agent_that_starts_on_a_full_disk_serves_the_tenants_that_have_directories(
    disk: SmallDisk, settings: AgentSettings
) -> None:
    async with tenants_with(settings, [row("a", 400, 700), row("b", 300)]):
        pass
    settings.hook_file.write_bytes(b"the hook of another version")
    disk.fill()
    again = TenantRegistry(settings, changed=lambda: None)
    await again.start()
    try:
        with pytest.raises(OSError, match="3 of 3 rows"):
            await again.apply([row("a", 400, 700), row("b", 200), row("new", 100)])
        for tenant_id in ("a", "b"):
            (await Client.connect(again.directory(tenant_id))).close()
        assert {each.row.id: each.row.request_milli for each in again.views()} == {"a": 400, "b": 200}
        disk.empty()
        await again.start()
        await again.apply([row("a", 400, 700), row("b", 200), row("new", 100)])
        (await Client.connect(again.directory("new"))).close()
        assert "request 200" in limits(again, "b")
    finally:
        await again.close()


@pytest.mark.promise("node-full-disk")
async def test_a_disk_that_turns_read_only_ends_nothing_that_is_served(
    disk: SmallDisk, tenants: TenantRegistry
) -> None:
    client = await Client.connect(tenants.directory("a"))
    with disk.read_only():
        with pytest.raises(OSError, match="Read-only file system"):
            await tenants.apply([row("a", 500, 700), row("b", 300)])
        assert (await client.expect(protocol.Limits)).gpus[0].request_milli == 500
    client.close()


@pytest.mark.promise("node-full-disk")
async def test_a_tenant_is_released_on_a_read_only_disk_and_drained_once_nothing_of_it_is_left(
    disk: SmallDisk, tenants: TenantRegistry
) -> None:
    directory = tenants.directory("a")
    released = [row("a", 400, 700, state=TenantState.RELEASING), row("b", 300)]
    with disk.read_only():
        with pytest.raises(UntakenRowsError, match="Read-only file system"):
            await tenants.apply(released)
        with pytest.raises(ConnectionRefusedError):
            await Client.connect(directory)
        assert tenants.directory("a") is None
        await tenants.observe(reading(), residue=lambda _: "its volume is published", owner_of=lambda _: None)
        assert not view_of(tenants, "a").status().drained
        await tenants.observe(reading(), residue=lambda _: None, owner_of=lambda _: None)
        assert view_of(tenants, "a").status().drained
        await tenants.apply(released)  # a release needs no further file


async def test_an_agent_starts_with_a_read_only_state_directory(disk: SmallDisk, settings: AgentSettings) -> None:
    """On a read-only disk an agent without inherited sockets cannot create sockets. It must start all the same, report
    this, and unmount volumes."""
    async with tenants_with(settings, [row("a", 400, 700)]):
        with Succession(settings.state_dir) as before:
            assert before.free()
    again = TenantRegistry(settings, changed=lambda: None)
    with disk.read_only(), Succession(settings.state_dir) as succession:
        assert succession.free()
        await again.start()
        with pytest.raises(OSError, match="Read-only file system"):
            await again.apply([row("a", 400, 700)])
    await again.close()
