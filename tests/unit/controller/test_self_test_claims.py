"""The operator allocates the claims of nodes' self-tests without a ledger row, and only in its own namespace."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
from sharepod.controller.self_test_claims import SelfTestClaims
from sharepod.kube import Json
from unit.controller.acting_world import World, acting_world

NAME = "sharepod-self-test-claim-x7k2p-gpus-abcde"


class Claims:
    """The reconciler, and an API server with one claim."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.asked: list[str] = []
        world.state.seen_claims.on_self_test = self.asked.append
        self.claims = SelfTestClaims(
            world.state.seen_claims, world.client, world.settings, lambda: world.now, world.wall
        )

    def make(self, *, namespace: str = "system", name: str = NAME, of: str = "self-test.sharepod.dev") -> str:
        request = {"name": "any", "exactly": {"deviceClassName": of, "allocationMode": "ExactCount", "count": 1}}
        body: Json = {"metadata": {"name": name, "finalizers": ["held"]}, "spec": {"devices": {"requests": [request]}}}
        made = self.world.server.storage.create(self.world.kind("resourceclaims"), namespace, body)
        return str(made["metadata"]["uid"])

    def read(self, namespace: str = "system", name: str = NAME) -> Json:
        return self.world.server.storage.get(self.world.kind("resourceclaims"), namespace, name)

    async def look(self, uid: str) -> None:
        await self.world.see_claims()
        await self.claims.reconcile(uid)

    def writes(self) -> int:
        return len(self.world.server.made("patch", "resourceclaims"))


@pytest.fixture
async def of() -> AsyncIterator[Claims]:
    async with acting_world() as world:
        yield Claims(world)


@pytest.mark.promise("operator-self-test-claims")
async def test_a_claim_of_the_self_test_is_allocated_by_two_writes_without_row_or_node(of: Claims) -> None:
    uid = of.make()
    await of.look(uid)
    await of.look(uid)
    claim = of.read()
    assert claim["metadata"]["finalizers"] == ["held", "resource.kubernetes.io/delete-protection"]
    given = claim["status"]["allocation"]
    assert given["devices"]["results"] == [
        {"device": "self-test", "driver": "gpu.sharepod.dev", "pool": "self-test", "request": "any"}
    ]
    assert "nodeSelector" not in given
    assert of.writes() == 2
    assert set(of.asked) == {uid}, "the watch leads to it"


@pytest.mark.promise("operator-self-test-claims")
@pytest.mark.parametrize(
    "more", [{"namespace": "team"}, {"of": "another.example.com"}, {"of": "sharepod.dev", "name": "mine"}]
)
async def test_no_other_claim_is_allocated_without_a_row(of: Claims, more: dict[str, Any]) -> None:
    uid = of.make(**more)
    await of.look(uid)
    of.claims.look_at_all()
    assert (of.writes(), len(of.claims.queue)) == (0, int("of" in more and "name" not in more))


async def test_an_allocation_that_was_taken_away_is_written_again_a_minute_later_at_the_earliest(of: Claims) -> None:
    uid = of.make()
    await of.look(uid)
    kind = of.world.kind("resourceclaims")
    of.world.server.storage.update(kind, "system", NAME, lambda item: {**item, "status": {}}, status=True)
    await of.look(uid)
    assert of.writes() == 2
    assert of.world.looks_again(60.0, uid, of.claims.queue)
    of.world.now += 60
    await of.look(uid)
    assert (of.writes(), "allocation" in of.read()["status"]) == (3, True)


async def test_a_claim_that_ends_or_that_was_replaced_is_left_alone(of: Claims) -> None:
    uid = of.make()
    await of.world.see_claims()
    kind = of.world.kind("resourceclaims")
    of.world.server.storage.delete(kind, "system", NAME)
    await of.claims.reconcile(uid)
    of.world.server.storage.finish_deletion(kind, "system", NAME)
    of.make()
    await of.claims.reconcile(uid)
    assert of.writes() == 0
    await of.claims.reconcile("of an unknown claim")
    assert of.writes() == 0
