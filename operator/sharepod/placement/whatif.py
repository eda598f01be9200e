"""Advice for a waiting request: which tenant would have to move, or which tenants would have to end. Pure.

Guarantees:
- If the named tenants end, or the named tenant moves to the named node, and nothing else changes, the engine places the
  request.
- The set of tenants that would have to end is minimal. If tenants of the request's own namespace suffice, it is the
  smallest set of them, otherwise the smallest set of all tenants.
- Tenants of other namespaces are counted, never named.
- Work is bounded: with more than `_MOST_TENANTS` tenants there is no advice.
- Both searches are generators, so that the caller can do other work between their steps. They yield None after each
  step, and the answer last. The answer is valid at that moment, even if the cluster has changed between two steps.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from sharepod.api.units import GpuUuid, TenantId

from .preemption.moves import Find, Movable, move_plans
from .preemption.planner import plans, still_holds
from .preemption.victims import PreemptionPlan, VictimFacts, victims_of
from .state.cluster import Cluster
from .state.types import PlacementRequest, Reservation

_MOST_NAMED = 4
"""Most tenants that the advice names; more are too many to delete by hand."""

_MOST_TENANTS = 4_000
"""Most tenants among which advice is searched: some 50 ms of work."""


@dataclass(frozen=True, slots=True)
class Leavers:
    """Tenants that would have to end. `own`: names of the tenants in the request's namespace; `others`: number of all
    others; `tenants`: all of them."""

    own: tuple[str, ...]
    others: int
    tenants: tuple[TenantId, ...]

    @property
    def advice(self) -> str:
        """Return the advice as text."""
        names = [*self.own[:_MOST_NAMED]]
        if len(self.own) > _MOST_NAMED:
            names.append(f"{len(self.own) - _MOST_NAMED} more of this namespace")
        if self.others:
            names.append(f"{self.others} {'tenant' if self.others == 1 else 'tenants'} of other namespaces")
        listed = names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
        return f"It would fit if {listed} ended."


@dataclass(frozen=True, slots=True)
class MoveAdvice:
    """Tenant that would have to run elsewhere. `name`: name of its Pod. `node`, `gpus`: where it could run."""

    tenant: TenantId
    name: str
    node: str
    gpus: tuple[GpuUuid, ...]

    @property
    def advice(self) -> str:
        """Return the advice as text."""
        return f"It would fit if {self.name} ran elsewhere on {self.node}: movable: true lets it be moved there."


def move_advice(
    cluster: Cluster, request: PlacementRequest, movable: Mapping[TenantId, Movable], find: Find
) -> Iterator[MoveAdvice | None]:
    """Search for a tenant whose move would make room, see the header; None comes last if there is none. `find`: see
    `Find`."""
    if len(movable) > _MOST_TENANTS:
        return
    for plan in move_plans(cluster, request, movable, find):
        if plan is None:
            yield None
        else:
            yield MoveAdvice(plan.tenant, movable[plan.tenant].request.name, plan.to.node, plan.to.gpus)


def leavers(cluster: Cluster, request: PlacementRequest) -> Iterator[Leavers | None]:
    """Search for the tenants that would have to end, of any priority, see the header; None comes last if no set
    suffices."""
    asked = replace(request, priority=1)
    if request.siblings:
        return
    for namespace in (request.namespace, None):
        # 1. All tenants, or the namespace's, as victims of equal cost.
        facts: dict[TenantId, VictimFacts] = {}
        for node in tuple(cluster.nodes()):
            rows = [row.wanted for row in node.rows.values() if namespace in (None, row.wanted.namespace)]
            facts.update((row.tenant, _fact(row)) for row in rows)
            yield None
        victims = victims_of(facts)
        if len(victims.units) > _MOST_TENANTS:
            return
        # 2. Search for the smallest sufficient set.
        plan: PreemptionPlan | None = None
        for plan in plans(cluster, asked, victims) if victims.units else ():  # noqa: B007 the last is the best
            yield None
        if plan is None or not still_holds(cluster, asked, plan, victims):
            continue
        rows = [row for tenant in plan.evict for _, row in cluster.reservations_of(tenant)]
        if rows:
            own = tuple(sorted({_name(row) for row in rows if row.namespace == request.namespace}))
            others = {row.pod_uid or row.tenant for row in rows if row.namespace != request.namespace}
            yield Leavers(own, len(others), plan.evict)
        return  # the set is empty: tenants that are already ending suffice


def _fact(row: Reservation) -> VictimFacts:
    return VictimFacts(unit=row.pod_uid or row.tenant, priority=0, leaving=row.releasing)


def _name(row: Reservation) -> str:
    return row.pod_name or (row.claim.name if row.claim is not None else row.tenant)
