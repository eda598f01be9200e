"""Shortage: the amounts that a request lacks on certain GPUs of a node, and the part of them that each unit would free.
Pure.

Guarantees:
- Amounts are counted as the filters count them: each row with its largest time and memory, pods as kube-scheduler adds
  them up.
- A tenant that excludes the request from a GPU (Exclusive, another exclusion label, the same anti-affinity label) must
  end, whatever amounts are free.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from sharepod.api.gpunode import Latency, Mode
from sharepod.api.objects import MAX_TENANTS
from sharepod.api.units import TenantId
from sharepod.placement.filters.gpu import GpuFilter
from sharepod.placement.state.accounts import GpuAccount, NodeAccount, Row
from sharepod.placement.state.cluster_view import GroupPlace
from sharepod.placement.state.types import PlacementRequest, Resources, label_key

from .victims import Unit

Dimension = str | tuple[str, str]
"""Name of an amount that a request may lack: (kind, GPU UUID) for a GPU, or the name of a resource of the node."""
Amounts = dict[Dimension, int]


@dataclass(slots=True)
class Frees:
    """Amounts that a unit frees: `by_end` when it is evicted, `by_lowering` when its request becomes 0."""

    by_end: Amounts = field(default_factory=dict)
    by_lowering: Amounts = field(default_factory=dict)


def usable_gpus(
    node: NodeAccount, request: PlacementRequest, places: Sequence[GroupPlace], checks: Sequence[GpuFilter]
) -> list[GpuAccount]:
    """Return the GPUs of a node that the request could have once enough of their tenants have left.

    Args:
        places: Places of the request's affinity group, to which it is then bound; empty: any place.
        checks: GPU filters for the request whose result no tenant changes.
    """
    group = next((uuids for name, uuids in places if name == node.name and len(uuids) == request.gpu.count), None)
    if places and group is None:
        return []
    return [
        gpu
        for gpu in node.gpus
        if (group is None or gpu.state.uuid in group)
        and gpu.state.available
        and gpu.state.held
        and not gpu.kept_from(request)
        and all(check.passes(gpu) for check in checks)
    ]


def must_end(row: Row, request: PlacementRequest) -> bool:
    """Return whether a tenant and the request exclude each other on one GPU, whatever its free time and memory."""
    mine, theirs = request.gpu, row.wanted
    if Mode.EXCLUSIVE in (mine.mode, theirs.mode):
        return True
    if label_key(theirs.namespace, theirs.labels.exclusion) != label_key(request.namespace, mine.labels.exclusion):
        return True
    apart = label_key(request.namespace, mine.labels.anti_affinity)
    return apart is not None and apart == label_key(theirs.namespace, theirs.labels.anti_affinity)


def short_of_gpu(gpu: GpuAccount, request: PlacementRequest) -> Amounts:
    """Return the amounts that the request lacks on a GPU. An Exclusive request lacks none: it fits once all tenants
    have left."""
    asked, uuid = request.gpu, gpu.state.uuid
    if asked.mode is Mode.EXCLUSIVE:
        return {}
    amounts: Amounts = {}
    if (time := asked.request_milli - gpu.free_milli) > 0:
        amounts["time", uuid] = time
    if (memory := asked.memory_on(gpu.state.memory) - gpu.free_memory) > 0:
        amounts["memory", uuid] = memory
    if asked.latency is Latency.INTERACTIVE:
        over = sum(row.wanted.latency is Latency.INTERACTIVE for row in gpu.rows.values()) - gpu.interactive_most + 1
        if over > 0:
            amounts["interactive", uuid] = over
    return amounts


def short_of_node(node: NodeAccount, request: PlacementRequest) -> Amounts:
    """Return the amounts of the node that the request's Pod lacks."""
    assert node.state is not None, "only known nodes are looked at"
    taken, asked = node.taken(), request.pod.resources
    short = {
        "pods": taken.pods + 1 - node.state.pods,
        "rows": len(node.rows) + 1 - MAX_TENANTS,
        "cpu": asked.cpu_milli - taken.free.cpu_milli if asked.cpu_milli else 0,
        "memory": asked.memory - taken.free.memory if asked.memory else 0,
    }
    for name, amount in asked.extended.items():
        short[f"extended {name}"] = amount - taken.free.extended.get(name, 0)
    return {name: amount for name, amount in short.items() if amount > 0}


def freed_by(node: NodeAccount, unit: Unit, gpus: Sequence[GpuAccount], short: Mapping[Dimension, int]) -> Frees:
    """Return how much of the amounts `short` the unit frees on this node and these GPUs."""
    frees = Frees()
    for tenant in unit.tenants:
        row = node.rows.get(tenant)
        if row is None:
            continue
        for gpu in gpus:
            if tenant in gpu.rows:
                uuid = gpu.state.uuid
                _add(frees.by_end, ("time", uuid), row.request_milli)
                _add(frees.by_end, ("memory", uuid), row.memory)
                _add(frees.by_end, ("interactive", uuid), int(row.wanted.latency is Latency.INTERACTIVE))
                if unit.lowerable and gives_time(row):
                    _add(frees.by_lowering, ("time", uuid), row.request_milli)
        _add(frees.by_end, "rows", 1)
    for name, amount in taken_of_node(node, unit.tenants).items():
        _add(frees.by_end, name, amount)
    frees.by_end = {name: amount for name, amount in frees.by_end.items() if name in short}
    frees.by_lowering = {name: amount for name, amount in frees.by_lowering.items() if name in short}
    return frees


def gives_time(row: Row) -> bool:
    """Return whether the request of a row may be lowered to 0. An Exclusive tenant has no share to lower, and an
    interactive one needs a request."""
    return row.wanted.mode is Mode.SHARED and row.wanted.latency is not Latency.INTERACTIVE


def taken_of_node(node: NodeAccount, tenants: Collection[TenantId]) -> Amounts:
    """Return the resources of the node that the pods of these tenants take."""
    pods = [usage.resources for usage in node.pods.values() if usage.tenant is not None and usage.tenant in tenants]
    seen = {usage.tenant for usage in node.pods.values()}
    coming = [node.rows[one].wanted for one in tenants if one in node.rows and one not in seen]
    assumed = [row.needs for row in coming if not row.releasing]
    total = sum((*pods, *assumed), Resources())
    amounts: Amounts = {"pods": len(pods) + len(assumed), "cpu": total.cpu_milli, "memory": total.memory}
    return amounts | {f"extended {name}": amount for name, amount in total.extended.items()}


def _add(amounts: Amounts, name: Dimension, amount: int) -> None:
    if amount:
        amounts[name] = amounts.get(name, 0) + amount
