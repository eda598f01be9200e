"""Refusals of placement, worded as kube-scheduler words them: nodes and GPUs are counted by reason, each reason with
the amount that came closest.

Guarantees (PL3 true-refusals of docs/design.md):
- Every known node is accounted for, and every number is exact.
- Advice that a change would fit now has been checked by a decision.
- `NeverFits` is reported only if no known node could take the request even without tenants and with all GPUs and the
  node available.
- No refusal names the objects or labels of another namespace.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from sharepod.api.gpunode import Mode
from sharepod.api.units import GpuUuid, format_fraction
from sharepod.placement.state.accounts import GpuAccount, NodeAccount
from sharepod.placement.state.cluster import Cluster
from sharepod.placement.state.cluster_view import GroupPlace, HeadReservation
from sharepod.placement.state.types import Obstacle, Outlook, PlacementRequest, Refusal, label_key
from sharepod.placement.wording import advised_memory, advised_request, advised_size, counted, gpus_of, some_of

from . import gpu as gpu_filters
from . import node as node_filters
from .gpu import GpuFilter
from .node import NodeFilter

Fits = Callable[[PlacementRequest], bool]

_JOIN_OR_LEAVE = (
    "Request the same as the group, or use another spec.gpu.affinity; placement is retried when the group has ended."
)

_TRIES = 3
"""Most smaller requests that are tried for the advice, the largest first. Each try takes as long as a decision."""


@dataclass(slots=True)
class _Tally:
    """GPUs and nodes that fail a filter, by the number of the first filter that they fail."""

    gpus: dict[int, list[GpuAccount]] = field(default_factory=dict)
    short_of_gpus: list[NodeAccount] = field(default_factory=list)
    nodes: dict[int, list[NodeAccount]] = field(default_factory=dict)
    others: list[Obstacle] = field(default_factory=list)


def explain(cluster: Cluster, request: PlacementRequest, *, fits: Fits) -> Refusal:
    """Return the refusal of a request that has no place, with its reasons. `fits`: returns whether another request
    would get a place."""
    refusal = _explain(cluster, request, fits=fits)
    if not request.siblings:
        return refusal
    number = len(request.siblings) + 1
    text = f"its pod has {number} claims, and all of them go to one node or none is placed"
    return replace(refusal, obstacles=(*refusal.obstacles, Obstacle("Together", "claim", number, text)))


def _explain(cluster: Cluster, request: PlacementRequest, *, fits: Fits) -> Refusal:
    nodes = sorted(cluster.nodes(), key=lambda node: node.name)
    if not nodes:
        return Refusal(
            outlook=Outlook.WAITING,
            headline="no node with GPUs to share is known",
            advice="Label a node sharepod.dev/pool=dedicated and see that the agent runs on it.",
        )
    headline = f"0/{len(nodes)} nodes can take it"
    if not any(_could_ever(node, request) for node in nodes):
        checks = gpu_filters.static(request)
        tally = _tally(nodes, request, node_filters.STATIC, checks)
        return Refusal(
            outlook=Outlook.NEVER,
            headline=headline,
            obstacles=tuple(_obstacles(tally, request, node_filters.STATIC, checks)),
            advice="None of them could take it even when empty: change the request, or add a node that fits it.",
        )
    node_checks = node_filters.STATIC + node_filters.DYNAMIC
    checks = gpu_filters.static(request) + gpu_filters.dynamic(request)
    key = label_key(request.namespace, request.gpu.labels.affinity)
    groups = cluster.groups(key) if key is not None else ()
    if groups:
        if conflict := _conflict(cluster, groups, request):
            return Refusal(outlook=Outlook.CONFLICT, headline=headline, obstacles=(conflict,), advice=_JOIN_OR_LEAVE)
        tally = _tally_of_groups(cluster, nodes, groups, request, node_checks, checks)
    else:
        tally = _tally(nodes, request, node_checks, checks)
    return Refusal(
        outlook=Outlook.WAITING,
        headline=headline,
        obstacles=tuple(_obstacles(tally, request, node_checks, checks)),
        fits_now=(_less_time(nodes, request, fits) or _less_memory(nodes, request, fits)) if tally.gpus else "",
        advice=_advice(cluster.head_reservation, request),
    )


def _conflict(cluster: Cluster, groups: Sequence[GroupPlace], request: PlacementRequest) -> Obstacle | None:
    """Return why the request can never join its running affinity group, even with enough free room. None if it
    could."""
    alike = [group for group in groups if len(group[1]) == request.gpu.count]
    if not alike:
        text: str | None = f"has {counted(len(groups[0][1]), 'GPU')} and spec.gpu.count is {request.gpu.count}"
    elif request.gpu.mode is Mode.EXCLUSIVE:
        text = "has its GPUs already and mode Exclusive shares them with no tenant"
    else:
        reasons = [_incompatibility(cluster.node(name), uuids, request) for name, uuids in alike]
        text = reasons[0] if all(reasons) else None
    if text is None:
        return None
    return Obstacle("AffinityConflict", "SharePod", 1, f'the affinity group "{request.gpu.labels.affinity}" {text}')


def _incompatibility(node: NodeAccount | None, uuids: frozenset[GpuUuid], request: PlacementRequest) -> str | None:
    """Return why the request and a member of its affinity group exclude each other on these GPUs. None if they do
    not."""
    if node is None:
        return None
    if not all(check.passes(node, request) for check in node_filters.STATIC):
        return f"is on {node.name}, which can never take this pod"
    gpus = _members(node, uuids)
    if any(gpu.exclusive for gpu in gpus):
        return "has its GPUs in mode Exclusive, which are shared with no tenant"
    checks = gpu_filters.static(request)
    if not all(check.passes(gpu) for gpu in gpus for check in checks):
        place = gpus_of(node.name, (gpu.index for gpu in gpus))
        return f"is on {place}, which spec.gpu.uuids, spec.gpu.models or spec.gpu.memory leave out"
    labels, namespace = request.gpu.labels, request.namespace
    rows = (row.wanted for gpu in gpus for row in gpu.rows.values() if not row.left)
    members = [row for row in rows if (row.namespace, row.labels.affinity) == (namespace, labels.affinity)]
    if any(row.labels.exclusion != labels.exclusion for row in members):
        return "has members with another spec.gpu.exclusion, which share no GPU with this one"
    if labels.anti_affinity is not None and any(row.labels.anti_affinity == labels.anti_affinity for row in members):
        return "has a member with the same spec.gpu.antiAffinity, which shares no GPU with this one"
    return None


def _members(node: NodeAccount, uuids: frozenset[GpuUuid]) -> list[GpuAccount]:
    return [gpu for gpu in node.gpus if gpu.state.uuid in uuids]


def _could_ever(node: NodeAccount, request: PlacementRequest) -> bool:
    """Return whether the node could take the request if it had no tenants and all of its GPUs were available.

    A node that has not reported a GPU yet counts as having any GPU.
    """
    checks = [check.passes for check in node_filters.STATIC]
    if not node.gpus:
        return all(passes(node, request) for passes in checks[1:])
    if not all(passes(node, request) for passes in checks):
        return False
    filters = gpu_filters.static(request)
    return sum(all(check.passes(gpu) for check in filters) for gpu in node.gpus) >= request.gpu.count


def _tally(
    nodes: Sequence[NodeAccount],
    request: PlacementRequest,
    node_checks: Sequence[NodeFilter],
    checks: Sequence[GpuFilter],
) -> _Tally:
    tally = _Tally()
    for node in nodes:
        if _node_failed(tally, node, request, node_checks):
            continue
        passing = len(node.gpus) - _gpus_failed(tally, node.gpus, checks)
        if 0 < passing < request.gpu.count:
            tally.short_of_gpus.append(node)
    return tally


def _tally_of_groups(
    cluster: Cluster,
    nodes: Sequence[NodeAccount],
    groups: Sequence[GroupPlace],
    request: PlacementRequest,
    node_checks: Sequence[NodeFilter],
    checks: Sequence[GpuFilter],
) -> _Tally:
    """Collect the obstacles of a request whose affinity group runs, on the group's GPUs only."""
    tally = _Tally()
    label = f'the affinity group "{request.gpu.labels.affinity}"'
    places = []
    for name, uuids in groups:
        node = cluster.node(name)
        members = _members(node, uuids) if node is not None else []
        place = gpus_of(name, (gpu.index for gpu in members)) if members else name
        places.append(place)
        if node is None or len(members) < len(uuids):
            text = f"{label} is on GPUs of {name} that cannot be seen at the moment"
            tally.others.append(Obstacle("NotSeen", "node", 1, text))
        elif not _node_failed(tally, node, request, node_checks):
            _gpus_failed(tally, members, checks)
    elsewhere = len(nodes) - len({name for name, _ in groups} & {node.name for node in nodes})
    if elsewhere:
        verb = "does" if elsewhere == 1 else "do"
        text = f"{counted(elsewhere, 'node')} {verb} not have {label}, which is on {some_of(places)}"
        tally.others.append(Obstacle("Affinity", "node", elsewhere, text))
    return tally


