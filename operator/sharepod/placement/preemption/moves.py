"""Move planner: finds one tenant whose restart on other GPUs makes room for a request that has no place. Pure.

Guarantees:
- At most one tenant moves, and only a tenant that may be moved. Moves do not cascade: nothing is evicted or moved for
  the mover.
- The mover fits elsewhere now, while it still has its present place and the request is counted there as well.
- Among all such moves the cheapest by `cost_of_move` is chosen (tests compare with trying all).
- The engine's own filters accept both the request and the mover.
- Members of an affinity group stay, because a move would split their group.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

from sharepod.api.sharepod import GpuRequest
from sharepod.api.units import Bytes, GpuUuid, TenantId
from sharepod.placement.filters import gpu as gpu_filters
from sharepod.placement.filters import node as node_filters
from sharepod.placement.filters.candidates import affinity_places, gpu_checks, gpu_passes, node_passes
from sharepod.placement.state.accounts import GpuAccount, NodeAccount, Row
from sharepod.placement.state.cluster import Cluster
from sharepod.placement.state.cluster_view import GroupPlace
from sharepod.placement.state.types import Assignment, PlacementRequest, Reservation

from .shortage import Amounts, must_end, short_of_gpu, short_of_node, taken_of_node, usable_gpus
from .victims import PreemptionPlan

_NODE_CHECKS = tuple(check.passes for check in (*node_filters.STATIC, *node_filters.UNAFFECTED_BY_TENANTS))
_MOVING = TenantId("the one that moves")
"""Id under which a mover's new share is tried on an account that also has its old share."""

