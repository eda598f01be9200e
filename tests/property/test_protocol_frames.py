"""No bytes that a tenant sends can do more than be refused."""

from __future__ import annotations

import dataclasses
import fcntl
import mmap
import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sharepod import protocol
from sharepod.protocol import ProtocolError, encode, parse_agent, parse_client

u16 = st.integers(0, (1 << 16) - 1)
u32 = st.integers(0, (1 << 32) - 1)
u64 = st.integers(0, (1 << 64) - 1)
size = st.integers(1, 1 << 62)
gpu = st.integers(0, protocol.MAX_GPUS - 1)
mask = st.integers(1, (1 << protocol.MAX_GPUS) - 1)
text = st.text(st.characters(exclude_characters="\0", codec="utf-8"), max_size=30)
rates = st.tuples(st.integers(0, 1000), st.integers(0, 1000)).map(sorted)
terms = st.builds(
    lambda uuid, rate, memory, enforced, context: protocol.GpuTerms(uuid, rate[0], rate[1], memory, enforced, context),
    st.binary(min_size=16, max_size=16),
    rates,
    st.integers(0, 1 << 62),
    st.booleans(),
    u32,
)
gpus = st.lists(terms, min_size=1, max_size=protocol.MAX_GPUS).map(tuple)

from_clients = st.one_of(
    st.builds(
        lambda versions, build, fenced, observes: protocol.Hello(versions[0], versions[1], build, fenced, observes),
        st.tuples(st.integers(1, 65535), st.integers(1, 65535)).map(sorted),
        st.text("0123456789abcdef", max_size=63),
        st.booleans(),
        st.booleans(),
    ),
    st.builds(protocol.Want, mask),
    st.builds(protocol.Drained, u64, u64, st.booleans(), st.booleans()),
    st.builds(protocol.Draining, u64, u64),
    st.builds(protocol.Reserve, u32, gpu, size, st.booleans()),
    st.builds(protocol.Reserve, u32, gpu, size, grown=st.booleans()),
    st.builds(protocol.Reserve, u32, gpu, size, ahead=st.booleans()),
    st.builds(protocol.Release, gpu, size, st.booleans()),
    st.builds(protocol.MemInfo, u32, gpu, st.integers(0, 1 << 62)),
)
from_agent = st.one_of(
    st.builds(protocol.Welcome, u32, gpus, u32),
    st.builds(protocol.Limits, gpus, u32),
    st.builds(protocol.Grant, u64, u64, mask, st.booleans(), st.booleans(), st.booleans()),
    st.builds(protocol.Revoke, u64),
    st.builds(protocol.Reserved, u32, gpu, st.integers(0, 1 << 62)),
    st.builds(protocol.Recall, gpu, size),
    st.builds(protocol.Memory, u32, gpu, st.integers(0, 1 << 62), st.integers(0, 1 << 62)),
    st.builds(protocol.Refused, st.sampled_from(protocol.RefusedReason), text),
)


@given(from_clients)
def test_a_clients_frame_survives_the_wire(frame: protocol.ClientFrame) -> None:
    assert parse_client(encode(frame)) == frame


@given(from_agent)
def test_an_agents_frame_survives_the_wire(frame: protocol.AgentFrame) -> None:
    assert parse_agent(encode(frame)) == frame


@settings(max_examples=500)
@given(st.binary(max_size=protocol.FRAME_MAX + 1))
def test_arbitrary_bytes_are_a_frame_or_an_error(packet: bytes) -> None:
    for parse in (parse_client, parse_agent):
        try:
            frame = parse(packet)
        except ProtocolError:
            continue
        assert dataclasses.is_dataclass(frame)


@settings(max_examples=1000)
@given(st.one_of(from_clients, from_agent), st.lists(st.tuples(st.integers(0, 1023), st.integers(0, 255)), max_size=8))
def test_a_frame_with_bytes_changed_is_valid_or_an_error(frame: protocol.Frame, changes: list[tuple[int, int]]) -> None:
    packet = bytearray(encode(frame))
    for position, value in changes:
        packet[position % len(packet)] = value
    for parse in (parse_client, parse_agent):
        try:
            changed = parse(bytes(packet))
        except ProtocolError:
            continue
        assert parse(encode(changed)) == changed, "what is accepted can be said again"


@given(from_clients, st.integers(-1024, 1024).filter(bool))
def test_a_packet_of_a_wrong_length_is_an_error(frame: protocol.ClientFrame, change: int) -> None:
    packet = encode(frame)
    wrong = packet[: max(0, len(packet) + change)] if change < 0 else packet + bytes(change)
    with pytest.raises(ProtocolError):
        parse_client(wrong)


@given(from_agent)
def test_a_client_cannot_speak_for_the_agent(frame: protocol.AgentFrame) -> None:
    with pytest.raises(ProtocolError):
        parse_client(encode(frame))


def test_every_frame_fits_what_a_receiver_sets_aside() -> None:
    most = protocol.Welcome(0, (protocol.GpuTerms(bytes(16), 0, 0, 0, False),) * protocol.MAX_GPUS, 0)
    assert len(encode(most)) <= protocol.FRAME_MAX


def test_a_client_can_neither_write_nor_resize_the_hints_page() -> None:
    page = protocol.HintsPage()
    try:
        theirs = os.open(f"/proc/self/fd/{page.fd}", os.O_RDWR)
        try:
            for attack in (
                lambda: os.ftruncate(theirs, 0),
                lambda: os.ftruncate(theirs, 1 << 20),
                lambda: os.pwrite(theirs, b"x", 0),
                lambda: mmap.mmap(theirs, mmap.PAGESIZE),
                lambda: fcntl.fcntl(theirs, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE),
            ):
                with pytest.raises(OSError):
                    attack()
            with mmap.mmap(theirs, mmap.PAGESIZE, mmap.MAP_SHARED, mmap.PROT_READ) as view:
                before = bytes(view[:16])
                page.contended = True
                page.limits_changed()
                assert bytes(view[:16]) != before, "the client sees what the daemon writes"
        finally:
            os.close(theirs)
    finally:
        page.close()
