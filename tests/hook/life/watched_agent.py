"""Scripted agent of the random life: it grants and revokes at random, and compares the hook's reports with the launches
that the driver has accepted.

Guarantees that are checked:
- From DRAINED (or WANT) of a process to its next grant, the driver accepts no launch of the process and has no
  unfinished work of it. Exception: launches that a thread was inside of at that moment, by the process's own memory
  (`gate_state.py`), if the grace period since the last grant has passed (T2, token.h). DRAINED counts these launches.
- From a grant to its DRAINED, the driver accepts no more launches than DRAINED reports. Exception: launches of an
  earlier turn that a thread was still inside of when the grant was sent. They may pass before the hook reads the grant.
- After a metered grant is barred, each thread finishes at most the one launch that it was inside of.
- The ledger of memory stays consistent.
"""

from __future__ import annotations

import contextlib
import mmap
import random
import select
import socket
import struct
import time
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path

from doubles.gpus import KINDS, submitted_at
from hook.conftest import Tenant
from hook.world.gate_state import Gate, Passage
from hook.world.scripted_agent import Client, ScriptedAgent
from sharepod.protocol import ClientFrame, Drained, Grant, Limits, Recall, Want, encode

THREADS_MOST = 8
"""Most threads of a process, without threads that these threads start."""
OUTLASTED = "launches that outlasted the grace"
"""Name of a count: launches that a thread was inside of when the gate was closed, and still inside of when the hook no
longer waited for the thread.
"""
CAME_LATER = "launches that came with a later grant"
"""Name of a count: launches of `OUTLASTED` that the driver accepted after the next grant was sent and before the hook
had read that grant.
"""
_SOCKET_PID = struct.Struct("=iii")
_TO_MISUSED = 7 * 8
"""Bytes from `submitted` to `misused` in the double's counts of a process."""
_TO_BEHIND = (8 + len(KINDS)) * 8
"""Bytes from `submitted` to `behind` in the double's counts of a process."""
_BACK_TO_PID = 8
"""Bytes from the double's counts of a process for the first device back to its pid."""


class Counts:
    """Launches that the double of libcuda has accepted of each process, and its unfinished work."""

    def __init__(self, state: Path) -> None:
        self._path = state
        with state.open("rb") as file:
            self._page = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)

    def place(self, pid: int) -> int:
        """Return the offset of a process's counts. KeyError if the process has not used CUDA."""
        return submitted_at(self._path, pid)

    def launches(self, turn: Turn) -> int | None:
        """Return the number of accepted launches; None if the process has ended and another process uses its place."""
        count: int = struct.unpack_from("=Q", self._page, turn.place)[0]
        owner: int = struct.unpack_from("=I", self._page, turn.place - _BACK_TO_PID)[0]
        return count if owner == turn.pid else None

    def misused(self, pid: int) -> int:
        """Return how many calls of a process had a handle of an ended context, or came while the driver ended."""
        try:
            count: int = struct.unpack_from("=Q", self._page, self.place(pid) + _TO_MISUSED)[0]
        except KeyError:  # the process has not used CUDA
            return 0
        return count

    def unfinished(self, turn: Turn) -> str:
        """Describe the process's unfinished work on the device; empty if there is none. Launches that were accepted
        behind an unfinished wait do not count: the drain need not wait for them.
        """
        counts, before = self._counts(turn), None
        while counts != before:  # a launch behind a wait may end between the two readings of `_counts`
            counts, before = self._counts(turn), counts
        submitted, done, _, last_end, behind, behind_end = counts
        own = last_end == behind_end or behind > 0  # the last time slice may belong to a launch behind a wait
        left = 0 if own else max(last_end - time.monotonic_ns(), 0)
        due = submitted - done - behind
        return f"{due} launches to begin, {left} ns of others" if due > 0 or left else ""

    def _counts(self, turn: Turn) -> tuple[int, ...]:
        behind = struct.unpack_from("=QQ", self._page, turn.place + _TO_BEHIND)
        return struct.unpack_from("=QQQQ", self._page, turn.place) + behind

    def close(self) -> None:
        self._page.close()