Find = Callable[[PlacementRequest], Assignment | None]
"""Function: returns the place that the engine would choose for a request now; None if there is none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Movable:
    """Tenant that may be moved. `request`: the request that it will have when it is placed again. `started`: seconds
    since the epoch. `lost_seconds`: seconds of work that a restart would lose."""

    request: PlacementRequest
    started: int = 0
    lost_seconds: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class MovePlan:
    """Move that frees `gpus` of `node` for a waiting request: `tenant` leaves its place on the node and goes to
    `to`."""

    tenant: TenantId
    node: str
    gpus: frozenset[GpuUuid]
    to: Assignment
    cost: MoveCost

    @property
    def preemption(self) -> PreemptionPlan:
        """Return the move as a preemption plan: the tenant is evicted, and placed at `to`."""
        return PreemptionPlan(node=self.node, gpus=self.gpus, evict=(self.tenant,), move_to=self.to)


MoveCost = tuple[int, int, int, str]
"""Cost of a move, see `cost_of_move`."""


def cost_of_move(movable: Movable) -> MoveCost:
    """Return the cost of moving a tenant: lost work, then share of time, age (younger is cheaper), id."""
    asked = movable.request.gpu
    share = asked.request_milli * asked.count
    return movable.lost_seconds, share, -movable.started, movable.request.tenant


@dataclass(frozen=True, slots=True)
class _Waits:
    """The waiting request, with values computed once for all nodes."""

    request: PlacementRequest
    places: tuple[GroupPlace, ...]
    checks: tuple[gpu_filters.GpuFilter, ...]


def plan_move(
    cluster: Cluster, request: PlacementRequest, movable: Mapping[TenantId, Movable], find: Find
) -> MovePlan | None:
    """Return the cheapest move that makes room for a request that fits nowhere. None if no move does."""
    found: MovePlan | None = None
    for found in move_plans(cluster, request, movable, find):  # noqa: B007 the last is the answer
        pass
    return found


def move_plans(
    cluster: Cluster, request: PlacementRequest, movable: Mapping[TenantId, Movable], find: Find
) -> Iterator[MovePlan | None]:
    """Search for a move step by step. Yields None after each step, so that a caller can do other work, and the plan
    last.

    Each node is read at its own step, so the cluster may have changed since: the caller must check the plan before it
    acts. No move is planned for requests of several claims (`siblings`).
    """
    if request.siblings or not movable:
        return
    # 1. Find tenants whose move could make enough room, by simple sums over their node.
    places = affinity_places(cluster, request)
    waits = _Waits(request, places, gpu_filters.static(request))
    names = [name for name, _ in places] if places else [node.name for node in cluster.nodes()]
    likely: list[tuple[MoveCost, str, TenantId]] = []
    for name in names:
        node = cluster.node(name)
        if node is not None and all(passes(node, request) for passes in _NODE_CHECKS):
            for tenant in _likely(node, waits, movable):
                likely.append((cost_of_move(movable[tenant]), name, tenant))
        yield None
    # 2. Take the first of them, in the order of cost, that also fits elsewhere by the filters.
    elsewhere = _Elsewhere(find)
    for cost, name, tenant in sorted(likely):
        node = cluster.node(name)
        found = _move(node, waits, tenant, movable[tenant], elsewhere, cost) if node is not None else None
        yield found
        if found is not None:
            return


def place_holds(cluster: Cluster, request: PlacementRequest, mover: PlacementRequest, plan: PreemptionPlan) -> bool:
    """Return whether a planned move still works: its target takes the mover, and the GPUs that it leaves take the
    request."""
    to, (tenant,) = plan.move_to, plan.evict
    node = cluster.node(to.node) if to is not None else None
    if to is None or node is None:
        return False
    asked = replace(mover, tenant=_MOVING)
    if to.node == plan.node:
        node = _left(node, tenant)
        _put(node, request.tenant, _reservation(node, request, plan.gpus))
    checks = gpu_checks(asked)
    gpus = [node.gpus_by_uuid[uuid] for uuid in to.gpus if uuid in node.gpus_by_uuid]
    return len(gpus) == len(to.gpus) and all(gpu_passes(gpu, checks) for gpu in gpus) and node_passes(node, asked)


def _likely(node: NodeAccount, waits: _Waits, movable: Mapping[TenantId, Movable]) -> list[TenantId]:
    """Return the tenants of one node that may free enough for the request if they leave."""
    request, count = waits.request, waits.request.gpu.count
    usable = usable_gpus(node, request, waits.places, waits.checks)
    if len(usable) < count:
        return []
    ready = {gpu.state.uuid for gpu in usable if not short_of_gpu(gpu, request) and not _others(gpu, request, None)}
    found: list[TenantId] = []
    of_node = short_of_node(node, request)
    for tenant, row in node.rows.items():
        if tenant not in movable or row.wanted.releasing or row.wanted.labels.affinity is not None:
            continue
        freed = [gpu for gpu in usable if gpu.state.uuid in row.gpus and _would_pass(gpu, request, tenant, row)]
        if len(ready.union(gpu.state.uuid for gpu in freed)) >= count and _covers(node, tenant, of_node):
            found.append(tenant)
    return found


def _others(gpu: GpuAccount, request: PlacementRequest, leaves: TenantId | None) -> bool:
    """Return whether a tenant on the GPU, other than `leaves`, excludes the request."""
    return any(tenant != leaves and must_end(row, request) for tenant, row in gpu.rows.items())


def _covers(node: NodeAccount, tenant: TenantId, of_node: Amounts) -> bool:
    """Return whether the tenant takes at least as much of the node's resources as the request lacks (`of_node`)."""
    taken = taken_of_node(node, (tenant,)) if of_node else {}
    return all(taken.get(name, int(name == "rows")) >= amount for name, amount in of_node.items())


def _would_pass(gpu: GpuAccount, request: PlacementRequest, tenant: TenantId, row: Row) -> bool:
    short, uuid = short_of_gpu(gpu, request), gpu.state.uuid
    if short.get(("time", uuid), 0) > row.request_milli or short.get(("memory", uuid), 0) > row.memory:
        return False
    return not _others(gpu, request, tenant)


