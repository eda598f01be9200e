"""Request groups change no result: each of several equal requests of one namespace gets the same place as
without groups."""

from __future__ import annotations

import random

import pytest
from sharepod.controller.placing import slices
from sharepod.controller.placing.namespace_turns import NamespaceTurns
from sharepod.controller.placing.waiting import RequestGroup, WaitingTenant
from sharepod.controller.placing.waiting_queue import WaitingQueue
from sharepod.placement.state.cluster import Cluster
from unit.controller.loop_world import World, deciding
from unit.controller.objects import sharepod_object

_STEPS = 60
_CROWD = 24
_REQUESTS = (0.9, 0.6, 0.3)


class _Life:
    """Random life of a small world. One seed gives the same events, whether or not the loop uses request groups."""

    def __init__(self, world: World, chance: random.Random, namespaces: str) -> None:
        self.world = world
        self.chance = chance
        self.namespaces = namespaces
        self.waits: list[str] = []
        self.nodes = 2
        self.versions = 1

    async def step(self, number: int) -> dict[str, str]:
        """Play one random event. Return the node of each tenant that was placed."""
        world, chance = self.world, self.chance
        what = chance.choice(
            ("come", "come", "leave", "leave", "changes", "gives up", "node", "order", "retry", "time")
        )
        self.waits = [tenant for tenant in self.waits if tenant not in world.placed]
        one = chance.choice(self.waits) if self.waits else None
        if what == "come" and number < _STEPS // 2:
            self.comes(f"t{number:02}")
        elif what == "leave" and world.placed:
            await world.leaves(chance.choice(sorted(world.placed)))
        elif what == "changes" and one is not None:
            self._asks_otherwise(one, chance.choice(_REQUESTS))
            world.loop.want_place(one)
        elif what == "gives up" and one is not None:
            world.state.drop_pod(f"pod-of-{one}")
            self.waits.remove(one)
            world.loop.want_place(one)
        elif what == "node":
            self.nodes += 1
            world.node(f"n{self.nodes}", chance.choice((1, 1, 2)))
            if chance.random() < 0.7:
                world.remove_node(f"n{self.nodes}")
        elif what == "order":
            world.loop.order_changed()
        elif what == "retry" and one is not None:
            world.loop.retry(one)
        elif what == "time":
            await world.later(chance.choice((1.0, 1.0, 30.0, 30.0, 700.0)))
        if chance.random() < 0.7:
            await world.settle()
        return dict(world.placed)

    def comes(self, name: str) -> None:
        request = self.chance.choice(_REQUESTS)
        self.waits.append(name)
        priority, namespace = self.chance.choice((0, 0, 0, 9)), self.chance.choice(self.namespaces)
        self.world.wants(name, request, priority=priority, namespace=namespace, memory="1Gi")

    def _asks_otherwise(self, tenant: str, request: float) -> None:
        self.versions += 1
        known = self.world.state.sharepods.get(tenant)
        assert known is not None
        metadata = {"creationTimestamp": known.created, "namespace": known.namespace}
        spec = {"gpu": {"request": request, "memory": "1Gi"}, "restartPolicy": "Never"}
        self.world.state.put_sharepod(
            sharepod_object(uid=tenant, name=tenant, version=self.versions, spec=spec, metadata=metadata)
        )


async def _history(seed: int, namespaces: str = "n") -> list[object]:
    chance = random.Random(seed)
    async with deciding(World()) as world:
        for name in ("n1", "n2"):
            world.node(name)
        life = _Life(world, chance, namespaces)
        for number in range(_CROWD):
            life.comes(f"crowd{number:02}")
        seen: list[object] = [await life.step(number) for number in range(_STEPS)]
        await world.later(60)
        waits = [tenant for tenant in life.waits if tenant not in world.placed]
        assert all(world.why(tenant) for tenant in waits)
        assert set(waits) == set(world.loop.waiting())
        return [*seen, dict(world.placed)]


@pytest.mark.promise("security-flood", "placement-no-lost-wake-up")
@pytest.mark.parametrize("seed", range(20))
async def test_each_request_gets_the_same_place_as_without_request_groups(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    groups: list[int] = []
    refused = RequestGroup.refused

    def counted(self: RequestGroup, version: int) -> None:
        groups.append(len(self))
        refused(self, version)

    monkeypatch.setattr(RequestGroup, "refused", counted)
    monkeypatch.setattr(slices, "SLICE_S", 1e9)  # so that a pass is one slice, whatever the machine's speed
    together = await _history(seed)
    assert max(groups) > 2
    monkeypatch.setattr(WaitingTenant, "is_like_others", property(lambda _waiting: False))
    groups.clear()
    alone = await _history(seed)
    assert not groups
    assert together == alone


@pytest.mark.promise("placement-no-lost-wake-up", "placement-namespace-turns")
@pytest.mark.parametrize("seed", range(20))
async def test_each_gets_what_it_would_get_if_all_were_filed_anew_before_each_pass(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slices, "SLICE_S", 1e9)  # so that a pass is one slice, whatever the machine's speed
    indexed = await _history(seed, namespaces="mnn")
    start_pass = WaitingQueue.start_pass

    async def from_scratch(self: WaitingQueue, cluster: Cluster) -> NamespaceTurns:
        for waiting in self.places.values():
            waiting.on_changed(waiting)
        return await start_pass(self, cluster)

    monkeypatch.setattr(WaitingQueue, "start_pass", from_scratch)
    assert indexed == await _history(seed, namespaces="mnn")
