"""Prepared hand-offs: the next grant is decided before the holder drains. The event loop's wait sends it once the
holder has DRAINED.

Guarantees:
- The prepared hand-off of a GPU is dropped as soon as the GPU's tenants change in any way, or the socket of the holder
  or of its successor is closed. The hand-off is prepared again before the loop waits.
- On a loop other than the agent's own loop, no hand-off is prepared.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from typing import NamedTuple, Protocol

from sharepod import protocol
from sharepod.agent.on_time import LoopHandOffs, Made, Order
from sharepod.timeshare import PreparedHandOff


class SocketClient(Protocol):
    """Connection of one process, as the loop's wait uses it."""

    closing: Callable[[], None] | None
    """Called before the socket is closed, to drop hand-offs that use it."""

    def fileno(self) -> int:
        """Return the descriptor of the connection's socket. Negative if it is closed."""

    def packet(self, frame: protocol.AgentFrame) -> bytes:
        """Return the encoded frame."""

    def taken(self) -> None:
        """Count a frame of this client, which the loop's wait has read, against its rate limit."""


class Ready(NamedTuple):
    """Prepared hand-off of one GPU."""

    holder: SocketClient
    successor: SocketClient
    turns: tuple[PreparedHandOff, ...]
    """Variants of the hand-off: for a DRAINED frame that asks for another turn, for a frame without that, or both."""
    grants: tuple[protocol.Grant, ...]
    """Grant frame to the successor, for each of `turns`."""


class PreparedHandOffs:
    """Prepared hand-offs of a node, on the running loop.

    Args:
        clock: Monotonic clock in nanoseconds.
        prepare: Decides the next hand-off of a GPU. None if it cannot be prepared.
        made: Called for each hand-off that was carried out, with its preparation, the variant used, and the moments of
        DRAINED and grant.
        reported: Called once after `made` was called for all hand-offs of one wait.
    """

    def __init__(
        self,
        clock: Callable[[], int],
        prepare: Callable[[str], Ready | None],
        made: Callable[[Ready, PreparedHandOff, int, int], None],
        reported: Callable[[], object],
    ) -> None:
        self._on_time = clock is time.monotonic_ns
        self._prepare_one = prepare
        self._tell = made
        self._reported = reported
        self._loop: LoopHandOffs | None = None
        self._places: dict[str, int] = {}
        """Number of each GPU in the loop's table of prepared hand-offs, by UUID."""
        self._gpus: list[str] = []
        """UUIDs by that number."""
        self._dropping: list[Callable[[], None]] = []
        self._ready: list[Ready | None] = []
        self._changed: dict[str, None] = {}
        """GPUs whose next hand-off must be decided, in the order in which they changed."""

    def change(self, gpus: Iterable[str]) -> None:
        """Drop the prepared hand-offs of these GPUs. Call it before their tenants change."""
        if self._loop is None and not self._claimed():
            return
        assert self._loop is not None, "it was claimed"
        for gpu in gpus:
            place = self._places.get(gpu)
            if place is not None:
                self._loop.drop(place)
            self._changed[gpu] = None
        self._loop.stale = True

    def change_all(self) -> None:
        """Drop the prepared hand-offs of all GPUs."""
        self.change(self._gpus)

    def end_by(self, moment: int | None) -> None:
        """Let the loop carry out no hand-off after `moment`, when the scheduler acts. None: no bound."""
        if self._loop is not None:
            self._loop.end_by(moment)

    def close(self) -> None:
        """Stop preparing hand-offs."""
        if self._loop is not None:
            self._loop.release()
            self._loop = None
        self._on_time = False

    def _claimed(self) -> bool:
        loop: LoopHandOffs | None = None
        if self._on_time:
            loop = getattr(asyncio.get_running_loop(), "hand_offs", None)
        if loop is None or not loop.claim(self._prepare, self._made, self._reported):
            self._on_time = False
            return False
        self._loop = loop
        return True

    def _prepare(self) -> None:
        assert self._loop is not None, "its loop calls this"
        several = len(self._changed) > 1
        while self._changed:
            gpu = next(iter(self._changed))
            del self._changed[gpu]
            ready = self._prepare_one(gpu)
            if ready is not None:
                self._put(gpu, ready)
            if several and self._loop.look():
                # the loop has carried out a hand-off: report it before preparing the rest
                self._loop.stale = bool(self._changed)
                return

    def _put(self, gpu: str, ready: Ready) -> None:
        place = self._place_of(gpu)
        holder, socket = ready.holder.fileno(), ready.successor.fileno()
        if place is None or holder < 0 or socket < 0:
            return
        wants: Order | None = None
        wants_not: Order | None = None
        for turn, grant in zip(ready.turns, ready.grants, strict=True):
            order = Order(socket, ready.successor.packet(grant), turn.since, turn.until)
            if turn.wanting:
                wants = order
            else:
                wants_not = order
        self._ready[place] = ready
        ready.holder.closing = ready.successor.closing = self._dropping[place]
        assert self._loop is not None, "it was claimed"
        self._loop.put(place, holder, ready.turns[0].held_id, (wants, wants_not))

    def _place_of(self, gpu: str) -> int | None:
        place = self._places.get(gpu)
        if place is None:
            place = len(self._gpus)
            if place == LoopHandOffs.PLACES:
                return None
            self._places[gpu] = place
            self._gpus.append(gpu)
            self._ready.append(None)
            self._dropping.append(lambda: self.change((gpu,)))
        return place

    def _made(self, made: Made) -> None:
        ready = self._ready[made.place]
        assert ready is not None, "it was prepared"
        self._ready[made.place] = None
        [turn] = [turn for turn in ready.turns if turn.wanting == made.wanting]
        ready.holder.taken()
        self.change((turn.gpu,))
        self._tell(ready, turn, made.seen_at, made.sent_at)
