"""Queue of the tenants that wait for a place. It gives each pass the order in which their requests are tried.

Guarantees:
- Requests that arrive during a pass can be added to that pass.
- A tenant that no longer requests anything leaves the queue the next time that its request is computed.
- While the order of many requests is computed, other tasks get turns.
- Requests of equal content that were refused together form one group, which a pass tries in one step, however many they
  are. Exceptions: requests for which GPUs are reserved, and clusters with nodes of pool `device-plugin`.
- A tenant is re-sorted only when its own request changes, so a new arrival never waits for a re-sort of the queue.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator

from sharepod.placement.engine import QueueKey
from sharepod.placement.state.cluster import Cluster
from sharepod.placement.state.types import PlacementRequest

from .namespace_turns import NamespaceTurns
from .queue_index import QueueIndex
from .requests import PlacementRequests
from .waiting import RequestGroup, WaitingTenant, who_asks_matters


class WaitingQueue:
    """Queue of waiting tenants.

    Args:
        requests: Computes a tenant's request.
        on_idle: Called with each tenant that no longer requests anything. The called function must remove the tenant.
        clock: Monotonic seconds.
    """

    def __init__(self, requests: PlacementRequests, on_idle: Callable[[str], None], clock: Callable[[], float]) -> None:
        self._requests = requests
        self._on_idle = on_idle
        self._clock = clock
        self.places: dict[str, WaitingTenant] = {}
        """All waiting tenants by id, in order of arrival."""
        self._came: list[WaitingTenant] = []
        """Tenants that have arrived and are not yet added to a pass."""
        self.arrived = asyncio.Event()
        """Event that is set while tenants have arrived that are not yet added to a pass."""
        self._queue_index = QueueIndex(self.has, self._know_key, self.arrived)
        self.arrivals = 0
        """Number of all arrivals so far."""

    def join(self, tenant: str) -> bool:
        """Add a tenant. Return True if the tenant must be tried: it is new, or its request has changed since its
        refusal. Return False if it already waits with the same request.
        """
        waiting = self.places.get(tenant)
        if waiting is None:
            self.places[tenant] = waiting = WaitingTenant(tenant, self._clock(), self._queue_index.changed)
            self._came.append(waiting)
            self.arrivals += 1
            self.arrived.set()
            return True
        if waiting.refused_at_version is None:
            return False
        self.request_of(waiting)
        return waiting.refused_at_version is None

    def leave(self, tenant: str) -> None:
        """Remove a tenant."""
        waiting = self.places.pop(tenant, None)
        if waiting is not None:
            self._queue_index.leave(waiting)

    def longest_wait_s(self) -> float:
        """Return the seconds that the oldest tenant has waited. 0 if none waits."""
        first = next(iter(self.places.values()), None)
        return self._clock() - first.since if first is not None else 0.0

    def clear(self) -> None:
        """Remove all tenants."""
        self.places.clear()
        self._queue_index.clear()
        self._take_arrivals()
        self._queue_index.clear()

    def has(self, waiting: WaitingTenant) -> bool:
        """Return True if this tenant still waits."""
        return self.places.get(waiting.tenant) is waiting

    @property
    def groups(self) -> Iterator[RequestGroup]:
        """Request groups of the queue, including empty groups."""
        return self._queue_index.groups

    def retry_at(self) -> float:
        """Return the earliest time, in monotonic seconds, at which a tenant must be tried even if nothing has changed.
        Infinity if there is none.
        """
        return self._queue_index.retry_at()

    def of_priority(self, least: int) -> Iterator[WaitingTenant]:
        """Yield the indexed tenants whose priority is at least `least`."""
        for (rank, _), line in list(self._queue_index.lines.items()):
            if -rank[0] >= least:
                for _, _, waiting, group in line:
                    yield from group if group is not None else (waiting,)

    def request_of(self, waiting: WaitingTenant) -> PlacementRequest | None:
        """Return the tenant's request. If it no longer requests anything, remove the tenant and return None."""
        worked_out = self._requests.worked_out(waiting)
        if worked_out is None:
            self._on_idle(waiting.tenant)
            return None
        return worked_out.request

    async def start_pass(self, cluster: Cluster) -> NamespaceTurns:
        """Return the turns of the requests to try in a pass. Requests that were refused at the present version of
        capacity are left out. Yields to other tasks.
        """
        self._take_arrivals()
        kept_for = {kept.tenant for kept in cluster.kept()}
        nobody_holds = not cluster.plugin_nodes()
        if not nobody_holds:
            self._queue_index.dissolve_groups()
        for tenant in kept_for:  # GPUs are reserved for this tenant, so equal requests may get another answer
            if (waiting := self.places.get(tenant)) is not None and waiting.group is not None:
                waiting.group.remove(waiting)

        def may_join(waiting: WaitingTenant) -> bool:
            return nobody_holds and waiting.tenant not in kept_for and waiting.is_like_others

        late = await self._queue_index.refresh(cluster.room_version, self._clock(), may_join)
        turns = NamespaceTurns(self._queue_index.lines, self._queue_index.untried)
        turns.add_entries(late)
        self.queue_arrivals(turns)
        return turns

    def refused(self, tried: WaitingTenant, cluster: Cluster, turns: NamespaceTurns) -> None:
        """Record the refusal of a request. It also holds for the requests in its group, which get no turn in this pass.

        If the tried request has changed since it joined the group, the refusal is recorded for that request only.
        """
        version = tried.refused_at_version = cluster.room_version
        group, known = turns.group, tried.worked_out
        self._queue_index.tried(tried, version)
        if group is None or known is None or known.asks != group.asks or who_asks_matters(cluster, known.request):
            return
        for kept in cluster.kept():
            if (member := self.places.get(kept.tenant)) is not None and member.group is group:
                group.remove(member)
                turns.add_all(self._keyed([member]))
        turns.leave_out_group()
        group.refused(version)
        if tried.is_like_others and self.has(tried):
            group.add([tried])
            self._queue_index.came_back(tried, group)

    def passed_over(self, waiting: WaitingTenant) -> None:
        """Record that a request had its turn, but was neither placed nor refused. The next pass tries it again."""
        if self.has(waiting):
            self._queue_index.changed(waiting)

    def queue_arrivals(self, turns: NamespaceTurns) -> None:
        """Add the new arrivals to the turns of the present pass."""
        turns.add_all(self._keyed(self._take_arrivals()))

    def _take_arrivals(self) -> list[WaitingTenant]:
        came, self._came = self._came, []
        self.arrived.clear()
        for waiting in came:
            self._queue_index.changed(waiting)
        return came

    def _keyed(self, waiting: Iterable[WaitingTenant]) -> Iterator[tuple[QueueKey, WaitingTenant]]:
        """Yield (key, tenant) of the tenants that still wait."""
        for each in waiting:
            if self.has(each) and (key := self._know_key(each)) is not None:
                yield key, each

    def _know_key(self, waiting: WaitingTenant) -> QueueKey | None:
        """Return the queue key of a tenant, computed on first use. None if the tenant no longer requests anything."""
        if waiting.key is None and self.request_of(waiting) is not None and waiting.worked_out is not None:
            waiting.key = waiting.worked_out.key
        return waiting.key
