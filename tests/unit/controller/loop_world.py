"""The placement loop over small nodes, on a clock that stands still until a test moves it."""

from __future__ import annotations

import asyncio
from typing import Any

from sharepod.api.units import Bytes, GpuUuid, TenantId
from sharepod.controller.placing.loop import PlacementLoop
from sharepod.controller.state.agent_leases import AgentLeases
from sharepod.controller.state.cluster_state import ClusterState
from sharepod.controller.state.memos import TenantMemos
from sharepod.placement.state.types import GpuState, NodeState, PlacementRequest, Resources
from unit.controller.objects import PODS, sharepod_object

HEAD_RESERVATION_AFTER = 600.0


class World:
    """The loop over a cluster of nodes with one or more GPUs, on a clock that stands still."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.state = ClusterState(PODS, AgentLeases(20.0, lambda: self.now))
        self.memos = TenantMemos()
        self.placed: dict[str, str] = {}
        self.loop = PlacementLoop(
            self.state,
            self.memos,
            may_act=lambda: True,
            on_decided=self.placed.__setitem__,
            on_answered=lambda tenant: None,
            clock=lambda: self.now,
            head_reservation_after=HEAD_RESERVATION_AFTER,
        )

    def node(self, name: str, gpus: int = 1) -> None:
        states = tuple(
            GpuState(uuid=GpuUuid(f"GPU-{name}-{index}"), index=index, model="m", memory=Bytes(1 << 34))
            for index in range(gpus)
        )
        self.state.cluster.upsert_node(NodeState(name=name, allocatable=Resources(64_000, 1 << 40), gpus=states))

    async def want(self, tenant: str, request: float, *, priority: int = 0, **gpu: Any) -> None:
        spec: dict[str, Any] = {"gpu": {"request": request, **gpu}}
        if priority:
            self.state.priorities[f"class-{priority}"] = priority
            spec["priorityClassName"] = f"class-{priority}"
        metadata = {"creationTimestamp": f"2026-01-01T00:00:{len(self.state.sharepods):02}Z"}
        self.state.put_sharepod(sharepod_object(uid=tenant, name=tenant, spec=spec, metadata=metadata))
        self.loop.want_place(tenant)
        await self.settle()

    async def leaves(self, tenant: str) -> None:
        self.state.cluster.release(self.placed.pop(tenant), TenantId(tenant))
        self.loop.room_changed()
        await self.settle()

    async def settle(self) -> None:
        self.loop.room_changed()
        for _ in range(60):
            await asyncio.sleep(0)

    async def later(self, seconds: float) -> None:
        self.now += seconds
        await self.settle()

    async def long_wait(self) -> None:
        """So long that room is kept for who has waited all the time, and then until the loop has done so."""
        await self.later(HEAD_RESERVATION_AFTER)
        await self.later(1)

    def request(self, tenant: str) -> PlacementRequest:
        """As the loop asks for it."""
        sharepod = self.state.sharepods.get(tenant)
        assert sharepod is not None
        return self.loop.request(sharepod)

    def why(self, tenant: str) -> str:
        refusal = self.memos.of(tenant).refusal
        return refusal.message if refusal is not None else ""
