"""The count of GPU time over successive agent processes that are killed, and tenants that begin and end, is exact."""

from __future__ import annotations

import asyncio
import contextlib
import random
import signal
import time
from pathlib import Path

import pytest
from sharepod import protocol
from sharepod.agent.state.consumption_file import KeptConsumption, read_consumption
from sharepod.agent.state.files import FolderFiles
from sharepod.api.gpunode import Mode, TenantState
from unit.agent.client import GPU0, GPU1, Client, row, until
from unit.agent.in_process import started
from unit.agent.program import Program, tenant_directory, value, write_tenants

ROWS = [row("a", 300), row("b", 500), row("whole", 1000, 1000, gpus=(GPU1,), mode=Mode.EXCLUSIVE)]


def kept(directory: Path) -> KeptConsumption:
    found = read_consumption(FolderFiles(directory / "state"))
    assert found is not None
    return found


def counted(directory: Path) -> bool:
    """Return whether the state file shows counts of every tenant and GPU."""
    found = read_consumption(FolderFiles(directory / "state"))
    return found is not None and len(found.tenants) == len(ROWS) and bool(found.series) and len(found.gpus) == 2


async def use(directory: Path, tenant: str, chance: random.Random) -> None:
    """Hold the GPU at random times until the agent has exited. Some processes end while they hold it."""
    with contextlib.suppress(OSError, AssertionError, TimeoutError):
        while True:
            client = await Client.connect(tenant_directory(directory, tenant))
            try:
                for _ in range(chance.randint(1, 3)):
                    grant = await client.granted()
                    await asyncio.sleep(chance.uniform(0.01, 0.2))
                    if chance.random() < 0.7:
                        client.send(protocol.Drained(grant.grant_id))
                    else:
                        break
            finally:
                client.close()


@pytest.mark.promise("node-consumption-whole")
@pytest.mark.promise("node-consumption-kept")
async def test_the_count_adds_up_over_agents_that_are_killed(directory: Path) -> None:
    chance = random.Random(7)
    write_tenants(directory, ROWS)
    first: KeptConsumption | None = None
    uncounted = killed_at = 0
    for life in range(4):
        program = await Program.start(directory)
        await program.logged("tenant is served", lambda line: line["tenant"] == "whole")
        if first is None:
            await until(lambda: counted(directory))
            first = kept(directory)
        else:
            uncounted += time.monotonic_ns() - killed_at
        users = [asyncio.create_task(use(directory, tenant, chance)) for tenant in ("a", "b")]
        await asyncio.sleep(chance.uniform(1.0, 2.5))
        if life < 3:
            await program.end(signal.SIGKILL)
            killed_at = kept(directory).gpus[GPU0].at_ns
        else:
            _status, metrics = await program.get("/metrics")
            assert await program.end() == 0
        for user in users:
            user.cancel()
        await asyncio.gather(*users, return_exceptions=True)
        await asyncio.sleep(chance.uniform(0, 0.5))
    last = kept(directory)
    assert first is not None

    # For each GPU: held + anticipated + handed over + idle + stalled + unmetered = elapsed time.
    held = 0
    for uuid in (GPU0, GPU1):
        was, now = first.gpus[uuid], last.gpus[uuid]
        spent = {use: getattr(now, use) - getattr(was, use) for use in type(now).model_fields if use != "at_ns"}
        passed = now.at_ns - was.at_ns
        assert sum(spent.values()) == passed
        assert 0 <= spent["unmetered"] <= uncounted
        held += spent["held"]
        within = passed // 1000
    assert last.gpus[GPU1].unmetered == 0, "an Exclusive tenant has its GPU also while no agent is there"
    assert value(metrics, "sharepod_gpu_time_seconds_total", gpu=GPU0, use="unmetered") == pytest.approx(
        last.gpus[GPU0].unmetered / 1e9
    )

    # For the namespace: held time is the sum over its tenants; reserved time is request x time.
    (was_series,), (series,) = first.series, last.series
    assert series.name == was_series.name
    assert abs((series.held_ns - was_series.held_ns) - held) <= within
    reserved = sum(
        (last.tenants[one.id].at_ns - first.tenants[one.id].at_ns) * one.request_milli // 1000 for one in ROWS
    )
    assert abs((series.reserved_ns - was_series.reserved_ns) - reserved) <= within


@pytest.mark.promise("node-consumption-kept")
async def test_a_tenants_last_time_is_counted_before_its_account_is_removed(directory: Path) -> None:
    write_tenants(directory, [row("a")])
    program = await Program.start(directory)
    await program.logged("tenant is served")
    client = await Client.connect(tenant_directory(directory, "a"))
    await client.granted()
    await asyncio.sleep(0.3)
    write_tenants(directory, [])
    await program.logged("tenant was removed from the ledger")
    await until(lambda: not kept(directory).tenants)
    await program.end(signal.SIGKILL)
    client.close()
    (series,) = kept(directory).series
    assert series.held_ns >= 300_000_000


async def test_a_tenants_status_reports_its_use_since_its_row_was_written(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sharepod.agent.agent._COUNT_S", 0.01)
    monkeypatch.setattr("sharepod.agent.agent._COUNTED_S", 0.01)
    async with started(directory) as agent:
        await agent.tenants.apply([row("a", 500, gpus=(GPU0, GPU1))])
        await until(lambda: (agent.facts().tenants[0].reserved_seconds or 0) >= 1)
        seen = agent.facts().tenants[0]
        assert (seen.held_seconds, seen.borrowed_seconds) == (0, 0)
        assert (seen.memory_mebibyte_seconds or 0) >= 2 * (row("a").memory >> 20)
        assert agent.facts().without_usage().tenants[0].model_dump(exclude_defaults=True).keys() <= {"id"}


async def test_the_last_report_of_a_tenant_has_its_final_totals(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sharepod.agent.agent._COUNT_S", 3600.0)
    async with started(directory) as agent:
        held = row("a", 1000)
        await agent.tenants.apply([held])
        await asyncio.sleep(0.1)
        await agent.tenants.apply([held.model_copy(update={"state": TenantState.RELEASING})])
        await until(lambda: agent.facts().tenants[0].drained)
        seen = agent.facts().tenants[0]
        assert (seen.memory_mebibyte_seconds or 0) >= (held.memory >> 20) // 10, "not counted yet"
        assert seen.counted_since is not None


async def test_an_unreadable_file_is_logged_and_counts_as_absent(directory: Path) -> None:
    (directory / "state").mkdir()
    (directory / "state" / "consumption.json").write_text("{")
    program = await Program.start(directory)
    line = await program.logged("cannot read the former count of GPU time")
    assert line["file"].endswith("consumption.json")
    await program.logged("tenant is served")
    await until(lambda: read_consumption(FolderFiles(directory / "state")) is not None)
    assert await program.end() == 0