@dataclass
class Turn:
    """State of one client's right to launch, as the agent knows it."""

    pid: int
    place: int
    """Offset of the process's counts in the double's state file."""
    held: Grant | None = None
    """Grant that the client holds, until it is drained."""
    before: int = 0
    """Number of launches when `held` was sent."""
    barred: int | None = None
    """Number of launches when `held` was barred; None: it is not barred."""
    settled: int | None = None
    """Number of launches when the client last reported that it does not hold the token; None while it may hold it."""
    claimed: int | None = None
    """Number of launches at the last DRAINED, by the client's report; None: it has sent no DRAINED over this
    connection.
    """
    gate: Gate | None = field(default=None, repr=False)
    """Gate of the process; None: the process has ended."""
    inside: dict[Passage, str] = field(default_factory=dict)
    """Launches that threads were inside of when `settled` was set, with a description of each thread. Kept while the
    next grant is sent. Empty if the grace period cannot have passed by then.
    """
    due: float | None = None
    """time.monotonic() at which the agent grants the token that the client has requested."""
    given_up: bool = False
    """True once the client closes this connection, and continues without an agent until it has opened another. Frames
    that it sent before may still arrive.
    """


class WatchedAgent(ScriptedAgent):
    """Scripted agent that grants every WANT after a while, and counts launches without a grant."""

    def __init__(self, tenant: Tenant, counts: Counts, chance: random.Random, hook: Path) -> None:
        self.seen: Counter[str] = Counter()
        self._hook = hook
        self._counts = counts
        self._chance = chance
        self._turns: dict[int, Turn] = {}
        self._granted_at: dict[int, float] = {}
        """Time of the last grant of each process (by pid), over any connection, as time.monotonic(). The grace period,
        which begins later, ends at least `grace_ms` after it."""
        super().__init__(tenant.directory, tenant.gpus)

    def step(self) -> None:
        """Send the grants that are due, renew or revoke held ones, and check every client's launches."""
        with self._changed:
            for client in [client for client in self.clients if not client.closed and id(client) in self._turns]:
                turn = self._turns[id(client)]
                if turn.given_up:
                    continue
                self._look(client, turn)
                try:
                    self._act(client, turn)
                except OSError:  # the process is ending
                    turn.due = None

    def vanish(self) -> None:
        super().vanish()
        self._turns.clear()

    def _act(self, client: Client, turn: Turn) -> None:
        chance = self._chance.random()
        if turn.due is not None and time.monotonic() >= turn.due:
            still = turn.gate.inside() if turn.gate is not None else []
            turn.inside = {passage: what for passage, what in turn.inside.items() if passage in still}
            turn.before = self._counts.launches(turn) or 0
            turn.due = turn.settled = turn.barred = None
            quantum_ms, metered = self._chance.choice([1, 5, 20, 50]), self._chance.random() < 0.5
            announce, concurrent, self.hints.co_running = (self._chance.random() < 0.5 for _ in range(3))
            grant = self.next_grant(quantum_ms, metered=metered, concurrent=concurrent)
            turn.held = replace(grant, announce=announce)
            self._granted_at[turn.pid] = time.monotonic()
            self.send(client, turn.held)
            self.seen["grants"] += 1
        elif turn.held is not None and chance < 0.01:
            self.revoke(client, turn.held)
        elif turn.held is not None and chance < 0.05:
            self.send(client, _renewed(turn.held, self._chance.choice([5, 20])))
            self.seen["renewals"] += 1
        elif turn.held is not None and turn.held.metered and turn.barred is None and chance < 0.06:
            self.hints.bar(turn.held.grant_id)
            turn.barred = self._counts.launches(turn)
            self.seen["bars"] += 1
        elif chance > 0.999:
            self._send_nonsense(client)
        elif chance > 0.995:
            self.recall(client, 0, self._chance.randrange(1 << 24))

    def _send_nonsense(self, client: Client) -> None:
        """Send an invalid frame: the hook closes the connection and opens another."""
        sound = bytearray(encode(Limits(self.gpus, self.grace_ms)))
        match self._chance.randrange(4):
            case 0:
                packet = self._chance.randbytes(self._chance.randrange(1, 400))
            case 1:
                packet = bytes(sound[: self._chance.randrange(1, len(sound))])
            case 2:
                packet = encode(Recall(self._chance.randrange(len(self.gpus), 1 << 32), 1 << 60))
            case _:
                at = sound.index(self.gpus[0].uuid) - 8  # offset of the number of GPUs
                packet = bytes(sound[:at] + self._chance.randbytes(4) + sound[at + 4 :])
        self._turns[id(client)].given_up = True
        client.socket.send(packet)
        self.seen["nonsense"] += 1

    def _look(self, client: Client, turn: Turn) -> None:
        now = self._counts.launches(turn)
        if turn.settled is None or now is None or now == turn.settled:
            return
        if _hung_up(client):  # the client continues without an agent after this
            turn.given_up = True
            return
        late = min(now - turn.settled, len(turn.inside))
        if turn.claimed is not None:
            late = min(late, max(0, turn.claimed - turn.settled))
        if late > 0:
            self.seen[OUTLASTED] += late
            print(f"{late} launches outlasted the grace: {turn}", flush=True)
            _forget(turn, late)
        if now > turn.settled + late:
            self._accuse(turn, now - turn.settled - late, "since it was drained")
        turn.settled = now

    def _accuse(self, turn: Turn, launches: int, when: str) -> None:
        self.seen["launches without a token"] += launches
        print(f"{launches} launches {when}: {turn}", flush=True)

    def _handle(self, client: Client, frame: ClientFrame) -> None:
        if isinstance(frame, Want | Drained):
            self._cross(client)
            self._hear(client, frame)
        try:
            super()._handle(client, frame)
        except AssertionError:
            self.seen["broken ledgers"] += 1

    def _cross(self, client: Client) -> None:
        """Sometimes renew the grant of a client that has just drained, as if the agent had not read DRAINED yet."""
        turn = self._turns.get(id(client))
        if turn is not None and turn.held is not None and not turn.given_up and self._chance.random() < 0.1:
            with contextlib.suppress(OSError):
                self.send(client, _renewed(turn.held, 20))
            self.seen["crossings"] += 1

    def _hear(self, client: Client, frame: Want | Drained) -> None:
        if id(client) not in self._turns:
            pid = _pid_of(client)
            with contextlib.suppress(KeyError):  # the process has ended since then
                self._turns[id(client)] = Turn(pid, self._counts.place(pid), gate=self._gate(pid))
        turn = self._turns.get(id(client))
        if turn is None or turn.given_up:
            return
        self._look(client, turn)
        inside = turn.gate.inside() if turn.gate is not None else []
        now = self._counts.launches(turn)
        waited = time.monotonic() - self._granted_at.get(turn.pid, 0) >= self.grace_ms / 1000
        turn.given_up |= _hung_up(client)
        if now is None or turn.given_up:
            return
        if isinstance(frame, Drained) and turn.held is not None and frame.grant_id == turn.held.grant_id:
            late = waited and (inside or turn.inside)
            beyond = now - turn.before - frame.launches
            if beyond > 0 and (later := min(beyond, len(turn.inside))):
                self.seen[CAME_LATER] += later
                print(f"{later} launches of an earlier turn came with {frame}: {turn}", flush=True)
                _forget(turn, later)
                turn.before += later
                beyond -= later
            if beyond > 0:
                self._accuse(turn, beyond, f"beyond {frame}")
            elif turn.barred is not None and now > turn.barred + 2 * THREADS_MOST:
                self.seen["launches under a barred grant"] += now - turn.barred
                print(f"{now - turn.barred} launches under a barred grant: {turn}", flush=True)
            elif (unfinished := self._counts.unfinished(turn)) and late:
                self.seen[OUTLASTED] += 1
                print(f"{unfinished} of a launch that outlasted the grace: {turn}", flush=True)
            elif unfinished:
                self.seen["drained too early"] += 1
                print(f"{unfinished} at {frame}: {turn}", flush=True)
            turn.claimed = turn.before + frame.launches
            turn.held = None
        if turn.held is None:
            turn.settled = now
            turn.inside = {at: turn.gate.describe(at.thread) for at in inside if turn.gate is not None and waited}
            if isinstance(frame, Want) or frame.wanting:
                turn.due = time.monotonic() + self._chance.choice([0.0, 0.0, 0.002, 0.02])

    def _gate(self, pid: int) -> Gate | None:
        try:
            return Gate(pid, self._hook)
        except (OSError, LookupError):  # the process has ended
            return None


def _forget(turn: Turn, launches: int) -> None:
    """Remove the first `launches` entries of `turn.inside`, because the driver has accepted so many launches."""
    turn.inside = dict(list(turn.inside.items())[launches:])


def _renewed(grant: Grant, quantum_ms: float) -> Grant:
    return replace(grant, quantum_ns=int(quantum_ms * 1e6), announce=False, renews=True)


def _pid_of(client: Client) -> int:
    credentials = client.socket.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _SOCKET_PID.size)
    pid: int = _SOCKET_PID.unpack(credentials)[0]
    return pid


def _hung_up(client: Client) -> bool:
    """Return whether the client has closed the connection, even if frames of it have not been read yet."""
    waiting = select.poll()
    try:
        waiting.register(client.socket, 0)
    except ValueError:  # this side has closed the connection as well
        return True
    return bool(waiting.poll(0))
