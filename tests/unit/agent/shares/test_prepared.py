"""Prepared hand-offs, which the event loop's wait carries out in C, between processes with real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import mmap
import os
import socket
import struct
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from dataclasses import astuple, dataclass, field
from pathlib import Path
from typing import Any, cast

import pytest
from sharepod import protocol
from sharepod.agent import on_time
from sharepod.agent.shares import tokens as tokens_module
from sharepod.agent.shares.prepared import PreparedHandOffs
from sharepod.agent.shares.silence import Silence, Silent
from sharepod.agent.shares.tokens import Tokens
from sharepod.agent.tenants.registry import TenantRegistry
from sharepod.rate_limit import RateLimiter
from sharepod.timeshare import Action, Scheduler, TokenRevocation
from unit.agent.client import GPU0, Client, row, served_in, settings_in, tenants_with, until


@dataclass
class Two:
    """Two tenants of one GPU: `holder` has just got the token, and `waiter` waits for it."""

    tenants: TenantRegistry
    holder: Client
    waiter: Client
    grant: protocol.Grant
    read: list[protocol.Drained]
    """DRAINED frames that Python has read."""
    due: list[Action] = field(default_factory=list)
    """Actions that `Undisturbed`, in place of the scheduler, returns at its next tick."""

    @property
    def tokens(self) -> Tokens:
        return self.tenants._tokens

    @property
    def held(self) -> int:
        """Return the id of the grant that `holder` has."""
        return self.grant.grant_id

    def client(self, name: str) -> Any:
        """Return the agent's connection to a tenant's process."""
        [served] = [each for each in served_in(self.tenants) if each.row.id == name]
        [connection] = served._connections
        return connection

    def set_tenant(self, name: str) -> None:
        """Add a tenant of the GPU, or set the rates that it already has."""
        nothing: Any = lambda _value: None  # noqa: E731
        self.tokens.set_tenant(name, (GPU0,), request_milli=0, limit_milli=500, contended=nothing, bar=nothing)

    def silence(self) -> None:
        self.tokens._tokens["a"].silence = Judged()
        self.tokens._listen(False)

    def stall(self) -> None:
        """Let the agent find that it has itself stalled, by an action that is long overdue."""
        self.tokens._due = -(10**18)
        self.tokens.gpu_time(GPU0)

    def revoke(self) -> None:
        self.due.append(TokenRevocation("a", self.held))
        self.tokens._pump()

    @property
    def prepared(self) -> bool:
        return bool(_place().socket >= 0)

    @property
    def order(self) -> bytes:
        """Return the grant frame, without its id, of the order for a holder that wants more time."""
        return bytes(_place().orders[0].grant)

    async def ready(self, *, wanting: bool) -> None:
        """Wait until a hand-off is prepared that stays valid for the next tenth of a second, if the holder drains."""
        async with asyncio.timeout(10):
            while True:
                order, now = _place().orders[0 if wanting else 1], time.monotonic_ns()
                if self.prepared and order.size and order.since <= now < order.until - 100_000_000:
                    return
                self.tokens._prepared.change((GPU0,))  # the order's time window ends, so prepare the hand-off again
                await asyncio.sleep(0.001)


class Undisturbed:
    """Scheduler in which nothing is due except the actions in `due`."""

    def __init__(self, scheduler: Scheduler, due: list[Action]) -> None:
        self._scheduler = scheduler
        self._due = due

    def __getattr__(self, name: str) -> Any:
        return getattr(self._scheduler, name)

    def tick(self, _now: int) -> list[Action]:
        """Return the due actions once, then none."""
        due = self._due.copy()
        self._due.clear()
        return due


class Judged(Silence):
    """Silence watch that finds its tenant silent at once."""

    def judge(self, now: int, _signs: object) -> Silent:
        """Return the finding, with work that ends in 2 ms."""
        return Silent(now + 2_000_000)


def _place() -> Any:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, on_time.OnTimeLoop)
    return loop.hand_offs.kept.places[0]


@contextlib.asynccontextmanager
async def two(directory: Path, monkeypatch: pytest.MonkeyPatch, *, pulses: bool) -> AsyncIterator[Two]:
    read: list[protocol.Drained] = []
    drained = Tokens.drained

    def noting(self: Tokens, tenant_id: str, client: Any, frame: protocol.Drained) -> None:
        read.append(frame)
        drained(self, tenant_id, client, frame)

    monkeypatch.setattr(Tokens, "drained", noting)
    # one hour: no delay of a slow machine counts as a stall
    monkeypatch.setattr(tokens_module, "STALL_NS", 3_600_000_000_000)
    async with tenants_with(settings_in(directory), [row("a"), row("b")]) as tenants:
        connect = connected_with_pulse if pulses else Client.connect
        holder, waiter = [await connect(tenants.directory(name)) for name in "ab"]
        grant = await holder.granted()
        waiter.send(protocol.Want(1))
        world = Two(tenants, holder, waiter, grant, read)
        terms = await holder.receive()
        assert isinstance(terms, protocol.Grant | protocol.Revoke), "its turn ends now that another waits"
        await world.ready(wanting=True)
        try:
            yield world
        finally:
            holder.close()
            waiter.close()


async def connected_with_pulse(directory: Path | None) -> Client:
    """Connect a client with a recent heartbeat, whose work takes an hour."""
    client = await Client.connect(directory, hello=False)
    client.send(protocol.Hello(1, protocol.PULSE_VERSION))
    await client.expect(protocol.Welcome)
    assert client.hints_fd is not None, "of two descriptors the last is the pulse page"
    with mmap.mmap(client.hints_fd, mmap.PAGESIZE) as page:
        now = time.monotonic_ns()
        page[:24] = struct.pack("=QQQ", 1, now + 3_600_000_000_000, now)
    return client


def played(
    directory: Path,
    monkeypatch: pytest.MonkeyPatch,
    play: Callable[[Two], Coroutine[Any, Any, None]],
    *,
    pulses: bool = False,
) -> None:
    """Run `play` with two tenants on the agent's loop. `pulses`: True if their processes have pulse pages."""

    async def main() -> None:
        async with two(directory, monkeypatch, pulses=pulses) as world:
            await play(world)

    on_time.run(main())


