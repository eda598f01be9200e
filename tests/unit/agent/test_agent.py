"""The agent in the test process: what it reports and when, and what prevents a GPU from being shared."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest
from sharepod import protocol
from sharepod.agent.agent import Agent
from sharepod.agent.devices.held_gpus import PluginPod
from sharepod.agent.devices.inventory import SimulatedInventory
from sharepod.api.gpunode import Pool, TenantState
from unit.agent.client import GI, GPU0, GPU1, Client, row, settings_in, until
from unit.agent.in_process import started
from unit.agent.program import replace, write_inventory


async def test_no_process_is_a_strangers_before_the_ledger_is_known(directory: Path) -> None:
    write_inventory(directory, {"pid": 4242, "uuid": GPU0, "memory": "1Gi"})
    async with started(directory) as agent:
        await asyncio.sleep(0.2)
        assert all(gpu.shareable for gpu in agent.facts().gpus)
        await agent.tenants.apply([])
        async with asyncio.timeout(10):
            while agent.facts().gpus[0].shareable:  # noqa: ASYNC110 - until the next reading
                await asyncio.sleep(0.01)


@pytest.mark.promise("node-release-soon")
async def test_a_release_waits_for_no_usual_reading(directory: Path) -> None:
    """Here readings are a minute apart. The release must take an additional one."""
    left: dict[str, str] = {"a": "its volume is published"}

    async with started(directory, inventory_interval_s=60) as agent:
        agent.residue = left.get

        def drained() -> set[str]:
            return {each.id for each in agent.tenants.status() if each.drained}

        await agent.tenants.apply([row("a"), row("b")])
        await agent.tenants.apply([row("a", state=TenantState.RELEASING), row("b", state=TenantState.RELEASING)])
        await until(lambda: drained() == {"b"})
        left.clear()
        await until(lambda: drained() == {"a", "b"})


async def test_a_crowd_of_processes_is_put_together_into_few_reports(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop, asked = asyncio.get_running_loop(), 0
    facts = Agent.facts

    def counted(agent: Agent) -> Any:
        nonlocal asked
        asked += 1
        return facts(agent)

    async with started(directory, inventory_interval_s=60) as agent:
        await agent.tenants.apply([row("a")])
        monkeypatch.setattr(Agent, "facts", counted)
        begun = loop.time()
        agent.changed.clear()
        for _ in range(50):
            (await Client.connect(agent.tenants.directory("a"))).close()
        await asyncio.wait_for(agent.changed.wait(), 10)
        assert 1 <= asked <= (loop.time() - begun) / 0.05 + 1


async def test_facts_report_changes_and_not_usage(directory: Path) -> None:
    settings = settings_in(directory)
    agent = Agent(settings, SimulatedInventory(directory / "inventory.yaml"))
    await agent.start()
    await agent.take_stock()
    try:
        await agent.tenants.apply([row("a")])
        await asyncio.wait_for(agent.changed.wait(), 5)
        agent.changed.clear()
        client = await Client.connect(agent.tenants.directory("a"))
        await asyncio.wait_for(agent.changed.wait(), 5)
        assert [status.connected for status in agent.facts().tenants] == [True]
        async with asyncio.timeout(10):
            while agent.changed.is_set():  # a reading may find the process before its HELLO, which is another change
                agent.changed.clear()
                await asyncio.sleep(4 * settings.inventory_interval_s)
        await client.reserve(1 * GI)
        grant = await client.granted()
        client.send(protocol.Drained(grant.grant_id))
        await asyncio.sleep(4 * settings.inventory_interval_s)
        assert not agent.changed.is_set(), "usage alone is no change"
        assert [status.memory for status in agent.facts().tenants] == [GI]
        client.close()
        assert agent.unhealthy() is None
    finally:
        await agent.close()
    assert agent.unhealthy() is not None


@pytest.mark.promise("node-foreign-process", "node-mig")
async def test_a_foreign_process_makes_a_gpu_unfit_to_be_shared_and_a_tenants_own_does_not(directory: Path) -> None:
    agent = Agent(settings_in(directory), SimulatedInventory(directory / "inventory.yaml"))
    await agent.start()
    await agent.take_stock()
    try:
        await agent.tenants.apply([row("a")])
        client = await Client.connect(agent.tenants.directory("a"))
        agent.changed.clear()
        write_inventory(
            directory, {"pid": os.getpid(), "uuid": GPU0, "memory": "1Gi"}, {"pid": 1, "uuid": GPU1, "memory": "1Gi"}
        )
        async with asyncio.timeout(10):
            while agent.facts().gpus[1].shareable:
                await agent.changed.wait()
                agent.changed.clear()
        first, second = agent.facts().gpus
        assert first.shareable
        assert "process 1 on the node uses it" in second.reason
        agent.held_gpus.know_ledger(Pool.DEVICE_PLUGIN, ())
        agent.know_plugin_pods({GPU1: PluginPod("team", "trainer")}, None)
        assert agent.facts().gpus[1].shareable, "the pod that the device plugin has given it to is no stranger"
        agent.know_plugin_pods({}, None)
        assert not agent.facts().gpus[1].shareable
        agent.held_gpus.know_ledger(Pool.DEDICATED, ())
        agent.changed.clear()
        agent.owner_of = lambda pid: "a"
        await asyncio.wait_for(agent.changed.wait(), 10)
        assert agent.facts().gpus[1].shareable
        client.close()
    finally:
        await agent.close()


async def test_an_inventory_that_cannot_be_read_any_more_makes_the_agent_unhealthy(directory: Path) -> None:
    settings = settings_in(directory, nvml_timeout_s=0.1)
    agent = Agent(settings, SimulatedInventory(directory / "inventory.yaml"))
    await agent.start()
    await agent.take_stock()
    try:
        replace(directory / "inventory.yaml", "gpus: nonsense")
        async with asyncio.timeout(10):
            while agent.unhealthy() is None:  # noqa: ASYNC110 - it becomes so by time passing
                await asyncio.sleep(0.02)
        assert "is not valid" in (agent.unhealthy() or "")
        assert len(agent.facts().gpus) == 2, "the last reading stands"
    finally:
        await agent.close()
