"""Hand-offs that the event loop's wait carries out, with real sockets and without an event loop."""

from __future__ import annotations

import asyncio
import contextlib
import os
import selectors
import socket
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
from sharepod import protocol
from sharepod.agent import on_time
from sharepod.agent.on_time import LoopHandOffs, Made, OnTimeLoop, OnTimeSelector, Order

S = 1_000_000_000
GRANT = protocol.encode(protocol.Grant(8, 30_000_000, 1, True))
OTHER = protocol.encode(protocol.Grant(8, 90_000_000, 1, True))


@dataclass
class Pair:
    """Connection of a process: the agent's end and the process's end."""

    ours: socket.socket
    theirs: socket.socket

    def sends(self, frame: protocol.Frame | bytes) -> None:
        self.theirs.send(frame if isinstance(frame, bytes) else protocol.encode(frame))

    def hears(self) -> list[bytes]:
        """Return the packets that the process has received."""
        return packets(self.theirs)


@dataclass
class World:
    """Selector that waits for the holders of two GPUs. `pairs`: holder and successor of GPU 0, then of GPU 1."""

    selector: OnTimeSelector
    pairs: list[Pair]
    made: list[Made] = field(default_factory=list)
    calls: list[str] = field(default_factory=list)

    def take(self, made: Made) -> None:
        self.made.append(made)
        self.calls.append(f"made {made.place}")

    def put(self, place: int = 0, since: int = 0, until: int = 2**62, *, wants_not: bool = True) -> None:
        """Prepare the hand-off of grant 7 from a GPU's holder to its successor, valid from `since` to `until` (ns).
        `wants_not`: also for a holder that wants no more time.
        """
        holder, successor = self.pairs[2 * place : 2 * place + 2]
        orders = [Order(successor.ours.fileno(), packet, since, until) for packet in (GRANT, OTHER)]
        self.hand_offs.put(place, holder.ours.fileno(), 7, (orders[0], orders[1] if wants_not else None))

    def wait(self) -> list[int]:
        """Wait once. Return the holders whose sockets are ready."""
        return [key.data for key, _ in self.selector.select(0.01)]

    @property
    def hand_offs(self) -> LoopHandOffs:
        return self.selector.hand_offs


def packets(sock: socket.socket) -> list[bytes]:
    found: list[bytes] = []
    while True:
        try:
            found.append(sock.recv(4096, socket.MSG_DONTWAIT))
        except BlockingIOError:
            return found


@pytest.fixture
def world() -> Iterator[World]:
    pairs = [Pair(*socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)) for _ in range(4)]
    with OnTimeSelector() as selector:
        world = World(selector, pairs)
        assert selector.hand_offs.claim(
            lambda: world.calls.append("prepare"), world.take, lambda: world.calls.append("reported")
        )
        assert not selector.hand_offs.claim(print, print, print), "they are another's"
        for place in (0, 1):
            selector.register(pairs[2 * place].ours, selectors.EVENT_READ, place)
        yield world
    for pair in pairs:
        pair.ours.close()
        pair.theirs.close()


@pytest.mark.promise("time-prepared")
@pytest.mark.parametrize("wanting", [True, False])
def test_the_successor_is_granted_when_the_holder_drains_before_anything_of_python_runs(
    world: World, wanting: bool
) -> None:
    world.put()
    begun = time.monotonic_ns()
    world.pairs[0].sends(protocol.Drained(7, wanting=wanting, idle=not wanting))
    assert world.wait() == [], "nothing is left to be read"
    assert world.pairs[1].hears() == [GRANT if wanting else OTHER]
    [made] = world.made
    assert (made.place, made.wanting) == (0, wanting)
    assert begun <= made.seen_at <= made.sent_at <= time.monotonic_ns()
    assert world.calls == ["made 0", "reported"]
    world.pairs[0].sends(protocol.Drained(7, wanting=wanting))
    assert world.wait() == [0], "it was handed on once"
    assert world.pairs[1].hears() == []


FRAMES = {
    "another grant": protocol.encode(protocol.Drained(6, wanting=True)),
    "unknown flags": protocol.encode(protocol.Drained(7))[:-8] + b"\x05\x00\x00\x00" + bytes(4),
    "another type": protocol.encode(protocol.Draining(7, 5)),
    "a longer packet": protocol.encode(protocol.Drained(7, wanting=True)) + b"\x00",
    "a shorter packet": protocol.encode(protocol.Drained(7, wanting=True))[:-1],
    "another size": protocol.encode(protocol.Drained(7))[:8] + b"\x29" + protocol.encode(protocol.Drained(7))[9:],
    "another magic": b"\x00" + protocol.encode(protocol.Drained(7, wanting=True))[1:],
    "an unknown version": protocol.encode(protocol.Drained(7, wanting=True), version=9),
}


@pytest.mark.parametrize("packet", FRAMES.values(), ids=FRAMES)
def test_what_is_no_drained_of_the_grant_is_left_in_the_socket(world: World, packet: bytes) -> None:
    world.put()
    world.pairs[0].sends(packet)
    world.pairs[0].sends(protocol.Drained(7, wanting=True))
    assert world.wait() == [0]
    assert world.pairs[1].hears() == []
    assert packets(world.pairs[0].ours) == [packet, protocol.encode(protocol.Drained(7, wanting=True))]
    assert world.made == []


