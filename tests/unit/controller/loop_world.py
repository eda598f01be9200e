"""World of the placement loop: small nodes, on a virtual clock.

The world never wakes the loop itself. It updates the cluster state, which has to wake the loop, and waits.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from sharepod.api.units import Bytes, GpuUuid
from sharepod.budgets.standing import WITHOUT_BUDGET, Standing
from sharepod.controller.placing.loop import PlacementLoop
from sharepod.controller.placing.making_room.moving import NO_MOVES, MoveLimits
from sharepod.controller.state.agent_leases import AgentLeases
from sharepod.controller.state.cluster_state import ClusterState
from sharepod.controller.state.memos import TenantMemos
from sharepod.placement.state.types import GpuState, NodeState, PlacementRequest, Resources
from unit.controller.objects import PODS, pod_object, sharepod_object

HEAD_RESERVATION_AFTER = 600.0
START = 1_767_225_600.0
"""Time of day at which a world begins. It equals the times in the objects."""
HEAD_RESERVATION_FOR = 36000.0
FAIR_WAIT = 5000.0
_MOMENT_S = 0.001
"""Seconds for which `settle` waits. Less than any timer of the loop, so no timer fires in this time."""


def node_state(name: str, gpus: int = 1) -> NodeState:
    states = tuple(
        GpuState(uuid=GpuUuid(f"GPU-{name}-{index}"), index=index, model="m", memory=Bytes(1 << 34))
        for index in range(gpus)
    )
    return NodeState(name=name, allocatable=Resources(64_000, 1 << 40), gpus=states)


class World:
    """Running placement loop over nodes with one or more GPUs. Create it inside an event loop on a virtual clock."""

    def __init__(
        self,
        *,
        preemptions_per_minute: float = 0.0,
        moves: MoveLimits = NO_MOVES,
        standing: Callable[[str], Standing] | None = None,
        lasts: float = HEAD_RESERVATION_FOR,
        idle_ratio: float = 1.0,
        max_excluded_gpus: int | None = None,
        rests: float = 0.0,
    ) -> None:
        clock = asyncio.get_running_loop().time
        began = clock()
        self.state = ClusterState(PODS, AgentLeases(20.0, clock), max_excluded_gpus=max_excluded_gpus)
        self.memos = TenantMemos()
        self.placed: dict[str, str] = {}
        self.leading = True
        self.standings: dict[str, Standing] = {}
        """Standings of the namespaces that have a budget."""
        self.loop = PlacementLoop(
            self.state,
            self.memos,
            may_act=lambda: self.leading,
            on_decided=self.placed.__setitem__,
            on_answered=lambda tenant: None,
            clock=clock,
            head_reservation_after=HEAD_RESERVATION_AFTER,
            head_reservation_for=lasts,
            head_idle_ratio=idle_ratio,
            preemptions_per_minute=preemptions_per_minute,
            moves=moves,
            wall=lambda: START + clock() - began,
            fair_wait=FAIR_WAIT,
            standing=standing or (lambda namespace: self.standings.get(namespace, WITHOUT_BUDGET)),
        )
        self.loop.rests = rests
        self.state.on_room_changed = self.loop.room_changed

    def node(self, name: str, gpus: int = 1) -> None:
        self.put_node(node_state(name, gpus))

    def put_node(self, node: NodeState) -> None:
        """Add or change a node, as `ClusterState.refresh_node` does."""
        self.state.cluster.upsert_node(node)
        self.state.on_room_changed()

    def remove_node(self, name: str) -> None:
        """Remove a node, as `ClusterState.refresh_node` does."""
        self.state.cluster.remove_node(name)
        self.state.on_room_changed()

    async def want(
        self,
        tenant: str,
        request: float,
        *,
        priority: int = 0,
        namespace: str = "n",
        restart: str = "Never",
        **gpu: Any,
    ) -> None:
        """Let a tenant request a place, and let the loop decide."""
        self.wants(tenant, request, priority=priority, namespace=namespace, restart=restart, **gpu)
        await self.settle()

    def wants(
        self,
        tenant: str,
        request: float,
        *,
        priority: int = 0,
        namespace: str = "n",
        restart: str = "Never",
        **gpu: Any,
    ) -> None:
        """Let a tenant request a place."""
        spec: dict[str, Any] = {"gpu": {"request": request, **gpu}, "restartPolicy": restart}
        made = f"2026-01-01T00:00:{len(self.state.sharepods):02}Z"
        metadata = {"creationTimestamp": made, "namespace": namespace}
        self.state.put_sharepod(sharepod_object(uid=tenant, name=tenant, spec=spec, metadata=metadata))
        own = pod_object(uid=f"pod-of-{tenant}", name=tenant, owner=tenant, gated=True, priority=priority)
        own["metadata"]["namespace"] = namespace
        self.state.put_pod(own)
        self.loop.want_place(tenant)

    async def leaves(self, tenant: str) -> None:
        """End a tenant that was placed. Its reservation is released."""
        self.state.ledgers.unreserve(self.placed.pop(tenant), tenant)
        await self.settle()

    async def settle(self) -> None:
        """Wait until the loop has no work left. On the virtual clock, time passes only when no task can run."""
        await self.later(_MOMENT_S)

    async def later(self, seconds: float) -> None:
        """Let this time pass. The loop does the work for which its timers wake it."""
        await asyncio.sleep(seconds)

    async def long_wait(self) -> None:
        """Wait until the loop has reserved room for a tenant that has waited the whole time."""
        await self.later(HEAD_RESERVATION_AFTER)
        await self.later(2)

    def request(self, tenant: str) -> PlacementRequest:
        """Return the loop's request for a SharePod."""
        sharepod = self.state.sharepods.get(tenant)
        pod = self.state.pod_of(tenant)
        assert sharepod is not None
        assert pod is not None
        return self.loop.requests.ranked(self.loop.requests.of_sharepod(sharepod, pod))

    @property
    def kept_for(self) -> str | None:
        """Return the tenant with the head-of-queue reservation. None if there is none."""
        reservation = self.state.cluster.head_reservation
        return reservation.tenant if reservation is not None else None

    @property
    def kept_on(self) -> str | None:
        """Return the node of the head-of-queue reservation. None if there is none."""
        reservation = self.state.cluster.head_reservation
        return reservation.node if reservation is not None else None

    def why(self, tenant: str) -> str:
        refusal = self.memos.of(tenant).refusal
        return refusal.message if refusal is not None else ""


@asynccontextmanager
async def deciding(world: World) -> AsyncIterator[World]:
    """Run the loop of a world."""
    task = asyncio.create_task(world.loop.run())
    yield world
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
