"""Prepared hand-offs change nothing: for any events of tenants, grants, their moments and all accounts are the same as
without preparation.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import replace

import pytest
from sharepod import protocol
from sharepod.agent.on_time import LoopHandOffs, Made, Order
from sharepod.agent.shares.tokens import Tokens
from sharepod.timeshare import Parameters

MS = 1_000_000
GPUS = ("g0", "g1")
LIVES, STEPS = 40, 150


class Process:
    """Client of the agent that stores the frames that it receives."""

    def __init__(self, pid: int, tenant: str, clock: Callable[[], int]) -> None:
        self.pid, self.tenant = pid, tenant
        self.version = protocol.VERSION_MAX
        self.alive = True
        self.frames: list[protocol.AgentFrame] = []
        self.pulse = protocol.Pulse(0, 0, 0)
        self.heartbeat: protocol.Heartbeat | None = protocol.Heartbeat(lambda: self.pulse)
        self.closing: Callable[[], None] | None = None
        self.clock = clock
        self.held: int | None = None
        """Id of the grant that the process holds or has not drained yet; None: there is none."""

    def send(self, frame: protocol.AgentFrame) -> None:
        """Receive a frame (method of `TokenClient`)."""
        if isinstance(frame, protocol.Grant) and not (frame.renews and frame.grant_id != self.held):
            self.held = frame.grant_id
        self.frames.append(frame)

    def fileno(self) -> int:
        """Return a number that stands for the descriptor of its socket, unique while it is connected."""
        return self.pid if self.alive else -1

    def packet(self, frame: protocol.AgentFrame) -> bytes:
        """Return the packet that the loop would send for the frame."""
        return protocol.encode(frame)

    def taken(self) -> None:
        """Do nothing: the count of sent frames is not tested."""

    def beat(self, ends_in_ns: int) -> None:
        """Write the pulse page: the held grant, and that its work ends in `ends_in_ns`."""
        now = self.clock()
        self.pulse = protocol.Pulse(self.held or 0, now + ends_in_ns if self.held else 0, now)


class Wait(LoopHandOffs):
    """The loop's prepared hand-offs on a test clock: the work of native/hand_offs.c without real sockets."""

    def __init__(self) -> None:
        super().__init__()
        self.orders: dict[int, tuple[int, int, tuple[Order | None, Order | None]]] = {}
        self.end: int | None = None
        self.made = 0

    def end_by(self, moment: int | None) -> None:
        """Let all windows (the intervals in which prepared hand-offs are valid) end at this moment at the latest."""
        self.end = moment

    def put(self, place: int, holder: int, grant_id: int, orders: tuple[Order | None, Order | None]) -> None:
        """Store a prepared hand-off at this place of the table."""
        self.orders[place] = holder, grant_id, orders

    def drop(self, place: int) -> None:
        self.orders.pop(place, None)

    def look(self) -> bool:
        """Carry out nothing: in a test each holder drains by a call of `drained`."""
        return False

    def edges(self) -> list[int]:
        """Prepare all hand-offs that can be prepared. Return the moments at which their windows begin or end."""
        if self.stale:
            self.prepare()
        windows = [each for _, _, orders in self.orders.values() for each in orders if each is not None]
        return [edge for each in windows for edge in (each.since, each.until)]

    def drained(self, now: int, process: Process, others: dict[int, Process], *, wanting: bool) -> bool:
        """Carry out the prepared hand-off of a holder that drains. Return False if none was prepared."""
        if self.stale:
            self.prepare()
        for place, (holder, grant_id, orders) in list(self.orders.items()):
            order = orders[0 if wanting else 1]
            if holder != process.fileno() or grant_id != process.held or order is None:
                continue
            if order.since <= now <= order.until and (self.end is None or now <= self.end):
                del self.orders[place]
                others[order.socket].send(protocol.parse_agent(order.packet))
                assert self._made is not None
                assert self._reported is not None
                self._made(Made(place, wanting, now, now))
                self._reported()
                self.made += 1
                return True
        return False


