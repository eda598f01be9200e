"""Calls between the agent's processes: answers, errors and descriptors arrive, and invalid frames end the link."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import os
import socket
import struct
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter
from sharepod.agent.apart.link import Call, Line, LinkLostError, PartService
from sharepod.agent.apart.outbox import Outbox
from sharepod.agent.devices.inventory import InventoryError
from sharepod.agent.sockets.peers import EXHAUSTED
from sharepod.agent.tenants.registry import UntakenRowsError
from unit.agent.client import until

ECHO: Call[str, str] = Call("echo", TypeAdapter(str), TypeAdapter(str), 4 << 20)
LARGE: Call[None, str] = Call("large", TypeAdapter(type(None)), TypeAdapter(str))
OPEN: Call[str, None] = Call("open", TypeAdapter(str), TypeAdapter(type(None)))
FAIL: Call[str, None] = Call("fail", TypeAdapter(str), TypeAdapter(type(None)))
HANG: Call[None, None] = Call("hang", TypeAdapter(type(None)), TypeAdapter(type(None)))
NOTE: Call[int, None] = Call("note", TypeAdapter(int), TypeAdapter(type(None)))
_ERRORS = {kind.__name__: kind for kind in (InventoryError, UntakenRowsError)}


class Far:
    """The other process of the link, played in the test process."""

    def __init__(self) -> None:
        self.noted: list[int] = []
        self.large = self.echoed = 0
        self.line = Line(
            PartService(
                {
                    "echo": (ECHO, self._echo),
                    "open": (OPEN, self._open),
                    "fail": (FAIL, self._fail),
                    "hang": (HANG, self._hang),
                    "large": (LARGE, self._large),
                },
                {"note": (NOTE, self.noted.append)},
                _ERRORS,
            )
        )

    async def _echo(self, text: str, descriptors: list[int]) -> tuple[str, Sequence[int]]:
        self.echoed += 1
        return text, descriptors

    async def _open(self, path: str, _descriptors: list[int]) -> tuple[None, Sequence[int]]:
        return None, [os.open(path, os.O_RDONLY)]

    async def _fail(self, kind: str, _descriptors: list[int]) -> tuple[None, Sequence[int]]:
        raise {
            "inventory": InventoryError("no driver"),
            "rows": UntakenRowsError(errno.ENOSPC, "full", "/x"),
            "other": ValueError("what"),
        }[kind]

    async def _large(self, _none: None, _descriptors: list[int]) -> tuple[str, Sequence[int]]:
        self.large += 1
        return "x" * (300 << 10), ()

    async def _hang(self, _none: None, _descriptors: list[int]) -> tuple[None, Sequence[int]]:
        await asyncio.sleep(3600)
        raise AssertionError


@pytest.fixture
async def ends() -> AsyncIterator[tuple[Line, Far]]:
    ours, theirs = socket.socketpair()
    near, far = Line(PartService({}, {}, _ERRORS)), Far()
    near.connect(ours)
    far.line.connect(theirs)
    yield near, far
    near.close()
    far.line.close()


def _file(descriptor: int) -> tuple[int, int]:
    """Return device and inode of the file behind a descriptor."""
    found = os.fstat(descriptor)
    return found.st_dev, found.st_ino


def _descriptors(*files: tuple[int, int]) -> int:
    """Return how many of this process's descriptors refer to these files. Leftovers of earlier tests may open or close
    other descriptors, so a count of all would be wrong."""
    count = 0
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208
        with contextlib.suppress(OSError):
            count += _file(int(name)) in files
    return count


async def test_an_answer_of_megabytes_arrives_among_small_ones(ends: tuple[Line, Far]) -> None:
    near, _far = ends
    texts = ["x" * (3 << 20), *map(str, range(200))]
    answers = await asyncio.gather(*(near.call(ECHO, text) for text in texts))
    assert [text for text, _none in answers] == texts


async def test_descriptors_come_over_both_ways_and_none_is_left(ends: tuple[Line, Far], tmp_path: Path) -> None:
    near, _far = ends
    (tmp_path / "file").write_text("content")
    _none, (opened,) = await near.call(OPEN, str(tmp_path / "file"))
    file = _file(opened)
    assert os.read(opened, 100) == b"content"
    for _ in range(100):
        _text, (again,) = await near.call(ECHO, "x" * 100_000, [opened])
        assert os.fstat(again).st_ino == os.fstat(opened).st_ino
        os.close(again)
    os.close(opened)
    assert _descriptors(file) == 0


async def test_errors_keep_their_type_and_text(ends: tuple[Line, Far]) -> None:
    near, _far = ends
    with pytest.raises(InventoryError, match="no driver"):
        await near.call(FAIL, "inventory")
    with pytest.raises(UntakenRowsError) as caught:
        await near.call(FAIL, "rows")
    assert (caught.value.errno, caught.value.filename) == (errno.ENOSPC, "/x")
    with pytest.raises(OSError, match="what"):
        await near.call(FAIL, "other")
    with pytest.raises(FileNotFoundError):
        await near.call(OPEN, "/nonexistent")


async def test_messages_arrive_in_order_and_before_the_answer_of_a_later_call(ends: tuple[Line, Far]) -> None:
    near, far = ends
    for number in range(100):
        near.notify(NOTE, number)
    await near.call(ECHO, "")
    assert far.noted == list(range(100))


async def test_calls_under_way_fail_when_the_other_process_goes_and_a_new_link_goes_on(ends: tuple[Line, Far]) -> None:
    near, far = ends
    hanging = asyncio.ensure_future(near.call(HANG, None))
    await near.call(ECHO, "")
    far.line.close()
    with pytest.raises(LinkLostError):
        await hanging
    assert not near.up
    with pytest.raises(LinkLostError):
        await near.call(ECHO, "x")
    near.notify(NOTE, 1)  # no receiver
    waiting = asyncio.ensure_future(near.call(ECHO, "again", wait_s=20))
    await asyncio.sleep(0)
    ours, theirs = socket.socketpair()
    near.connect(ours)
    far.line.connect(theirs)
    assert (await waiting)[0] == "again"


async def test_an_answer_that_does_not_come_in_time_fails_the_call(ends: tuple[Line, Far]) -> None:
    near, _far = ends
    with pytest.raises(LinkLostError, match="no answer"):
        await near.call(HANG, None, timeout_s=0.01)


async def test_however_many_calls_hang_no_more_than_a_bound_is_taken(ends: tuple[Line, Far]) -> None:
    near, far = ends
    calls = [asyncio.ensure_future(near.call(HANG, None)) for _ in range(400)]
    assert far.line._link is not None
    link = far.line._link
    await until(lambda: len(link._answering) == 128)
    await asyncio.sleep(0.05)
    assert len(link._answering) == 128
    for call in calls:
        call.cancel()


def _frame(body: bytes, *, length: int | None = None, kind: int = 0, count: int = 0) -> bytes:
    return struct.pack("=IBBQ", len(body) if length is None else length, kind, count, 1) + body


@pytest.mark.parametrize(
    "sent",
    [
        _frame(b"", length=1 << 30),
        _frame(b"", kind=9),
        _frame(b"echo\n1", count=3),
        _frame(b"echo\n1", count=255),
        _frame(b"nothing\nnull"),
        _frame(b"echo\n{}"),
        _frame(b"echo"),
        _frame(b'note\n"x"', kind=1),
        _frame(b"hang\nnull", kind=1),
        _frame(b"open\n" + json.dumps("x" * (1 << 16)).encode()),
    ],
)
async def test_an_invalid_call_ends_the_link(sent: bytes) -> None:
    ours, theirs = socket.socketpair()
    far = Far()
    far.line.connect(theirs)
    ours.send(sent)
    await until(lambda: not far.line.up)
    ours.close()


async def test_a_process_that_does_not_read_gets_a_bounded_number_of_answers_and_all_once_it_reads() -> None:
    ours, theirs = socket.socketpair()
    far = Far()
    far.line.connect(theirs)
    ours.setblocking(False)
    asked = 200
    ours.send(_frame(b"large\nnull") * asked)
    await until(lambda: far.large >= 54)
    for _ in range(500):
        await asyncio.sleep(0)
    assert far.large <= 128, "calls that were begun at once"
    received = 0
    while received < asked * (300 << 10):
        some = await asyncio.get_running_loop().sock_recv(ours, 1 << 20)
        assert some, "the link is there"
        received += len(some)
    assert far.large == asked
    ours.close()
    await until(lambda: not far.line.up)


async def test_a_process_to_which_too_much_is_told_without_its_reading_loses_its_link() -> None:
    ours, theirs = socket.socketpair()
    far = Far()
    far.line.connect(theirs)
    for _ in range(100):
        far.line.notify(ECHO, "x" * (1 << 20))  # type: ignore[arg-type]
    assert not far.line.up
    ours.close()


@pytest.mark.parametrize("sent", [_frame(b"note\n1", kind=1), _frame(b"", length=8 << 20)])
async def test_descriptors_that_belong_to_no_frame_end_the_link_and_are_closed(sent: bytes) -> None:
    ours, theirs = socket.socketpair()
    both = _file(ours.fileno()), _file(theirs.fileno())
    far = Far()
    far.line.connect(theirs)
    with contextlib.suppress(OSError):
        for _ in range(20):
            socket.send_fds(ours, [sent], [ours.fileno()] * 64)
            await asyncio.sleep(0.001)
    await until(lambda: not far.line.up)
    ours.close()
    assert _descriptors(*both) == 0


@pytest.mark.parametrize("sent", [_frame(b"note\n1", kind=1, count=1), _frame(b"nothing\nnull", count=1)])
async def test_unclaimed_descriptors_are_closed(ends: tuple[Line, Far], sent: bytes) -> None:
    ours, theirs = socket.socketpair()
    file = _file(ours.fileno())
    far = Far()
    far.line.connect(theirs)
    socket.send_fds(ours, [sent], [ours.fileno()])
    await until(lambda: bool(far.noted) or not far.line.up)
    assert _descriptors(file) == 1
    far.line.close()
    ours.close()


async def test_more_descriptors_than_a_frame_may_have_end_the_link_and_are_closed() -> None:
    ours, theirs = socket.socketpair()
    both = _file(ours.fileno()), _file(theirs.fileno())
    far = Far()
    far.line.connect(theirs)
    socket.send_fds(ours, [_frame(b"echo\n" + b'"x"', count=64)], [ours.fileno()] * 100)
    await until(lambda: not far.line.up)
    ours.close()
    assert _descriptors(*both) == 0


async def test_descriptors_of_an_unclaimed_answer_are_closed(ends: tuple[Line, Far], tmp_path: Path) -> None:
    near, _far = ends
    (tmp_path / "file").write_text("content")
    status = (tmp_path / "file").stat()
    given_up = asyncio.ensure_future(near.call(OPEN, str(tmp_path / "file")))
    await asyncio.sleep(0)
    given_up.cancel()
    await asyncio.gather(given_up, return_exceptions=True)
    await near.call(ECHO, "")
    assert _descriptors((status.st_dev, status.st_ino)) == 0


async def test_descriptors_of_frames_that_were_not_sent_are_closed_with_the_link(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("content")
    ours, theirs = socket.socketpair()
    near = Line(PartService({}, {}, _ERRORS))
    near.connect(ours)
    with (tmp_path / "file").open() as file:
        calls = [asyncio.ensure_future(near.call(ECHO, "x" * (1 << 20), [file.fileno()])) for _ in range(3)]
        await asyncio.sleep(0)
        near.close()
        await asyncio.gather(*calls, return_exceptions=True)
        theirs.close()  # together with the descriptors that were sent and not received
        assert _descriptors(_file(file.fileno())) == 1


async def test_a_link_works_after_any_amount_of_traffic(ends: tuple[Line, Far]) -> None:
    near, _far = ends
    text = "x" * (3 << 20)
    for _ in range(24):
        assert len((await near.call(ECHO, text))[0]) == len(text)


async def test_answers_that_are_not_read_are_bounded_by_their_number_too() -> None:
    ours, theirs = socket.socketpair()
    far = Far()
    far.line.connect(theirs)
    ours.setblocking(False)
    with contextlib.suppress(BlockingIOError):  # the other process does not read any more
        for _ in range(400):
            ours.send(_frame(b"echo\n" + json.dumps("x" * 20_000).encode()))
            for _ in range(20):
                await asyncio.sleep(0)
    assert 128 <= far.echoed < 180, "queued frames, and frames in the socket"
    far.line.close()
    ours.close()


async def test_answers_that_are_not_read_are_bounded_by_their_bytes_too() -> None:
    ours, theirs = socket.socketpair()
    far = Far()
    far.line.connect(theirs)
    for _ in range(100):
        ours.send(_frame(b"large\nnull"))
        for _ in range(20):
            await asyncio.sleep(0)
    assert 40 < far.large < 70, "of 300 KiB each: 16 MiB, and what the socket holds"
    far.line.close()
    ours.close()


class Short:
    """Socket whose first packets the operating system refuses, because the node has no descriptors, memory or watches
    left.
    """

    def __init__(self, sock: socket.socket, errors: Sequence[int]) -> None:
        self.left = list(errors)
        self.fileno, self._sendmsg = sock.fileno, sock.sendmsg

    def sendmsg(self, *arguments: Any) -> int:
        if self.left:
            raise OSError(self.left.pop(), "")
        return self._sendmsg(*arguments)


async def test_a_node_that_is_short_of_descriptors_memory_or_watches_delays_a_frame_and_loses_none() -> None:
    ours, theirs = socket.socketpair()
    short = Short(ours, sorted(EXHAUSTED))
    failed: list[None] = []
    outbox = Outbox(cast("socket.socket", short), lambda: failed.append(None), lambda: None)
    outbox.put(b"first", [os.open("/dev/null", os.O_RDONLY)], answer=False)
    outbox.put(b"second", [], answer=False)
    assert len(short.left) == len(EXHAUSTED) - 1, "a second frame is no reason to try again"
    await until(lambda: outbox.waiting == 0)
    assert not failed
    packet, descriptors, _flags, _address = socket.recv_fds(theirs, 64, 4)
    packet += theirs.recv(64) if packet == b"first" else b""
    assert (packet, len(descriptors)) == (b"firstsecond", 1)
    outbox.put(b"third", [], answer=False)
    short.left = [errno.ETOOMANYREFS]
    outbox.put(b"fourth", [os.open("/dev/null", os.O_RDONLY)], answer=False)
    outbox.close()
    await asyncio.sleep(0)
    os.close(descriptors[0])
    ours.close()
    theirs.close()


@given(st.lists(st.one_of(st.binary(max_size=300), st.builds(_frame, st.binary(max_size=80), kind=st.integers(0, 4)))))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_arbitrary_bytes_end_only_their_link(sent: list[bytes]) -> None:
    async def world() -> None:
        ours, theirs = socket.socketpair()
        both = _file(ours.fileno()), _file(theirs.fileno())
        far = Far()
        far.line.connect(theirs)
        for packet in sent:
            try:
                ours.send(packet)
            except OSError:
                break
            await asyncio.sleep(0)
        await asyncio.sleep(0)
        ours.close()
        await until(lambda: not far.line.up)
        assert _descriptors(*both) == 0

    asyncio.run(world())
