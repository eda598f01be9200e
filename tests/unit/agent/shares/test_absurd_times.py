"""Absurd times, near the largest values of their fields: they affect only the client that sends them."""

from __future__ import annotations

import asyncio
import mmap
import socket
import struct
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from sharepod import protocol
from sharepod.agent import on_time
from sharepod.agent.tenants.registry import TenantRegistry
from unit.agent.client import GPU1, Client, row, served_in, settings_in, tenants_with

FAR = 2**64 - 1


def played(directory: Path, play: Callable[[TenantRegistry], Awaitable[None]]) -> list[str]:
    """Run `play` on the agent's event loop. Two tenants share one GPU, and a third has another GPU. Return (errors of
    the loop, ids of tenants with a refused message)."""
    failed: list[str] = []

    async def main() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _loop, context: failed.append(str(context)))
        rows = [row("liar"), row("neighbour"), row("elsewhere", gpus=(GPU1,))]
        async with tenants_with(settings_in(directory), rows) as tenants:
            await play(tenants)
            failed.extend(each.row.id for each in served_in(tenants) if each.refusals.counts)

    on_time.run(main())
    return failed


async def connected_with_pulse(tenants: TenantRegistry) -> tuple[Client, mmap.mmap]:
    """Connect a client of the lying tenant. Return the client and its mapped pulse page."""
    client = await Client.connect(tenants.directory("liar"), hello=False)
    client.send(protocol.Hello(1, protocol.PULSE_VERSION))
    for _ in range(1000):
        await asyncio.sleep(0.001)
        try:
            _, (hints, pulse), *_ = socket.recv_fds(client.sock, protocol.FRAME_MAX, 4)
        except BlockingIOError:
            continue
        page = mmap.mmap(pulse, mmap.PAGESIZE, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        for fd in (hints, pulse):
            socket.close(fd)
        return client, page
    raise AssertionError("no welcome")


@pytest.mark.promise("security-input")
def test_an_end_of_work_in_centuries_keeps_no_other_tenant_from_a_token(tmp_path: Path) -> None:
    async def play(tenants: TenantRegistry) -> None:
        liar, other = [await Client.connect(tenants.directory(name)) for name in ("liar", "elsewhere")]
        grant = await liar.granted()
        liar.send(protocol.Draining(grant.grant_id, FAR))
        held = await other.granted()
        other.send(protocol.Drained(held.grant_id, wanting=True))
        await other.granted_anew()
        liar.close()
        other.close()

    assert played(tmp_path, play) == []


@pytest.mark.promise("security-input")
@pytest.mark.parametrize("beat_at", [0, 1, 2**63, FAR])
@pytest.mark.parametrize("ends_at", [0, 1, FAR])
def test_a_pulse_of_another_time_keeps_no_other_tenant_from_a_token(tmp_path: Path, beat_at: int, ends_at: int) -> None:
    async def play(tenants: TenantRegistry) -> None:
        liar, page = await connected_with_pulse(tenants)
        other = await Client.connect(tenants.directory("neighbour"))
        for written in (beat_at, FAR - beat_at):
            page[:24] = struct.pack("=QQQ", 0, ends_at, written)
            liar.send(protocol.Want(1))
            await asyncio.sleep(0.001)
            page[:24] = struct.pack("=QQQ", 0, ends_at, beat_at)
            held = await liar.granted_anew()
            page[:24] = struct.pack("=QQQ", held.grant_id, ends_at, written)
            other.send(protocol.Want(1))
            await asyncio.sleep(0.012)  # by now the agent has checked whether the holder is silent
            liar.send(protocol.Drained(held.grant_id))
            others = await other.granted_anew()
            other.send(protocol.Drained(others.grant_id))
            await asyncio.sleep(0.001)
        liar.close()
        other.close()

    assert played(tmp_path, play) == []