class World:
    """Tenants with their processes, and the tokens that they get."""

    def __init__(self, *, prepares: bool) -> None:
        self.now = 1
        self.tokens = Tokens(Parameters(), lambda: self.now)
        self.wait = Wait()
        if prepares:
            prepared = self.tokens._prepared
            assert self.wait.claim(prepared._prepare, prepared._made, prepared._reported)
            prepared._loop = self.wait
        self.processes: dict[int, Process] = {}
        self.barred: list[str] = []

    def set(self, name: str, gpus: tuple[str, ...], request: int, limit: int, interactive: bool) -> None:
        self.tokens.set_tenant(
            name,
            gpus,
            request_milli=request,
            limit_milli=limit,
            interactive=interactive,
            contended=lambda _: None,
            bar=lambda _id: self.barred.append(name),
        )

    def start(self, pid: int, name: str) -> None:
        self.processes[pid] = Process(pid, name, lambda: self.now)

    def drain(self, process: Process, *, wanting: bool) -> None:
        """Report that a process has drained: by a prepared hand-off if there is one, else by its frame."""
        held, process.held = process.held, process.held
        assert held is not None
        process.beat(0)
        if not self.wait.drained(self.now, process, self.processes, wanting=wanting):
            process.held = None
            self.tokens.drained(process.tenant, process, protocol.Drained(held, wanting=wanting))
        elif process.held == held:
            process.held = None

    def announce(self, process: Process, ends_in_ns: int) -> None:
        """Report when a process's last work ends."""
        assert process.held is not None
        self.tokens.draining(process.tenant, process, protocol.Draining(process.held, ends_in_ns))

    def advance(self, moment: int) -> None:
        self.now = max(self.now, moment)

    def lose(self, pid: int, *, alive: bool) -> None:
        """Close the connection of a process. `alive`: the process still runs."""
        process = self.processes.pop(pid)
        if process.closing is not None:
            process.closing()
        process.alive = False
        self.tokens.connection_lost(process.tenant, process, alive=alive)

    def seen(self) -> list[list[protocol.AgentFrame]]:
        """Return the frames of all processes, with grants numbered in the order in which each process got them."""
        seen: list[list[protocol.AgentFrame]] = []
        for process in self.processes.values():
            numbers: dict[int, int] = {}
            frames: list[protocol.AgentFrame] = []
            for frame in process.frames:
                if isinstance(frame, protocol.Grant | protocol.Revoke):
                    frame = replace(frame, grant_id=numbers.setdefault(frame.grant_id, len(numbers)))
                frames.append(frame)
            seen.append(frames)
        return seen

    def books(self, names: list[str]) -> list[object]:
        """Return all accounts of the tenants' time, to compare the two worlds."""
        tokens = self.tokens
        return [
            self.barred,
            sum(tokens.hand_offs.counts),
            tokens._looks.pending,
            tokens._looks._at,
            [tokens.gpu_time(gpu) for gpu in GPUS],
            [
                (
                    tokens.usage(name),
                    tokens.snapshot(name),
                    tokens.turns(name),
                    tokens.waited_ns(name),
                    tokens.waits(name).sum_ns,
                    sorted(tokens._tokens[name].sent_at.values()),
                    tokens._tokens[name].ends_at,
                )
                for name in names
            ],
        ]


