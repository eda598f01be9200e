"""The socket of a tenant, with clients that keep to the protocol."""

from __future__ import annotations

import asyncio
import mmap
import os
import subprocess
import sys
from pathlib import Path

import pytest
from sharepod import protocol
from sharepod.agent.settings import AgentSettings
from sharepod.agent.tenants.registry import TenantRegistry
from sharepod.api.gpunode import MemoryIsolation, TenantState, TenantStatus
from unit.agent.client import GI, GPU0, GPU1, Client, memory_used, reading, row, served_in, settings_in, tenants_with


async def test_a_hook_gets_the_terms_of_its_tenant(tenants: TenantRegistry) -> None:
    client = await Client.connect(tenants.directory("a"))
    [terms] = client.welcome.gpus if client.welcome else ()
    assert (terms.request_milli, terms.limit_milli, terms.memory, terms.enforced) == (400, 700, 4 * GI, True)
    assert terms.uuid.hex() in GPU0.replace("-", "").lower()
    client.close()


@pytest.mark.parametrize(
    ("spoken", "agreed"), [(1, 1), (2, 2), (3, 3), (protocol.VERSION_MAX + 1, protocol.VERSION_MAX)]
)
async def test_the_version_that_a_process_speaks_is_known_of_it(
    tenants: TenantRegistry, spoken: int, agreed: int
) -> None:
    client = await Client.connect(tenants.directory("a"), hello=False)
    client.send(protocol.Hello(1, spoken))
    await client.expect(protocol.Welcome)
    [connection] = {user for tenant in served_in(tenants) for user in tenant._users}
    assert connection.version == agreed
    client.close()


async def test_the_hints_page_shows_contention(tenants: TenantRegistry) -> None:
    a, b = await Client.connect(tenants.directory("a")), await Client.connect(tenants.directory("b"))
    assert a.hints_fd is not None
    with mmap.mmap(a.hints_fd, mmap.PAGESIZE, mmap.MAP_SHARED, mmap.PROT_READ) as page:
        assert int.from_bytes(page[8:12], sys.byteorder) == 0
        await b.granted()
        assert int.from_bytes(page[8:12], sys.byteorder) == 1
    a.close()
    b.close()


async def test_one_token_goes_round(tenants: TenantRegistry) -> None:
    a, b = await Client.connect(tenants.directory("a")), await Client.connect(tenants.directory("b"))
    grant = await a.granted()
    assert grant.metered
    b.send(protocol.Want(1))
    assert await b.nothing_comes(0.05)
    a.send(protocol.Drained(grant.grant_id, wanting=True))
    second = await b.expect(protocol.Grant)
    assert second.grant_id != grant.grant_id
    b.send(protocol.Drained(second.grant_id))
    await a.granted_again(grant.grant_id)
    a.close()
    b.close()


async def test_the_next_is_granted_before_the_last_work_of_all_the_holders_processes_ends(
    tenants: TenantRegistry,
) -> None:
    a, b = await Client.connect(tenants.directory("a")), await Client.connect(tenants.directory("b"))
    sibling = await Client.connect(tenants.directory("a"))
    grant = await a.granted()
    assert grant.announce
    assert (await sibling.granted()).grant_id == grant.grant_id
    b.send(protocol.Want(1))
    assert await a.told_to_end() == await sibling.told_to_end() == grant.grant_id
    sibling.send(protocol.Draining(grant.grant_id, 0))
    a.send(protocol.Draining(grant.grant_id + 1, 0))
    assert await b.nothing_comes(0.02)
    a.send(protocol.Draining(grant.grant_id, 0))
    following = await b.expect(protocol.Grant)
    assert following.grant_id != grant.grant_id
    a.send(protocol.Drained(grant.grant_id, wanting=True))
    sibling.send(protocol.Drained(grant.grant_id))
    b.send(protocol.Drained(following.grant_id))
    assert (await a.expect(protocol.Grant)).grant_id not in (grant.grant_id, following.grant_id)
    for client in (a, b, sibling):
        client.close()


