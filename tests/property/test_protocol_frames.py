"""Any bytes that a tenant sends are parsed as a frame or refused. They have no other effect."""

from __future__ import annotations

import dataclasses
import fcntl
import mmap
import os
import select
import socket
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sharepod import protocol
from sharepod.agent.sockets._frame_reader import ffi as reader_ffi
from sharepod.agent.sockets._frame_reader import lib as reader
from sharepod.agent.sockets.hook_connection import frame_of
from sharepod.protocol import ProtocolError, encode, parse_agent, parse_client
from sharepod.protocol._wire import ffi, lib

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
    st.builds(protocol.Grant, u64, u64, mask, *[st.booleans()] * 6),
    st.builds(protocol.Revoke, u64),
    st.builds(protocol.Reserved, u32, gpu, st.integers(0, 1 << 62)),
    st.builds(protocol.Recall, gpu, size),
    st.builds(protocol.Memory, u32, gpu, st.integers(0, 1 << 62), st.integers(0, 1 << 62)),
    st.builds(protocol.Refused, st.sampled_from(protocol.RefusedReason), text),
)

flags_of = {
    protocol.Hello: {"no_membarrier": lib.SHP_HELLO_NO_MEMBARRIER, "observes": lib.SHP_HELLO_OBSERVES},
    protocol.Drained: {"wanting": lib.SHP_DRAINED_WANT, "idle": lib.SHP_DRAINED_IDLE},
    protocol.Reserve: {
        "handover": lib.SHP_RESERVE_HANDOVER,
        "grown": lib.SHP_RESERVE_GROWN,
        "ahead": lib.SHP_RESERVE_AHEAD,
    },
    protocol.Release: {"recalled": lib.SHP_RELEASE_RECALLED},
    protocol.Grant: {
        "metered": lib.SHP_GRANT_METERED,
        "announce": lib.SHP_GRANT_ANNOUNCE,
        "renews": lib.SHP_GRANT_RENEWS,
        "short": lib.SHP_GRANT_SHORT,
        "prompt": lib.SHP_GRANT_PROMPT,
        "concurrent": lib.SHP_GRANT_CONCURRENT,
    },
}
"""For each frame type: the bit of each flag, by field."""


@given(st.one_of(from_clients, from_agent))
def test_the_hooks_struct_has_the_frames_values_and_flags(frame: protocol.Frame) -> None:
    packet, flags = encode(frame), flags_of.get(type(frame), {})
    struct = "welcome" if isinstance(frame, protocol.Limits) else type(frame).__name__.lower()
    raw = ffi.from_buffer(f"struct shp_{struct} *", packet)
    assert raw.header.size == len(packet) == ffi.sizeof(raw[0])
    for field in dataclasses.fields(frame):
        value, place = getattr(frame, field.name), raw.header if field.name == "seq" else raw
        if isinstance(value, int) and not isinstance(value, bool):
            assert getattr(place, field.name) == value, field.name
    if flags:
        assert raw.flags == sum(bit for name, bit in flags.items() if getattr(frame, name))
    for terms, gpu in zip(getattr(frame, "gpus", ()), getattr(raw, "gpus", ()), strict=False):
        assert (gpu.request_milli, gpu.limit_milli) == (terms.request_milli, terms.limit_milli)
        assert (gpu.memory, gpu.context_kib, bytes(gpu.uuid)) == (terms.memory, terms.context_kib, terms.uuid)
        assert gpu.flags == lib.SHP_GPU_MEMORY_ENFORCED * terms.enforced


@given(st.integers(-1 << 70, 1 << 70).filter(lambda value: not 0 <= value < 1 << 64))
def test_a_value_out_of_range_makes_no_frame(value: int) -> None:
    for frame in (protocol.Revoke(value), protocol.Grant(1, value, 1, True), protocol.Welcome(value, (), 0)):
        with pytest.raises(OverflowError):
            encode(frame)


def test_terms_of_more_gpus_than_fit_make_no_frame() -> None:
    with pytest.raises(OverflowError):
        encode(protocol.Limits((protocol.GpuTerms(bytes(16), 0, 0, 0, False),) * (protocol.MAX_GPUS + 1), 0))


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
        assert parse(encode(changed)) == changed, "each accepted frame can be encoded"


def received(packet: bytes) -> Any:
    """Return the result of the agent's reader for a packet (shp_received)."""
    client, agent = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with client, agent, select.epoll() as poller:
        poller.register(agent, select.EPOLLIN)
        client.send(packet)
        into = reader_ffi.new("shp_received[]", 2)
        assert reader.shp_receive(poller.fileno(), into, 1) == 1
        assert (into[0].socket, into[0].size, into[0].emptied) == (agent.fileno(), len(packet), 1)
        return into[0]


def agree(packet: bytes) -> None:
    """Check that the reader recognises a frame about time exactly if the codec accepts it, with the same values, and
    recognises no other frame."""
    raw = received(packet)
    try:
        frame = parse_client(packet)
    except ProtocolError:
        assert raw.type == 0
        with pytest.raises(ProtocolError):
            frame_of(raw)
        return
    assert frame_of(raw) == frame
    assert bool(raw.type) == isinstance(frame, (protocol.Want, protocol.Draining, protocol.Drained))


@pytest.mark.promise("security-read-in-c")
@settings(max_examples=1000)
@given(from_clients, st.lists(st.tuples(st.integers(0, 1023), st.integers(0, 255)), max_size=3))
def test_the_agents_reader_agrees_with_the_codec(frame: protocol.ClientFrame, changes: list[tuple[int, int]]) -> None:
    agree(encode(frame))
    packet = bytearray(encode(frame))
    for position, value in changes:
        packet[position % len(packet)] = value
    agree(bytes(packet))


few = st.sampled_from((0, 1, 2, 3, 4, 1 << 15, 1 << 16, 1 << 31))


@pytest.mark.promise("security-read-in-c")
@settings(max_examples=500)
@given(st.sampled_from((("want", 2), ("drained", 3), ("draining", 7))), st.integers(0, 3), few, few, few)
def test_the_agents_reader_of_time_frames_agrees_with_the_codec(
    kind: tuple[str, int], version: int, grant_id: int, mask: int, flags: int
) -> None:
    frame = ffi.new(f"struct shp_{kind[0]} *")
    frame.header.magic, frame.header.version, frame.header.type = lib.SHP_MAGIC, version, kind[1]
    frame.header.size = ffi.sizeof(frame[0])
    for name, value in (("grant_id", grant_id), ("gpu_mask", mask), ("flags", flags)):
        if hasattr(frame, name):
            setattr(frame, name, value)
    agree(bytes(ffi.buffer(frame)))


@given(st.binary(min_size=1, max_size=protocol.FRAME_MAX + 1))
def test_the_agents_reader_agrees_with_the_codec_on_any_bytes(packet: bytes) -> None:
    agree(packet)


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


def test_every_frame_fits_the_buffer_of_a_receiver() -> None:
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


def test_a_uuid_that_is_too_short_is_not_sent() -> None:
    terms = protocol.GpuTerms(b"u" * 15, 400, 1000, 1 << 30, True, 0)
    with pytest.raises(ValueError, match="16 bytes"):
        encode(protocol.Limits((terms,), 5))
