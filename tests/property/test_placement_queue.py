"""Promises of the queue: no request waits that could be placed, and of two equal requests the first in order is placed
first. Everything random comes from a seed.
"""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest
from sharepod.placement.engine import queue_key
from sharepod.placement.state.types import NodeState, PlacementRequest
from unit.controller.loop_world import HEAD_RESERVATION_AFTER, World
from unit.controller.objects import sharepod_object
from unit.virtual_time import VirtualTimeLoop

_SHAPES: tuple[dict[str, Any], ...] = (
    {"request": 0.3},
    {"request": 0.5},
    {"request": 1.0},
    {"request": 0.5, "count": 2},
    {"request": 0.4, "affinity": "g"},
    {"request": 0.4, "exclusion": "x"},
    {"request": 0.2, "antiAffinity": "a"},
)


class Play:
    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.world = World()
        self.away: dict[str, NodeState] = {}
        self._version = 1
        for number in range(3):
            self.world.node(f"n{number}", 2)

    def ask_otherwise(self) -> set[str]:
        """Change the requests of some waiting tenants, some of them twice. Return the tenants of whose change the
        placement loop was not notified."""
        chance, world, untold = self.chance, self.world, set[str]()
        waits = sorted(world.loop.waiting())
        for tenant in chance.choices(waits, k=4) if waits and chance.random() < 0.3 else ():
            self._version += 1
            sharepod = world.state.sharepods.get(tenant)
            assert sharepod is not None
            spec = {"gpu": dict(chance.choice(_SHAPES)), "restartPolicy": "Never"}
            metadata = {"creationTimestamp": sharepod.created, "namespace": sharepod.namespace}
            changed = sharepod_object(uid=tenant, name=tenant, version=self._version, spec=spec, metadata=metadata)
            world.state.put_sharepod(changed)
            untold.add(tenant)
            if chance.random() < 0.5:
                world.loop.want_place(tenant)
                untold.discard(tenant)
        return untold

    async def notify(self, untold: set[str]) -> None:
        for tenant in untold & set(self.world.loop.waiting()):
            self.world.loop.want_place(tenant)
        await self.world.settle()

    async def step(self, number: int) -> None:
        chance, world = self.chance, self.world
        what = chance.random()
        if what < 0.5:
            shape = dict(chance.choice(_SHAPES))
            request = float(str(shape.pop("request")))
            await world.want(f"t{number}", request, priority=chance.choice((0, 0, 0, 7)), **shape)
        elif what < 0.75 and world.placed:
            await world.leaves(chance.choice(sorted(world.placed)))
        elif what < 0.85 and (waits := sorted(world.loop.waiting())):
            tenant = chance.choice(waits)
            world.state.drop_sharepod(tenant)
            world.loop.leave(tenant)
        elif what < 0.9 and not self.away:
            name = f"n{chance.randrange(3)}"
            node = world.state.cluster.node(name)
            if node is not None and node.state is not None:
                self.away[name] = node.state
                world.remove_node(name)
        elif what < 0.95 and self.away:
            _, state = self.away.popitem()
            world.put_node(state)
        else:
            await world.later(chance.choice((1.0, 6.0, HEAD_RESERVATION_AFTER)))
        await world.settle()

    def requests(self) -> dict[str, PlacementRequest]:
        return {tenant: self.world.request(tenant) for tenant in self.world.loop.waiting()}


@pytest.mark.promise("placement-no-lost-wake-up")
@pytest.mark.parametrize("seed", range(12))
def test_no_placeable_request_waits_and_placements_follow_the_order_of_the_queue(seed: int) -> None:
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        runner.run(_play(seed))


async def _play(seed: int) -> None:
    play = Play(seed)
    run = asyncio.create_task(play.world.loop.run())
    try:
        placed = 0
        for number in range(120):
            untold = play.ask_otherwise()
            waited = play.requests()
            await play.step(number)
            await play.notify(untold)
            waits = play.requests()
            for request in waits.values():
                assert play.world.loop.engine.find(request) is None, f"step {number}: {request.name} could be placed"
            for tenant in waited.keys() & play.world.placed.keys():
                placed += 1
                for other in waits.values():
                    if other.tenant not in untold and _alike(other, waited[tenant]):
                        assert queue_key(waited[tenant]) < queue_key(other), f"step {number}"
        assert placed, "a waiting tenant was placed"
    finally:
        run.cancel()
        await asyncio.gather(run, return_exceptions=True)


def _alike(one: PlacementRequest, other: PlacementRequest) -> bool:
    return (one.gpu, one.pod, one.namespace) == (other.gpu, other.pod, other.namespace)