@pytest.mark.promise("time-prepared")
def test_a_token_passes_between_processes_without_python_and_the_accounts_add_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def play(world: Two) -> None:
        tokens, holder, waiter, grant = world.tokens, world.holder, world.waiter, world.grant
        for wanting in (True, False):
            before = sum(tokens.hand_offs.counts)
            await world.ready(wanting=wanting)
            holder.send(protocol.Drained(grant.grant_id, wanting=wanting, idle=not wanting))
            granted = await waiter.granted_anew()
            assert granted.grant_id > grant.grant_id
            assert granted.metered
            assert granted.announce
            assert granted.quantum_ns > 0
            assert sum(tokens.hand_offs.counts) == before + 1
            holder, waiter, grant = waiter, holder, granted
            if wanting:
                await until(lambda: world.prepared)
        assert world.read == [], "all of it was handed on by the wait"
        begun = time.monotonic_ns()
        opened = tokens.gpu_time(GPU0)
        usage = [tokens.usage(name) for name in "ab"]
        assert opened is not None
        assert sum(each.grants for each in usage) == 3
        assert opened.stalled_ns == 0
        assert abs(sum(each.held_ns for each in usage) - opened.held_ns) < 10_000_000, "read one after the other"
        first = sum(astuple(opened))
        last = tokens.gpu_time(GPU0)
        assert last is not None
        assert 0 <= sum(astuple(last)) - first <= time.monotonic_ns() - begun + 1_000_000

    played(tmp_path, monkeypatch, play)


@pytest.mark.promise("time-starved")
def test_who_is_handed_a_token_by_the_wait_is_watched_and_who_held_it_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def play(world: Two) -> None:
        watches = world.tokens._looks.watches
        await until(lambda: watches("a"))
        await world.ready(wanting=True)
        world.holder.send(protocol.Drained(world.held, wanting=True))
        await world.waiter.granted_anew()
        assert world.read == []
        assert (watches("a"), watches("b")) == (False, True)

    played(tmp_path, monkeypatch, play, pulses=True)


