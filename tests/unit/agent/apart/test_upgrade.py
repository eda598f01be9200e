"""An agent in two processes, and its successor: it passes the tenants' sockets on, and no attempt to connect fails."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from unit.agent.apart.test_two_processes import parts
from unit.agent.client import GI, Client, row, until
from unit.agent.program import Program, running, tenant_directory, value, write_tenants
from unit.agent.small_disk import small_disk

pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="only root can take rights away"),
    pytest.mark.alone,  # on a busy machine an agent may end before its successor takes over
]

APART = ["--apart"]


class Caller:
    """Client that connects to tenants' sockets repeatedly, and counts successes and failures."""

    def __init__(self, *directories: Path) -> None:
        self.connected = 0
        self.failed: list[str] = []
        self._directories = directories
        self._task = asyncio.create_task(self._go_on())

    async def _go_on(self) -> None:
        while True:
            for directory in self._directories:
                folder = os.open(directory, os.O_PATH)
                sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
                try:
                    sock.connect(f"/proc/self/fd/{folder}/agent.sock")
                    self.connected += 1
                except BlockingIOError:  # the queue of connections is full; the call waits for room
                    pass
                except OSError as error:
                    self.failed.append(str(error))
                finally:
                    os.close(folder)
                    sock.close()
            await asyncio.sleep(0.01)

    async def end(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)


@contextlib.asynccontextmanager
async def calling(*directories: Path) -> AsyncIterator[Caller]:
    caller = Caller(*directories)
    try:
        yield caller
    finally:
        await caller.end()


@contextlib.asynccontextmanager
async def two(directory: Path) -> AsyncIterator[tuple[Program, Program]]:
    """Run an agent that serves `a` and `b`, and a standby."""
    write_tenants(directory, [row("a", 400, 700), row("b", 300)])
    async with running(directory, arguments=APART) as first:
        await first.logged("tenant is served", times=2)
        async with running(directory, arguments=APART) as second:
            await second.logged("will pass its sockets on")
            yield first, second


def identity(directory: Path) -> tuple[int, int]:
    """Return an identity of the tenant's socket that differs from that of any other socket. The inode number alone
    would not, because a filesystem reuses it at once."""
    status = (directory / "agent.sock").stat()
    return status.st_ino, status.st_ctime_ns


@pytest.mark.promise("install-no-gap")
async def test_at_an_upgrade_no_attempt_to_connect_fails(directory: Path) -> None:
    a, b = (tenant_directory(directory, name) for name in "ab")
    async with two(directory) as (first, second):
        before = [identity(a), identity(b)]
        client = await Client.connect(a)
        assert await client.reserve(3 * GI) == 3 * GI
        async with calling(a, b) as caller:
            await until(lambda: caller.connected > 2)
            await first.end()
            await second.logged("tenant is served", times=2)
        assert caller.failed == []
        assert [identity(a), identity(b)] == before
        assert (await second.logged("sockets were passed on"))["sockets"] == 2
        assert (await second.logged("taken over from the earlier agent"))["processes"] == 1
        _status_code, metrics = await second.get("/metrics")
        assert value(metrics, "sharepod_tenant_memory_used_bytes", tenant="a") == 3 * GI
        for each in (a, b):
            newcomer = await Client.connect(each)
            await newcomer.granted()
            newcomer.close()
        # The sockets that the second agent inherited must outlive a kill of each of its processes.
        async with calling(a, b) as caller:
            for part in ("worker", "privileged"):
                # Parts() finds a new worker only after it has given up its rights
                await until(lambda: len(parts(second)) == 2)
                os.kill(parts(second)[part], signal.SIGKILL)
                await second.logged(f"the {part} was killed")
            newcomer = await Client.connect(a)
            await newcomer.granted()
            newcomer.close()
        assert caller.failed == []
        client.close()
        assert await second.end() == 0


@pytest.mark.promise("install-no-gap")
async def test_a_killed_privileged_process_keeps_its_turn_and_passes_on_all_sockets(directory: Path) -> None:
    """The worker of the first agent still serves after its privileged process was killed, so the standby must not serve
    yet.
    """
    a, b = (tenant_directory(directory, name) for name in "ab")
    async with two(directory) as (first, second):
        before = [identity(a), identity(b)]
        client = await Client.connect(a)
        os.kill(parts(first)["privileged"], signal.SIGKILL)
        await first.logged("this agent serves", times=2)
        assert await client.reserve(GI) == GI
        await second.logged("will pass its sockets on", times=2)
        assert [line for line in second.log if line["event"] == "this agent serves"] == []
        async with calling(a, b) as caller:
            await first.end()
            await second.logged("tenant is served", times=2)
        assert caller.failed == []
        assert [identity(a), identity(b)] == before
        client.close()
        assert await second.end() == 0


async def test_after_an_agent_that_passes_nothing_on_the_next_one_makes_sockets_of_its_own(directory: Path) -> None:
    a = tenant_directory(directory, "a")
    async with two(directory) as (first, second):
        before = identity(a)
        os.kill(parts(first)["privileged"], signal.SIGSTOP)
        await first.end(signal.SIGKILL)
        await second.logged("tenant is served", times=2)
        assert identity(a) != before
        newcomer = await Client.connect(a)
        await newcomer.granted()
        newcomer.close()
        assert await second.end() == 0


@pytest.mark.promise("install-no-gap", "node-full-disk")
async def test_on_a_disk_that_has_filled_up_an_upgrade_serves_on_the_same_sockets(directory: Path) -> None:
    a = tenant_directory(directory, "a")
    with small_disk(directory / "state") as disk:
        async with two(directory) as (first, second):
            client = await Client.connect(a)
            assert await client.reserve(GI) == GI
            before = identity(a)
            disk.fill()
            async with calling(a) as caller:
                await first.end()
                await second.logged("tenant is served", times=2)
            assert caller.failed == []
            assert identity(a) == before
            _status_code, metrics = await second.get("/metrics")
            assert value(metrics, "sharepod_tenant_memory_used_bytes", tenant="a") == GI
            newcomer = await Client.connect(a)
            await newcomer.granted()
            newcomer.close()
            client.close()
            disk.empty()
            assert await second.end() == 0