def _move(
    node: NodeAccount, waits: _Waits, tenant: TenantId, mover: Movable, elsewhere: _Elsewhere, cost: MoveCost
) -> MovePlan | None:
    """Return the move of one tenant. None if it does not leave enough room, or if the tenant does not fit elsewhere."""
    request, asked, row = waits.request, mover.request, node.rows.get(tenant)
    own = gpu_checks(asked)
    place = elsewhere.on_another_node(asked, node.name)
    if row is None or (
        place is None and not any(gpu_passes(gpu, own) for gpu in node.gpus if gpu.state.uuid not in row.gpus)
    ):
        return None
    after, checks = _left(node, tenant), gpu_checks(request)
    usable = usable_gpus(after, request, waits.places, waits.checks)
    passing = [gpu for gpu in usable if gpu_passes(gpu, checks)]
    if len(passing) < request.gpu.count or not node_passes(after, request):
        return None
    # 1. To another node, as the engine chooses.
    if place is not None:
        chosen = _tightest(passing, row, request.gpu.count)
        return MovePlan(tenant=tenant, node=node.name, gpus=_uuids(chosen), to=place, cost=cost)
    # 2. To other GPUs of its node. The request prefers GPUs that the mover cannot have.
    for_mover = [gpu for gpu in after.gpus if gpu_passes(gpu, own)]
    chosen = sorted(passing, key=lambda gpu: gpu in for_mover)[: request.gpu.count]
    rest = [gpu for gpu in for_mover if gpu not in chosen]
    if len(rest) < asked.gpu.count:
        return None
    _put(after, request.tenant, _reservation(after, request, _uuids(chosen)))
    if not node_passes(after, asked):
        return None
    taken = sorted(rest, key=lambda gpu: (gpu.free_milli, gpu.index))[: asked.gpu.count]
    to = Assignment(node=node.name, gpus=_in_order(taken), memory=_memory(taken, asked.gpu))
    return MovePlan(tenant=tenant, node=node.name, gpus=_uuids(chosen), to=to, cost=cost)


class _Elsewhere:
    """Places of movers on other nodes. For each kind of request, the engine's best place is searched once and
    remembered."""

    def __init__(self, find: Find) -> None:
        self._find = find
        self._best: dict[tuple[object, ...], Assignment | None] = {}

    def on_another_node(self, asked: PlacementRequest, node: str) -> Assignment | None:
        """Return the place that the engine would choose for a mover on any node except this one."""
        kind = (asked.namespace, asked.priority, asked.gpu, repr(asked.pod), repr(asked.avoid), asked.owner)
        if kind not in self._best:
            self._best[kind] = self._find(replace(asked, tenant=_MOVING))
        best = self._best[kind]
        if best is None or best.node != node:
            return best
        avoid = {**asked.avoid, node: "is its present node"}
        return self._find(replace(asked, tenant=_MOVING, avoid=avoid))


def _tightest(passing: list[GpuAccount], row: Row, count: int) -> list[GpuAccount]:
    """Return the GPUs to give to the request: first the GPUs that the mover leaves, then the fullest."""
    return sorted(passing, key=lambda gpu: (gpu.state.uuid not in row.gpus, gpu.free_milli, gpu.index))[:count]


def _left(node: NodeAccount, tenant: TenantId) -> NodeAccount:
    """Return a copy of the node's account without the tenant and its pod."""
    account = node.copy()
    account.put(tenant, None)
    for uid, usage in list(account.pods.items()):
        if usage.tenant == tenant:
            account.set_pod(uid, None)
    return account


def _put(account: NodeAccount, tenant: TenantId, reservation: Reservation) -> None:
    account.put(tenant, Row(reservation, None))


def _reservation(account: NodeAccount, request: PlacementRequest, gpus: frozenset[GpuUuid]) -> Reservation:
    chosen = [gpu for gpu in account.gpus if gpu.state.uuid in gpus]
    place = Assignment(node=account.name, gpus=_in_order(chosen), memory=_memory(chosen, request.gpu))
    return place.reservation(request)


def _memory(gpus: list[GpuAccount], asked: GpuRequest) -> Bytes:
    return Bytes(min(asked.memory_on(gpu.state.memory) for gpu in gpus))


def _in_order(gpus: list[GpuAccount]) -> tuple[GpuUuid, ...]:
    return tuple(gpu.state.uuid for gpu in sorted(gpus, key=lambda gpu: (gpu.index, gpu.state.uuid)))


def _uuids(gpus: list[GpuAccount]) -> frozenset[GpuUuid]:
    return frozenset(gpu.state.uuid for gpu in gpus)