def test_a_frame_that_the_wait_has_taken_is_charged_to_its_tenant(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def play(world: Two) -> None:
        charged: list[float] = []
        monkeypatch.setattr(RateLimiter, "charge", lambda _self, amount: charged.append(amount))
        world.holder.send(protocol.Drained(world.grant.grant_id, wanting=True))
        await world.waiter.expect(protocol.Grant)
        assert charged == [1]

    played(tmp_path, monkeypatch, play)


def test_nothing_is_sent_to_a_descriptor_that_has_become_anothers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def play(world: Two) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
        with reused(world.client("b"), ours):
            world.holder.send(protocol.Drained(world.held, wanting=True))
            await until(lambda: len(world.read) == 1)
            with pytest.raises(BlockingIOError):
                theirs.recv(100)
        theirs.close()

    played(tmp_path, monkeypatch, play)


def test_nothing_is_taken_from_a_descriptor_that_has_become_anothers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def play(world: Two) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
        with reused(world.client("a"), ours):
            packet = protocol.encode(protocol.Drained(world.held, wanting=True))
            theirs.send(packet)
            read: list[bytes] = []
            asyncio.get_running_loop().add_reader(ours, lambda: read.append(ours.recv(100)))
            await until(lambda: read == [packet])
            asyncio.get_running_loop().remove_reader(ours)
        theirs.close()

    played(tmp_path, monkeypatch, play)


@contextlib.contextmanager
def reused(connection: Any, ours: socket.socket) -> Iterator[None]:
    """Close one of the agent's connections, and give its descriptor number to `ours` in the block."""
    number = connection.fileno()
    connection.close()
    other = os.dup2(ours.fileno(), number) if ours.fileno() != number else None
    try:
        yield
    finally:
        if other is not None:
            os.close(other)
        ours.close()


def test_one_that_asks_again_changes_nothing_of_what_is_prepared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If a repeated WANT caused a new decision, a tenant could load the agent by cheap frames."""

    async def play(world: Two) -> None:
        asked: list[str] = []
        want = Tokens.want

        def noting(self: Tokens, tenant_id: str, client: Any) -> None:
            asked.append(tenant_id)
            want(self, tenant_id, client)

        monkeypatch.setattr(Tokens, "want", noting)
        before = world.order
        for count in (1, 2):
            world.waiter.send(protocol.Want(1))
            await until(lambda: len(asked) == count)  # noqa: B023
        assert world.prepared
        assert world.order == before

    played(tmp_path, monkeypatch, play)


@pytest.mark.parametrize("what", ["closed", "removed", "lost", "waited for by two"])
def test_what_changes_after_a_hand_off_was_prepared_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    async def play(world: Two) -> None:
        tenants, more = world.tenants, list[Client]()
        if what == "closed":
            tenants.set_open(frozenset())
        elif what == "removed":
            await tenants.apply([row("a")])
        elif what == "lost":
            world.waiter.close()
            await until(lambda: not world.prepared)
        else:
            more.append(await Client.connect(tenants.directory("b")))
            more[0].send(protocol.Want(1))
            await until(lambda: not world.prepared)
        world.holder.send(protocol.Drained(world.grant.grant_id, wanting=True))
        await until(lambda: len(world.read) == 1)
        if what == "waited for by two":
            assert (await more[0].expect(protocol.Grant)) == (await world.waiter.expect(protocol.Grant))
        elif what != "removed" and what != "lost":
            assert await world.waiter.nothing_comes()
        for client in more:
            client.close()

    played(tmp_path, monkeypatch, play)


CHANGES: dict[str, Callable[[Two], object]] = {
    "rates": lambda world: world.set_tenant("b"),
    "a tenant that comes": lambda world: world.set_tenant("c"),
    "a process that connects": lambda world: world.tokens.set_connected("b", connected=True),
    "a surcharge": lambda world: world.tokens.surcharge("b", 1),
    "an end of work": lambda world: world.tokens.draining("a", world.client("a"), protocol.Draining(world.held, 10**9)),
    "a holder that drains": lambda world: world.tokens.drained("a", world.client("a"), protocol.Drained(world.held)),
    "a holder that has disconnected": lambda world: world.tokens.connection_lost("a", world.client("a"), alive=True),
    "a successor that has disconnected": lambda world: world.tokens.connection_lost("b", world.client("b")),
    "a tenant that goes": lambda world: world.tokens.remove("b"),
    "something due": lambda world: world.revoke(),
    "a holder without processor time": lambda world: world.silence(),
    "a stall": lambda world: world.stall(),
}


@pytest.mark.promise("time-prepared")
@pytest.mark.parametrize("what", CHANGES)
def test_whatever_changes_of_a_gpus_tenants_what_is_prepared_is_dropped_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """The hand-off must be dropped at the change itself, not by a grant that follows. So `Undisturbed` lets no other
    action become due.
    """

    async def play(world: Two) -> None:
        world.tokens._scheduler = cast(Scheduler, Undisturbed(world.tokens._scheduler, world.due))
        assert world.prepared
        CHANGES[what](world)
        assert not world.prepared
        world.set_tenant("b")

    played(tmp_path, monkeypatch, play)


def test_an_agent_that_ends_hands_nothing_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next agent may already serve, so this one must grant nothing more."""

    async def play(world: Two) -> None:
        world.tokens.close()
        assert not world.prepared
        world.tokens.want("b", world.tenants._entries["b"].serving._connections.copy().pop())  # type: ignore[union-attr]
        await asyncio.sleep(0.001)
        assert not world.prepared

    played(tmp_path, monkeypatch, play)


async def test_gpus_are_prepared_in_the_order_in_which_they_changed() -> None:
    gpus = [f"GPU-{place}" for place in (5, 2, 7, 0, 3, 6, 1, 4)]
    asked: list[str] = []
    loop = on_time.LoopHandOffs()
    prepared = PreparedHandOffs(time.monotonic_ns, asked.append, lambda *_: None, lambda: None)
    assert loop.claim(prepared._prepare, prepared._made, prepared._reported)
    prepared._loop = loop
    prepared.change(gpus)
    loop.prepare()
    assert asked == gpus
