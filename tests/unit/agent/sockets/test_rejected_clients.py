"""Clients that break the protocol, flood, stay silent or are too many: each is refused or disconnected, without effect
on others.
"""

from __future__ import annotations

import asyncio
import gc
import os
import resource
import socket
from pathlib import Path

import pytest
from sharepod import listener, protocol
from sharepod.agent.sockets import hook_connection
from sharepod.agent.sockets.hook_connection import HookConnection
from sharepod.agent.tenants.registry import TenantRegistry
from structlog.testing import capture_logs
from unit.agent.client import GI, Client, row, served_in, settings_in, tenants_with, until


def open_descriptors() -> int:
    gc.collect()  # close descriptors of earlier tests now, not while this test counts descriptors
    return len(os.listdir("/proc/self/fd"))  # noqa: PTH208


async def test_without_descriptors_accepting_pauses_and_goes_on_later(
    tenants: TenantRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = await Client.connect(tenants.directory("b"))
    monkeypatch.setattr(listener, "_EXHAUSTED_PAUSE_S", 0.1)
    kept, limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (open_descriptors() + 2, limit))
    try:
        with capture_logs() as lines:
            sock = await Client.connect(tenants.directory("a"), hello=False)
            await good.granted()
            await asyncio.sleep(0.3)
        assert sum("cannot accept" in line["event"] for line in lines) == 1
        sock.close()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (kept, limit))
    again = await Client.connect(tenants.directory("a"))
    again.close()
    good.close()


async def test_a_flood_of_one_tenant_is_handled_in_turns_of_bounded_length(tenants: TenantRegistry) -> None:
    [flooded] = [tenant for tenant in served_in(tenants) if tenant.row.id == "a"]
    clients = [await Client.connect(tenants.directory("a")) for _ in range(8)]
    taken: list[int] = []
    handle = flooded.handle

    def counted(client: HookConnection, frame: protocol.ClientFrame) -> None:
        taken[-1] += 1
        handle(client, frame)

    flooded.handle = counted  # type: ignore[method-assign]
    for client in clients:
        for seq in range(50):
            client.send(protocol.MemInfo(seq, 0))
    while sum(taken) < 400:
        taken.append(0)
        await asyncio.sleep(0)
    assert 0 < max(taken) <= 2 * 32, "never more than what a turn has and the next one"
    for client in clients:
        client.close()


@pytest.mark.promise("security-disconnected")
async def test_a_silent_client_is_disconnected(tenants: TenantRegistry, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hook_connection, "_HELLO_WITHIN_S", 0.05)
    mute = await Client.connect(tenants.directory("a"), hello=False)
    assert await mute.ends()
    mute.close()


async def test_clients_that_break_the_protocol_do_not_fill_the_log(tenants: TenantRegistry) -> None:
    with capture_logs() as lines:
        for _ in range(20):
            bad = await Client.connect(tenants.directory("a"))
            bad.send_raw(b"nonsense")
            assert await bad.ends()
            bad.close()
    assert sum(line["log_level"] == "warning" for line in lines) == 1


@pytest.mark.parametrize("frame", [protocol.Want(1), protocol.MemInfo(1, 0), protocol.Release(0, 0)])
async def test_nothing_is_handed_over_after_any_other_frame(
    tenants: TenantRegistry, frame: protocol.ClientFrame
) -> None:
    client = await Client.connect(tenants.directory("a"))
    client.send(frame)
    client.send(protocol.Reserve(1, 0, 1 * GI, handover=True))
    while await client.receive() is not None:
        pass
    client.close()


async def test_handovers_are_bounded_in_sum(tenants: TenantRegistry) -> None:
    client = await Client.connect(tenants.directory("a"))
    assert await client.reserve(1 << 47, handover=True) == 1 << 47
    client.send(protocol.Reserve(2, 0, 1, handover=True))
    assert await client.ends()
    client.close()


