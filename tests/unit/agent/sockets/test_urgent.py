"""Frames about time precede frames about memory: the token never waits for allocations."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from sharepod import protocol
from sharepod.agent.sockets.frame_budget import FrameBudget
from sharepod.agent.sockets.hook_connection import HookConnection
from unit.agent.client import Client, row, served_in, settings_in, tenants_with, until

MIB = 1 << 20


@pytest.mark.promise("time-token-before-memory")
async def test_a_token_is_given_back_while_allocations_wait_for_the_tenants_rate(tmp_path: Path) -> None:
    async with tenants_with(settings_in(tmp_path, frames_per_s=100), [row("a"), row("b")]) as tenants:
        [served] = [each for each in served_in(tenants) if each.row.id == "a"]
        busy, other = await Client.connect(tenants.directory("a")), await Client.connect(tenants.directory("b"))
        grant = await busy.granted()
        for seq in range(1, 101):
            busy.send(protocol.MemInfo(seq, 0))
        await until(lambda: served.throttled > 0)
        other.send(protocol.Want(1))
        busy.send(protocol.Drained(grant.grant_id))
        await other.expect(protocol.Grant)
        answered: list[int] = []
        while len(answered) < 100:
            frame = await busy.receive()
            answered += [frame.seq] if isinstance(frame, protocol.Memory) else []
        assert answered == list(range(1, 101)), "in the order in which they were asked"
        busy.close()
        other.close()


async def test_what_a_tenants_turn_reads_about_time_is_handled_before_what_it_reads_about_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # no limit: one turn of the loop handles all frames, however slow the machine is
    monkeypatch.setattr(FrameBudget, "begin_turn", lambda _: math.inf)
    async with tenants_with(settings_in(tmp_path), [row("a"), row("b")]) as tenants:
        [served] = [each for each in served_in(tenants) if each.row.id == "a"]
        client = await Client.connect(tenants.directory("a"))
        order = []
        handle = served.handle

        def noting(sender: HookConnection, frame: protocol.ClientFrame) -> None:
            order.append(type(frame))
            handle(sender, frame)

        served.handle = noting  # type: ignore[method-assign, assignment]
        for frame in (protocol.Reserve(1, 0, MIB), protocol.MemInfo(2, 0), protocol.Want(1)):
            client.send(frame)
        for kind in (protocol.Grant, protocol.Reserved, protocol.Memory):
            await client.expect(kind)
        assert order == [protocol.Want, protocol.Reserve, protocol.MemInfo]
        client.close()


async def test_a_client_that_ends_leaves_no_frame_behind(tmp_path: Path) -> None:
    async with tenants_with(settings_in(tmp_path, frames_per_s=100), [row("a")]) as tenants:
        [served] = served_in(tenants)
        closed, stays = await Client.connect(tenants.directory("a")), await Client.connect(tenants.directory("a"))
        for seq in range(1, 101):
            closed.send(protocol.MemInfo(seq, 0))
        await until(lambda: served.throttled > 0)
        closed.close()
        await until(lambda: served.connected == 1)
        stays.send(protocol.MemInfo(7, 0))
        assert (await stays.expect(protocol.Memory)).seq == 7
        stays.close()
