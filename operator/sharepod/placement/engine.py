"""Placement engine: decides where a SharePod is placed.

A decision filters nodes, then GPUs by affinity, exclusion, anti-affinity, time and memory, and ranks the rest by the
request's policy.

Guarantees (docs/design.md defines PL1 to PL5):
- PL1 complete: a place is found if and only if the filters leave one.
- PL2 rules-in-Python: a place that breaks a filter is never chosen, whatever its score.
- Deciding changes nothing. The same history of the cluster and the same request give the same answer.
- Members of an affinity group that runs go to the group's GPUs or wait.
- GPUs of the head-of-queue reservation go to the tenant for which they are reserved, or to a request of higher priority
  that fits nowhere else.
- PL3 true-refusals: see `filters/explain.py`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from .beside_replicas import BesideReplicas
from .binpack.packing import Offers, Packing
from .choices import assignment, best, cheapest, nearest
from .filters.candidates import (
    affinity_places,
    candidates,
    candidates_of_group,
    gpu_checks,
    gpu_passes,
    node_passes,
)
from .filters.explain import explain
from .holders import find_holder
from .policies import MOST_FREE, PACK_BEST_EFFORT, SPREAD, Policy, policy_for
from .state.cluster import Cluster
from .state.cluster_view import HeadReservation
from .state.types import Assignment, NewHolder, PlacementRequest, Refusal, label_key
from .together import place_on, places_together

QueueKey = tuple[int, int, str, str, str]

_OVERDUE = -1
"""Standing of an overdue request in `head_key`: lower than the standing of any namespace, so the request precedes all
others of its priority."""


def queue_key(request: PlacementRequest) -> QueueKey:
    """Return the sort key of the queue: priority, then standing, then age, then namespace and name."""
    return (-request.priority, request.standing, request.created, request.namespace, request.name)


def head_key(key: QueueKey, *, overdue: bool) -> QueueKey:
    """Return the sort key by which the head of the queue is chosen: the queue's key, except that overdue requests come
    first within their priority, oldest first."""
    return (key[0], _OVERDUE, *key[2:]) if overdue else key


class Engine:
    """Decisions over one cluster. `packing` learns the demand and ranks nodes for Binpack."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.packing = Packing(cluster.accounts)
        cluster.subscribe(self.packing.touch)
        self.beside_replicas = BesideReplicas(cluster, self.packing.columns)

    def place(self, request: PlacementRequest) -> Assignment | Refusal:
        """Return a place for the request, or the refusal."""
        fits = self.find
        if (found := fits(request)) is not None:
            return found
        return explain(self.cluster, request, fits=lambda other: fits(other) is not None)

    def place_or_hold(self, request: PlacementRequest) -> Assignment | NewHolder | Refusal:
        """Decide as `place` does, and also consider nodes whose GPUs NVIDIA's device plugin owns.

        On these nodes, GPUs that holders have come first; otherwise the answer names where to create holders.
        """
        return self.find(request) or find_holder(self.cluster, request) or self.place(request)

    def find(self, request: PlacementRequest) -> Assignment | None:
        """Decide as `place` does, but return None for a refusal, without its costly explanation."""
        if not request.siblings:
            return self._find_alone(request)
        alone = self._find_alone(request)
        if alone is None:
            return None
        first = self.cluster.known((alone.node,))
        return place_on(self.cluster, first[0], request) or places_together(self.cluster, self.cluster.nodes(), request)

    def _find_alone(self, request: PlacementRequest) -> Assignment | None:
        """Return a place for the request, without its `siblings`."""
        cluster = self.cluster
        places = affinity_places(cluster, request)
        policy = policy_for(request, first_of_group=request.gpu.labels.affinity is not None and not places)
        # 1. If an affinity group runs, or the request names GPUs by UUID, the nodes are fixed.
        if places:
            return best(candidates_of_group(cluster, request, places), request, policy)
        if request.gpu.uuids:
            wanted = set(request.gpu.uuids)
            named = [node for node in cluster.nodes() if not wanted.isdisjoint(node.gpus_by_uuid)]
            return best(candidates(named, request), request, policy)
        # 2. If the namespace already excludes others from as many GPUs as it may, the request may only go to GPUs that
        #    have its exclusion label.
        label = label_key(request.namespace, request.gpu.labels.exclusion)
        if label is not None and not cluster.excluded.has_room_for(request):
            return best(candidates(cluster.known(cluster.nodes_excluding(label)), request), request, policy)
        # 3. GPUs that are reserved for this tenant come first.
        kept = cluster.kept()
        own = [item.node for item in kept if item.tenant == request.tenant]
        if own and (found := best(candidates(cluster.known(own), request), request, policy)) is not None:
            return found
        # 4. Then unreserved GPUs, ranked by the request's policy. The columns leave out reserved GPUs.
        open_to = [item for item in kept if item.tenant != request.tenant and _lets_pass(item, request)]
        if not open_to:
            return self._by_policy(request, policy)
        # 5. Last: GPUs reserved for a lower priority, or open to its namespace.
        elsewhere = self._by_policy(replace(request, priority=min(item.priority for item in open_to) - 1), policy)
        return elsewhere or best(candidates(cluster.known(item.node for item in open_to), request), request, policy)

    def serves(self, request: PlacementRequest, nodes: Iterable[str]) -> bool:
        """Return whether one of these nodes takes the request. Exact for the cluster if no other node has gained room
        since the refusal, and its affinity group is unchanged."""
        if request.siblings:
            return places_together(self.cluster, self.cluster.known(nodes), request) is not None
        places = affinity_places(self.cluster, request)
        if places:
            return any(True for _ in candidates_of_group(self.cluster, request, places))
        return any(True for _ in candidates(self.cluster.known(nodes), request))

    def reserve(self, request: PlacementRequest, assignment: Assignment) -> None:
        """Reserve the places that `find` returned. Raises `PlacementError` as `Cluster.reserve` does. Also update the
        columns now, so that the next decision is faster."""
        for one, place in zip((request, *request.siblings), (assignment, *assignment.siblings), strict=True):
            self.cluster.reserve(assignment.node, place.reservation(one))
        self.packing.settle()

    def _by_policy(self, request: PlacementRequest, policy: Policy) -> Assignment | None:
        """Return the best place on unreserved GPUs, ranked by the policy. None if there is none."""
        cluster, packing = self.cluster, self.packing
        if policy is MOST_FREE:
            return self._first(packing.most_free(request), request, policy)
        if policy is SPREAD:
            packing.settle()
            having = self.beside_replicas.nodes(request)
            elsewhere = self._first(packing.most_free(request, without=having), request, policy)
            return elsewhere or self.beside_replicas.best(request)
        if policy is PACK_BEST_EFFORT:
            return self._first(packing.least_promised(request), request, policy)
        if packing.ready:
            return self._best_packed(request)
        return best(candidates(cluster.nodes(), request), request, policy)

    def _first(self, offers: Offers, request: PlacementRequest, policy: Policy) -> Assignment | None:
        """Return the first of the offers that passes the filters."""
        while (name := offers.next()) is not None:
            for node, passing in candidates(self.cluster.known((name,)), request):
                return assignment(name, cheapest(node, passing, request, policy), request)
            offers.reject()
        return None

    def _best_packed(self, request: PlacementRequest) -> Assignment | None:
        """Return Binpack's best offer that passes the filters."""
        checks = gpu_checks(request)
        offers = self.packing.offers(request)
        while (name := offers.next()) is not None:
            node = self.cluster.node(name)
            if node is not None and node_passes(node, request):
                offered = [node.gpus[position] for position in offers.gpus(all_passing=node.topology is not None)]
                gpus = [gpu for gpu in offered if gpu_passes(gpu, checks)]
                if len(gpus) >= request.gpu.count:
                    return assignment(name, nearest(node, gpus, request.gpu.count), request)
            offers.reject()
        return None


def _lets_pass(reservation: HeadReservation, request: PlacementRequest) -> bool:
    """Return whether a request of another tenant may use the GPUs of this reservation."""
    if reservation.open_to == request.namespace:
        return reservation.priority <= request.priority
    return reservation.priority < request.priority
