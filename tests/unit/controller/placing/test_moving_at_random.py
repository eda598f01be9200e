"""Moves and preemptions among random arrivals, ends, refusals and crashes: no share is assigned twice, and no
reservation remains.
"""

from __future__ import annotations

import random
from collections import Counter

import pytest
from unit.controller.preempting_world import Playing, playing


class _Life:
    """Random life of a few nodes. Evictions are accepted at once. The test ends Pods and lets them return."""

    def __init__(self, world: Playing, chance: random.Random) -> None:
        self.world = world
        self.chance = chance
        self.priorities: dict[str, int] = {}
        self.running: set[str] = set()
        self.ending: set[str] = set()
        self.away: set[str] = set()
        self.seen: Counter[str] = Counter()

    async def step(self) -> None:
        """Play one random event and its consequences."""
        what = self.chance.choice(("comes", "comes", "comes", "leaves", "leaves", "pod ends", "back", "back", "crash"))
        match what:
            case "comes":
                await self._comes()
            case "leaves" if self.running:
                await self._gone(self.chance.choice(sorted(self.running)))
            case "pod ends" if self.ending:
                await self._pod_ends(self.chance.choice(sorted(self.ending)))
            case "back" if self.away:
                await self._comes_back(self.chance.choice(sorted(self.away)))
            case "crash" if self.chance.random() < 0.2:
                self.seen["crashes"] += 1
                self.world.loop.preemptions.clear()
            case _:
                await self.world.later(30.0)
        await self.world.later(self.chance.choice((0.1, 2.0)))
        await self.follow()

    async def follow(self) -> None:
        """Evict the victims of the preemptions, and run the placed tenants."""
        world = self.world
        for item in world.begun:
            self.seen["moves" if item.plan.move_to is not None else "preemptions"] += 1
            for victim in item.plan.evict:
                if victim in self.running:
                    if self.chance.random() < 0.3:
                        self.seen["refusals"] += 1
                        world.loop.preemptions.refused(item.request.tenant, world.pod(victim))
                        break
                    world.deletes(victim, ends_by=True)
                    world.loop.victims_seen.evicted(world.pod(victim))
                    self.running.discard(victim)
                    self.ending.add(victim)
        world.begun.clear()
        for tenant in sorted(world.placed.keys() - self.running - self.ending):
            self.running.add(tenant)
            await world.runs_where_it_was_placed(tenant, self.priorities[tenant])
        assert world.state.cluster.overcommits() == ()

    async def quiet(self) -> None:
        """Let all tenants that are ending end, and wait for places for all that return."""
        for _ in range(8):
            for tenant in sorted(self.ending):
                await self._pod_ends(tenant)
            for tenant in sorted(self.away):
                await self._comes_back(tenant)
            await self.world.later(200.0)
            await self.follow()
            if not (self.ending or self.away or self.world.begun):
                return

    async def _comes(self) -> None:
        name = f"t{len(self.priorities)}"
        self.priorities[name] = self.chance.choice((0, 0, 0, 0, 0, 9))
        request = self.chance.choice((0.2, 0.3, 0.4, 0.5, 0.7))
        memory = self.chance.choice(("1Gi", "1Gi", "9Gi"))
        movable = self.chance.choice((True, True, None, False))
        await self.world.want(
            name, request, priority=self.priorities[name], memory=memory, movable=movable, restart="Always"
        )

    async def _pod_ends(self, tenant: str) -> None:
        self.ending.discard(tenant)
        await self.world.ends(tenant)
        self.away.add(tenant)

    async def _comes_back(self, tenant: str) -> None:
        self.away.discard(tenant)
        await self.world.comes_back(tenant)

    async def _gone(self, tenant: str) -> None:
        self.running.discard(tenant)
        await self.world.ends(tenant)
        self.world.state.drop_sharepod(tenant)


@pytest.mark.promise("placement-move-keeps")
async def test_nothing_is_promised_twice_and_in_the_end_nothing_is_kept_but_for_those_that_wait() -> None:
    seen: Counter[str] = Counter()
    for seed in range(16):
        async with playing(moves=6000.0, per_minute=6000.0) as world:
            for name in "bc":
                world.node(name)
            life = _Life(world, random.Random(seed))
            for _ in range(80):
                await life.step()
            await life.quiet()
            assert not world.loop.preemptions.moving, f"seed {seed}"
            assert world.kept() <= set(world.loop.waiting()), f"seed {seed}"
            seen += life.seen
    assert min(seen[what] for what in ("moves", "preemptions", "refusals", "crashes")) >= 3, seen
