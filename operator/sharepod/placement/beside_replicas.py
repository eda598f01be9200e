"""Spread over nodes that already run replicas of the request's owner, such as a ReplicaSet: ranks these nodes by cost.

Guarantees:
- `best` returns the same place as `choices.best` with the costs `SPREAD` over the nodes with replicas.
- A decision reads only nodes with replicas. It computes costs again only for nodes that have changed since the owner's
  last decision, and filters only nodes that can still be the best.
- Costs of at most `_MAX_NODES` nodes are kept, summed over all owners but the present one.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush

import numpy as np
import numpy.typing as npt

from .binpack.columns import Columns
from .choices import assignment, cheapest
from .filters.candidates import candidates
from .policies import SPREAD, Cost, least_spread
from .state.accounts import GpuAccount
from .state.cluster import Cluster
from .state.types import Assignment, PlacementRequest

_MAX_NODES = 100_000
"""Most nodes whose costs are kept, summed over all owners and numbers of GPUs: some 30 MB. The owners whose last
decision is oldest are dropped first."""


@dataclass(slots=True)
class _Order:
    """Nodes with replicas of one owner, for requests of one number of GPUs.

    - `names`: all of these nodes, including nodes that are unknown now.
    - `least`: by node, a lower bound of its cost by `SPREAD`.
    - `heap`: the nodes, ordered by that bound. Outdated entries stay until they come first.
    - `seen`: number of changes of the cluster up to which the entries are current.
    - `there`: mask of the nodes with replicas, by index in the columns. `started_over`: the rebuild of the columns to
      which it belongs.
    """

    names: set[str] = field(default_factory=set)
    least: dict[str, Cost] = field(default_factory=dict)
    heap: list[tuple[Cost, str]] = field(default_factory=list)
    seen: int = -1
    there: npt.NDArray[np.bool_] = field(default_factory=lambda: np.zeros(0, dtype=bool))
    started_over: int = -1


class BesideReplicas:
    """Ordered nodes with replicas of each owner, for requests with policy Spread. It subscribes to the cluster's
    changes."""

    def __init__(self, cluster: Cluster, columns: Columns) -> None:
        self._cluster = cluster
        self._columns = columns
        self._orders: dict[tuple[str, int], _Order] = {}
        self._changed: dict[str, int] = {}
        self._version = 0
        cluster.subscribe(self._touch)

    def nodes(self, request: PlacementRequest) -> npt.NDArray[np.bool_] | None:
        """Return a mask of the nodes with replicas of the request's owner, by index in the columns. None if no node has
        any. Call `Columns.settle` before."""
        return order.there if (order := self._order(request)) is not None else None

    def best(self, request: PlacementRequest) -> Assignment | None:
        """Return the cheapest place on nodes with replicas of the owner; None: no place."""
        order = self._order(request)
        if order is None:
            return None
        best: tuple[Cost, str, Sequence[GpuAccount]] | None = None
        tried: dict[str, Cost] = {}
        while order.heap and (best is None or order.heap[0] <= best[:2]):
            least, name = heappop(order.heap)
            if order.least.get(name) != least or name in tried:
                continue
            tried[name] = least
            for node, passing in candidates(self._cluster.known((name,)), request):
                chosen = cheapest(node, passing, request, SPREAD)
                cost = SPREAD.node(node, chosen, request)
                if best is None or (cost, name) < best[:2]:
                    best = cost, name, chosen
        for name, least in tried.items():
            heappush(order.heap, (least, name))
        return None if best is None else assignment(best[1], best[2], request)

    def _touch(self, name: str) -> None:
        if not self._orders:
            return
        self._version += 1
        self._changed.pop(name, None)
        self._changed[name] = self._version

    def _order(self, request: PlacementRequest) -> _Order | None:
        """Return the current order of nodes with replicas of the request's owner; None: no such node."""
        owner = request.owner
        if owner is None or not self._cluster.replicas_on(owner):
            return None
        key = owner, request.gpu.count
        order = self._orders.pop(key, None) or _Order()
        self._orders[key] = order  # the most recently used order comes last
        replicas = self._cluster.replicas_on(owner)
        if order.seen < 0:
            self._read(order, request, list(replicas))
        else:
            self._read(order, request, self._changed_since(order, replicas))
        order.seen = self._version
        if order.started_over != self._columns.started_over:
            order.started_over = self._columns.started_over
            order.there = np.zeros(len(self._columns.names), dtype=bool)
            positions = self._columns.positions
            order.there[[positions[name] for name in replicas if name in positions]] = True
        if len(order.heap) > 2 * len(order.least) + 16:
            order.heap = [(least, name) for name, least in order.least.items()]
            heapify(order.heap)
        self._forget()
        return order

    def _changed_since(self, order: _Order, replicas: Collection[str]) -> list[str]:
        """Return the nodes with replicas, now or at the owner's last decision, that have changed since that decision.

        The search reads all nodes with replicas or all changes, whichever are fewer.
        """
        if self._version - order.seen > len(order.names) + len(replicas):
            return [name for name in {*order.names, *replicas} if self._changed.get(name, 0) > order.seen]
        changed = []
        for name in reversed(self._changed):
            if self._changed[name] <= order.seen:
                break
            changed.append(name)
        return changed

    def _read(self, order: _Order, request: PlacementRequest, names: Sequence[str]) -> None:
        """Update the entries of these nodes."""
        replicas = self._cluster.replicas_on(request.owner or "")
        positions = self._columns.positions if order.started_over == self._columns.started_over else {}
        for name in names:
            if name in replicas:
                order.names.add(name)
            else:
                order.names.discard(name)
            node = self._cluster.node(name) if name in replicas else None
            if name in positions:
                order.there[positions[name]] = name in replicas
            if node is None:
                order.least.pop(name, None)
            elif order.least.get(name) != (least := least_spread(node, request)):
                order.least[name] = least
                heappush(order.heap, (least, name))

    def _forget(self) -> None:
        """Drop the nodes of the owners whose last decision is oldest, and the changes of deleted nodes."""
        kept = sum(len(order.least) for order in self._orders.values())
        for key in list(self._orders)[:-1]:
            if kept <= _MAX_NODES:
                break
            kept -= len(self._orders.pop(key).least)
        if len(self._changed) > 2 * len(self._cluster.accounts) + 16:
            last = next(reversed(self._orders))
            self._orders = {last: self._orders[last]}
            self._changed.clear()
