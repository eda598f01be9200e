"""`sharepod-agent` as a program in mode standalone: it starts, rereads its files, serves and ends."""

from __future__ import annotations

import asyncio
import json
import re
import resource
import signal
from pathlib import Path

import pytest
from sharepod import protocol
from sharepod.api.gpunode import TenantState
from unit.agent.client import GI, GPU0, GPU1, Client, row, until
from unit.agent.program import Program, replace, running, tenant_directory, value, write_tenants


async def test_an_agent_serves_tenants_metrics_and_health_until_sigterm(directory: Path) -> None:
    async with running(directory) as program:
        await program.logged("tenant", lambda line: line.get("tenant") == "a")
        client = await Client.connect(tenant_directory(directory, "a"))
        grant = await client.granted()
        client.send(protocol.Drained(grant.grant_id))
        assert await client.reserve(1 * GI) == 1 * GI
        assert await program.get("/healthz") == (200, "ok\n")
        status, metrics = await program.get("/metrics")
        assert status == 200
        assert value(metrics, "sharepod_tenant_grants_total", tenant="a", namespace="default", pod="a") == 1
        assert value(metrics, "sharepod_tenant_memory_used_bytes", tenant="a", gpu=GPU0) == GI
        assert value(metrics, "sharepod_tenant_request_ratio", tenant="a") == 0.4
        assert value(metrics, "sharepod_gpu_memory_bytes", gpu=GPU1) == 16 * GI
        assert re.search(r"^sharepod_agent_inventory_simulated 1\.0$", metrics, re.MULTILINE)
        assert {line["event"] for line in program.log} >= {"the inventory is simulated: there is no GPU behind it"}
        assert await program.end() == 0
        assert await client.ends()
        client.close()


async def test_it_may_have_as_many_descriptors_as_the_node_allows(directory: Path) -> None:
    async with running(directory) as program:
        line = await program.logged("limit of open files")
        assert line["now"] == resource.getrlimit(resource.RLIMIT_NOFILE)[1]


async def test_it_follows_its_tenants_file_and_keeps_what_it_has_when_that_is_wrong(directory: Path) -> None:
    async with running(directory) as program:
        await program.logged("tenant", lambda line: line.get("tenant") == "a")
        write_tenants(directory, [row("a", 500, 700), row("b", 400)])
        await program.logged("tenant", lambda line: line.get("tenant") == "b")
        await program.logged("tenant changed", lambda line: line["request"] == 500)
        replace(directory / "tenants.yaml", "tenants: [{id: x}]")
        await program.logged("keeping the tenants as they were", lambda line: "namespace" in line["error"])
        client = await Client.connect(tenant_directory(directory, "a"))
        client.close()
        write_tenants(directory, [row("a", 500, 700), row("b", 400, state=TenantState.RELEASING)])
        program.process.send_signal(signal.SIGHUP)
        await program.logged("tenant is drained", lambda line: line["tenant"] == "b")
        write_tenants(directory, [row("a", 500, 700)])
        await program.logged("tenant's directory removed", lambda line: line["tenant"] == "b")
        assert await program.end() == 0


async def test_a_killed_agent_leaves_its_tenants_in_place_and_the_next_agent_serves_them(directory: Path) -> None:
    async with running(directory) as program:
        await program.logged("tenant", lambda line: line.get("tenant") == "a")
        client = await Client.connect(tenant_directory(directory, "a"))
        assert await client.reserve(3 * GI) == 3 * GI
        await program.end(signal.SIGKILL)
        assert await client.ends()
        client.close()
    async with running(directory) as program:
        await program.logged("tenant", lambda line: line.get("tenant") == "a")
        client = await Client.connect(tenant_directory(directory, "a"))
        assert await client.reserve(3 * GI, handover=True) == 3 * GI
        assert await client.reserve(2 * GI) == 0
        client.close()
        assert await program.end() == 0


_FAILS_WHILE_STOPPING = """
import asyncio, sys
from sharepod.agent import main, standalone
async def drive(agent, again):
    try:
        await asyncio.Event().wait()
    finally:
        raise OSError(5, "the disk has failed")
standalone.run = drive
sys.exit(main.main())
"""


async def test_a_failure_while_it_stops_leaves_its_exit_status_at_zero(directory: Path) -> None:
    agent = await Program.start(directory, script=_FAILS_WHILE_STOPPING)
    await agent.logged("this agent serves")
    assert await agent.end() == 0
    assert "the disk has failed" in (await agent.logged("a task failed while the agent stopped"))["error"]


@pytest.mark.promise("install-standby")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
async def test_a_second_agent_stands_by_and_serves_when_the_first_has_ended(
    directory: Path, number: signal.Signals
) -> None:
    async with running(directory) as first:
        await first.logged("tenant is served")
        async with running(directory) as second:
            await second.logged("standing by")
            async with asyncio.timeout(20):
                # The standby still checks whether it could serve.
                while await second.get("/healthz") != (200, "stands by: another agent serves\n"):  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
            listening = (tenant_directory(directory, "a") / "agent.sock").stat().st_ino
            assert [line for line in second.log if line["event"] == "tenant is served"] == []
            await first.end(number)
            await second.logged("tenant is served")
            await until(lambda: (tenant_directory(directory, "a") / "agent.sock").stat().st_ino != listening)
            client = await Client.connect(tenant_directory(directory, "a"))
            await client.granted()
            client.close()
            assert await second.get("/healthz") == (200, "ok\n")
            assert await second.end() == 0


@pytest.mark.promise("install-unfit")
@pytest.mark.parametrize("missing", ["HOOK_FILE", "INVENTORY_FILE"])
async def test_an_agent_that_could_not_serve_is_not_ready_beside_one_that_serves(directory: Path, missing: str) -> None:
    async with running(directory) as first:
        await first.logged("tenant is served")
        async with running(directory, **{f"SHAREPOD_AGENT_{missing}": "/none"}) as second:
            await second.logged("this agent could not serve")
            status, text = await second.get("/healthz")
            assert status == 503
            assert "another agent serves; this one could not: " in text
            assert "/none" in text
            assert await second.end() == 0
        client = await Client.connect(tenant_directory(directory, "a"))
        await client.granted()
        client.close()


@pytest.mark.parametrize(
    ("changes", "code", "words"),
    [
        ({"SHAREPOD_AGENT_GRACE_MS": "soon"}, 2, "grace_ms"),
        ({"SHAREPOD_AGENT_HOOK_FILE": "/none.so"}, 1, "make shim"),
        ({"SHAREPOD_AGENT_INVENTORY_FILE": "/none.yaml"}, 1, "cannot read the inventory file /none.yaml"),
        ({"SHAREPOD_AGENT_TENANTS_FILE": "/none.yaml"}, 1, "cannot read the tenants file /none.yaml"),
        ({"SHAREPOD_AGENT_HTTP_BIND": "192.0.2.1"}, 1, "192.0.2.1"),
    ],
)
async def test_a_missing_requirement_ends_the_program_with_a_message(
    directory: Path, changes: dict[str, str], code: int, words: str
) -> None:
    async with running(directory, **changes) as program:
        assert await asyncio.wait_for(program.process.wait(), 20) == code
        await program._reading
        assert words in json.dumps(program.log)