def _node_failed(tally: _Tally, node: NodeAccount, request: PlacementRequest, checks: Sequence[NodeFilter]) -> bool:
    for number, check in enumerate(checks):
        if not check.passes(node, request):
            tally.nodes.setdefault(number, []).append(node)
            return True
    return False


def _gpus_failed(tally: _Tally, gpus: Sequence[GpuAccount], checks: Sequence[GpuFilter]) -> int:
    failed = 0
    for gpu in gpus:
        for number, check in enumerate(checks):
            if not check.passes(gpu):
                tally.gpus.setdefault(number, []).append(gpu)
                failed += 1
                break
    return failed


def _obstacles(
    tally: _Tally, request: PlacementRequest, node_checks: Sequence[NodeFilter], checks: Sequence[GpuFilter]
) -> Iterator[Obstacle]:
    for number, gpus in sorted(tally.gpus.items()):
        yield Obstacle(checks[number].name, "GPU", len(gpus), checks[number].explain(gpus))
    if short := len(tally.short_of_gpus):
        asked = counted(request.gpu.count, "GPU")
        text = f"{counted(short, 'node')} {'has' if short == 1 else 'have'} room on fewer than the {asked} asked"
        yield Obstacle("FewFreeGpus", "node", short, text)
    for number, failed in sorted(tally.nodes.items()):
        yield Obstacle(node_checks[number].name, "node", len(failed), node_checks[number].explain(failed, request))
    yield from tally.others


