"""Candidates: the nodes and GPUs that pass every filter for a request.

Guarantees:
- A candidate has at least as many passing GPUs as the request needs.
- Of interchangeable GPUs, only as many are listed as the request needs.
- The order of candidates has no meaning.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from sharepod.placement.state.accounts import GpuAccount, NodeAccount
from sharepod.placement.state.cluster import Cluster
from sharepod.placement.state.cluster_view import GroupPlace
from sharepod.placement.state.types import PlacementRequest, label_key

from . import gpu as gpu_filters
from . import node as node_filters

Candidate = tuple[NodeAccount, Sequence[GpuAccount]]
"""Node that passes, and its GPUs that pass."""

_NODE_CHECKS = tuple(check.passes for check in node_filters.STATIC + node_filters.DYNAMIC)


def affinity_places(cluster: Cluster, request: PlacementRequest) -> tuple[GroupPlace, ...]:
    """Return the places of the request's running affinity group; empty for a request without a group and for its first
    member."""
    key = label_key(request.namespace, request.gpu.labels.affinity)
    return cluster.groups(key) if key is not None else ()


def candidates(nodes: Iterable[NodeAccount], request: PlacementRequest) -> Iterator[Candidate]:
    """Yield the candidates among these nodes."""
    checks = gpu_checks(request)
    for node in nodes:
        passing = _passing(node, request, checks)
        if len(passing) >= request.gpu.count and node_passes(node, request):
            yield node, passing


def candidates_of_group(
    cluster: Cluster, request: PlacementRequest, places: Sequence[GroupPlace]
) -> Iterator[Candidate]:
    """Yield the candidates among the places of an affinity group: exactly the group's GPUs."""
    return candidates_among(cluster.known(name for name, _ in places), request, places)


def candidates_among(
    nodes: Iterable[NodeAccount], request: PlacementRequest, places: Sequence[GroupPlace]
) -> Iterator[Candidate]:
    """Yield the places of an affinity group that take the request, by these node accounts: exactly the group's GPUs."""
    checks, accounts = gpu_checks(request), {node.name: node for node in nodes}
    for name, uuids in places:
        node = accounts.get(name)
        if node is None or len(uuids) != request.gpu.count or not node_passes(node, request):
            continue
        members = [gpu for gpu in node.gpus if gpu.state.uuid in uuids]
        if len(members) == len(uuids) and all(gpu_passes(gpu, checks) for gpu in members):
            yield node, members


def gpu_checks(request: PlacementRequest) -> tuple[gpu_filters.Passes, ...]:
    """Return the checks of all GPU filters for a request.

    Their order does not matter for the result, because all must pass. Time and memory come first, because they fail
    most often.
    """
    return tuple(check.passes for check in (*reversed(gpu_filters.dynamic(request)), *gpu_filters.static(request)))


def gpu_passes(gpu: GpuAccount, checks: Sequence[gpu_filters.Passes]) -> bool:
    """Return whether a GPU passes all of these checks."""
    for check in checks:  # noqa: SIM110 a generator costs as much as the checks
        if not check(gpu):
            return False
    return True


def node_passes(node: NodeAccount, request: PlacementRequest) -> bool:
    """Return whether a node passes all node filters."""
    for passes in _NODE_CHECKS:  # noqa: SIM110 as above
        if not passes(node, request):
            return False
    return True


def _passing(
    node: NodeAccount, request: PlacementRequest, checks: Sequence[gpu_filters.Passes]
) -> Sequence[GpuAccount]:
    """Return the GPUs of a node that pass; of interchangeable GPUs, only as many as the request needs."""
    if request.gpu.uuids or (request.gpu.count > 1 and node.topology is not None):
        return [gpu for gpu in node.gpus if gpu_passes(gpu, checks)]
    passing: list[GpuAccount] = []
    for alike in node.interchangeable():
        if gpu_passes(alike[0], checks):
            passing += alike[: request.gpu.count]
    return passing
