"""Version 1 of the protocol: the recorded bytes stay valid, because pods live longer than agents."""

from __future__ import annotations

from pathlib import Path

import pytest
from sharepod import protocol
from unit.agent.client import GI, Client, row, settings_in, tenants_with

HELLO = "31534850010001005800000000000000010001000100000061626331323300" + "00" * 57
OBSERVER = "31534850010001005800000000000000010001000200000061626300" + "00" * 60
GPU_TERMS = (protocol.GpuTerms(bytes(range(16)), 400, 700, 4 << 30, True, 300 << 10),)
TERMS = "01000000e8030000000102030405060708090a0b0c0d0e0f90010000bc02000000000000010000000100000000b00400" + "00" * 600
FROM_CLIENTS: dict[str, protocol.ClientFrame] = {
    HELLO: protocol.Hello(1, 1, "abc123", True),
    OBSERVER: protocol.Hello(1, 1, "abc", False, True),
    "3153485001000400200000000700000000000000020000000000100000000000": protocol.Reserve(7, 0, 1 << 20, grown=True),
    "315348500100020018000000000000000300000000000000": protocol.Want(3),
    "315348500100030028000000000000000700000000000000d2040000000000000100000000000000": protocol.Drained(7, 1234, True),
    "31534850010007002000000000000000070000000000000040420f0000000000": protocol.Draining(7, 1_000_000),
    "3153485001000400200000000500000001000000000000000000100000000000": protocol.Reserve(5, 1, 1 << 20),
    "315348500100040020000000060000000000000001000000000000c000000000": protocol.Reserve(6, 0, 3 << 30, True),
    "315348500100040020000000080000000000000004000000000000c000000000": protocol.Reserve(8, 0, 3 << 30, ahead=True),
    "3153485001000500200000000000000000000000010000000010000000000000": protocol.Release(0, 4096, True),
    "3153485001000600200000000900000000000000000000000002000000000000": protocol.MemInfo(9, 0, 512),
}
FROM_DAEMONS: dict[str, protocol.AgentFrame] = {
    "31534850010040009802000000000000" + TERMS: protocol.Welcome(0, GPU_TERMS, 1000),
    "31534850010046009802000000000000" + TERMS: protocol.Limits(GPU_TERMS, 1000),
    "3153485001004700b800000000000000030000000000000066756c6c" + "00" * 156: protocol.Refused(
        protocol.RefusedReason.FULL, "full"
    ),
    "3153485001004300200000000500000000000000010000000000000000000000": protocol.Reserved(5, 0, 0),
    "31534850010041002800000000000000070000000000000080c3c901000000000100000001000000": protocol.Grant(
        7, 30_000_000, 1, True
    ),
    "31534850010041002800000000000000070000000000000080c3c901000000000100000007000000": protocol.Grant(
        7, 30_000_000, 1, True, True, True
    ),
    "315348500100420018000000000000000700000000000000": protocol.Revoke(7),
    "3153485001004300200000000500000001000000000000000000100000000000": protocol.Reserved(5, 1, 1 << 20),
    "3153485001004400200000000000000000000000000000000000200000000000": protocol.Recall(0, 1 << 21),
    "31534850010045002800000009000000000000000000000000000000010000000000004000000000": protocol.Memory(
        9, 0, 4 << 30, 1 << 30
    ),
}


@pytest.mark.promise("install-old-hooks")
@pytest.mark.parametrize(("recorded", "frame"), FROM_CLIENTS.items())
def test_frames_of_hooks_of_version_1_are_understood(recorded: str, frame: protocol.ClientFrame) -> None:
    assert protocol.parse_client(bytes.fromhex(recorded)) == frame


@pytest.mark.promise("install-old-hooks")
@pytest.mark.parametrize(("recorded", "frame"), FROM_DAEMONS.items())
def test_frames_sent_to_hooks_of_version_1_have_not_changed(recorded: str, frame: protocol.AgentFrame) -> None:
    assert protocol.encode(frame, version=1).hex() == recorded


@pytest.mark.promise("install-old-hooks")
async def test_a_client_of_version_1_gets_the_token_and_memory(tmp_path: Path) -> None:
    """The client knows only the recorded bytes."""
    async with tenants_with(settings_in(tmp_path), [row("a", 400, 1000)]) as tenants:
        client = await Client.connect(tenants.directory("a"), hello=False)
        client.send_raw(bytes.fromhex(HELLO))
        welcome = await client.expect(protocol.Welcome)
        assert [terms.memory for terms in welcome.gpus] == [4 * GI]
        client.send_raw(bytes.fromhex("315348500100020018000000000000000100000000000000"))
        grant = await client.expect(protocol.Grant)
        reserve = "3153485001000400200000000500000000000000000000000000100000000000"
        client.send_raw(bytes.fromhex(reserve))
        assert await client.expect(protocol.Reserved) == protocol.Reserved(5, 0, 1 << 20)
        drained = bytearray.fromhex("3153485001000300280000000000000000" + "00" * 23)
        drained[16:24] = grant.grant_id.to_bytes(8, "little")
        client.send_raw(bytes(drained))
        client.send_raw(bytes.fromhex("3153485001000600200000000900000000000000000000000000000000000000"))
        assert await client.expect(protocol.Memory) == protocol.Memory(9, 0, 4 * GI, 1 << 20)
        client.close()
