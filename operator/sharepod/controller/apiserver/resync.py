"""Full lists of the operator's own: before anything is decided, after a gap of a watch, and every few minutes.

Guarantees:
- After `relist` has returned, the cluster state holds every object that existed when it was called and still does,
  and none that was gone by then.
- An object that a list does not show is taken as gone only after a GET has said so.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable, Iterable

import structlog

from sharepod.api.objects import POOL_LABEL, TENANT_LABEL
from sharepod.controller import metrics
from sharepod.controller.state.cluster_state import ClusterState
from sharepod.controller.state.facts import ObjectFacts
from sharepod.kube import ForbiddenError, Json, NotFoundError

from .client import GPUNODES, NODES, PODS, PRIORITY_CLASSES, SHAREPODS, Client, Resource

_BATCH = 100
"""Objects taken in before other tasks get a turn: about 10 ms."""
_COLLECT_AFTER = 20_000
"""New Python objects between two collections of the youngest generation. Python's 700 is some ten decisions."""

log = structlog.get_logger(__name__)


class Resync:
    """Lister and sweeper. One `relist` runs at a time; a caller meanwhile waits for one that begins after its call."""

    def __init__(self, state: ClusterState, client: Client) -> None:
        self._state = state
        self._client = client
        self._lock = asyncio.Lock()
        self._asked = 0
        self._done = 0
        self.complete = False
        """True once everything was listed."""

    async def relist(self) -> None:
        """List everything and drop what is gone. Raises `ApiError`."""
        self._asked += 1
        mine = self._asked
        async with self._lock:
            if self._done >= mine:
                return
            covers = self._asked
            await self.read_priorities()
            await self._kind(NODES, self._state.nodes, self._state.put_node, self._state.drop_node, POOL_LABEL)
            await self._kind(SHAREPODS, self._state.sharepods, self._state.put_sharepod, self._state.drop_sharepod)
            await self._kind(PODS, self._state.pods, self._state.put_pod, self._state.drop_pod, TENANT_LABEL)
            await self._kind(GPUNODES, self._state.gpunodes, self._state.put_gpunode, self._state.drop_gpunode)
            self._done = covers
            if not self.complete:
                # The facts stay alive: a collection that walks all of them takes 0.1 s at 10,000 GPUs.
                gc.collect()
                gc.freeze()
                gc.set_threshold(_COLLECT_AFTER)
            self.complete = True

    async def _kind(
        self,
        resource: Resource,
        known: Iterable[ObjectFacts],
        put: Callable[[Json], None],
        drop: Callable[[str], None],
        labels: str = "",
    ) -> None:
        items, _version = await self._client.list_all(resource, labels=labels)
        for number, raw in enumerate(items):
            put(raw)
            if number % _BATCH == _BATCH - 1:
                await asyncio.sleep(0)
        listed = {str(raw["metadata"]["uid"]) for raw in items}
        for item in [item for item in known if item.uid not in listed]:
            await self._confirm(resource, item, put, drop)

    async def _confirm(
        self, resource: Resource, item: ObjectFacts, put: Callable[[Json], None], drop: Callable[[str], None]
    ) -> None:
        try:
            raw = await self._client.get(resource, item.name, item.namespace or None)
        except NotFoundError:
            raw = None
        if raw is not None and str(raw["metadata"]["uid"]) == item.uid:
            if resource is NODES and POOL_LABEL not in (raw["metadata"].get("labels") or {}):
                drop(item.uid)
            else:
                put(raw)
            return
        log.info(
            "object is gone, and no watch said so",
            resource=resource.plural,
            namespace=item.namespace,
            name=item.name,
        )
        metrics.SWEPT.labels(resource.plural).inc()
        drop(item.uid)

    async def read_priorities(self) -> None:
        """Read the PriorityClasses, which are not watched. Raises `ApiError`."""
        try:
            items, _ = await self._client.list_all(PRIORITY_CLASSES)
        except ForbiddenError as error:
            log.warning("cannot read PriorityClasses: the queue goes by age alone", error=str(error))
            return
        self._state.priorities = {str(item["metadata"]["name"]): int(item.get("value") or 0) for item in items}
        self._state.default_priority = max(
            (int(item["value"]) for item in items if item.get("globalDefault")), default=0
        )
