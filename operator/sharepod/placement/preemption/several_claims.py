"""Preemption for a Pod with several claims, which all go to one node: finds tenants to preempt for all of them. Pure.

Guarantees:
- Only tenants of a lower effective priority are preempted. Time is preempted first, if that is enough.
- A plan is found on a node whenever preempting its tenants of lower priority could suffice. No tenant of the plan is
  superfluous. The set is not always the cheapest: the most valuable tenants are spared first.
- A plan is checked with the engine's own placement of several requests (`place_on`).
- Work is bounded: at most `_NODES` nodes are searched, nodes with the fewest tenants to evict first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from sharepod.placement.state.accounts import NodeAccount
from sharepod.placement.state.cluster import Cluster
from sharepod.placement.state.types import Assignment, PlacementRequest
from sharepod.placement.together import place_on

from .planner import account_after, leaves, units_below
from .shortage import gives_time
from .victims import PreemptionPlan, Unit, Victims, cost_of

_NODES = 16
"""Most nodes that are searched for one request. Each takes some 10 ms with 30 tenants."""


def plans_for_several(cluster: Cluster, request: PlacementRequest, victims: Victims) -> Iterator[PreemptionPlan | None]:
    """Search one node after the other. Yields the best plan so far after each node, so that the caller can do other
    work in between.

    Each node is read at its own step, so the cluster may have changed since: the caller must check the plan before it
    acts.
    """
    likely: list[tuple[int, str]] = []
    for node in sorted(cluster.nodes(), key=lambda node: node.name):
        units = units_below(node, request, victims)
        if _NodeSearch(cluster, node, request, victims).place(units, ()) is not None:
            likely.append((len(units), node.name))
        yield None
    best: PreemptionPlan | None = None
    for _, name in sorted(likely)[:_NODES]:
        known = cluster.node(name)
        found = _NodeSearch(cluster, known, request, victims).plan() if known is not None else None
        if found is not None and (best is None or found.cost < best.cost):
            best = found
        yield best


def holds_for_several(cluster: Cluster, request: PlacementRequest, plan: PreemptionPlan, victims: Victims) -> bool:
    """Return whether an earlier plan still makes room, and preempts no tenant that a PodDisruptionBudget protects by
    now."""
    node = cluster.node(plan.node)
    if node is None:
        return False
    here = [(tenant, node.rows[tenant]) for tenant in (*plan.lower, *plan.evict) if tenant in node.rows]
    units = [victims.units.get(tenant) for tenant, row in here if not leaves(tenant, row, victims)]
    if any(unit is None or unit.priority >= request.priority for unit in units):
        return False
    return place_on(cluster, account_after(node, plan, victims), request) is not None


class _NodeSearch:
    """Search for a plan on one node."""

    def __init__(self, cluster: Cluster, node: NodeAccount, request: PlacementRequest, victims: Victims) -> None:
        self._cluster = cluster
        self._node = node
        self._request = request
        self._victims = victims

    def place(self, evict: Sequence[Unit], lower: Sequence[Unit]) -> Assignment | None:
        """Return the places of all claims after these units were evicted and lowered, and after tenants that are ending
        have left. None if there are none."""
        account = account_after(self._node, self._as_plan(evict, lower), self._victims)
        return place_on(self._cluster, account, self._request)

    def plan(self) -> PreemptionPlan | None:
        """Return a plan that makes room on this node for all claims of the Pod. None if even the eviction of all
        tenants of lower priority makes too little room."""
        units = units_below(self._node, self._request, self._victims)
        units = sorted(units, key=lambda unit: (cost_of([unit], ()), unit.name), reverse=True)
        lowerable = [unit for unit in units if self._gives_time(unit)]
        # 1. If lowering requests makes enough room, evict no unit. 2. Otherwise spare the most valuable units: they
        #    lose nothing, or only time.
        if self.place((), lowerable) is not None:
            evict, lower = list[Unit](), lowerable
        elif self.place(units, ()) is not None:
            evict, lower = self._spared(units)
        else:
            return None
        # 3. Lower no unit without need.
        lower = _fewest(lower, lambda fewer: self.place(evict, fewer) is not None)
        place = self.place(evict, lower)
        assert place is not None, "each step was checked"
        return self._as_plan(evict, lower, place)

    def _spared(self, units: Sequence[Unit]) -> tuple[list[Unit], list[Unit]]:
        """Return the units to evict, and the units only to lower. Starting with the most valuable, each unit is spared
        if the others suffice."""
        evict, lower = list(units), list[Unit]()
        for unit in units:
            fewer = [other for other in evict if other is not unit]
            if self.place(fewer, lower) is not None:
                evict = fewer
            elif self._gives_time(unit) and self.place(fewer, [*lower, unit]) is not None:
                evict, lower = fewer, [*lower, unit]
        return evict, lower

    def _gives_time(self, unit: Unit) -> bool:
        """Return whether the requests of all rows that a unit has on this node may be lowered to 0."""
        rows = (self._node.rows.get(tenant) for tenant in unit.tenants)
        return unit.lowerable and all(gives_time(row) for row in rows if row is not None)

    def _as_plan(self, evict: Sequence[Unit], lower: Sequence[Unit], place: Assignment | None = None) -> PreemptionPlan:
        rows, victims = self._node.rows, self._victims
        parts = (place, *place.siblings) if place is not None else ()
        leaving = [one for one, row in rows.items() if leaves(one, row, victims)]
        priority = self._request.priority
        return PreemptionPlan(
            node=self._node.name,
            gpus=frozenset(uuid for part in parts for uuid in part.gpus),
            lower=tuple(sorted(one for unit in lower for one in unit.tenants if one in rows)),
            evict=tuple(sorted(one for unit in evict for one in unit.tenants)),
            leaving=tuple(sorted(one for one in leaving if victims.leaving.get(one, priority) < priority)),
            refused_lately=any(unit.protected for unit in evict),
            cost=cost_of(evict, lower),
        )


def _fewest(units: Sequence[Unit], enough: Callable[[list[Unit]], bool]) -> list[Unit]:
    """Return the units that are needed: drop each unit, in order, if the remaining ones are `enough`."""
    kept = list(units)
    for unit in units:
        fewer = [other for other in kept if other is not unit]
        if enough(fewer):
            kept = fewer
    return kept
