"""Views of tenants: their values stay the same while the tenants change."""

from __future__ import annotations

from dataclasses import FrozenInstanceError
from pathlib import Path

import pytest
from sharepod.agent.devices.inventory import Process
from sharepod.api.gpunode import Mode, TenantState
from unit.agent.client import GI, GPU0, GPU1, Client, reading, row, settings_in, tenants_with, until, view_of


async def test_a_view_of_a_tenant_agrees_with_its_status(tmp_path: Path) -> None:
    rows = [row("a", 400, gpus=(GPU0, GPU1)), row("b", 300)]
    async with tenants_with(settings_in(tmp_path), rows) as tenants:
        client = await Client.connect(tenants.directory("a"))
        assert await client.reserve(GI, gpu=1) == GI
        await client.granted()
        views = list(tenants.views())
        assert [view.row.id for view in views] == ["a", "b"], "in the ledger's order"
        assert tuple(view.status() for view in views) == tenants.status()
        view, share = views[0], views[0].share()
        assert dict(view.memory_used) == {GPU0: 0, GPU1: GI}
        assert (view.processes, view.connected) == (1, True)
        assert share is not None
        assert share.usage.grants == sum(share.waits.counts) == 1
        assert set(share.denied_allocations) == {GPU0, GPU1}
        client.close()


async def test_a_view_does_not_change_when_the_tenant_does(tmp_path: Path) -> None:
    async with tenants_with(settings_in(tmp_path), [row("a")]) as tenants:
        client = await Client.connect(tenants.directory("a"))
        assert await client.reserve(GI) == GI
        before = view_of(tenants, "a")
        client.close()
        await tenants.apply([row("a", state=TenantState.RELEASING)])
        await until(lambda: not view_of(tenants, "a").memory_used)
        assert dict(before.memory_used) == {GPU0: GI}
        assert before.row.state is TenantState.RESERVED
        with pytest.raises(FrozenInstanceError):
            before.processes = 0  # type: ignore[misc]


async def test_a_refused_allocation_is_a_finding_with_what_was_asked_held_and_allowed(tmp_path: Path) -> None:
    async with tenants_with(settings_in(tmp_path), [row("a", gpus=(GPU0, GPU1))]) as tenants:
        client = await Client.connect(tenants.directory("a"))
        assert await client.reserve(3 * GI, gpu=1) == 3 * GI
        assert await client.reserve(2 * GI, gpu=1, seq=2) == 0
        await tenants.observe(reading(), residue=lambda _: None, owner_of=lambda _: None)
        (finding,) = view_of(tenants, "a").findings
        assert finding.reason == "MemoryRefused"
        assert f"asked for 2048 MiB more on {GPU1} and was refused: 3072 of its 4096 MiB" in finding.message
        assert view_of(tenants, "a").enforced is True
        client.close()


async def test_only_a_tenant_that_is_being_served_has_a_share(tmp_path: Path) -> None:
    rows = [row("whole", 1000, 1000, gpus=(GPU1,), mode=Mode.EXCLUSIVE), row("a")]
    async with tenants_with(settings_in(tmp_path), rows) as tenants:
        assert view_of(tenants, "whole").share() is None
        assert view_of(tenants, "a").share() is not None
        await tenants.observe(reading(Process(4242, GPU1, GI)), residue=lambda _: None, owner_of=lambda _: "whole")
        assert dict(view_of(tenants, "whole").memory_used) == {GPU1: GI}
        await tenants.apply([rows[0], row("a", state=TenantState.RELEASING)])
        assert view_of(tenants, "a").share() is None
        assert view_of(tenants, "a").usage is None
