"""Leadership: at most one process acts, for any clocks, delays and losses."""

from __future__ import annotations

import asyncio
import copy
import random
from collections import Counter
from typing import Any, cast

import pytest
from sharepod.controller.apiserver import leadership
from sharepod.controller.apiserver.client import Client
from sharepod.controller.apiserver.leadership import Leadership
from sharepod.kube import Json
from unit.controller.fakes import FakeServer, unavailable

DURATION, DEADLINE, RETRY = 15.0, 10.0, 2.0
_SURELY = 5
"""Steps after which a process has surely read the Lease once, although calls are lost at random."""


class World:
    """One server, the true time, and processes that read it through clocks with offsets of their own."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.server = FakeServer()
        self.gained: list[str] = []
        self.lost: list[str] = []

    def process(self, identity: str, offset: float = 0.0, retry_period: float = RETRY) -> Leadership:
        return Leadership(
            cast(Client, self.server),
            namespace="n",
            identity=identity,
            duration=DURATION,
            renew_deadline=DEADLINE,
            retry_period=retry_period,
            on_gained=lambda: self.gained.append(identity),
            on_lost=lambda: self.lost.append(identity),
            clock=lambda: self.now + offset,
        )


async def test_the_first_leads_and_the_second_stands_by() -> None:
    world = World()
    one, two = world.process("one"), world.process("two", offset=500.0)
    for _ in range(20):
        await one.step()
        await two.step()
        world.now += RETRY
        assert one.acting()
        assert not two.acting()
    assert world.gained == ["one"]


async def test_another_takes_over_only_after_the_lease_was_not_renewed_for_its_duration() -> None:
    world = World()
    one, two = world.process("one"), world.process("two")
    await one.step()
    silent = world.now
    while not two.acting():
        assert world.now < silent + DURATION + 3 * RETRY
        await two.step()
        world.now += 0.5
    assert world.now > silent + DURATION
    await one.step()
    assert world.lost == ["one"]


async def test_a_leader_that_cannot_renew_stops_by_itself_before_its_lease_ends() -> None:
    world = World()
    one = world.process("one")
    await one.step()

    async def down(_: str) -> None:
        raise unavailable()

    world.server.before = down
    world.now += DEADLINE - 0.1
    await one.step()
    assert one.acting()
    world.now += 0.2
    assert not one.acting()  # the process does not act although no task has run since
    await one.step()
    assert world.lost == ["one"]


@pytest.mark.promise("operator-renewed-late")
@pytest.mark.parametrize("slow_s", [0.0, 3.0], ids=["between-tries", "while-the-api-server-answers"])
async def test_a_leader_that_renews_too_late_starts_from_scratch(slow_s: float) -> None:
    """All work is reconsidered, because writes that the operator tried after the deadline were refused and dropped."""
    world = World()
    one = world.process("one")
    await one.step()

    async def slow(verb: str) -> None:
        world.now += slow_s if verb == "get" else 0.0

    async def quick(_: str) -> None:
        pass

    world.now += DEADLINE - slow_s / 2 if slow_s else DEADLINE + 0.1
    world.server.before = slow
    await one.step()
    assert one.acting()
    world.server.before = quick
    assert (world.lost, world.gained) == (["one"], ["one", "one"])
    world.now += DEADLINE - slow_s - 0.1
    await one.step()
    assert world.lost == ["one"], "a renewal in time is none"


async def test_an_answer_that_is_no_lease_ends_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()
    one = world.process("one")

    async def odd(*_: Any) -> Json:
        return {"kind": "Lease", "spec": {"holderIdentity": "two"}}

    monkeypatch.setattr(world.server, "get", odd)
    await one.step()
    assert not one.acting()
    monkeypatch.undo()
    await one.step()
    assert one.acting()


async def test_a_lease_that_has_changed_hands_too_often_to_count_is_taken() -> None:
    world = World()
    one, two = world.process("one"), world.process("two")
    await one.step()
    (lease,) = world.server.objects.values()
    lease["spec"]["leaseTransitions"] = (1 << 31) - 1
    while not two.acting():
        await two.step()
        world.now += RETRY
    (lease,) = world.server.objects.values()
    assert lease["spec"]["leaseTransitions"] == (1 << 31) - 1


async def test_a_leader_that_ends_gives_up_the_lease_at_once() -> None:
    world = World()
    one, two = world.process("one"), world.process("two")
    running = asyncio.create_task(one.run())
    while not one.acting():  # noqa: ASYNC110  in steps of the event loop
        await asyncio.sleep(0)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert not one.acting()
    await two.step()
    assert two.acting()


@pytest.mark.promise("operator-one-leads")
@pytest.mark.promise("operator-lease-taken")
@pytest.mark.parametrize("deleted", [False, True])
@pytest.mark.parametrize("seed", range(80))
async def test_never_two_act_at_once(seed: int, deleted: bool) -> None:
    """`deleted`: True if the Lease is deleted once, after each process has seen it."""
    chance = random.Random(seed)
    world = World()
    processes = [world.process(name, offset=chance.uniform(-1e6, 1e6)) for name in ("one", "two", "three")]
    acted: set[str] = set()
    steps: Counter[str] = Counter()
    deletions = ["one"] if deleted else []

    def check() -> None:
        acting = [process.identity for process in processes if process.acting()]
        assert len(acting) <= 1, acting
        acted.update(acting)

    async def pass_time(_call: str) -> None:
        """Let a call take some time. Some calls are lost, before or after they take effect."""
        for _ in range(chance.choice((0, 0, 1, 4))):
            world.now += chance.uniform(0.0, 2.0)
            check()
            await asyncio.sleep(0)
        if chance.random() < 0.1:
            raise unavailable()

    world.server.before = world.server.after = pass_time

    async def live(process: Leadership) -> None:
        for _ in range(60):
            await process.step()
            steps[process.identity] += 1
            check()
            if deletions and min(steps[one.identity] for one in processes) > _SURELY and chance.random() < 0.05:
                deletions.pop()
                world.server.objects.pop(("leases", "n", "sharepod-operator"), None)
            if chance.random() < 0.05:  # the process is stopped, as by SIGSTOP
                for _ in range(chance.randrange(40)):
                    await asyncio.sleep(0)
            for _ in range(3):
                world.now += chance.uniform(0.0, RETRY / 3)
                check()
                await asyncio.sleep(0)

    await asyncio.gather(*(live(process) for process in processes))
    assert acted


async def test_the_lease_says_who_holds_it_and_how_often_it_changed_hands() -> None:
    world = World()
    one, two = world.process("one"), world.process("two")
    await one.step()
    for _ in range(20):
        await two.step()
        world.now += RETRY
    spec: Any = world.server.objects[("leases", "n", "sharepod-operator")]["spec"]
    assert spec["holderIdentity"] == "two"
    assert spec["leaseTransitions"] == 1
    assert spec["leaseDurationSeconds"] == 15


def seen(world: World) -> Json:
    """Return the Lease as a watch shows it."""
    return world.server.objects[("leases", "n", "sharepod-operator")]


@pytest.mark.promise("operator-takeover")
async def test_a_lease_that_is_given_up_is_taken_as_soon_as_the_watch_shows_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(leadership, "_END_S", 60.0)
    world = World()
    one, two = world.process("one"), world.process("two", retry_period=60.0)
    await one.step()
    standing_by = asyncio.create_task(two.run())
    leading = asyncio.create_task(one.run())
    world.server.on_write = lambda _, item: two.noticed(item)
    try:
        async with asyncio.timeout(10):
            while two._observed is None:  # noqa: ASYNC110  in steps of the event loop
                await asyncio.sleep(0)
            leading.cancel()
            while not two.acting():  # noqa: ASYNC110  in steps of the event loop
                await asyncio.sleep(0)
    finally:
        standing_by.cancel()
        leading.cancel()
        await asyncio.gather(standing_by, leading, return_exceptions=True)
    assert world.gained == ["one", "two"]


@pytest.mark.promise("operator-takeover")
async def test_a_lease_whose_holder_has_died_is_tried_for_as_soon_as_it_has_ended() -> None:
    world = World()
    one, two = world.process("one"), world.process("two", retry_period=60.0)
    await one.step()
    two.noticed(seen(world))
    world.now += DURATION - 1.0
    await two.step()
    assert two.wait_s() == pytest.approx(1.0, abs=0.1)
    world.now += 1.1
    await two.step()
    assert two.acting()


async def test_the_watch_tells_a_leader_that_its_lease_was_taken_and_nothing_of_other_leases() -> None:
    world = World()
    one = world.process("one")
    await one.step()
    one.noticed(seen(world))
    one.noticed({"metadata": {"name": "sharepod-agent-a"}, "spec": {}})
    assert not one._wake.is_set()
    other = copy.deepcopy(seen(world))
    other["spec"]["holderIdentity"] = "two"
    one.noticed(other)
    assert one._wake.is_set()
