"""Decides where a SharePod goes. Reads the cluster and changes nothing; the same cluster and request give the same
answer.

In order: nodes are filtered, then GPUs by affinity, exclusion, anti-affinity, time and memory; what is left is scored.
A member of an affinity group that runs already names the GPUs for all that follow; they go there or wait. Where nothing
is left, the answer says for each group of nodes or GPUs why, and what would help.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from sharepod.api.gpunode import Mode
from sharepod.api.units import WHOLE_GPU, Bytes, GpuUuid
from sharepod.placement.binpack.packing import Offers
from sharepod.placement.filters import gpu as gpu_filters
from sharepod.placement.filters import node as node_filters
from sharepod.placement.filters.explain import explain
from sharepod.placement.state.accounts import GpuAccount, NodeAccount
from sharepod.placement.state.cluster import Cluster, Group, HeadReservation
from sharepod.placement.state.types import Assignment, NewHolder, PlacementRequest, PodNeeds, Refusal, label_key

from .policies import MOST_FREE, PACK_BEST_EFFORT, SPREAD, Cost, Score, replicas_on, score_for

DEVICE_PLUGIN_RESOURCE = "nvidia.com/gpu"
"""What NVIDIA's device plugin calls a GPU among a node's resources."""

QueueKey = tuple[int, str, str, str]

_NODE_CHECKS = tuple(check.passes for check in node_filters.STATIC + node_filters.DYNAMIC)


def queue_key(request: PlacementRequest) -> QueueKey:
    """Sorts requests into the order in which they are placed: priority, then age, then name."""
    return (-request.priority, request.created, request.namespace, request.name)


def place(cluster: Cluster, request: PlacementRequest) -> Assignment | Refusal:
    """A place for the request, or why there is none."""
    return find(cluster, request) or explain(cluster, request, fits=lambda other: find(cluster, other) is not None)


def place_or_hold(cluster: Cluster, request: PlacementRequest) -> Assignment | NewHolder | Refusal:
    """As `place`, on nodes too where NVIDIA's device plugin owns the GPUs: what holders have first, else where to make
    some."""
    return find(cluster, request) or find_holder(cluster, request) or place(cluster, request)


def find_holder(cluster: Cluster, request: PlacementRequest) -> NewHolder | None:
    """Where new holders would make a place: the fewest of them, on the node that then has the fewest GPUs left to give.

    The kubelet chooses among the GPUs that nobody holds, so all of them have to suit; a request for certain GPUs, and
    one whose affinity group has its GPUs already, cannot be served this way. Nor is a tenant that waits on a holder in
    flight given another.
    """
    key = label_key(request.namespace, request.gpu.labels.affinity)
    if request.gpu.uuids or (key is not None and cluster.groups(key)):
        return None
    nodes = [node for node in cluster.nodes() if node.state is not None and node.state.device_plugin]
    if any(request.tenant in node.holders.values() for node in nodes):
        return None
    checks = _gpu_checks(request)
    best: tuple[int, int, str, NewHolder] | None = None
    for node in nodes:
        ours = [gpu for gpu in node.gpus if gpu.state.held]
        others = [gpu for gpu in node.gpus if not gpu.state.held]
        passing = [gpu for gpu in ours if _gpu_passes(gpu, checks)][: request.gpu.count]
        wanted = request.gpu.count - len(passing)
        left = _left_to_give(node)
        if not 0 < wanted <= min(left, len(others)) or not _node_passes(node, request):
            continue
        if not all(_gpu_would_pass(gpu, request) for gpu in others):
            continue
        memory = Bytes(min(request.gpu.memory_on(gpu.state.memory) for gpu in (*passing, *others)))
        answer = NewHolder(node=node.name, count=wanted, memory=memory)
        if best is None or (wanted, left, node.name) < best[:3]:
            best = wanted, left, node.name, answer
    return None if best is None else best[3]


def _left_to_give(node: NodeAccount) -> int:
    """GPUs that the device plugin has given to no pod, less those that holders in flight will get."""
    return node.taken().free.extended.get(DEVICE_PLUGIN_RESOURCE, 0) - len(node.holders)


def _gpu_would_pass(gpu: GpuAccount, request: PlacementRequest) -> bool:
    """Whether it suits once a holder of ours has it."""
    fits = all(check.passes(gpu) for check in gpu_filters.static(request))
    return fits and gpu.state.available and not gpu.tenants


def find(cluster: Cluster, request: PlacementRequest) -> Assignment | None:
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
    kept = cluster.head_reservation
    if kept is None or (kept.tenant != request.tenant and kept.priority >= request.priority):
        return _by_score(cluster, request, score)
    on_kept = _candidates(_known(cluster, (kept.node,)), request)  # scores leave out what is kept
    if kept.tenant == request.tenant:
        return _best(on_kept, request, score) or _by_score(cluster, request, score)
    elsewhere = _by_score(cluster, replace(request, priority=kept.priority), score)
    return elsewhere or _best(on_kept, request, score)


def _by_score(cluster: Cluster, request: PlacementRequest, score: Score) -> Assignment | None:
    """The best place of those that are kept for nobody."""
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


def serves(cluster: Cluster, request: PlacementRequest, nodes: Iterable[str]) -> bool:
    """Whether one of these nodes takes the request; it is not said which is best. Exact where no other node has got
    more room, and its affinity group has not changed, since it was refused."""
    key = label_key(request.namespace, request.gpu.labels.affinity)
    groups = cluster.groups(key) if key is not None else ()
    if groups:
        return any(True for _ in _candidates_of_groups(cluster, request, groups))
    return any(True for _ in _candidates(_known(cluster, nodes), request))


def find_head_reservation(cluster: Cluster, request: PlacementRequest) -> HeadReservation | None:
    """The GPUs of one node that would be free for this request soonest: where the least has to go. None where no node
    could take it even so. GPUs of an affinity group are its only ones."""
    key = label_key(request.namespace, request.gpu.labels.affinity)
    groups = cluster.groups(key) if key is not None else ()
    checks = gpu_filters.static(request)
    best: tuple[tuple[bool, int, str], frozenset[GpuUuid]] | None = None
    for node in cluster.nodes():
        if not _node_could(node, request):
            continue
        gpus = [gpu for gpu in node.gpus if _usable_once_free(gpu, checks)]
        if groups:
            alike = (uuids for name, uuids in groups if name == node.name and len(uuids) == request.gpu.count)
            its = next(alike, frozenset[GpuUuid]())
            gpus = [gpu for gpu in gpus if gpu.state.uuid in its]
        if len(gpus) < request.gpu.count:
            continue
        ranked = sorted((shortfall_on(gpu, request), gpu.index, gpu.state.uuid) for gpu in gpus)[: request.gpu.count]
        rank = (not _node_passes(node, request), sum(cost for cost, _, _ in ranked), node.name)
        if best is None or rank < best[0]:
            best = rank, frozenset(uuid for _, _, uuid in ranked)
    return None if best is None else HeadReservation(request.tenant, best[0][2], best[1], request.priority)


def is_attainable(cluster: Cluster, request: PlacementRequest, kept: HeadReservation) -> bool:
    """Whether what is kept for this request can serve it one day. Not so where its node was cordoned since, a GPU has
    failed, or its affinity group has begun on others."""
    node = cluster.node(kept.node)
    if node is None or len(kept.gpus) != request.gpu.count or not _node_could(node, request):
        return False
    key = label_key(request.namespace, request.gpu.labels.affinity)
    groups = cluster.groups(key) if key is not None else ()
    if groups and (kept.node, kept.gpus) not in groups:
        return False
    checks = gpu_filters.static(request)
    gpus = [node.gpus_by_uuid[uuid] for uuid in kept.gpus if uuid in node.gpus_by_uuid]
    return len(gpus) == len(kept.gpus) and all(_usable_once_free(gpu, checks) for gpu in gpus)


def _usable_once_free(gpu: GpuAccount, checks: Sequence[gpu_filters.GpuFilter]) -> bool:
    """Whether it takes the request, whose static checks these are, once enough of its tenants have gone."""
    return gpu.state.available and gpu.state.held and all(check.passes(gpu) for check in checks)


def shortfall_on(gpu: GpuAccount, request: PlacementRequest) -> int:
    """Thousandths of the GPU's time and of its memory that have to go before the request fits."""
    asked = request.gpu
    exclusion = {label_key(request.namespace, asked.labels.exclusion)}
    apart = label_key(request.namespace, asked.labels.anti_affinity)
    alone = asked.mode is Mode.EXCLUSIVE or gpu.exclusive or (apart is not None and apart in gpu.apart)
    if gpu.tenants and (alone or gpu.exclusions != exclusion):
        return 2 * WHOLE_GPU
    size = gpu.state.memory or 1
    memory = max(asked.memory_on(gpu.state.memory) - gpu.free_memory, 0)
    return max(asked.request - gpu.free_milli, 0) + memory * WHOLE_GPU // size


