"""Privileged process and worker, both played in the test process: the worker receives the ledger's rows, the privileged
process the worker's facts, and a new worker receives everything."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from sharepod.agent.agent import Agent
from sharepod.agent.apart import distant_agent
from sharepod.agent.apart.distant_agent import DistantAgent
from sharepod.agent.apart.worker import Worker
from sharepod.agent.devices.held_gpus import PluginPod
from sharepod.agent.devices.inventory import InventoryError, SimulatedInventory
from sharepod.agent.settings import AgentSettings
from sharepod.agent.state.kept_descriptors import NOTHING_KEPT
from sharepod.agent.telemetry.endpoints import Sockets
from sharepod.api.gpunode import Pool, TenantState
from unit.agent.client import GI, GPU0, GPU1, Client, row, settings_in, until
from unit.agent.program import write_inventory


class Parts:
    """Parts of privileged process and worker, on one loop. `begin_worker` starts the next worker."""

    def __init__(self, settings: AgentSettings) -> None:
        self.settings = settings
        self.agent = DistantAgent(
            settings, SimulatedInventory(settings.state_dir.parent / "inventory.yaml"), NOTHING_KEPT
        )
        self.running: asyncio.Task[int] | None = None
        self.supervisors: list[socket.socket] = []

    async def begin_worker(self) -> None:
        """Start a worker, and link it with the privileged process."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.supervisors.append(ours)
        self.running = asyncio.create_task(Worker(self.settings, theirs, Sockets.of(self.settings)).run())
        await asyncio.sleep(0)
        one, other = socket.socketpair()
        socket.send_fds(ours, [b"1"], [other.fileno()])
        other.close()
        self.agent.line.connect(one)

    async def end_worker(self) -> None:
        """End the worker as a kill does: its sockets are closed at once."""
        assert self.running is not None
        self.agent.line.close()
        self.supervisors[-1].close()
        await self.running


@pytest.fixture
async def parts(tmp_path: Path) -> AsyncIterator[Parts]:
    settings = settings_in(tmp_path, http_bind="127.0.0.1", http_port=0, inventory_interval_s=0.05)
    write_inventory(tmp_path)
    parts = Parts(settings)
    await parts.begin_worker()
    yield parts
    await parts.agent.close()
    assert parts.running is not None
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(parts.running, 10)
    for supervisor in parts.supervisors:
        supervisor.close()


async def _serving(parts: Parts) -> None:
    await parts.agent.start()
    parts.agent.know_plugin_pods({}, None)
    parts.agent.held_gpus.know_ledger(Pool.DEDICATED, ())
    await parts.agent.take_stock()
    await parts.agent.tenants.apply([row("a", 300), row("b", 300, gpus=("GPU-none",))])


async def test_rows_are_served_and_facts_come_back_with_them(parts: Parts) -> None:
    await _serving(parts)
    agent = parts.agent
    assert agent.tenants.directory("a") == parts.settings.state_dir / "tenants" / "a"
    assert agent.tenants.directory("b") is None
    assert "GPU-none" in str(agent.tenants.unservable("b"))
    assert [tenant.id for tenant in agent.facts().tenants] == ["a", "b"], "with the answer, not later"
    assert [gpu.uuid for gpu in agent.facts().gpus] == [GPU0, GPU1]
    assert agent.unhealthy() is None
    client = await Client.connect(agent.tenants.directory("a"))
    assert await client.reserve(GI) == GI
    await until(lambda: agent.facts().tenants[0].memory == GI)
    client.close()
    await until(lambda: agent.consumption[1] is not None)


@pytest.mark.promise("node-teller-killed")
async def test_the_next_worker_gets_the_state_of_the_one_before(parts: Parts) -> None:
    await _serving(parts)
    parts.agent.know_plugin_pods({GPU1: PluginPod("default", "native")}, None)
    await parts.end_worker()
    waiting = asyncio.create_task(parts.agent.tenants.apply([row("a", 300), row("c", 200)]))
    await asyncio.sleep(0)
    await parts.begin_worker()
    await asyncio.wait_for(waiting, 10)
    for tenant_id in ("a", "c"):
        (await Client.connect(parts.agent.tenants.directory(tenant_id))).close()
    assert [tenant.id for tenant in parts.agent.facts().tenants] == ["a", "c"]


async def test_a_tenant_is_drained_only_if_both_find_nothing_of_it(parts: Parts) -> None:
    await _serving(parts)
    left: list[str | None] = ["a volume"]
    parts.agent.residue = lambda tenant_id: left[0]
    await parts.agent.tenants.apply([row("a", 300, state=TenantState.RELEASING)])
    await asyncio.sleep(0.3)
    assert [tenant.drained for tenant in parts.agent.facts().tenants] == [False]
    left[0] = None
    await until(lambda: parts.agent.facts().tenants[0].drained)
    left[0] = "a process"
    assert [tenant.drained for tenant in parts.agent.facts().tenants] == [False]
    left[0] = None
    await parts.agent.tenants.apply([])
    await until(lambda: not (parts.settings.state_dir / "tenants" / "a").exists())


async def test_a_missing_inventory_is_told_as_such_and_a_standing_agent_says_why_it_could_not_serve(
    parts: Parts,
) -> None:
    await parts.agent.start()
    (parts.settings.state_dir.parent / "inventory.yaml").unlink()
    with pytest.raises(InventoryError):
        await parts.agent.take_stock()
    await parts.agent.check()
    assert "inventory" in str(parts.agent.unfit)
    await parts.agent.take_stock(needed=False)
    await until(lambda: parts.agent.unhealthy() is not None)


@pytest.mark.parametrize("worker", ["answers", "hangs", "is away", "has never served"])
async def test_an_agent_that_ends_knows_whether_its_worker_may_still_serve(
    parts: Parts, monkeypatch: pytest.MonkeyPatch, worker: str
) -> None:
    if worker != "has never served":
        await _serving(parts)
    if worker == "is away":
        await parts.end_worker()
    if worker == "hangs":
        monkeypatch.setattr(distant_agent, "_CLOSE_S", 0.05)
        monkeypatch.setattr(Agent, "close", lambda self: asyncio.Event().wait())
    await parts.agent.close()
    assert parts.agent.may_serve == (worker in ("hangs", "is away"))
    monkeypatch.undo()
    if worker == "has never served":
        await parts.end_worker()
    if worker == "hangs":
        assert parts.running is not None
        parts.running.cancel()
        await asyncio.gather(parts.running, return_exceptions=True)
        parts.running = asyncio.create_task(asyncio.sleep(0, 0))
