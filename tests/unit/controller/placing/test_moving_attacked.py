"""Abuse of moving, and unfavourable moves: the tests bound restarts and useless reservations."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from sharepod.api.objects import CLAIM_DRIVER
from sharepod.api.units import TenantId
from unit.controller.objects import sharepod_object
from unit.controller.placing.test_moving import moves, scattered
from unit.controller.preempting_world import Playing, playing


@asynccontextmanager
async def three_movers(**options: Any) -> AsyncIterator[Playing]:
    """Yield three nodes with a mover of 0.4, and three with a tenant of 0.55 that stays. The move of any mover makes
    room for 0.8."""
    async with playing(**{"moves": 600.0, **options}) as world:
        world.remove_node("a")
        for number in range(3):
            world.node(f"m{number}")
            await world.runs(f"mover{number}", 0.4, memory="1Gi", movable=True, restart="Always")
            await world.runs(f"filler{number}", 0.6, memory="1Gi")
        for number in range(3):
            world.node(f"e{number}")
            await world.runs(f"fixed{number}", 0.55, memory="1Gi")
        for number in range(3):
            await world.ends(f"filler{number}")
        yield world


async def goes_by_the_next_look(world: Playing, *, ends_by: str | bool = True) -> None:
    """Delete the Pod of each chosen mover, with a grace period that ends at `ends_by`, and run the loop for a
    minute."""
    for _ in range(4):
        for (tenant,), _ in moves(world):
            world.deletes(tenant, ends_by=ends_by)
        await world.later(15)


@pytest.mark.promise("placement-move-grace")
async def test_a_tenant_with_hours_of_grace_is_not_moved() -> None:
    async with three_movers() as world:
        for number in range(3):
            world.has_grace(f"mover{number}", 2 * 3600)
        await world.want("waits", 0.8, memory="1Gi")
        await goes_by_the_next_look(world, ends_by="2026-01-01T03:00:00Z")
        assert moves(world) == [], "none of them would go within an hour, so each would be evicted in turn"
    async with three_movers() as world:
        world.has_grace("mover1", 600)
        for number in (0, 2):
            world.has_grace(f"mover{number}", 601)
        await world.want("waits", 0.8, memory="1Gi")
        await goes_by_the_next_look(world)
        assert [who for who, _ in moves(world)] == [("mover1",)]


@pytest.mark.promise("placement-move-once")
async def test_one_whose_room_goes_to_another_has_nobody_else_moved_for_it_before_move_after() -> None:
    async with three_movers(move_after=600.0) as world:
        for number in range(3):
            world.has_grace(f"mover{number}", 30)
        await world.later(601)
        await world.want("waits", 0.8, memory="1Gi")
        await world.later(2)
        ((mover,), _) = moves(world)[0]
        world.deletes(mover, ends_by="2026-01-01T00:10:40Z")
        await world.want("higher", 0.9, memory="1Gi", priority=9)  # the other mover would be evicted for this request
        await world.ends(mover)
        await world.later(30)
        assert "waits" not in world.placed
        begun = [str(item.request.tenant) for item in world.begun if item.plan.move_to is not None]
        assert begun.count("waits") == 1
        await world.later(600)
        begun = [str(item.request.tenant) for item in world.begun if item.plan.move_to is not None]
        assert begun.count("waits") == 2


@pytest.mark.promise("placement-move-consent")
async def test_best_effort_stays_where_another_would_be_evicted() -> None:
    async with playing(moves=600.0) as world:
        await world.runs("evicted", 0, memory="8Gi", restart="Always")
        await world.runs("next-to-it", 0.5, memory="8Gi", restart="Always", priority=9)
        world.node("b")
        await world.runs("stays", 0, memory="6Gi", restart="Always")
        await world.runs("filler", 0.5, memory="10Gi", restart="Always", priority=9)
        world.node("c")
        await world.runs("at-the-new-place", 0.5, memory="9Gi", restart="Always", priority=9)
        await world.ends("filler")
        await world.runs("small-filler", 0.5, memory="8Gi", restart="Always", priority=9)
        await world.want("high", 0.1, memory="7.5Gi", priority=9)
        await world.later(2)
        assert [(item.plan.evict, item.plan.move_to) for item in world.begun] == [(("evicted",), None)]


@pytest.mark.promise("placement-move-consent")
async def test_consent_that_is_taken_back_before_the_eviction_holds() -> None:
    async with scattered() as world:
        await world.want("waits", 0.8, memory="1Gi")
        await world.later(2)
        assert world.kept() == {"waits", "mover"}
        spec: dict[str, Any] = {"gpu": {"request": 0.4, "memory": "1Gi", "movable": False}, "restartPolicy": "Always"}
        metadata = {"namespace": "n"}
        world.state.put_sharepod(sharepod_object(uid="mover", name="mover", version=9, spec=spec, metadata=metadata))
        await world.later(2)
        assert world.loop.preemptions.of("waits") is None, "the preemptor evicts no tenant for it any more"
        assert world.kept() == set()
    async with scattered() as world:
        await world.want("waits", 0.8, memory="1Gi")
        await world.later(2)
        world.deletes("mover")
        world.state.put_sharepod(sharepod_object(uid="mover", name="mover", version=9, spec=spec, metadata=metadata))
        await world.later(2)
        assert world.kept() == {"waits", "mover"}, "it goes already: both keep what they were promised"


async def test_best_effort_stays_where_nobody_is_evicted() -> None:
    async with scattered(mover={"request": 0, "memory": "12Gi", "movable": None}, per_minute=0.0) as world:
        await world.want("high", 0.1, memory="15.5Gi", priority=9)
        await world.later(30)
        assert world.begun == []


class Replicas:
    """Pods of one ReplicaSet that may be moved, each with a claim of 0.4 from its template."""

    def __init__(self, world: Playing) -> None:
        self.world = world
        self._version = 1

    async def want(self, name: str, milli: int = 400, *, node: str | None = None) -> None:
        """Create a Pod with its claim. `node`: node on which it runs."""
        state = self.world.state
        self._version += 1
        common = {"namespace": "n", "resourceVersion": str(self._version)}
        created = "2026-01-01T00:00:00Z" if node else f"2026-01-01T00:01:{self._version:02}Z"
        controller = {"kind": "ReplicaSet", "uid": "rs", "name": "rs", "controller": True}
        pod: Any = {
            "metadata": {
                **common,
                "uid": f"pod-{name}",
                "name": name,
                "creationTimestamp": created,
                "ownerReferences": [controller],
            },
            "spec": {
                "containers": [{"name": "main"}],
                "resourceClaims": [{"name": "gpu", "resourceClaimTemplateName": "t"}],
                **({"nodeName": node} if node else {}),
            },
            "status": {
                "phase": "Running" if node else "Pending",
                "resourceClaimStatuses": [{"name": "gpu", "resourceClaimName": name}],
                **({"startTime": "2026-01-01T00:00:00Z"} if node else {}),
            },
        }
        owner = {"apiVersion": "v1", "kind": "Pod", "uid": f"pod-{name}", "name": name, "controller": True}
        capacity = {"requests": {"timeMilli": str(milli), "memory": "1Gi"}}
        exactly = {"deviceClassName": "sharepod.dev", "capacity": capacity}
        allocation = {"devices": {"results": [{"request": "gpu", "driver": CLAIM_DRIVER}]}}
        claim: Any = {
            "metadata": {
                **common,
                "uid": name,
                "name": name,
                "annotations": {"sharepod.dev/gpu-movable": "true", "resource.kubernetes.io/pod-claim-name": "gpu"},
                "ownerReferences": [owner],
            },
            "spec": {"devices": {"requests": [{"name": "gpu", "exactly": exactly}]}},
            "status": (
                {"allocation": allocation, "reservedFor": [{"resource": "pods", "name": name, "uid": f"pod-{name}"}]}
                if node
                else {}
            ),
        }
        state.seen_claims.put_claim(claim)
        state.other_pods.put(pod)
        if node is None:
            self.world.loop.want_place(name)
            await self.world.settle()

    async def runs(self, name: str, milli: int = 400) -> None:
        await self.want(name, milli)
        assert name in self.world.placed, self.world.why(name)
        await self.want(name, milli, node=self.world.placed[name])
        await self.world.writes()


@pytest.mark.promise("placement-move-plain")
async def test_a_replica_that_waited_before_the_move_does_not_end_what_is_kept_for_the_next_pod() -> None:
    async with playing(moves=600.0) as world:
        replicas = Replicas(world)
        await replicas.runs("mover")
        await world.runs("filler", 0.6, memory="1Gi")
        world.node("b")
        await world.runs("fixed", 0.5, memory="1Gi")
        await world.ends("filler")
        await replicas.want("waits", 800)
        await world.later(2)
        assert moves(world) == [(("mover",), "b")]
        assert world.kept() == {"waits", "mover"}
        world.state.seen_claims.claims.drop("mover")
        world.state.other_pods.drop("pod-mover")
        world.state.cluster.release(world.placed.pop("mover"), TenantId("mover"))
        world.state.on_room_changed()
        await world.settle()
        assert world.placed["waits"] == "a"
        assert world.kept() == {"mover"}, "the next Pod of the mover is still to come"
        await world.want("slips", 0.4, memory="1Gi", namespace="other")
        assert "slips" not in world.placed
        await replicas.want("next")
        assert world.placed["next"] == "b"
        assert world.kept() == set()