def _node_could(node: NodeAccount, request: PlacementRequest) -> bool:
    """Whether it takes the request once enough of its tenants have gone."""
    checks = (check.passes for check in (*node_filters.STATIC, *node_filters.AS_IT_IS))
    return all(passes(node, request) for passes in checks)


def _known(cluster: Cluster, names: Iterable[str]) -> list[NodeAccount]:
    return [node for node in map(cluster.node, names) if node is not None]


def _best(
    places: Iterable[tuple[NodeAccount, Sequence[GpuAccount]]], request: PlacementRequest, score: Score
) -> Assignment | None:
    best: tuple[Cost, str, Sequence[GpuAccount]] | None = None
    for node, passing in places:
        candidates = _cheapest(node, passing, request, score)
        cost = score.node(node, candidates, request)
        if best is None or (cost, node.name) < best[:2]:
            best = cost, node.name, candidates
    return None if best is None else _assignment(best[1], best[2], request)


def _cheapest(
    node: NodeAccount, passing: Sequence[GpuAccount], request: PlacementRequest, score: Score
) -> Sequence[GpuAccount]:
    """Several GPUs are near each other first, and cheap second. Replicas that are spread are apart before that."""
    count = request.gpu.count
    if len(passing) <= count:
        return passing
    ranked = sorted(passing, key=lambda gpu: (score.gpu(gpu, request), gpu.index, gpu.state.uuid))
    if score is not SPREAD:
        return _nearest(node, ranked, count)
    most = replicas_on(ranked[count - 1], request)
    fewer = [gpu for gpu in ranked if replicas_on(gpu, request) < most]
    return _nearest(node, [gpu for gpu in ranked if replicas_on(gpu, request) <= most], count, having=fewer)


