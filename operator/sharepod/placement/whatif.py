"""Advice to a request that waits: which tenant would have to move, or which would have to go. Pure.

Guarantees:
- Advice followed means placed: once those named have gone, or the one named runs on the node that is named, and nothing
  else has changed, the engine places the request.
- No fewer would do: of sets of the request's own namespace the smallest is named where one helps, else the smallest of
  all, by number.
- Tenants of other namespaces are counted, never named.
- Work is bounded: among more than `_MOST_TENANTS` none are looked for.
- Both look step by step and yield None after each, so that a caller can do other work; the answer comes last. What is
  named would do at that moment, also where the cluster has changed between two steps.
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
"""Tenants that are named: of more, nobody deletes all by hand."""

_MOST_TENANTS = 4_000
"""Tenants among which those that would have to go are looked for: some 50 ms of work."""


@dataclass(frozen=True, slots=True)
class Leavers:
    """Tenants that would have to go. `own`: names of those of the request's namespace; `others`: number of all others;
    `tenants`: all of them."""

    own: tuple[str, ...]
    others: int
    tenants: tuple[TenantId, ...]

    @property
    def advice(self) -> str:
        """The same in words."""
        names = [*self.own[:_MOST_NAMED]]
        if len(self.own) > _MOST_NAMED:
            names.append(f"{len(self.own) - _MOST_NAMED} more of this namespace")
        if self.others:
            names.append(f"{self.others} {'tenant' if self.others == 1 else 'tenants'} of other namespaces")
        listed = names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
        return f"It would fit if {listed} ended."


@dataclass(frozen=True, slots=True)
class MoveAdvice:
    """Tenant that would have to run elsewhere. `name`: of its Pod; `node`: where it has room."""

    tenant: TenantId
    name: str
    node: str
    gpus: tuple[GpuUuid, ...]

    @property
    def advice(self) -> str:
        """The same in words."""
        return f"It would fit if {self.name} ran elsewhere on {self.node}: movable: true lets it be moved there."


def move_advice(
    cluster: Cluster, request: PlacementRequest, movable: Mapping[TenantId, Movable], find: Find
) -> Iterator[MoveAdvice | None]:
    """Look which of these tenants would have to move; None comes last if no single move would help. `find`: see
    `Find`."""
    if len(movable) > _MOST_TENANTS:
        return
    for plan in move_plans(cluster, request, movable, find):
        if plan is None:
            yield None
        else:
            yield MoveAdvice(plan.tenant, movable[plan.tenant].request.name, plan.to.node, plan.to.gpus)


def leavers(cluster: Cluster, request: PlacementRequest) -> Iterator[Leavers | None]:
    """Look which tenants would have to go, whatever their priority; None comes last if nobody's going would help."""
    asked = replace(request, priority=1)
    if request.beside:
        return
    for namespace in (request.namespace, None):
        # 1. All tenants, or those of the namespace, as victims of equal cost.
        facts: dict[TenantId, VictimFacts] = {}
        for node in tuple(cluster.nodes()):
            rows = [row.wanted for row in node.rows.values() if namespace in (None, row.wanted.namespace)]
            facts.update((row.tenant, _fact(row)) for row in rows)
            yield None
        victims = victims_of(facts)
        if len(victims.units) > _MOST_TENANTS:
            return
        # 2. The fewest of them.
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
        return  # without any, those that end already are enough


def _fact(row: Reservation) -> VictimFacts:
    return VictimFacts(unit=row.pod_uid or row.tenant, priority=0, leaving=row.releasing)


def _name(row: Reservation) -> str:
    return row.pod_name or (row.claim.name if row.claim is not None else row.tenant)
