"""World of the placement loop in which placed Pods run, and the test writes the ledgers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from sharepod.api.units import TenantId
from sharepod.budgets.standing import WITHOUT_BUDGET, Standing
from sharepod.controller.placing.making_room.moving import MoveLimits
from sharepod.controller.placing.making_room.preemptions import OngoingPreemption
from unit.controller.loop_world import World
from unit.controller.objects import pod_object


class Playing(World):
    """World in which Pods run once they are placed, and the test writes the ledgers."""

    def __init__(
        self,
        *,
        per_minute: float = 600.0,
        standing: Callable[[str], Standing] = lambda _namespace: WITHOUT_BUDGET,
        moves: float = 0.0,
        move_after: float = 0.0,
    ) -> None:
        limits = MoveLimits(moves, move_after)
        super().__init__(preemptions_per_minute=per_minute, standing=standing, moves=limits)
        self.begun: list[OngoingPreemption] = []
        self.loop.preemptions.on_begun = self.begun.append
        self._priorities: dict[str, int] = {}
        self._pods: dict[str, int] = {}
        """For each tenant: number of Pods that it had before the present one."""
        self._generation = 0
        self._version = 1
        self._graces: dict[str, int] = {}

    async def runs(self, tenant: str, request: float, *, priority: int = 0, **gpu: Any) -> None:
        """Place a tenant, write its row, and bind its Pod."""
        await self.want(tenant, request, priority=priority, **gpu)
        assert tenant in self.placed, self.why(tenant)
        await self.runs_where_it_was_placed(tenant, priority)

    async def writes(self) -> None:
        """Write the ledgers as decided."""
        self._generation += 1
        for node in list(self.state.cluster.nodes()):
            self.state.cluster.load(node.name, self.state.cluster.reservations(node.name), self._generation)
            self.state.cluster.nothing_in_flight(node.name)
        self.state.on_room_changed()
        await self.settle()

    async def ends(self, tenant: str) -> None:
        """Delete the Pod and the row of a tenant."""
        self.state.drop_pod(self.pod(tenant))
        self.state.cluster.release(self.placed[tenant], TenantId(tenant))
        self.placed.pop(tenant)
        self.state.on_room_changed()
        await self.settle()

    async def comes_back(self, tenant: str) -> None:
        """Let the next Pod of a tenant request a place."""
        self._pods[tenant] = self._pods.get(tenant, 0) + 1
        priority = self._priorities[tenant]
        self.state.put_pod(pod_object(uid=self.pod(tenant), name=tenant, owner=tenant, gated=True, priority=priority))
        self.loop.want_place(tenant)
        await self.settle()

    def deletes(self, tenant: str, *, ends_by: str | bool = True) -> None:
        """Begin the deletion of a tenant's Pod. Its grace period ends at `ends_by`, by default now."""
        self._see(tenant, deleting=ends_by)

    def has_grace(self, tenant: str, seconds: int) -> None:
        """Set the grace period of a running tenant's Pod, which runs since the start of the world."""
        self._graces[tenant] = seconds
        self._see(tenant)

    async def runs_where_it_was_placed(self, tenant: str, priority: int) -> None:
        """Write the row of a tenant that was placed, and bind its Pod."""
        self._priorities[tenant] = priority
        self._see(tenant)
        await self.writes()

    def pod(self, tenant: str) -> str:
        """Return the uid of a tenant's present Pod."""
        number = self._pods.get(tenant, 0)
        return f"pod-of-{tenant}" + (f"-{number}" if number else "")

    def _see(self, tenant: str, *, deleting: bool | str = False) -> None:
        self._version += 1
        raw = pod_object(
            uid=self.pod(tenant),
            name=tenant,
            owner=tenant,
            version=self._version,
            node=self.placed[tenant],
            phase="Running",
            priority=self._priorities[tenant],
            deleting=deleting,
        )
        raw["spec"]["terminationGracePeriodSeconds"] = self._graces.get(tenant, 30)
        if tenant in self._graces:
            raw["status"] = {"phase": "Running", "startTime": "2026-01-01T00:00:00Z"}
        self.state.put_pod(raw)

    def kept(self) -> set[str]:
        """Return the tenants for which GPUs are reserved."""
        return {item.tenant for item in self.state.cluster.kept()}

    def request_of(self, tenant: str) -> int:
        """Return the request in a tenant's row."""
        return self.state.cluster.reservations_of(TenantId(tenant))[0][1].request_milli


@asynccontextmanager
async def playing(**options: Any) -> AsyncIterator[Playing]:
    world = Playing(**options)
    world.node("a")
    deciding = asyncio.create_task(world.loop.run())
    yield world
    deciding.cancel()
    await asyncio.gather(deciding, return_exceptions=True)
