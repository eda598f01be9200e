"""The keeper of an agent: starts it again when it is killed, on a read-only disk too, and ends with it."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import os
import signal
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from unit.agent.client import GI, Client, until
from unit.agent.program import Program, running, tenant_directory, value, write_tenants
from unit.agent.small_disk import SmallDisk, small_disk

_KEPT = """
import sys, time
from sharepod import logs
from sharepod.agent import keeper
from sharepod.agent.settings import AgentSettings
logs.configure(AgentSettings().log_level, AgentSettings().log_format)
def agent(kept):
    print("begun", file=sys.stderr, flush=True)
    {body}
sys.exit(keeper.keep(agent))
"""


@pytest.mark.promise("install-killed")
async def test_a_keeper_that_is_told_to_end_before_its_agent_listens_ends(directory: Path) -> None:
    keeper = await Program.start(directory, script=_KEPT.format(body="time.sleep(60)"))
    await keeper.says("begun")
    assert await keeper.end() == 0
    assert len([line for line in keeper.log if "begun" in line["event"]]) == 1


async def test_what_ends_a_kept_agent_is_told(directory: Path) -> None:
    keeper = await Program.start(directory, script=_KEPT.format(body="raise RuntimeError('of no use')"))
    assert await asyncio.wait_for(keeper.process.wait(), 20) == 1
    await keeper._reading
    assert "of no use" in json.dumps(keeper.log)


@pytest.mark.promise("install-killed")
async def test_a_kept_agent_that_is_killed_is_there_again_and_one_that_ends_by_itself_is_not(directory: Path) -> None:
    async with running(directory, arguments=["--keep"]) as keeper:
        for times in range(1, 3):
            await keeper.says("tenant is served", times=times)
            os.kill(_child(keeper.process.pid), signal.SIGKILL)
            line = await keeper.says("agent was killed", times=times)
            assert line["signal"] == "SIGKILL"
        await keeper.says("tenant is served", times=3)
        child = _child(keeper.process.pid)
        assert await keeper.end() == 0
        assert not _exists(child)


@contextlib.asynccontextmanager
async def kept_on_small_disk(directory: Path) -> AsyncIterator[tuple[Program, SmallDisk]]:
    """Run a kept agent, whose state is on a disk of its own, until it serves its tenant."""
    with small_disk(directory / "state") as disk:
        async with running(directory, arguments=["--keep"]) as keeper:
            await keeper.says("tenant is served")
            yield keeper, disk


@pytest.mark.promise("node-read-only-killed")
async def test_a_kept_agent_that_is_killed_serves_again_on_a_disk_that_has_become_read_only(directory: Path) -> None:
    async with kept_on_small_disk(directory) as (keeper, disk):
        with disk.read_only():
            os.kill(_child(keeper.process.pid), signal.SIGKILL)
            await keeper.says("tenant is served", times=2)
            assert "Read-only file system" in (await keeper.says("cannot apply the tenants"))["error"]
            client = await Client.connect(tenant_directory(directory, "a"))
            assert await client.reserve(3 * GI) == 3 * GI
            os.kill(_child(keeper.process.pid), signal.SIGKILL)
            assert (await keeper.says("taken over from the earlier agent"))["processes"] == 1
            _status, told = await keeper.get("/metrics", times=3)
            assert value(told, "sharepod_tenant_memory_used_bytes", tenant="a") == 3 * GI
            newcomer = await Client.connect(tenant_directory(directory, "a"))
            await newcomer.granted()
            client.close()
            newcomer.close()
            write_tenants(directory, [])
            await keeper.says("tenant is gone from the ledger")
            await until(lambda: _refuses(tenant_directory(directory, "a")))
        assert await keeper.end() == 0


@pytest.mark.promise("node-read-only-killed")
async def test_once_the_disk_is_writable_again_an_agent_listens_on_a_socket_of_its_own(directory: Path) -> None:
    async with kept_on_small_disk(directory) as (keeper, disk):
        before = (tenant_directory(directory, "a") / "agent.sock").stat().st_ino
        with disk.read_only():
            os.kill(_child(keeper.process.pid), signal.SIGKILL)
            await keeper.says("tenant is served", times=2)
            client = await Client.connect(tenant_directory(directory, "a"))
        await until(lambda: (tenant_directory(directory, "a") / "agent.sock").stat().st_ino != before)
        await client.granted()  # it stays connected
        other = await Client.connect(tenant_directory(directory, "a"))
        other.close()
        client.close()
        assert await keeper.end() == 0


@pytest.mark.promise("install-killed")
async def test_a_keeper_gives_up_an_agent_that_is_killed_again_and_again(directory: Path) -> None:
    async with running(directory, arguments=["--keep"]) as keeper:
        for times in range(1, 6):
            await keeper.says("agent starts", times=times)
            os.kill(_child(keeper.process.pid), signal.SIGKILL)
        assert await asyncio.wait_for(keeper.process.wait(), 20) == 128 + signal.SIGKILL
        await keeper.says("again and again")


async def test_an_agent_ends_with_its_keeper(directory: Path) -> None:
    keeper = await Program.start(directory, arguments=["--keep"])
    await keeper.says("tenant is served")
    child = _child(keeper.process.pid)
    keeper.process.kill()
    async with asyncio.timeout(20):
        while _exists(child):  # noqa: ASYNC110 - somebody else's child by now
            await asyncio.sleep(0.01)
    await keeper.end(signal.SIGKILL)


def _refuses(directory: Path) -> bool:
    """Connecting is refused: the keeper, which hears of it last, has let go of the socket too."""
    folder = os.open(directory, os.O_PATH)
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK) as sock:
            return sock.connect_ex(f"/proc/self/fd/{folder}/agent.sock") == errno.ECONNREFUSED
    finally:
        os.close(folder)


def _exists(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def _child(pid: int) -> int:
    """The only child of a process."""
    (child,) = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return int(child)