class Life:
    """One random life of tenants, played in two worlds. In one of them hand-offs are prepared."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        self.plain, self.ahead = self.worlds = World(prepares=False), World(prepares=True)
        self.tenants: dict[str, tuple[str, ...]] = {}
        self._pids = iter(range(1, 10_000))
        gangs, several = rng.random() < 0.15, rng.random() < 0.3
        self._span = rng.choice((0.2, 2, 20)) * MS
        for name in "abcde"[: rng.randint(2, 5)]:
            whole = gangs and rng.random() < 0.4
            self.tenants[name] = GPUS if whole else (rng.choice((GPUS[0], GPUS[0], GPUS[1])),)
            self._rates(name)
            for _ in range(rng.choice((1, 1, 2)) if several else 1):
                self._begin(name)

    def step(self) -> None:
        """Advance to a due step or to an edge of a window, and play one event."""
        rng, now = self.rng, self.plain.now
        moment = now + rng.randint(1, max(2, int(self._span * rng.choice((0.01, 1, 1, 5)))))
        if rng.random() < 0.3:
            edges = [edge for edge in self.ahead.wait.edges() if now <= edge <= now + 1500 * MS]
            moment = rng.choice(edges) if edges else moment
        due = self.plain.tokens._due
        assert self.ahead.tokens._due == due
        stalls = rng.random() < 0.02
        if due is not None and due <= moment and not stalls:
            self._both(lambda world: world.advance(due))
            self._both(lambda world: world.tokens._pump())
            return
        self._both(lambda world: world.advance(moment + (30 * MS if stalls else 0)))
        if self.plain.processes:
            self._happen()
        assert self.ahead.seen() == self.plain.seen()
        assert self.ahead.books(list(self.tenants)) == self.plain.books(list(self.tenants))

    def _happen(self) -> None:
        rng = self.rng
        what, flag, ns = rng.random(), rng.random() < 0.6, rng.randint(0, 4 * MS)
        holders = [pid for pid, process in self.plain.processes.items() if process.held is not None]
        drains = (what < 0.5 or 0.7 <= what < 0.76) and bool(holders)
        pid = rng.choice(holders if drains else list(self.plain.processes))
        name = self.plain.processes[pid].tenant
        if what < 0.5 and drains:
            self._both(lambda world: world.drain(world.processes[pid], wanting=flag))
        elif 0.7 <= what < 0.76 and drains:
            self._both(lambda world: world.announce(world.processes[pid], ns))
        elif what < 0.76:
            self._both(lambda world: world.tokens.want(name, world.processes[pid]))
        elif what < 0.84:
            self._both(lambda world: world.processes[pid].beat(ns))
        elif what < 0.87:
            self._both(lambda world: world.tokens._listen(flag))
        elif what < 0.9:
            self._both(lambda world: world.lose(pid, alive=flag))
            if flag:
                self._both(lambda world: world.tokens.exited(name, pid))
            self._begin(name)
        elif what < 0.93:
            self._rates(name)
        elif what < 0.95:
            shut = None if flag else frozenset({rng.choice(GPUS)})
            self._both(lambda world: world.tokens.set_open(shut))
        elif what < 0.97:
            self._both(lambda world: world.tokens.surcharge(name, 5 * ns))

    def _both(self, act: Callable[[World], object]) -> None:
        for world in self.worlds:
            act(world)

    def _rates(self, name: str) -> None:
        rng = self.rng
        request, interactive = rng.choice((0, 100, 100, 300, 500)), rng.random() < 0.2
        limit = rng.choice((1000, 1000, max(request, 400)))
        self._both(lambda world: world.set(name, self.tenants[name], request, limit, interactive))

    def _begin(self, name: str) -> None:
        pid = next(self._pids)
        self._both(lambda world: world.start(pid, name))
        self._both(lambda world: world.tokens.set_connected(name, connected=True))


def live(seed: int) -> int:
    """Play the same events in two worlds and compare them. Return the number of prepared hand-offs that were
    carried out."""
    life = Life(seed)
    for _ in range(STEPS):
        life.step()
    for world in life.worlds:
        world.tokens.close()
    return life.ahead.wait.made


@pytest.mark.promise("time-prepared")
async def test_a_life_with_prepared_hand_offs_is_the_life_without_them() -> None:
    failed: list[dict[str, object]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _loop, context: failed.append(context))
    made = sum(live(seed) for seed in range(LIVES))
    assert not failed
    assert made > 3 * LIVES


@pytest.mark.promise("time-prepared")
async def test_the_last_of_two_holding_processes_passes_the_token_on() -> None:
    """A tenant's grant ends when its last process drains. A hand-off is prepared only if a single process holds."""
    world = World(prepares=True)
    for pid, name in ((1, "two"), (2, "two"), (3, "one")):
        world.set(name, GPUS[:1], 500, 1000, interactive=False)
        world.start(pid, name)
        world.tokens.set_connected(name, connected=True)
    first, last, successor = world.processes.values()
    for process in (successor, first, last):
        world.tokens.want(process.tenant, process)
    world.advance(5 * MS)
    world.drain(successor, wanting=True)
    assert first.held is not None
    assert first.held == last.held
    world.advance(6 * MS)
    first.beat(MS)
    last.beat(MS)
    world.wait.edges()  # this prepares all possible hand-offs
    world.drain(first, wanting=False)
    assert successor.held is None
    world.drain(last, wanting=False)
    assert successor.held is not None
    world.tokens.close()
