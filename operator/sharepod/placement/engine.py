"""Placement engine: decides where a SharePod goes.

A decision filters nodes, then GPUs by affinity, exclusion, anti-affinity, time and memory, and ranks what is left by
the request's policy.

Guarantees (PL1 to PL5 are those of docs/design.md):
- PL1 complete: a place is found if and only if the filters leave one.
- PL2 rules-in-Python: a place that breaks a filter is never chosen, whatever a score says.
- Deciding changes nothing. The same history of the cluster and the same request give the same answer.
- Members of an affinity group that runs go to the group's GPUs or wait.
- GPUs of the head-of-line reservation go to its tenant, or to a request of higher priority that fits nowhere else.
- PL3 true-refusals: see `filters/explain.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from sharepod.api.units import Bytes

from .binpack.packing import Offers, Packing
from .filters.candidates import (
    Candidate,
    affinity_places,
    candidates,
    candidates_of_group,
    gpu_checks,
    gpu_passes,
    node_passes,
)
from .filters.explain import explain
from .holders import find_holder
from .policies import MOST_FREE, PACK_BEST_EFFORT, SPREAD, Cost, Policy, policy_for, replicas_on
from .state.accounts import GpuAccount, NodeAccount
from .state.cluster import Cluster
from .state.types import Assignment, NewHolder, PlacementRequest, Refusal

QueueKey = tuple[int, str, str, str]


def queue_key(request: PlacementRequest) -> QueueKey:
    """Return the sort key of the queue: priority, then age, then namespace and name."""
    return (-request.priority, request.created, request.namespace, request.name)


class Engine:
    """Decisions over one cluster. Owns `packing`, which learns the demand and ranks nodes for Binpack."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.packing = Packing(cluster.accounts)
        cluster.subscribe(self.packing.touch)

    def place(self, request: PlacementRequest) -> Assignment | Refusal:
        """Return a place for the request, or why there is none."""
        fits = self.find
        return fits(request) or explain(self.cluster, request, fits=lambda other: fits(other) is not None)

    def place_or_hold(self, request: PlacementRequest) -> Assignment | NewHolder | Refusal:
        """Decide as `place`, on nodes too where NVIDIA's device plugin owns the GPUs.

        There, GPUs that holders have come first; otherwise the answer is where to create holders.
        """
        return self.find(request) or find_holder(self.cluster, request) or self.place(request)

    def find(self, request: PlacementRequest) -> Assignment | None:
        """Decide as `place` without explaining a refusal, which is most of its cost."""
        cluster = self.cluster
        places = affinity_places(cluster, request)
        policy = policy_for(request, first_of_group=request.gpu.labels.affinity is not None and not places)
        # 1. An affinity group that runs, or GPUs asked for by UUID, leave no choice of nodes.
        if places:
            return _best(candidates_of_group(cluster, request, places), request, policy)
        if request.gpu.uuids:
            wanted = set(request.gpu.uuids)
            named = [node for node in cluster.nodes() if not wanted.isdisjoint(node.gpus_by_uuid)]
            return _best(candidates(named, request), request, policy)
        # 2. A request that may not use the head-of-line reservation: its policy ranks the other GPUs.
        head = cluster.head_reservation
        if head is None or (head.tenant != request.tenant and head.priority >= request.priority):
            return self._by_policy(request, policy)
        # 3. The reservation's tenant takes the reserved GPUs first; one of higher priority takes them last.
        reserved = candidates(cluster.known((head.node,)), request)  # the columns leave out reserved GPUs
        if head.tenant == request.tenant:
            return _best(reserved, request, policy) or self._by_policy(request, policy)
        elsewhere = self._by_policy(replace(request, priority=head.priority), policy)
        return elsewhere or _best(reserved, request, policy)

    def serves(self, request: PlacementRequest, nodes: Iterable[str]) -> bool:
        """Return whether one of these nodes takes the request, not which is best.

        Exact if no other node has got more room, and the request's affinity group has not changed, since the request
        was refused.
        """
        places = affinity_places(self.cluster, request)
        if places:
            return any(True for _ in candidates_of_group(self.cluster, request, places))
        return any(True for _ in candidates(self.cluster.known(nodes), request))

    def reserve(self, request: PlacementRequest, assignment: Assignment) -> None:
        """Take the place that `find` gave. Raises `PlacementError` as `Cluster.reserve` does.

        Brings the columns up to date as well, so that the next decision need not.
        """
        self.cluster.reserve(assignment.node, assignment.reservation(request))
        self.packing.settle()

    def _by_policy(self, request: PlacementRequest, policy: Policy) -> Assignment | None:
        """Return the best place outside the head-of-line reservation."""
        cluster, packing = self.cluster, self.packing
        if policy is MOST_FREE:
            return self._first(packing.most_free(request), request, policy)
        if policy is SPREAD:
            replicas = cluster.replicas(request.owner)
            elsewhere = self._first(packing.most_free(request, without=replicas), request, policy)
            return elsewhere or _best(candidates(cluster.known(replicas), request), request, policy)
        if policy is PACK_BEST_EFFORT:
            return self._first(packing.least_promised(request), request, policy)
        if packing.ready:
            return self._best_packed(request)
        return _best(candidates(cluster.nodes(), request), request, policy)

    def _first(self, offers: Offers, request: PlacementRequest, policy: Policy) -> Assignment | None:
        """Return the first of the offers that the filters let pass."""
        while (name := offers.next()) is not None:
            for node, passing in candidates(self.cluster.known((name,)), request):
                return _assignment(name, _cheapest(node, passing, request, policy), request)
            offers.reject()
        return None

    def _best_packed(self, request: PlacementRequest) -> Assignment | None:
        """Return the best offer of Binpack that the filters let pass."""
        checks = gpu_checks(request)
        offers = self.packing.offers(request)
        while (name := offers.next()) is not None:
            node = self.cluster.node(name)
            if node is not None and node_passes(node, request):
                offered = [node.gpus[position] for position in offers.gpus(all_passing=node.topology is not None)]
                gpus = [gpu for gpu in offered if gpu_passes(gpu, checks)]
                if len(gpus) >= request.gpu.count:
                    return _assignment(name, _nearest(node, gpus, request.gpu.count), request)
            offers.reject()
        return None


