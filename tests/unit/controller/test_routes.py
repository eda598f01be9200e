"""Routes of watch events: all objects arrive, tenants without a share first, and other tasks run in between."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from sharepod.controller import routes
from sharepod.controller.apiserver.workqueue import WorkQueue
from sharepod.controller.routes import Routes
from sharepod.controller.state.agent_leases import AgentLeases
from sharepod.controller.state.cluster_state import ClusterState
from unit.controller.objects import PODS, sharepod_object

ENDED = {"phase": "Succeeded", "endTime": "2026-01-01T00:00:00Z"}


class Added(WorkQueue[str]):
    """Queue that records added keys."""

    def __init__(self, noted: list[str]) -> None:
        super().__init__("test", self._nothing, 1)
        self._noted = noted

    @staticmethod
    async def _nothing(_key: str) -> None:
        return None

    def add(self, key: str) -> None:
        self._noted.append(f"news of {key}")

    def add_resync(self, key: str) -> None:
        self._noted.append(f"resync of {key}")


class World:
    def __init__(self) -> None:
        self.noted: list[str] = []
        self.acts = True
        state = ClusterState(PODS, AgentLeases(20.0, lambda: 0.0))
        for number in range(6):
            status = {} if number % 2 else ENDED
            state.put_sharepod(sharepod_object(uid=f"t{number}", name=f"p{number}", status=status))
        with_queue: Any = SimpleNamespace(queue=Added(self.noted))
        other: Any = SimpleNamespace(
            room_changed=lambda: None, want=lambda _namespace: None, look_at_all=lambda: self.noted.append("claims")
        )
        self.routes = Routes(
            state,
            other,
            tenants=with_queue,
            claims=with_queue,
            nodes=with_queue,
            holders=with_queue,
            line_templates=other,
            self_test_claims=other,
            acts=lambda: self.acts,
        )

    async def another(self, *, ends: bool = False) -> None:
        while True:
            self.noted.append("another")
            self.acts = self.acts and not ends
            await asyncio.sleep(0)


@pytest.mark.promise("operator-new-before-known")
async def test_all_tenants_are_looked_at_those_without_a_share_first_and_others_get_turns(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(routes, "_TURN_S", -1.0)
    world = World()
    task = asyncio.create_task(world.another())
    await world.routes.look_at_all()
    task.cancel()
    assert sorted(world.noted[:3]) == ["news of t1", "news of t3", "news of t5"]
    assert world.noted[3:9:2] == ["another"] * 3
    assert sorted(world.noted[4:9:2]) == ["resync of t0", "resync of t2", "resync of t4"]


async def test_one_that_acts_no_more_looks_at_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routes, "_TURN_S", -1.0)
    world = World()
    task = asyncio.create_task(world.another(ends=True))
    await world.routes.look_at_all()
    task.cancel()
    assert not [item for item in world.noted if item.startswith(("resync", "claims"))]