def _advice(head: HeadReservation | None, request: PlacementRequest) -> str:
    if head is not None and head.tenant == request.tenant:
        return f"It has waited longest: GPUs of {head.node} are kept for it until it fits."
    return "It will be placed automatically as soon as there is room."


def _less_time(nodes: Sequence[NodeAccount], request: PlacementRequest, fits: Fits) -> str:
    """Return advice: a smaller `spec.gpu.request` that fits now. Empty if none."""
    free = _free_on(nodes, request, lambda gpu: gpu.free_milli)
    candidates = {milli for each in free if (milli := advised_request(each)) is not None}
    smaller = [milli for milli in candidates if milli < request.gpu.request_milli]
    for milli in sorted(smaller, reverse=True)[:_TRIES]:
        if fits(replace(request, gpu=replace(request.gpu, request_milli=milli))):
            return f"spec.gpu.request {format_fraction(milli)}"
    return ""


def _less_memory(nodes: Sequence[NodeAccount], request: PlacementRequest, fits: Fits) -> str:
    """Return advice: a smaller `spec.gpu.memory` that fits now. Empty if none."""
    asked = request.gpu.memory
    free = _free_on(nodes, request, lambda gpu: gpu.free_memory)
    candidates = {size for each in free if (size := advised_memory(each)) is not None}
    smaller = [size for size in candidates if asked is None or size < asked]
    for size in sorted(smaller, reverse=True)[:_TRIES]:
        if fits(replace(request, gpu=replace(request.gpu, memory=size))):
            return f"spec.gpu.memory {advised_size(size)}"
    return ""


def _free_on(nodes: Sequence[NodeAccount], request: PlacementRequest, free: Callable[[GpuAccount], int]) -> set[int]:
    """Return the free amounts that a request of `count` GPUs could have, one for each node. The amount of a node is the
    free part of the fullest among its `count` freest GPUs."""
    found = set()
    for node in nodes:
        ranked = sorted((free(gpu) for gpu in node.gpus), reverse=True)
        if len(ranked) >= request.gpu.count:
            found.add(ranked[request.gpu.count - 1])
    return found