def test_an_order_is_carried_out_in_its_window_alone(world: World) -> None:
    drained, now = protocol.Drained(7, wanting=True), time.monotonic_ns()
    world.pairs[0].sends(drained)
    for since, until, end in ((now + 60 * S, 2**62, None), (0, now, None), (0, 2**62, now)):
        world.put(since=since, until=until)
        world.hand_offs.end_by(end)
        assert world.wait() == [0]
        assert world.pairs[1].hears() == []
    world.put()
    world.hand_offs.end_by(None)
    assert world.wait() == []
    assert world.pairs[1].hears() == [GRANT]


def test_a_form_of_drained_for_which_nothing_is_prepared_is_left(world: World) -> None:
    world.put(wants_not=False)
    world.pairs[0].sends(protocol.Drained(7))
    assert world.wait() == [0]
    assert world.pairs[1].hears() == []


def test_what_was_dropped_is_not_carried_out(world: World) -> None:
    world.put()
    world.hand_offs.drop(0)
    world.pairs[0].sends(protocol.Drained(7))
    assert world.wait() == [0]
    assert world.pairs[1].hears() == []
    world.put()
    world.hand_offs.release()
    assert world.wait() == [0]
    assert world.pairs[1].hears() == []


@pytest.mark.parametrize("full", [True, False], ids=["full", "closed"])
def test_where_the_grant_cannot_be_sent_nothing_was_handed_on(world: World, full: bool) -> None:
    world.put()
    if full:
        world.pairs[1].ours.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            while True:
                world.pairs[1].ours.send(bytes(1024))
    else:
        world.pairs[1].theirs.close()
    world.pairs[0].sends(protocol.Drained(7))
    assert world.wait() == [0]
    assert world.made == []
    assert packets(world.pairs[0].ours) == [protocol.encode(protocol.Drained(7))]


def test_python_is_told_of_several_in_the_order_in_which_they_drained(world: World) -> None:
    """A hand-off that is carried out while Python handles the report of an earlier one must be reported after it."""
    for place in (0, 1):
        world.put(place)
    world.pairs[2].sends(protocol.Drained(7))
    taken = world.take

    def take(made: Made) -> None:
        if made.place == 1:
            world.pairs[0].sends(protocol.Drained(7))
        taken(made)

    world.hand_offs._made = take
    assert world.wait() == []
    assert world.calls == ["made 1", "made 0", "reported"]
    assert world.pairs[1].hears() == world.pairs[3].hears() == [OTHER]


def test_a_wait_does_not_begin_while_a_hand_off_is_to_be_reported(world: World) -> None:
    world.put()
    world.pairs[0].sends(protocol.Drained(7))
    assert world.hand_offs.look()
    assert world.made == []
    assert world.selector.select(None) == []
    assert len(world.made) == 1


@pytest.mark.parametrize("timeout", [None, 5.0, 0.01])
def test_after_a_hand_off_the_wait_goes_on_until_a_timer_ends_it(world: World, timeout: float | None) -> None:
    """After a hand-off Python must soon take the report. The wait's own timeout has a resolution of 1 ms, so a timer
    ends the wait.
    """
    world.put()
    world.pairs[0].sends(protocol.Drained(7))
    assert world.selector.select(timeout) == []
    assert len(world.made) == 1
    assert int.from_bytes(os.read(world.selector._timer, 8), sys.byteorder) == 1, "BlockingIOError: it was never set"


def test_hand_offs_are_prepared_before_a_wait_where_something_has_changed(world: World) -> None:
    world.wait()
    world.hand_offs.stale = True
    world.wait()
    world.wait()
    assert world.calls == ["prepare"]


async def _fails(errors: list[object]) -> None:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, OnTimeLoop)
    loop.set_exception_handler(lambda _loop, context: errors.append(context["exception"]))
    hand_offs = loop.hand_offs
    with contextlib.ExitStack() as stack:
        pairs = [Pair(*socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)) for _ in range(2)]
        for pair in pairs:
            stack.enter_context(pair.ours)
            stack.enter_context(pair.theirs)
        assert hand_offs.claim(lambda: 1 / 0, lambda _made: 1 / 0, lambda: None)
        order = Order(pairs[1].ours.fileno(), GRANT, 0, 2**62)
        hand_offs.put(0, pairs[0].ours.fileno(), 7, (order, order))
        hand_offs.stale = True
        await asyncio.sleep(0.001)
        assert len(errors) == 1
        pairs[0].sends(protocol.Drained(7))
        loop.add_reader(pairs[0].ours, lambda: None)
        await asyncio.sleep(0.001)
        assert pairs[1].hears() == [], "a failure cancels the prepared hand-off"
        hand_offs.put(0, pairs[0].ours.fileno(), 7, (order, order))
        await asyncio.sleep(0.001)
        assert pairs[1].hears() == [GRANT]
        loop.remove_reader(pairs[0].ours)


def test_a_failed_hand_off_ends_no_event_loop() -> None:
    errors: list[object] = []
    on_time.run(_fails(errors))
    assert [type(error) for error in errors] == [ZeroDivisionError, ZeroDivisionError]
