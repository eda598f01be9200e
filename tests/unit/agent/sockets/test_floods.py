"""Floods: a program that sends too much loses its connection. Other tenants are not delayed."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from statistics import median

import pytest
from harness import floods
from sharepod import protocol
from sharepod.agent.sockets.hook_connection import HookConnection
from sharepod.agent.sockets.refusals import ClientRefusal
from sharepod.agent.tenants.registry import TenantRegistry
from sharepod.agent.tenants.served import ServedTenant
from unit.agent.client import Client, row, served_in, settings_in, tenants_with, until

pytestmark = pytest.mark.alone  # the tests measure rates of floods over seconds

REFUSED = {
    "frames": ClientRefusal.FLOOD,
    "questions": ClientRefusal.UNREAD,
    "garbage": ClientRefusal.MALFORMED,
    "connects": None,
    "mute": ClientRefusal.SILENT,
    "stolen": None,
    "crowd": None,
}


@asynccontextmanager
async def flooding(tenants: TenantRegistry, how: str) -> AsyncIterator[None]:
    there = tenants.directory("bad")
    assert there is not None
    program = await asyncio.create_subprocess_exec(*floods.command(how), cwd=there, stdout=asyncio.subprocess.PIPE)
    try:
        assert program.stdout is not None
        assert await asyncio.wait_for(program.stdout.readline(), 20) == b"begins\n"
        yield
    finally:
        program.kill()
        await program.communicate()


async def answer_times(client: Client, count: int) -> list[float]:
    """Return the time that each of `count` queries took."""
    took = []
    for seq in range(1, count + 1):
        begin = time.perf_counter()
        client.send(protocol.MemInfo(seq, 0))
        await client.expect(protocol.Memory)
        took.append(time.perf_counter() - begin)
        await asyncio.sleep(0.001)
    return took


@pytest.mark.promise("security-input", "security-flood-own-time", "security-frames")
@pytest.mark.parametrize("how", floods.KINDS)
async def test_a_flood_ends_its_senders_connection_and_affects_no_other_tenant(
    tmp_path: Path, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sharepod.agent.sockets.hook_connection._HELLO_WITHIN_S", 0.2)
    monkeypatch.setattr("sharepod.agent.sockets.inbox._FLOOD_S", 0.2)
    settings = settings_in(tmp_path, frames_per_s=2000, connects_per_s=200, connections_max=64)
    async with tenants_with(settings, [row("good", 500), row("bad", 500)]) as tenants:
        honest = await Client.connect(tenants.directory("good"))
        alone = await answer_times(honest, 100)
        async with flooding(tenants, how):
            during = await answer_times(honest, 100)
            why = REFUSED[how]
            async with asyncio.timeout(20):
                while why is not None and not tenants.refusals[why]:
                    await answer_times(honest, 10)
            late = await Client.connect(tenants.directory("good"))
        assert tenants.directory("good") is not None
        [served] = [each for each in served_in(tenants) if each.row.id == "good"]
        assert served.connected == 2
        assert not served.refusals.counts
        # The flooding process takes processor time too, so on few processors answers are slower. 50 ms are allowed for
        # that.
        assert median(during) <= 10 * median(alone) + 0.05
        honest.close()
        late.close()


@pytest.mark.promise("security-flood-own-time")
async def test_a_flooding_process_waits_and_an_honest_sibling_is_served(tmp_path: Path) -> None:
    settings = settings_in(tmp_path, frames_per_s=500)
    async with tenants_with(settings, [row("a")]) as tenants:
        [served] = served_in(tenants)
        greedy, honest = await Client.connect(tenants.directory("a")), await Client.connect(tenants.directory("a"))
        begin = time.monotonic()
        for seq in range(1, 701):
            greedy.send(protocol.MemInfo(seq, 0))
            await greedy.expect(protocol.Memory)
        assert time.monotonic() - begin >= 0.75, "125 at once, then 500 a second"
        assert served.throttled
        assert len(await answer_times(honest, 3)) == 3
        assert served.connected == 2
        greedy.close()
        honest.close()


@pytest.mark.promise("security-flood-allowance")
async def test_tenants_that_flood_share_what_one_may_send(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # no client is disconnected for sending too many frames without a pause
    monkeypatch.setattr("sharepod.agent.sockets.inbox._STREAK_MAX", 1 << 30)
    settings = settings_in(tmp_path, frames_per_s=1000)
    names = ["a", "b", "c", "d"]
    async with tenants_with(settings, [row(name, 250) for name in names]) as tenants:
        handled = 0

        def counting(served: ServedTenant) -> None:
            handle = served.handle

            def counted(client: HookConnection, frame: protocol.ClientFrame) -> None:
                nonlocal handled
                handled += 1
                handle(client, frame)

            served.handle = counted  # type: ignore[method-assign]

        for served in served_in(tenants):
            counting(served)
        clients = [await Client.connect(tenants.directory(name)) for name in names]
        nothing, begin = protocol.encode(protocol.Drained(99, False)), time.monotonic()
        while (elapsed := time.monotonic() - begin) < 2.5:
            for client in clients:
                with contextlib.suppress(BlockingIOError, ConnectionError):
                    client.send_raw(nothing)
            await asyncio.sleep(0)
        assert all(served.throttled for served in served_in(tenants))
        # at most: a saved quarter second of each of four tenants, 1,000 frames a second, and half as many that the last
        # turns handle beyond the rate
        assert 1000 <= handled <= 4 * 250 + 1.5 * 1000 * elapsed
        for client in clients:
            client.close()


async def test_a_thousand_that_are_lost_at_once_are_let_go_in_turns(tmp_path: Path) -> None:
    async with tenants_with(settings_in(tmp_path), [row("a"), row("b")]) as tenants:
        honest = await Client.connect(tenants.directory("b"))
        [served] = [each for each in served_in(tenants) if each.row.id == "a"]
        crowd = [await Client.connect(tenants.directory("a")) for _ in range(200)]
        slow, let_go = served.memory.disconnected, 0

        def disconnected(client: HookConnection, *, alive: bool) -> None:
            nonlocal let_go
            let_go += 1
            time.sleep(0.001)
            slow(client, alive=alive)

        served.memory.disconnected = disconnected  # type: ignore[method-assign, assignment]
        for client in crowd:
            client.close()
        honest.send(protocol.MemInfo(1, 0))
        await honest.expect(protocol.Memory)
        assert let_go < 100, "it did not wait for all of them"
        await until(lambda: served.connected == 0)
        assert let_go == 200
        honest.close()