def _nearest(
    node: NodeAccount, ranked: Sequence[GpuAccount], count: int, *, having: Sequence[GpuAccount] = ()
) -> Sequence[GpuAccount]:
    if node.topology is None or count == 1:
        return ranked[:count]
    names, first = ([gpu.state.uuid for gpu in gpus] for gpus in (ranked, having))
    return [node.gpus_by_uuid[uuid] for uuid in node.topology.nearest(names, count, having=first)]


def _first(cluster: Cluster, offers: Offers, request: PlacementRequest, score: Score) -> Assignment | None:
    """The first of the offers that the filters let pass."""
    while (name := offers.next()) is not None:
        for node, passing in _candidates(_known(cluster, (name,)), request):
            return _assignment(name, _cheapest(node, passing, request, score), request)
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


def _best_packed(cluster: Cluster, request: PlacementRequest) -> Assignment | None:
    checks = _gpu_checks(request)
    offers = cluster.packing.offers(request)
    while (name := offers.next()) is not None:
        node = cluster.node(name)
        if node is not None and _node_passes(node, request):
            offered = [node.gpus[cell] for cell in offers.cells(whole=node.topology is not None)]
            gpus = [gpu for gpu in offered if _gpu_passes(gpu, checks)]
            if len(gpus) >= request.gpu.count:
                return _assignment(name, _nearest(node, gpus, request.gpu.count), request)
        offers.reject()
    return None


def _gpu_checks(request: PlacementRequest) -> tuple[gpu_filters.Passes, ...]:
    """All have to pass, so their order is free: time and memory, which fail most often, come first."""
    return tuple(check.passes for check in (*reversed(gpu_filters.dynamic(request)), *gpu_filters.static(request)))


def _candidates_of_groups(
    cluster: Cluster, request: PlacementRequest, groups: Sequence[Group]
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


def _candidates(
    nodes: Iterable[NodeAccount], request: PlacementRequest
) -> Iterator[tuple[NodeAccount, Sequence[GpuAccount]]]:
    """Nodes that pass with those of their GPUs that pass, where they are enough."""
    checks = _gpu_checks(request)
    for node in nodes:
        passing = _passing(node, request, checks)
        if len(passing) >= request.gpu.count and _node_passes(node, request):
            yield node, passing


def _passing(node: NodeAccount, request: PlacementRequest, checks: Sequence[gpu_filters.Passes]) -> list[GpuAccount]:
    """The GPUs of a node that pass; of idle ones of a kind as many as can be used, for the next are no better."""
    if request.gpu.uuids or (request.gpu.count > 1 and node.topology is not None):
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


def _node_passes(node: NodeAccount, request: PlacementRequest) -> bool:
    for passes in _NODE_CHECKS:  # noqa: SIM110 as above
        if not passes(node, request):
            return False
    return True


def _assignment(node: str, gpus: Sequence[GpuAccount], request: PlacementRequest) -> Assignment:
    """On GPUs of different size a share without `memory` gets on each what it would get on the smallest: one tenant has
    one amount on all of its GPUs."""
    ordered = sorted(gpus, key=lambda gpu: (gpu.index, gpu.state.uuid))
    memory = min(request.gpu.memory_on(gpu.state.memory) for gpu in ordered)
    return Assignment(node=node, gpus=tuple(gpu.state.uuid for gpu in ordered), memory=Bytes(memory))
