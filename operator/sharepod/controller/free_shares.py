"""Free shares of the cluster, as totals by GPU model and node pool, in a ConfigMap for users who may not read GPUNodes.

Guarantees:
- The ConfigMap holds totals: no name of a node, namespace, Pod or user.
- Changed totals are written at most every `PERIOD_S`, unchanged totals never.
- The operator patches the ConfigMap and never creates it: if an administrator has not applied it, nothing is published.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass

import structlog

from sharepod.api.objects import FREE_SHARES
from sharepod.api.units import Bytes, Milli
from sharepod.kube import ApiError, Json, NotFoundError
from sharepod.placement.state.accounts import GpuAccount, NodeAccount
from sharepod.placement.state.needs import UNSCHEDULABLE_TAINT
from sharepod.placement.state.types import NodeState

from .apiserver.client import CONFIG_MAPS, Client, NotLeadingError
from .state.cluster_state import ClusterState

PERIOD_S = 5.0
"""Seconds between two writes: short for a person who reads the totals, and at most one small write in five seconds."""
KEY = "free.json"
"""Key of the totals in the ConfigMap: a JSON list, read by `kubectl sharepod free`."""

log = structlog.get_logger(__name__)


@dataclass(slots=True)
class _Total:
    """Total of the GPUs of one model and pool. `largest`: free (time, memory) of the GPU with the largest free
    share."""

    gpus: int = 0
    unused: int = 0
    free_milli: int = 0
    largest: tuple[Milli, Bytes] | None = None

    def add(self, node: NodeAccount, gpu: GpuAccount) -> None:
        self.gpus += 1
        free = _free(node, gpu)
        if free is not None:
            self.unused += not gpu.rows
            self.free_milli += free[0]
            self.largest = max(self.largest or free, free)

    def shown(self) -> Json:
        largest = self.largest and {"requestMilli": self.largest[0], "memory": self.largest[1]}
        return {"gpus": self.gpus, "unused": self.unused, "freeMilli": self.free_milli, "largest": largest}


def free_totals(state: ClusterState) -> list[Json]:
    """Return the totals by model and pool: GPUs, unused GPUs, free time and the largest free share."""
    totals: dict[tuple[str, str], _Total] = {}
    for gpunode in state.gpunodes:
        node = state.cluster.node(gpunode.name)
        if node is not None:
            for gpu in node.gpus:
                totals.setdefault((gpu.state.model, gpunode.spec.pool), _Total()).add(node, gpu)
    return [{"model": model, "pool": pool, **total.shown()} for (model, pool), total in sorted(totals.items())]


def _free(node: NodeAccount, gpu: GpuAccount) -> tuple[Milli, Bytes] | None:
    """Return the free (time, memory) of a GPU; None if the GPU takes no new tenants or has no free memory."""
    able = node.state is not None and _open(node.state) and gpu.state.available and not gpu.state.taken
    if not able or gpu.exclusive or gpu.free_memory <= 0:
        return None
    return Milli(max(0, gpu.free_milli)), Bytes(gpu.free_memory)


def _open(node: NodeState) -> bool:
    """Return whether a node takes new tenants: it is available and not cordoned."""
    return node.unavailable is None and all(taint.key != UNSCHEDULABLE_TAINT.key for taint in node.taints)


class FreeShares:
    """Writer of the ConfigMap.

    Args:
        state: The cluster state.
        client: The API server.
        namespace: The operator's namespace.
        acts: Returns True while this process acts as the leader. Otherwise nothing is written.
    """

    def __init__(self, state: ClusterState, client: Client, namespace: str, acts: Callable[[], bool]) -> None:
        self._state = state
        self._client = client
        self._namespace = namespace
        self._acts = acts
        self._written: str | None = None
        self._changed = True
        state.cluster.subscribe(self._touched)

    async def run(self) -> None:
        """Write changed totals every `PERIOD_S` until cancelled."""
        while True:
            if self._acts():
                await self.write()
            await asyncio.sleep(PERIOD_S)

    def forget(self) -> None:
        """Drop the written totals, as another operator may have written other totals since."""
        self._written, self._changed = None, True

    async def write(self) -> None:
        """Write the totals if they have changed."""
        if not self._changed:
            return
        self._changed = False
        text = json.dumps(free_totals(self._state))
        if text == self._written:
            return
        try:
            await self._client.patch_merge(CONFIG_MAPS, FREE_SHARES, {"data": {KEY: text}}, self._namespace)
        except NotFoundError:
            log.debug("free shares are not published: the ConfigMap does not exist", name=FREE_SHARES)
        except (ApiError, NotLeadingError) as error:
            log.warning("cannot write the free shares", name=FREE_SHARES, error=str(error))
            self._changed = True
            return
        self._written = text

    def _touched(self, _node: str) -> None:
        self._changed = True
