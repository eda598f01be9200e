"""Victims: what preemption knows of tenants that could make room, and what a set of them costs. Pure.

Guarantees:
- Tenants of one `unit` (the containers' claims of one Pod, a gang) end together and count once.
- Costs are compared item by item; the least wins.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from sharepod.api.units import GpuUuid, TenantId
from sharepod.placement.state.types import Assignment


@dataclass(frozen=True, slots=True, kw_only=True)
class VictimFacts:
    """Facts of one tenant that runs."""

    unit: str
    """What ends with it: the uid of its Pod, or a name that a gang has in common."""
    priority: int
    """Effective priority: only a request of a higher one may preempt it."""
    over_budget_milli: int = 0
    """How far its namespace is over its budget, in thousandths of that budget; 0 within it."""
    started: int = 0
    """When it started, seconds since the epoch."""
    lost_seconds: int = 0
    """Seconds of work that its end would lose."""
    protected: bool = False
    """The API server refused its eviction lately: a PodDisruptionBudget has no room for it."""
    lowerable: bool = False
    """Its request may be lowered to 0: it goes on with what others leave of the GPU's time."""
    slow: bool = False
    """Its Pod may take longer to end than others wait for it."""
    leaving: bool = False
    """Its Pod is being deleted: what it has will be free without another step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """Tenants that end together. The highest priority and the earliest start among them are the unit's."""

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
    """Plan that makes room for a request on these GPUs of one node.

    `lower`: tenants whose request becomes 0; `evict`: tenants whose Pods end. `leaving`: tenants of lower priority
    whose Pods end anyway, and are waited for. `refused_lately`: a PodDisruptionBudget protects one of those to evict,
    and no other set would do. `move_to`: where the one that is evicted is placed again, if that is a move.
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
"""Priority in place of the highest one where there is nobody: below each that the API server takes (32 bits)."""


def cost_of(evicted: Collection[Unit], lowered: Collection[Unit]) -> PlanCost:
    """Return the cost of evicting and lowering these units.

    In this order: evictions that a PodDisruptionBudget has refused; the highest priority of those evicted; their
    number; how far they are over budget, the further the cheaper; the earliest start among them, the later the
    cheaper; seconds of work lost; then the same of those lowered, as far as it matters to them.
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
"""The first items of a cost, which never fall when another unit is evicted."""


@dataclass(frozen=True, slots=True)
class Victims:
    """Tenants that run, as preemption looks at them. `units`: the unit of each that stays unless it is preempted;
    `leaving`: those whose Pods end anyway, each with its priority; `stuck`: those whose Pods have long been gone and
    whose rows stay: they are not counted on."""

    units: Mapping[TenantId, Unit]
    leaving: Mapping[TenantId, int]
    stuck: frozenset[TenantId] = frozenset()

    def are_slow(self, tenants: Iterable[TenantId]) -> bool:
        """Return whether any of these tenants may take longer to end than others wait for it."""
        units = (self.units.get(tenant) for tenant in tenants)
        return any(unit is not None and unit.slow for unit in units)

    def without_slow(self) -> Victims:
        """Return the same without those that may take longer to end than others wait for them."""
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