def _best(places: Iterable[Candidate], request: PlacementRequest, policy: Policy) -> Assignment | None:
    """Return the place of least cost, the first node by name among equals."""
    best: tuple[Cost, str, Sequence[GpuAccount]] | None = None
    for node, passing in places:
        chosen = _cheapest(node, passing, request, policy)
        cost = policy.node(node, chosen, request)
        if best is None or (cost, node.name) < best[:2]:
            best = cost, node.name, chosen
    return None if best is None else _assignment(best[1], best[2], request)


def _cheapest(
    node: NodeAccount, passing: Sequence[GpuAccount], request: PlacementRequest, policy: Policy
) -> Sequence[GpuAccount]:
    """Choose the GPUs of one node: replicas that are spread go to different GPUs first; then several GPUs are near each
    other; then cheap."""
    count = request.gpu.count
    if len(passing) <= count:
        return passing
    ranked = sorted(passing, key=lambda gpu: (policy.gpu(gpu, request), gpu.index, gpu.state.uuid))
    if policy is not SPREAD:
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


def _assignment(node: str, gpus: Sequence[GpuAccount], request: PlacementRequest) -> Assignment:
    """Make the answer. One tenant has one amount of memory on all of its GPUs: on GPUs of different size, a share
    without `memory` gets on each what it would get on the smallest."""
    ordered = sorted(gpus, key=lambda gpu: (gpu.index, gpu.state.uuid))
    memory = min(request.gpu.memory_on(gpu.state.memory) for gpu in ordered)
    return Assignment(node=node, gpus=tuple(gpu.state.uuid for gpu in ordered), memory=Bytes(memory))
