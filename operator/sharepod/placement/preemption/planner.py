"""Preemption planner: finds tenants to lower or evict for a request that has no place. Pure.

Guarantees (PL6 of docs/design.md):
- Only tenants of a lower effective priority than the request's are preempted, and none of its own affinity group.
- Time is preempted first: if lowering some requests to 0 is enough, no tenant is evicted.
- The set is the cheapest by `victims.cost_of`, over all nodes and sets of GPUs, and has no superfluous member. This is
  exact within the bounds of `search.cheapest_set` and `_GPU_SETS` (tests compare with trying all sets).
- The engine's own filters accept the request after the preemption.
- Work is bounded: each node is searched once, and only on GPUs whose plan could cost less than the best plan so far.
- Shares of tenants that are ending anyway count as free, so no other tenant is preempted for that room.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, islice

from sharepod.api.units import GpuUuid, Milli, TenantId
from sharepod.placement.filters import gpu as gpu_filters
from sharepod.placement.filters import node as node_filters
from sharepod.placement.filters.candidates import affinity_places, gpu_checks, gpu_passes, node_passes
from sharepod.placement.state.accounts import GpuAccount, NodeAccount, Row
from sharepod.placement.state.cluster import Cluster
from sharepod.placement.state.cluster_view import GroupPlace
from sharepod.placement.state.types import PlacementRequest, label_key

from .search import Chosen, cheapest_set
from .shortage import Amounts, freed_by, must_end, short_of_gpu, short_of_node, usable_gpus
from .victims import BOUNDED_ITEMS, PlanCost, PreemptionPlan, Unit, Victims

_NODE_CHECKS = tuple(check.passes for check in (*node_filters.STATIC, *node_filters.UNAFFECTED_BY_TENANTS))
_GPU_SETS = 64
"""Most sets of GPUs of one node that are searched for a request of several GPUs. With eight GPUs, this covers all pairs
(28) and almost all sets of four (70)."""


@dataclass(frozen=True, slots=True)
class _Asked:
    """The waiting request, with values computed once for all nodes: places of its affinity group, and filters that no
    tenant changes."""

    request: PlacementRequest
    places: tuple[GroupPlace, ...]
    checks: tuple[gpu_filters.GpuFilter, ...]
    group: frozenset[TenantId]
    """Members of the request's affinity group, which are never preempted for it."""


def plan_preemption(cluster: Cluster, request: PlacementRequest, victims: Victims) -> PreemptionPlan | None:
    """Return the preemption for a request that fits nowhere. None if no preemption makes room.

    A plan with empty `lower` and `evict` means that the request fits once tenants that are ending anyway have left.
    Requests of several claims (`siblings`) are planned in `several_claims`.
    """
    best: PreemptionPlan | None = None
    for best in plans(cluster, request, victims):  # noqa: B007 the last is the best
        pass
    return best


def plans(cluster: Cluster, request: PlacementRequest, victims: Victims) -> Iterator[PreemptionPlan | None]:
    """Search one node after the other. Yields the best plan so far after each node, so that the caller can do other
    work in between.

    Each node is read at its own step, so the cluster may have changed since: the caller must check the plan before it
    acts.
    """
    best: PreemptionPlan | None = None
    if request.siblings:
        return
    places = affinity_places(cluster, request)
    asked = _Asked(request, places, gpu_filters.static(request), _group(cluster, request, places))
    names = [name for name, _ in places] if places else [node.name for node in cluster.nodes()]
    for name in sorted(names):
        node = cluster.node(name)
        if node is None or not all(passes(node, request) for passes in _NODE_CHECKS):
            continue
        found = _on_node(node, asked, victims, best.cost if best is not None else None)
        if found is not None and (best is None or found.cost < best.cost):
            best = found
        yield best


def still_holds(cluster: Cluster, request: PlacementRequest, plan: PreemptionPlan, victims: Victims) -> bool:
    """Return whether an earlier plan still makes room, and preempts no tenant that a PodDisruptionBudget protects by
    now."""
    node = cluster.node(plan.node)
    if node is None or not all(passes(node, request) for passes in _NODE_CHECKS):
        return False
    here = [(tenant, node.rows[tenant]) for tenant in (*plan.lower, *plan.evict) if tenant in node.rows]
    units = [victims.units.get(tenant) for tenant, row in here if not leaves(tenant, row, victims)]
    most = request.priority if plan.move_to is not None else request.priority - 1
    if any(unit is None or unit.priority > most for unit in units):
        return False
    places = affinity_places(cluster, request)
    return (not places or (plan.node, plan.gpus) in places) and _fits(
        account_after(node, plan, victims), request, plan.gpus
    )


