"""Places for several requests of one Pod: all on one node, or none.

Guarantees:
- The accounts do not change: the requests are placed one after the other on a copy of a node's account.
- A place that breaks a filter is never chosen; earlier requests of the Pod count as tenants.
- Requests are placed in the given order only.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from sharepod.api.units import GpuUuid

from .choices import assignment, cheapest
from .filters.candidates import affinity_places, candidates, candidates_among
from .policies import Policy, policy_for
from .state.accounts import NodeAccount, Row
from .state.cluster import Cluster
from .state.types import Assignment, LabelKey, PlacementRequest, label_key


def places_together(cluster: Cluster, nodes: Iterable[NodeAccount], request: PlacementRequest) -> Assignment | None:
    """Return places for a request and its `siblings`, all on one node: the first by name that takes all; None: no
    node."""
    alone = (node for node, _ in candidates(sorted(nodes, key=lambda node: node.name), request))
    return next((found for node in alone if (found := place_on(cluster, node, request)) is not None), None)


def place_on(cluster: Cluster, node: NodeAccount, request: PlacementRequest) -> Assignment | None:
    """Return places on this node for a request and its `siblings`; None if it does not take all of them."""
    account = node.copy()
    found: list[Assignment] = []
    groups: dict[LabelKey, frozenset[GpuUuid]] = {}
    for one in (request, *request.siblings):
        key = label_key(one.namespace, one.gpu.labels.affinity)
        places = affinity_places(cluster, one)
        if key is not None and key in groups:
            places = ((node.name, groups[key]),)
        passing = candidates_among([account], one, places) if places else candidates([account], one)
        chosen = next((cheapest(account, gpus, one, _policy(one)) for _, gpus in passing), None)
        if chosen is None:
            return None
        place = assignment(account.name, chosen, one)
        if key is not None:
            groups[key] = frozenset(place.gpus)
        account.put(one.tenant, Row(place.reservation(one), None))
        found.append(place)
    return replace(found[0], siblings=tuple(found[1:]))


def _policy(request: PlacementRequest) -> Policy:
    return policy_for(request, first_of_group=request.gpu.labels.affinity is not None)