async def test_a_holder_without_quantum_gets_one_when_another_wants(tenants: TenantRegistry) -> None:
    a, b = await Client.connect(tenants.directory("a")), await Client.connect(tenants.directory("b"))
    grant = await b.granted()
    assert grant.quantum_ns == 0
    a.send(protocol.Want(1))
    assert await b.told_to_end() == grant.grant_id
    b.send(protocol.Drained(grant.grant_id))
    await a.expect(protocol.Grant)
    a.close()
    b.close()


async def test_processes_of_one_tenant_share_the_token(tenants: TenantRegistry) -> None:
    first, second = await Client.connect(tenants.directory("b")), await Client.connect(tenants.directory("b"))
    other = await Client.connect(tenants.directory("a"))
    grant = await first.granted()
    assert (await second.granted()).grant_id == grant.grant_id
    other.send(protocol.Want(1))
    for client in (first, second):
        await client.told_to_end()
    first.send(protocol.Drained(grant.grant_id))
    assert await other.nothing_comes(0.05), "the token is drained when every process is"
    second.send(protocol.Drained(grant.grant_id))
    await other.expect(protocol.Grant)
    for client in (first, second, other):
        client.close()


HOLDER = (
    "import socket,sys;from sharepod import protocol as p;"
    "s=socket.socket(socket.AF_UNIX,socket.SOCK_SEQPACKET);s.connect(sys.argv[1]);"
    "s.send(p.encode(p.Hello(1,1)));s.recv(1024);"
    "s.send(p.encode(p.Reserve(1,0,4<<30)));s.recv(1024);s.send(p.encode(p.Want(1)));s.recv(1024);"
    "print('holds',flush=True);sys.stdin.read()"
)
"""Source of a program that takes all of its tenant's memory and the token, and keeps both."""


