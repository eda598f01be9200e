"""Choices among places that pass every filter: which GPUs of one node, and which of several nodes.

Guarantees:
- Among equal places the first by name, index and UUID is chosen, so the same accounts and request give the same choice.
- GPUs of one node are chosen by cost. Among equally cheap sets, the GPUs with the shortest distances are chosen.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from sharepod.api.units import Bytes

from .filters.candidates import Candidate
from .policies import SPREAD, Cost, Policy, replicas_on
from .state.accounts import GpuAccount, NodeAccount
from .state.types import Assignment, PlacementRequest


def best(places: Iterable[Candidate], request: PlacementRequest, policy: Policy) -> Assignment | None:
    """Return the place of least cost, the first node by name among equals."""
    best: tuple[Cost, str, Sequence[GpuAccount]] | None = None
    for node, passing in places:
        chosen = cheapest(node, passing, request, policy)
        cost = policy.node(node, chosen, request)
        if best is None or (cost, node.name) < best[:2]:
            best = cost, node.name, chosen
    return None if best is None else assignment(best[1], best[2], request)


def cheapest(
    node: NodeAccount, passing: Sequence[GpuAccount], request: PlacementRequest, policy: Policy
) -> Sequence[GpuAccount]:
    """Choose among the passing GPUs of one node. Spread first avoids GPUs with replicas of its owner. Then distances
    count, then cost."""
    count = request.gpu.count
    if len(passing) <= count:
        return passing
    ranked = sorted(passing, key=lambda gpu: (policy.gpu(gpu, request), gpu.index, gpu.state.uuid))
    if policy is not SPREAD:
        return nearest(node, ranked, count)
    most = replicas_on(ranked[count - 1], request)
    fewer = [gpu for gpu in ranked if replicas_on(gpu, request) < most]
    return nearest(node, [gpu for gpu in ranked if replicas_on(gpu, request) <= most], count, having=fewer)


def nearest(
    node: NodeAccount, ranked: Sequence[GpuAccount], count: int, *, having: Sequence[GpuAccount] = ()
) -> Sequence[GpuAccount]:
    if node.topology is None or count == 1:
        return ranked[:count]
    names, first = ([gpu.state.uuid for gpu in gpus] for gpus in (ranked, having))
    return [node.gpus_by_uuid[uuid] for uuid in node.topology.nearest(names, count, having=first)]


def assignment(node: str, gpus: Sequence[GpuAccount], request: PlacementRequest) -> Assignment:
    """Return the assignment of these GPUs. A tenant has the same memory on all of them, so a share without `memory`
    gets the amount for the smallest GPU."""
    ordered = sorted(gpus, key=lambda gpu: (gpu.index, gpu.state.uuid))
    memory = min(request.gpu.memory_on(gpu.state.memory) for gpu in ordered)
    return Assignment(node=node, gpus=tuple(gpu.state.uuid for gpu in ordered), memory=Bytes(memory))
