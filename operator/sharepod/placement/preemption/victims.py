"""Victims: facts of tenants that could be preempted, and the cost of a set of them. Pure.

Guarantees:
- Tenants of one `unit` (the containers' claims of one Pod, a gang) end together and count once.
- Costs are tuples that are compared item by item; the least cost wins.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from sharepod.api.units import GpuUuid, TenantId
from sharepod.placement.state.types import Assignment


@dataclass(frozen=True, slots=True, kw_only=True)
class VictimFacts:
    """Facts of one running tenant."""

    unit: str
    """Name that tenants have in common which end together: the UID of their Pod, or the name of their gang."""
    priority: int
    """Effective priority: only a request of higher priority may preempt the tenant."""
    over_budget_milli: int = 0
    """Amount by which its namespace exceeds its budget, in thousandths of the budget. 0 within the budget."""
    started: int = 0
    """Time at which it started, in seconds since the epoch."""
    lost_seconds: int = 0
    """Seconds of work that would be lost if it ended now."""
    protected: bool = False
    """True if the API server has recently refused its eviction, because a PodDisruptionBudget does not allow it."""
    lowerable: bool = False
    """True if its request may be lowered to 0. The tenant then uses only time that other tenants leave idle."""
    slow: bool = False
    """True if its Pod may take longer to end than waiting requests allow."""
    leaving: bool = False
    """True if its Pod is being deleted: its share becomes free without a preemption."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """Tenants that end together, with their highest priority and earliest start."""

    name: str
    tenants: frozenset[TenantId]
    priority: int
    over_budget_milli: int
    started: int
    lost_seconds: int
    protected: bool
    lowerable: bool
    slow: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PreemptionPlan:
    """Preemption that frees these GPUs of one node for a request.

    `lower`: tenants whose request becomes 0; `evict`: tenants whose Pods end. `leaving`: tenants of lower priority
    whose Pods end anyway, and are waited for. `refused_lately`: a PodDisruptionBudget protects one of the tenants to
    evict, and no other set suffices. `move_to`: new place of the evicted tenant, if the plan is a move.
    """

    node: str
    gpus: frozenset[GpuUuid]
    lower: tuple[TenantId, ...] = ()
    evict: tuple[TenantId, ...] = ()
    leaving: tuple[TenantId, ...] = ()
    refused_lately: bool = False
    cost: PlanCost = ()
    move_to: Assignment | None = None


PlanCost = tuple[int, ...]
"""Cost of a plan, see `cost_of`."""

_NOBODY = -(1 << 40)
"""Highest priority of an empty set: lower than any priority that the API server accepts (32 bits)."""


def cost_of(evicted: Collection[Unit], lowered: Collection[Unit]) -> PlanCost:
    """Return the cost of evicting and lowering these units, as a tuple that is compared item by item:

    1. evictions that a PodDisruptionBudget has refused;
    2. the highest evicted priority;
    3. the number of evictions;
    4. the excess of the evicted units over their budgets (more is cheaper);
    5. their earliest start (later is cheaper);
    6. the seconds of work that are lost.

    The same items for the lowered units follow, where they apply.
    """
    return (
        sum(unit.protected for unit in evicted),
        max((unit.priority for unit in evicted), default=_NOBODY),
        len(evicted),
        -sum(unit.over_budget_milli for unit in evicted),
        -min((unit.started for unit in evicted), default=0),
        sum(unit.lost_seconds for unit in evicted),
        max((unit.priority for unit in lowered), default=_NOBODY),
        len(lowered),
        -sum(unit.over_budget_milli for unit in lowered),
    )


BOUNDED_ITEMS = 3
"""Number of leading items of a cost that never fall when one more unit is evicted."""


@dataclass(frozen=True, slots=True)
class Victims:
    """Running tenants as candidates for preemption. `units`: the unit of each tenant that is not ending. `leaving`:
    priority of each tenant whose Pod is ending anyway. `stuck`: tenants without a Pod whose rows stay, so their shares
    do not become free by themselves."""

    units: Mapping[TenantId, Unit]
    leaving: Mapping[TenantId, int]
    stuck: frozenset[TenantId] = frozenset()

    def are_slow(self, tenants: Iterable[TenantId]) -> bool:
        """Return whether any of these tenants may take longer to end than waiting requests allow
        (`VictimFacts.slow`)."""
        units = (self.units.get(tenant) for tenant in tenants)
        return any(unit is not None and unit.slow for unit in units)

    def without_slow(self) -> Victims:
        """Return these victims without slow tenants (`VictimFacts.slow`)."""
        return replace(self, units={tenant: unit for tenant, unit in self.units.items() if not unit.slow})


def victims_of(facts: Mapping[TenantId, VictimFacts]) -> Victims:
    """Group tenants into the units that end together."""
    members: dict[str, list[tuple[TenantId, VictimFacts]]] = {}
    leaving: dict[TenantId, int] = {}
    for tenant, fact in facts.items():
        if fact.leaving:
            leaving[tenant] = fact.priority
        else:
            members.setdefault(fact.unit, []).append((tenant, fact))
    units = (_unit(name, some) for name, some in members.items())
    return Victims({tenant: unit for unit in units for tenant in unit.tenants}, leaving)


def _unit(name: str, members: Sequence[tuple[TenantId, VictimFacts]]) -> Unit:
    facts = [fact for _, fact in members]
    return Unit(
        name=name,
        tenants=frozenset(tenant for tenant, _ in members),
        priority=max(fact.priority for fact in facts),
        over_budget_milli=max(fact.over_budget_milli for fact in facts),
        started=min(fact.started for fact in facts),
        lost_seconds=max(fact.lost_seconds for fact in facts),
        protected=any(fact.protected for fact in facts),
        lowerable=all(fact.lowerable for fact in facts),
        slow=any(fact.slow for fact in facts),
    )