HOSTILE: dict[str, bytes] = {
    "empty": b"",
    "short": b"xx",
    "huge": bytes(4096),
    "not ours": bytes(32),
    "someone else's gpu": protocol.encode(protocol.Want(2)),
    "a gpu that is not there": protocol.encode(protocol.Reserve(1, 5, 10)),
    "a second hello": protocol.encode(protocol.Hello(1, 1)),
    "a daemon's frame": protocol.encode(protocol.Revoke(1)),
    "more than it has": protocol.encode(protocol.Release(0, 1 << 40)),
    "an answer to nothing": protocol.encode(protocol.Release(0, 0, recalled=True)),
}


@pytest.mark.promise("security-disconnected", "security-bad-frames")
@pytest.mark.parametrize("packet", HOSTILE.values(), ids=HOSTILE.keys())
async def test_a_protocol_error_closes_its_connection_and_affects_no_other(
    tenants: TenantRegistry, packet: bytes
) -> None:
    good, bad = await Client.connect(tenants.directory("a")), await Client.connect(tenants.directory("a"))
    bad.send_raw(packet)
    assert await bad.ends()
    await good.granted()
    good.close()
    bad.close()


async def test_nothing_is_answered_before_hello(tenants: TenantRegistry) -> None:
    client = await Client.connect(tenants.directory("a"), hello=False)
    client.send(protocol.Want(1))
    assert await client.ends()
    client.close()


async def test_an_unsupported_version_is_refused_with_a_message(tenants: TenantRegistry) -> None:
    client = await Client.connect(tenants.directory("a"), hello=False)
    client.send(protocol.Hello(protocol.VERSION_MAX + 1, protocol.VERSION_MAX + 3))
    refused = await client.expect(protocol.Refused)
    assert refused.reason == protocol.RefusedReason.VERSION
    assert "restart the pod" in refused.text
    assert await client.ends()
    client.close()


@pytest.mark.promise("security-disconnected")
async def test_a_client_that_does_not_read_is_given_up(tenants: TenantRegistry) -> None:
    good, deaf = await Client.connect(tenants.directory("a")), await Client.connect(tenants.directory("a"))
    [deafened] = [tenant for tenant in served_in(tenants) if tenant.row.id == "a"]
    asked = 0
    while deafened.connected == 2:
        try:
            deaf.send(protocol.MemInfo(asked, 0))
        except OSError:
            break
        asked += 1
        if asked % 16 == 0:
            await asyncio.sleep(0)
        assert asked < 100_000
    await until(lambda: deafened.connected == 1)
    await good.granted()
    good.close()
    deaf.close()


@pytest.mark.promise("security-descriptors")
async def test_descriptors_that_a_client_sends_are_dropped(tenants: TenantRegistry) -> None:
    client = await Client.connect(tenants.directory("b"))
    gc.collect()  # close descriptors of earlier tests now, not while this test counts descriptors
    before = open_descriptors()
    for _ in range(20):
        socket.send_fds(client.sock, [protocol.encode(protocol.MemInfo(1, 0))], [0])
        await client.expect(protocol.Memory)
    assert open_descriptors() <= before
    client.close()


async def test_connections_of_one_tenant_are_bounded(tmp_path: Path) -> None:
    async with tenants_with(settings_in(tmp_path, connections_max=2), [row("a")]) as tenants:
        clients = [await Client.connect(tenants.directory("a")) for _ in range(2)]
        extra = await Client.connect(tenants.directory("a"), hello=False)
        refused = await extra.expect(protocol.Refused)
        assert refused.reason is protocol.RefusedReason.FULL
        assert "2 processes connected" in refused.text
        assert "connections_max" in refused.text
        assert await extra.ends()
        clients[0].close()
        [tenant] = served_in(tenants)
        await until(lambda: tenant.connected == 1)
        again = await Client.connect(tenants.directory("a"))
        for client in (*clients, extra, again):
            client.close()