def _on_node(node: NodeAccount, asked: _Asked, victims: Victims, below: PlanCost | None) -> PreemptionPlan | None:
    """Return the cheapest plan on one node that costs less than `below`. None if there is none."""
    request = asked.request
    # 1. Shares of tenants that are ending anyway count as free.
    leaving = [tenant for tenant, row in node.rows.items() if leaves(tenant, row, victims)]
    account = _without(node, leaving) if leaving else node
    units = _units(account, asked, victims)
    if not units and not leaving:
        return None
    going = {tenant for unit in units for tenant in unit.tenants}
    # 2. Find GPUs that the request could have after preemption. GPUs that need none come first.
    usable = usable_gpus(account, request, asked.places, asked.checks)
    usable = [gpu for gpu in usable if _may_be_freed(gpu, request, going)]
    if len(usable) < request.gpu.count:
        return None
    capped = gpu_filters.within_cap(request)
    ready = [gpu for gpu in usable if not short_of_gpu(gpu, request) and not _conflicting(gpu, request)]
    ready = [gpu for gpu in ready if all(check.passes(gpu) for check in capped)]
    ready = ready[: request.gpu.count]
    others = [gpu for gpu in usable if gpu not in ready]
    # 3. Search, for each set of GPUs, the cheapest units to preempt.
    best: PreemptionPlan | None = None
    by_tenant = {tenant: unit for unit in units for tenant in unit.tenants}
    of_node = short_of_node(account, request)
    for more in islice(combinations(_ranked(others, request), request.gpu.count - len(ready)), _GPU_SETS):
        gpus = (*ready, *more)
        chosen = _cheapest(account, gpus, of_node, request, by_tenant, best.cost if best is not None else below)
        if chosen is None or (best is not None and chosen.cost >= best.cost):
            continue
        plan = _plan(node, gpus, chosen, leaving, request, victims)
        if _fits(account_after(node, plan, victims), request, plan.gpus):
            best = plan
    return best


def _cheapest(
    node: NodeAccount,
    gpus: Sequence[GpuAccount],
    of_node: Amounts,
    request: PlacementRequest,
    by_tenant: Mapping[TenantId, Unit],
    below: PlanCost | None,
) -> Chosen | None:
    """Return the cheapest units whose preemption frees these GPUs for the request; None if none cost at most
    `below`."""
    if below is not None and not of_node and not all(_may_cost(gpu, request, by_tenant, below) for gpu in gpus):
        return None
    short = dict(of_node)
    forced: dict[str, Unit] = {}
    for gpu in gpus:
        short |= short_of_gpu(gpu, request)
        forced |= {by_tenant[tenant].name: by_tenant[tenant] for tenant in _conflicting(gpu, request)}
    here = dict.fromkeys(tenant for gpu in gpus for tenant in gpu.rows) if not of_node else by_tenant
    units = {unit.name: unit for tenant in here if (unit := by_tenant.get(tenant)) is not None}
    return cheapest_set(
        short,
        [(unit, freed_by(node, unit, gpus, short)) for unit in units.values()],
        list(forced.values()),
        below=below,
    )


def _may_cost(gpu: GpuAccount, request: PlacementRequest, by_tenant: Mapping[TenantId, Unit], most: PlanCost) -> bool:
    """Return False if freeing this GPU surely costs more than `most`: a quick bound."""
    protected, priority, count = most[:BOUNDED_ITEMS]
    if protected:
        return True
    short, uuid = short_of_gpu(gpu, request), gpu.state.uuid
    time, memory = short.get(("time", uuid), 0), short.get(("memory", uuid), 0)
    below, level = [], []
    for tenant, row in gpu.rows.items():
        unit = by_tenant.get(tenant)
        if unit is None:
            continue
        if unit.lowerable:
            time -= row.request_milli
        if not unit.protected and unit.priority <= priority:
            freed = (0 if unit.lowerable else row.request_milli, row.memory)
            level.append(freed)
            if unit.priority < priority:
                below.append(freed)
    few = [sorted(column)[-count:] if count else [] for column in zip(*level, strict=True)] or [[], []]
    lower = [[freed[0] for freed in below], [freed[1] for freed in below]]
    return any(sum(some[0]) >= time and sum(some[1]) >= memory for some in (few, lower))


def _plan(
    node: NodeAccount,
    gpus: Sequence[GpuAccount],
    chosen: Chosen,
    leaving: Collection[TenantId],
    request: PlacementRequest,
    victims: Victims,
) -> PreemptionPlan:
    return PreemptionPlan(
        node=node.name,
        gpus=frozenset(gpu.state.uuid for gpu in gpus),
        lower=_in_order(tenant for unit in chosen.lower for tenant in unit.tenants if tenant in node.rows),
        evict=_in_order(tenant for unit in chosen.evict for tenant in unit.tenants),
        leaving=_in_order(one for one in leaving if victims.leaving.get(one, request.priority) < request.priority),
        refused_lately=any(unit.protected for unit in chosen.evict),
        cost=chosen.cost,
    )


