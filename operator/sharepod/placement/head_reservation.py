"""Head-of-queue reservation: which GPUs to keep free for the oldest waiting request, as EASY backfill does.

Without a reservation, small requests that fit at once could delay a large request indefinitely (PL5 no-starvation of
docs/design.md). `Cluster.reserve_for_head` applies a reservation; the caller decides when.

Guarantees:
- A reservation is made only on a node that takes the request once enough of its tenants have left. GPUs that the
  request may not have now because of the cap on excluded GPUs are not reserved.
- Among such nodes, the node is chosen where enough tenants are expected to end first. Among equals it is the node with
  the least amount to free, then the first by name.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

from sharepod.api.gpunode import Latency, Mode
from sharepod.api.units import WHOLE_GPU, GpuUuid, TenantId

from .filters import gpu as gpu_filters
from .filters import node as node_filters
from .filters.candidates import affinity_places, node_passes
from .state.accounts import GpuAccount, NodeAccount, Row
from .state.cluster import Cluster
from .state.cluster_view import HeadReservation
from .state.types import PlacementRequest, label_key

_NODE_CHECKS = tuple(check.passes for check in (*node_filters.STATIC, *node_filters.UNAFFECTED_BY_TENANTS))

SecondsLeft: TypeAlias = Callable[[TenantId, Row], float]
"""Function: returns the seconds until a tenant is expected to end (see run_times.py)."""


def _unknown(_tenant: TenantId, _row: Row) -> float:
    return 0.0


def find_head_reservation(
    cluster: Cluster, request: PlacementRequest, left: SecondsLeft = _unknown
) -> HeadReservation | None:
    """Choose GPUs of one node where room for this request is expected first. None if no node could take it even without
    tenants. A request whose affinity group runs can only have the group's GPUs."""
    places = affinity_places(cluster, request)
    checks = (*gpu_filters.static(request), *gpu_filters.within_cap(request))
    best: tuple[tuple[bool, float, int, str], frozenset[GpuUuid]] | None = None
    for node in cluster.nodes():
        if not _node_usable(node, request):
            continue
        gpus = [gpu for gpu in node.gpus if _gpu_usable(gpu, checks)]
        if places:
            alike = (uuids for name, uuids in places if name == node.name and len(uuids) == request.gpu.count)
            of_group = next(alike, frozenset[GpuUuid]())
            gpus = [gpu for gpu in gpus if gpu.state.uuid in of_group]
        if len(gpus) < request.gpu.count:
            continue
        ranked = sorted(
            (_free_in(gpu, request, left), _to_free(gpu, request), gpu.index, gpu.state.uuid) for gpu in gpus
        )[: request.gpu.count]
        rank = (not node_passes(node, request), ranked[-1][0], sum(cost for _, cost, _, _ in ranked), node.name)
        if best is None or rank < best[0]:
            best = rank, frozenset(uuid for _, _, _, uuid in ranked)
    return None if best is None else HeadReservation(request.tenant, best[0][3], best[1], request.priority)


def is_attainable(cluster: Cluster, request: PlacementRequest, reservation: HeadReservation) -> bool:
    """Return whether the reserved GPUs could still take the request later.

    False if the node is cordoned, a GPU has failed, or the request's affinity group runs on other GPUs.
    """
    node = cluster.node(reservation.node)
    if node is None or len(reservation.gpus) != request.gpu.count or not _node_usable(node, request):
        return False
    places = affinity_places(cluster, request)
    if places and (reservation.node, reservation.gpus) not in places:
        return False
    checks = (*gpu_filters.static(request), *gpu_filters.within_cap(request))
    gpus = [node.gpus_by_uuid[uuid] for uuid in reservation.gpus if uuid in node.gpus_by_uuid]
    return len(gpus) == len(reservation.gpus) and all(_gpu_usable(gpu, checks) for gpu in gpus)


def _node_usable(node: NodeAccount, request: PlacementRequest) -> bool:
    """Return whether the node takes the request once enough of its tenants have left."""
    return all(passes(node, request) for passes in _NODE_CHECKS)


def _gpu_usable(gpu: GpuAccount, checks: Sequence[gpu_filters.GpuFilter]) -> bool:
    """Return whether the GPU takes the request once enough of its tenants have left. `checks`: the request's
    static filters, and its filter of the cap on excluded GPUs."""
    return gpu.state.available and gpu.state.held and all(check.passes(gpu) for check in checks)


def _to_free(gpu: GpuAccount, request: PlacementRequest) -> int:
    """Return how much the GPU's tenants must free before the request fits: thousandths of its time plus thousandths of
    its memory. At most 0: it fits."""
    asked = request.gpu
    exclusion = {label_key(request.namespace, asked.labels.exclusion)}
    anti_affinity = label_key(request.namespace, asked.labels.anti_affinity)
    conflicts = anti_affinity is not None and anti_affinity in gpu.anti_affinity
    conflicts |= asked.latency is Latency.INTERACTIVE and gpu.interactive_full
    alone = asked.mode is Mode.EXCLUSIVE or gpu.exclusive or conflicts
    if gpu.tenants and (alone or gpu.exclusions != exclusion):
        return 2 * WHOLE_GPU
    size = gpu.state.memory or 1
    memory = max(asked.memory_on(gpu.state.memory) - gpu.free_memory, 0)
    return max(asked.request_milli - gpu.free_milli, 0) + memory * WHOLE_GPU // size


def _free_in(gpu: GpuAccount, request: PlacementRequest, left: SecondsLeft) -> float:
    """Return the seconds until enough of the GPU's tenants are expected to have ended for the request to fit."""
    to_free = _to_free(gpu, request)
    if to_free <= 0 or left is _unknown:
        return 0.0
    ends = sorted((left(tenant, row), _freed(row, gpu)) for tenant, row in gpu.rows.items())
    for seconds, freed in ends:
        to_free -= freed
        if to_free <= 0:
            return seconds
    return ends[-1][0] if ends else 0.0


def _freed(row: Row, gpu: GpuAccount) -> int:
    """Return how much of the GPU a tenant frees when it ends: thousandths of its time plus thousandths of its
    memory."""
    return row.request_milli + row.memory * WHOLE_GPU // (gpu.state.memory or 1)