async def test_a_holder_that_exits_releases_its_token_and_bytes_at_once(tenants: TenantRegistry) -> None:
    sibling = await Client.connect(tenants.directory("b"))
    holder = subprocess.Popen(  # noqa: ASYNC220
        [sys.executable, "-c", HOLDER, f"{tenants.directory('b')}/agent.sock"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert holder.stdout is not None
    try:
        assert await asyncio.to_thread(holder.stdout.readline) == b"holds\n"
        a = await Client.connect(tenants.directory("a"))
        a.send(protocol.Want(1))
        assert await a.nothing_comes(0.05)
        assert await sibling.reserve(4 * GI) == 0
        holder.kill()
        await a.expect(protocol.Grant, timeout_s=0.5)
        assert await sibling.reserve(4 * GI, seq=2) == 4 * GI
        a.close()
    finally:
        holder.kill()
        await asyncio.to_thread(holder.communicate)
    sibling.close()


async def test_a_lost_connection_of_a_living_process_frees_neither_memory_nor_token(tmp_path: Path) -> None:
    rows = [row("a", 400), row("b", 600)]
    async with tenants_with(settings_in(tmp_path, recall_ms=10), rows) as tenants:
        a, b = await Client.connect(tenants.directory("a")), await Client.connect(tenants.directory("b"))
        assert await b.reserve(4 * GI) == 4 * GI
        grant = await b.granted()
        a.send(protocol.Want(1))
        await b.told_to_end()
        b.close()
        assert await a.nothing_comes(0.1)
        assert memory_used(tenants, "b")[GPU0] == 4 * GI
        again = await Client.connect(tenants.directory("b"))
        assert await again.reserve(3 * GI, handover=True) == 3 * GI
        assert memory_used(tenants, "b")[GPU0] == 4 * GI, "it may have more to declare"
        assert await again.reserve(1 * GI + 1) == 0, "that was all of it"
        assert await again.reserve(1 * GI) == 1 * GI
        again.send(protocol.Drained(grant.grant_id))
        await a.expect(protocol.Grant, timeout_s=0.5)
        a.close()
        again.close()


async def test_a_holder_whose_connection_is_lost_is_overtaken_and_can_be_granted_again(tmp_path: Path) -> None:
    async with tenants_with(settings_in(tmp_path, grace_ms=50), [row("a", 400), row("b", 600)]) as tenants:
        a, b = await Client.connect(tenants.directory("a")), await Client.connect(tenants.directory("b"))
        await b.granted()
        a.send(protocol.Want(1))
        await b.told_to_end()
        b.close()
        again = await Client.connect(tenants.directory("b"))
        again.send(protocol.Want(1))
        grant = await a.expect(protocol.Grant)
        a.send(protocol.Drained(grant.grant_id))
        await again.expect(protocol.Grant)
        a.close()
        again.close()


async def test_a_process_that_dies_gives_the_token_back_although_a_child_keeps_its_socket(
    tenants: TenantRegistry,
) -> None:
    directory = tenants.directory("b")
    program = (
        "import os,socket,sys,time;from sharepod import protocol as p;"
        "s=socket.socket(socket.AF_UNIX,socket.SOCK_SEQPACKET);s.connect(sys.argv[1]);"
        "s.send(p.encode(p.Hello(1,1)));s.recv(1024);s.send(p.encode(p.Want(1)));s.recv(1024);"
        "os.set_inheritable(s.fileno(),True);"
        "c=os.fork();"
        "(sys.stdout.write(f'{c}\\n'),sys.stdout.flush(),sys.stdin.read(),os._exit(0)) if c else time.sleep(60)"
    )
    parent = subprocess.Popen(  # noqa: ASYNC220
        [sys.executable, "-c", program, f"{directory}/agent.sock"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert parent.stdout is not None
    child = int(await asyncio.to_thread(parent.stdout.readline))
    try:
        a = await Client.connect(tenants.directory("a"))
        a.send(protocol.Want(1))
        assert await a.nothing_comes(0.05)
        parent.kill()
        await a.expect(protocol.Grant, timeout_s=0.5)
        a.close()
    finally:
        os.kill(child, 9)
        await asyncio.to_thread(parent.communicate)


async def test_memory_is_refused_beyond_the_limit_and_never_for_a_siblings_idle_credits(
    tenants: TenantRegistry,
) -> None:
    first, second = await Client.connect(tenants.directory("a")), await Client.connect(tenants.directory("a"))
    assert await first.reserve(3 * GI) == 3 * GI
    second.send(protocol.Reserve(9, 0, 2 * GI))
    recall = await first.expect(protocol.Recall)
    assert recall.bytes == 1 * GI
    first.send(protocol.Release(0, 1 * GI, recalled=True))
    assert (await second.expect(protocol.Reserved)).bytes == 2 * GI
    second.send(protocol.Reserve(10, 0, 1))
    await first.expect(protocol.Recall)
    assert (await second.expect(protocol.Reserved)).bytes == 0, "no sibling answered in time"
    second.send(protocol.MemInfo(3, 0, idle=1 * GI))
    answer = await second.expect(protocol.Memory)
    assert (answer.seq, answer.limit, answer.used) == (3, 4 * GI, 3 * GI)
    first.close()
    second.close()


async def test_a_process_declares_its_held_memory_again_after_an_agents_restart(tenants: TenantRegistry) -> None:
    client = await Client.connect(tenants.directory("a"))
    assert await client.reserve(5 * GI, handover=True) == 5 * GI, "it is in use, whatever the limit"
    assert await client.reserve(1) == 0
    client.send(protocol.Reserve(1, 0, 1, handover=True))
    assert await client.ends(), "later it would be a way round the limit"
    client.close()


async def test_changed_terms_reach_the_clients_and_the_file(tenants: TenantRegistry) -> None:
    client = await Client.connect(tenants.directory("a"))
    await tenants.apply([row("a", 300, 800, memory=2 * GI, memory_isolation=MemoryIsolation.NONE), row("b", 600)])
    limits = await client.expect(protocol.Limits)
    [terms] = limits.gpus
    assert (terms.request_milli, terms.limit_milli, terms.memory, terms.enforced) == (300, 800, 2 * GI, False)
    directory = tenants.directory("a")
    assert directory is not None
    assert (directory / "limits").read_text() == f"gpu {GPU0} request 300 limit 800 memory {2 * GI} enforced 0\n"
    client.close()


async def test_a_tenant_that_is_being_released_is_refused(tenants: TenantRegistry) -> None:
    holder, other = await Client.connect(tenants.directory("b")), await Client.connect(tenants.directory("a"))
    directory = tenants.directory("b")
    await holder.granted()
    other.send(protocol.Want(1))
    await holder.told_to_end()
    await tenants.apply([row("a", 400, 700), row("b", 600, state=TenantState.RELEASING)])
    refused = await holder.expect(protocol.Refused)
    assert refused.reason == protocol.RefusedReason.RELEASING
    assert await holder.ends()
    await other.expect(protocol.Grant)
    with pytest.raises(OSError):
        await Client.connect(directory)
    holder.close()
    other.close()


@pytest.mark.promise("time-gang")
async def test_a_gang_has_one_token_for_all_its_gpus(settings: AgentSettings) -> None:
    rows = [row("gang", 500, gpus=(GPU0, GPU1)), row("single", 500, gpus=(GPU1,))]
    async with tenants_with(settings, rows) as tenants:
        gang, single = (
            await Client.connect(tenants.directory("gang")),
            await Client.connect(tenants.directory("single")),
        )
        first = await single.granted()
        gang.send(protocol.Want(3))
        await single.told_to_end()
        assert await gang.nothing_comes(0.02)
        single.send(protocol.Drained(first.grant_id))
        assert (await gang.expect(protocol.Grant)).gpu_mask == 3
        gang.close()
        single.close()


async def test_an_agent_that_starts_again_takes_over_at_the_same_path(settings: AgentSettings) -> None:
    async with tenants_with(settings, [row("a")]) as tenants:
        directory = tenants.directory("a")
        assert directory is not None
        inode, old = directory.stat().st_ino, await Client.connect(directory)
    assert await old.ends()
    async with tenants_with(settings, [row("a")]) as tenants:
        assert tenants.directory("a") == directory
        assert directory.stat().st_ino == inode, "mounts pin the directory"
        assert tenants.status()[0].held_milli is not None, "the account goes on, and so does what it is a mean of"
        again = await Client.connect(directory)
        await again.granted()
        again.close()
    old.close()


@pytest.mark.promise("operator-usage-known")
async def test_usage_and_processes_are_reported(tenants: TenantRegistry, monkeypatch: pytest.MonkeyPatch) -> None:
    client = await Client.connect(tenants.directory("b"))
    await client.reserve(1 * GI)
    grant = await client.granted()
    await asyncio.sleep(0.2)
    client.send(protocol.Drained(grant.grant_id))
    client.send(protocol.MemInfo(1, 0))
    await client.expect(protocol.Memory)
    await tenants.observe(reading(), residue=lambda _: None, owner_of=lambda _: None)
    loop = asyncio.get_running_loop()
    now = loop.time()

    def after(seconds: float) -> TenantStatus:
        with monkeypatch.context() as moved:
            moved.setattr(loop, "time", lambda: now + seconds)
            _, status = tenants.status()
        return status

    status = after(0)
    assert (status.id, status.processes, status.memory, status.connected, status.enforced) == ("b", 1, GI, True, True)
    assert [after(seconds).held_milli for seconds in (0, 9)] == [None, None], "a mean of ten seconds"
    assert 15 <= (after(10).held_milli or 0) <= 60
    client.close()
