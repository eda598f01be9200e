"""Decides where a SharePod goes. Reads the cluster and changes nothing; the same cluster and request give the same
answer.

In order: nodes are filtered, then GPUs by affinity, exclusion, anti-affinity, time and memory; what is left is scored.
A member of an affinity group that runs already names the GPUs for all that follow; they go there or wait. Where nothing
is left, the answer says for each group of nodes or GPUs why, and what would help.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from sharepod.api.units import Bytes

from . import gpu_filters, node_filters
from .accounts import GpuAccount, NodeAccount
from .cluster import Cluster, Group
from .explain import explain
from .model import Assignment, PodNeeds, Refusal, Request, label_key
from .packing import Offers
from .score import MOST_FREE, PACK_BEST_EFFORT, SPREAD, Cost, Score, score_for

QueueKey = tuple[int, str, str, str]

_NODE_CHECKS = tuple(check.passes for check in node_filters.STATIC + node_filters.DYNAMIC)


def queue_key(request: Request) -> QueueKey:
    """Sorts requests into the order in which they are placed: priority, then age, then name."""
    return (-request.priority, request.created, request.namespace, request.name)


def place(cluster: Cluster, request: Request) -> Assignment | Refusal:
    """A place for the request, or why there is none."""
    return find(cluster, request) or explain(cluster, request, fits=lambda other: find(cluster, other) is not None)


def find(cluster: Cluster, request: Request) -> Assignment | None:
    """As `place`, without saying why not: a fraction of its cost where there is no place."""
    key = label_key(request.namespace, request.gpu.labels.affinity)
    groups = cluster.groups(key) if key is not None else ()
    score = score_for(request, first_of_group=key is not None and not groups)
    if groups:
        return _best(_candidates_of_groups(cluster, request, groups), request, score)
    if request.gpu.uuids:
        wanted = set(request.gpu.uuids)
        named = [node for node in cluster.nodes() if not wanted.isdisjoint(node.gpus_by_uuid)]
        return _best(_candidates(named, request), request, score)
    packing = cluster.packing
    if score is MOST_FREE:
        return _first(cluster, packing.most_free(request), request, score)
    if score is SPREAD:
        replicas = cluster.replicas(request.owner)
        elsewhere = _first(cluster, packing.most_free(request, without=replicas), request, score)
        return elsewhere or _best(_candidates(_known(cluster, replicas), request), request, score)
    if score is PACK_BEST_EFFORT:
        return _first(cluster, packing.least_promised(request), request, score)
    if packing.ready:
        return _best_packed(cluster, request)
    return _best(_candidates(cluster.nodes(), request), request, score)


def _known(cluster: Cluster, names: Iterable[str]) -> list[NodeAccount]:
    return [node for node in map(cluster.node, names) if node is not None]


def _best(
    places: Iterable[tuple[NodeAccount, Sequence[GpuAccount]]], request: Request, score: Score
) -> Assignment | None:
    best: tuple[Cost, str, Sequence[GpuAccount]] | None = None
    for node, passing in places:
        candidates = _cheapest(passing, request, score)
        cost = score.node(node, candidates, request)
        if best is None or (cost, node.name) < best[:2]:
            best = cost, node.name, candidates
    return None if best is None else _assignment(best[1], best[2], request)


def _cheapest(passing: Sequence[GpuAccount], request: Request, score: Score) -> Sequence[GpuAccount]:
    if len(passing) <= request.gpu.count:
        return passing
    ranked = sorted(passing, key=lambda gpu: (score.gpu(gpu, request), gpu.index, gpu.state.uuid))
    return ranked[: request.gpu.count]


def _first(cluster: Cluster, offers: Offers, request: Request, score: Score) -> Assignment | None:
    """The first of the offers that the filters let pass."""
    while (name := offers.next()) is not None:
        for _, passing in _candidates(_known(cluster, (name,)), request):
            return _assignment(name, _cheapest(passing, request, score), request)
        offers.reject()
    return None


def find_host(cluster: Cluster, needs: PodNeeds) -> str | None:
    """A node for a pod that asks for no GPU: of those that take it, where it is least in the way of GPU shares."""
    offers = cluster.packing.host(needs)
    while (name := offers.next()) is not None:
        node = cluster.node(name)
        if node is not None and node_filters.takes_pod(node, needs):
            return name
        offers.reject()
    return None


def _best_packed(cluster: Cluster, request: Request) -> Assignment | None:
    checks = _gpu_checks(request)
    offers = cluster.packing.offers(request)
    while (name := offers.next()) is not None:
        node = cluster.node(name)
        if node is not None and _node_passes(node, request):
            gpus = [node.gpus[cell] for cell in offers.cells()]
            if len(gpus) == request.gpu.count and all(_gpu_passes(gpu, checks) for gpu in gpus):
                return _assignment(name, gpus, request)
        offers.reject()
    return None


def _gpu_checks(request: Request) -> tuple[gpu_filters.Passes, ...]:
    """All have to pass, so their order is free: time and memory, which fail most often, come first."""
    return tuple(check.passes for check in (*reversed(gpu_filters.dynamic(request)), *gpu_filters.static(request)))


def _candidates_of_groups(
    cluster: Cluster, request: Request, groups: Sequence[Group]
) -> Iterator[tuple[NodeAccount, Sequence[GpuAccount]]]:
    """Where the affinity group has GPUs, these and no others."""
    checks = _gpu_checks(request)
    for name, uuids in groups:
        node = cluster.node(name)
        if node is None or len(uuids) != request.gpu.count or not _node_passes(node, request):
            continue
        members = [gpu for gpu in node.gpus if gpu.state.uuid in uuids]
        if len(members) == len(uuids) and all(_gpu_passes(gpu, checks) for gpu in members):
            yield node, members


def _candidates(nodes: Iterable[NodeAccount], request: Request) -> Iterator[tuple[NodeAccount, Sequence[GpuAccount]]]:
    """Nodes that pass with those of their GPUs that pass, where they are enough."""
    checks = _gpu_checks(request)
    for node in nodes:
        passing = _passing(node, request, checks)
        if len(passing) >= request.gpu.count and _node_passes(node, request):
            yield node, passing


def _passing(node: NodeAccount, request: Request, checks: Sequence[gpu_filters.Passes]) -> list[GpuAccount]:
    """The GPUs of a node that pass; of idle ones of a kind as many as can be used, for the next are no better."""
    if request.gpu.uuids:
        return [gpu for gpu in node.gpus if _gpu_passes(gpu, checks)]
    passing: list[GpuAccount] = []
    for kind in node.kinds():
        if _gpu_passes(kind[0], checks):
            passing += kind[: request.gpu.count]
    return passing


def _gpu_passes(gpu: GpuAccount, checks: Sequence[gpu_filters.Passes]) -> bool:
    for check in checks:  # noqa: SIM110 a generator costs as much as the checks
        if not check(gpu):
            return False
    return True


def _node_passes(node: NodeAccount, request: Request) -> bool:
    for passes in _NODE_CHECKS:  # noqa: SIM110 as above
        if not passes(node, request):
            return False
    return True


def _assignment(node: str, gpus: Sequence[GpuAccount], request: Request) -> Assignment:
    """On GPUs of different size a share without `memory` gets on each what it would get on the smallest: one tenant has
    one amount on all of its GPUs."""
    ordered = sorted(gpus, key=lambda gpu: (gpu.index, gpu.state.uuid))
    memory = min(request.gpu.memory_on(gpu.state.memory) for gpu in ordered)
    return Assignment(node=node, gpus=tuple(gpu.state.uuid for gpu in ordered), memory=Bytes(memory))