def _in_order(tenants: Iterator[TenantId]) -> tuple[TenantId, ...]:
    return tuple(sorted(tenants))


def leaves(tenant: TenantId, row: Row, victims: Victims) -> bool:
    """Return whether a tenant's share becomes free without a preemption, because the tenant is ending."""
    return tenant in victims.leaving or (row.wanted.releasing and tenant not in victims.stuck)


def _group(cluster: Cluster, request: PlacementRequest, places: Sequence[GroupPlace]) -> frozenset[TenantId]:
    """Return the members of the request's affinity group."""
    key = label_key(request.namespace, request.gpu.labels.affinity)
    rows = (item for node in cluster.known(name for name, _ in places) for item in node.rows.items())
    return frozenset(
        tenant for tenant, row in rows if label_key(row.wanted.namespace, row.wanted.labels.affinity) == key
    )


def _units(node: NodeAccount, asked: _Asked, victims: Victims) -> list[Unit]:
    """Return the units that may be preempted on this node."""
    found = units_below(node, asked.request, victims)
    return [unit for unit in found if not asked.group or asked.group.isdisjoint(unit.tenants)]


def units_below(node: NodeAccount, request: PlacementRequest, victims: Victims) -> list[Unit]:
    """Return the units with a tenant on this node and a lower priority than the request's, ordered by name."""
    priority, units = request.priority, victims.units
    here = (unit for tenant in node.rows if (unit := units.get(tenant)) is not None and unit.priority < priority)
    found = {unit.name: unit for unit in here}
    return [unit for _, unit in sorted(found.items())]


def _may_be_freed(gpu: GpuAccount, request: PlacementRequest, going: Collection[TenantId]) -> bool:
    """Return whether the GPU takes the request once all of the tenants `going` have left it."""
    if any(tenant not in going for tenant in _conflicting(gpu, request)):
        return False
    rows = [row for tenant, row in gpu.rows.items() if tenant in going]
    short, uuid = short_of_gpu(gpu, request), gpu.state.uuid
    return short.get(("time", uuid), 0) <= sum(row.request_milli for row in rows) and short.get(
        ("memory", uuid), 0
    ) <= sum(row.memory for row in rows)


def _conflicting(gpu: GpuAccount, request: PlacementRequest) -> list[TenantId]:
    """Return the tenants of a GPU that must leave it for the request, whatever the free time and memory."""
    return [tenant for tenant, row in gpu.rows.items() if must_end(row, request)]


def _ranked(gpus: Sequence[GpuAccount], request: PlacementRequest) -> list[GpuAccount]:
    """Sort GPUs by the amount that must be freed for the request, least first."""

    def effort(gpu: GpuAccount) -> tuple[int, int, int, GpuUuid]:
        short = short_of_gpu(gpu, request)
        time = short.get(("time", gpu.state.uuid), 0)
        memory = short.get(("memory", gpu.state.uuid), 0) * 1000 // (gpu.state.memory or 1)
        return len(_conflicting(gpu, request)), time + memory, gpu.index, gpu.state.uuid

    return sorted(gpus, key=effort)


def account_after(node: NodeAccount, plan: PreemptionPlan, victims: Victims) -> NodeAccount:
    """Return a copy of the node's account as it will be after the plan."""
    leaving = [tenant for tenant, row in node.rows.items() if leaves(tenant, row, victims)]
    account = _without(node, [*leaving, *plan.evict])
    for tenant in plan.lower:
        row = account.rows.get(tenant)
        if row is not None:
            account.put(tenant, Row(replace(row.wanted, request_milli=Milli(0)), None))
    return account


def _without(node: NodeAccount, tenants: Collection[TenantId]) -> NodeAccount:
    """Return a copy of the node's account without these tenants and their pods."""
    account = node.copy()
    for tenant in tenants:
        account.put(tenant, None)
    for uid, usage in list(account.pods.items()):
        if usage.tenant is not None and usage.tenant in tenants:
            account.set_pod(uid, None)
    return account


def _fits(account: NodeAccount, request: PlacementRequest, gpus: Collection[GpuUuid]) -> bool:
    """Return whether all filters accept the request on these GPUs of the account."""
    checks = gpu_checks(request)
    known = [account.gpus_by_uuid[uuid] for uuid in gpus if uuid in account.gpus_by_uuid]
    return (
        len(known) == request.gpu.count
        and node_passes(account, request)
        and all(gpu_passes(gpu, checks) for gpu in known)
    )
