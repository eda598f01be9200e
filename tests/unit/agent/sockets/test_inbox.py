"""Reading more frames from a tenant's clients than one turn of the loop can handle."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator

import pytest
from sharepod import protocol
from sharepod.agent.sockets.frame_budget import FrameBudget
from sharepod.agent.sockets.hook_connection import frame_of
from sharepod.agent.sockets.inbox import Inbox, Received
from unit.agent.client import until


class NoTime(FrameBudget):
    """Budget whose turns are over at once, so that each turn handles one frame."""

    def begin_turn(self) -> float:
        return 0.0


class Reader:
    """Reading end of a connection, which stores the frames that it gets."""

    streak = longest_streak = 0

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.frames: list[protocol.ClientFrame] = []
        self.given = asyncio.Event()

    def fileno(self) -> int:
        return self.sock.fileno()

    def take(self, received: Received) -> None:
        self.frames.append(frame_of(received))
        self.given.set()

    def answer(self, frame: protocol.ClientFrame) -> None:
        raise AssertionError(frame)


class Pair:
    """Connection whose end `client` sends, and whose end `reader` is read by the inbox."""

    def __init__(self) -> None:
        self.client, agent = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.reader = Reader(agent)

    def send(self, *grants: int) -> None:
        for grant in grants:
            self.client.send(protocol.encode(protocol.Drained(grant)))

    def close(self) -> None:
        self.client.close()
        self.reader.sock.close()


@pytest.fixture
async def inbox() -> AsyncIterator[Inbox]:
    inbox = Inbox("a", NoTime(1000), per_s=1000, on_flood=lambda sender: None)
    yield inbox
    inbox.close()


async def test_frames_that_a_turn_has_no_time_for_are_handled_in_later_turns(inbox: Inbox) -> None:
    one, other = Pair(), Pair()
    for pair in (one, other):
        inbox.add(pair.reader)
    one.send(1, 2, 3)
    other.send(4)
    await until(lambda: len(one.reader.frames) + len(other.reader.frames) == 4)
    assert one.reader.frames == [protocol.Drained(grant) for grant in (1, 2, 3)]
    assert other.reader.frames == [protocol.Drained(4)]
    for pair in (one, other):
        pair.close()


async def test_frames_of_a_connection_that_has_ended_are_not_taken_for_the_next_ones(inbox: Inbox) -> None:
    """A connection closes while frames of it are still queued in the inbox. The next connection gets its descriptor
    number, but must not get its frames."""
    removed, following = Pair(), Pair()
    inbox.add(removed.reader)
    removed.send(1, 2, 3)
    await removed.reader.given.wait()
    number = removed.reader.fileno()
    inbox.remove(removed.reader)
    removed.close()
    os.dup2(following.reader.fileno(), number)
    following.reader.sock.close()
    following.reader.sock = socket.socket(fileno=number)
    inbox.add(following.reader)
    following.send(9)
    await until(lambda: bool(following.reader.frames))
    assert following.reader.frames == [protocol.Drained(9)]
    assert removed.reader.frames == [protocol.Drained(1)]
    following.close()
