"""Preemption for a Pod with several claims, which all go to one node: which tenants make room for all of them. Pure.

Guarantees:
- Only tenants of a lower effective priority make room; time alone comes first, wherever that is enough.
- A plan is found on a node whenever its tenants of lower priority could make room there at all, and no tenant of it is
  superfluous. The set is not always the cheapest: those worth most are spared first.
- The engine's own places for several requests (`place_on`) are what a plan is checked with.
- Work is bounded: at most `_NODES` nodes are searched, those with the fewest tenants to go first.
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
"""Nodes that are searched for one request: each takes some hundredths of a second with 30 tenants."""


def plans_for_several(cluster: Cluster, request: PlacementRequest, victims: Victims) -> Iterator[PreemptionPlan | None]:
    """Look at one node after the other; yield the best plan so far after each, so that a caller can do other work.

    A node that changes meanwhile is seen as it is when it is looked at: the caller checks the plan before it acts.
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
    """Return whether a plan, made a while ago, would still do and take from nobody that may keep what it has."""
    node = cluster.node(plan.node)
    if node is None:
        return False
    here = [(tenant, node.rows[tenant]) for tenant in (*plan.lower, *plan.evict) if tenant in node.rows]
    units = [victims.units.get(tenant) for tenant, row in here if not leaves(tenant, row, victims)]
    if any(unit is None or unit.priority >= request.priority for unit in units):
        return False
    return place_on(cluster, account_after(node, plan, victims), request) is not None


class _NodeSearch:
    """Search of one node."""

    def __init__(self, cluster: Cluster, node: NodeAccount, request: PlacementRequest, victims: Victims) -> None:
        self._cluster = cluster
        self._node = node
        self._request = request
        self._victims = victims

    def place(self, evict: Sequence[Unit], lower: Sequence[Unit]) -> Assignment | None:
        """Return the places once these have made room, and those have left whose Pods end anyway."""
        account = account_after(self._node, self._as_plan(evict, lower), self._victims)
        return place_on(self._cluster, account, self._request)

    def plan(self) -> PreemptionPlan | None:
        """Return who makes room; None if that is not enough."""
        units = units_below(self._node, self._request, self._victims)
        units = sorted(units, key=lambda unit: (cost_of([unit], ()), unit.name), reverse=True)
        lowerable = [unit for unit in units if self._gives_time(unit)]
        # 1. Nobody ends where time alone is enough; 2. else those worth most keep all they have, or all but time.
        if self.place((), lowerable) is not None:
            evict, lower = list[Unit](), lowerable
        elif self.place(units, ()) is not None:
            evict, lower = self._spared(units)
        else:
            return None
        # 3. None is lowered without need.
        lower = _fewest(lower, lambda fewer: self.place(evict, fewer) is not None)
        place = self.place(evict, lower)
        assert place is not None, "each step was checked"
        return self._as_plan(evict, lower, place)

    def _spared(self, units: Sequence[Unit]) -> tuple[list[Unit], list[Unit]]:
        """Return who still has to be evicted, and who is only lowered, when those worth most are spared first."""
        evict, lower = list(units), list[Unit]()
        for unit in units:
            fewer = [other for other in evict if other is not unit]
            if self.place(fewer, lower) is not None:
                evict = fewer
            elif self._gives_time(unit) and self.place(fewer, [*lower, unit]) is not None:
                evict, lower = fewer, [*lower, unit]
        return evict, lower

    def _gives_time(self, unit: Unit) -> bool:
        """Return whether all rows of a unit here may have request 0."""
        rows = (self._node.rows.get(tenant) for tenant in unit.tenants)
        return unit.lowerable and all(gives_time(row) for row in rows if row is not None)

    def _as_plan(self, evict: Sequence[Unit], lower: Sequence[Unit], place: Assignment | None = None) -> PreemptionPlan:
        rows, victims = self._node.rows, self._victims
        parts = (place, *place.beside) if place is not None else ()
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
    """Return units without those that are not needed, the first ones left out first."""
    kept = list(units)
    for unit in units:
        fewer = [other for other in kept if other is not unit]
        if enough(fewer):
            kept = fewer
    return kept
