"""Unusual upgrades of an agent in two processes: several at once, in a row, stopped or killed halfway. No attempt of a
program to connect fails, and at most one agent serves.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from unit.agent.apart.test_two_processes import parts
from unit.agent.apart.test_upgrade import APART, calling, identity, two
from unit.agent.client import GI, Client, until
from unit.agent.program import Program, running, tenant_directory

pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="only root can take rights away"),
    pytest.mark.alone,  # on a busy machine an agent may end before its successor takes over
]


@contextlib.contextmanager
def stopped(program: Program) -> Iterator[None]:
    """In the block, all processes of an agent are stopped."""
    pids = [program.process.pid, *parts(program).values()]
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


def serves(program: Program) -> bool:
    return any(line["event"] == "this agent serves" for line in program.log)


async def served(directory: Path) -> None:
    """Check that a program that starts now gets memory and a turn."""
    newcomer = await Client.connect(tenant_directory(directory, "a"))
    await newcomer.granted()
    newcomer.close()


@pytest.mark.promise("install-no-gap")
async def test_of_two_that_stand_by_one_serves_and_the_other_follows_it(directory: Path) -> None:
    a, b = (tenant_directory(directory, name) for name in "ab")
    async with two(directory) as (first, second), running(directory, arguments=APART) as third:
        await third.logged("will pass its sockets on")
        before = [identity(a), identity(b)]
        client = await Client.connect(a)
        assert await client.reserve(GI) == GI
        async with calling(a, b) as caller:
            await until(lambda: caller.connected > 2)
            await first.end()
            await second.logged("tenant is served", times=2)
            assert not serves(third)
            await third.logged("will pass its sockets on", times=2)
            await second.end()
            await third.logged("tenant is served", times=2)
        assert caller.failed == []
        assert [identity(a), identity(b)] == before
        await served(directory)
        client.close()
        assert await third.end() == 0


@pytest.mark.promise("install-no-gap")
async def test_one_that_is_told_to_end_as_soon_as_its_turn_comes_passes_on_what_it_was_given(directory: Path) -> None:
    """The second agent is ended as soon as the first has exited, perhaps before it serves."""
    a, b = (tenant_directory(directory, name) for name in "ab")
    async with two(directory) as (first, second), running(directory, arguments=APART) as third:
        await third.logged("will pass its sockets on")
        before = [identity(a), identity(b)]
        async with calling(a, b) as caller:
            await until(lambda: caller.connected > 2)
            await first.end()
            await second.end()
            await third.logged("tenant is served", times=2)
        assert caller.failed == []
        assert [identity(a), identity(b)] == before
        await served(directory)
        assert await third.end() == 0


@pytest.mark.promise("install-no-gap")
async def test_a_stopped_next_tenant_is_skipped(directory: Path) -> None:
    a, b = (tenant_directory(directory, name) for name in "ab")
    async with two(directory) as (first, second), running(directory, arguments=APART) as third:
        await third.logged("will pass its sockets on")
        before = [identity(a), identity(b)]
        with stopped(second):
            async with calling(a, b) as caller:
                await until(lambda: caller.connected > 2)
                assert await first.end() == 0
                await third.logged("tenant is served", times=2)
            assert caller.failed == []
            assert [identity(a), identity(b)] == before
            await served(directory)
        await second.logged("will pass its sockets on", times=2)
        assert not serves(second)
        async with calling(a, b) as caller:
            await third.end()
            await second.logged("tenant is served", times=2)
        assert caller.failed == []
        await served(directory)
        assert await second.end() == 0


@pytest.mark.promise("install-no-gap")
@pytest.mark.parametrize("part", ["privileged", "worker"])
async def test_one_whose_half_is_stopped_ends_all_the_same_and_the_next_one_serves(directory: Path, part: str) -> None:
    a, b = (tenant_directory(directory, name) for name in "ab")
    async with two(directory) as (first, second):
        await until(lambda: len(parts(first)) == 2)
        frozen = parts(first)[part]
        os.kill(frozen, signal.SIGSTOP)
        first.process.send_signal(signal.SIGTERM)
        # a stopped process handles no signal, so the kubelet kills the container after the grace period
        if part == "privileged":
            await first.end(signal.SIGKILL)
        else:
            await first.process.wait()
        await second.logged("tenant is served", times=2)
        async with calling(a, b) as caller:
            await until(lambda: caller.connected > 2)
        assert caller.failed == []
        await served(directory)
        assert await second.end() == 0
