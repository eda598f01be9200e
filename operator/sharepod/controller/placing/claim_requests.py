"""Requests of claims: the placement requests for the claims of a waiting Pod.

Guarantees:
- A place for a claim is requested only while a Pod that uses it waits for a node, and once all claims of that Pod are
  known.
- Claims of one Pod without a place are requested together: all get places on one node, or none is placed.
- A Pod with a placed claim gets its other places on the same node.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import islice, takewhile
from operator import attrgetter

from sharepod.api.gpunode import ClaimReference
from sharepod.api.units import TenantId
from sharepod.controller.state.cluster_state import ClusterState
from sharepod.controller.state.facts.claim_facts import MAX_CLAIMS, ClaimFacts, ClaimPodFacts
from sharepod.placement.state.types import NodeRequirement, NodeSelectorTerm, PlacementRequest, PodNeeds, Resources

_MOST_LOOKED_AT = 16
"""Pods of one claim that are checked in one turn for a Pod whose claims can all be placed."""
_TURN_S, _ROUND_S = 1.0, 10.0
"""Seconds until the next Pods on a claim have their turn, and until the first ones have it again. Without changes a
claim of 17 such Pods costs two checks in eleven seconds."""


def waiting_pod(state: ClusterState, claim: ClaimFacts) -> ClaimPodFacts | None:
    """Return the waiting Pod for which a claim is placed. It is the first by priority and age whose claims can all be
    placed, else the first. Of many Pods only those with a turn are checked."""
    seen = state.seen_claims
    users = seen.users(claim)  # waiting Pods come first
    if not users or not users[0].waits:
        return None
    turn = seen.turns.get(claim.uid, 0)
    looked_at = takewhile(attrgetter("waits"), islice(users, turn, turn + _MOST_LOOKED_AT))
    return next((pod for pod in looked_at if _can_be_placed(state, pod)), users[0])


def next_turn(state: ClusterState, claim: ClaimFacts) -> float | None:
    """Give the turn to other Pods of a claim if those with the turn cannot be placed. Return the seconds until they are
    checked; None if there are no others."""
    seen, pod = state.seen_claims, waiting_pod(state, claim)
    if pod is None or claim.request is None or claim.deleting or _can_be_placed(state, pod):
        return None
    users, turn = seen.users(claim), seen.turns.pop(claim.uid, 0) + _MOST_LOOKED_AT
    if turn < len(users) and users[turn].waits:
        seen.turns[claim.uid] = turn
        return _TURN_S
    return _ROUND_S if len(users) > _MOST_LOOKED_AT and users[_MOST_LOOKED_AT].waits else None


def _can_be_placed(state: ClusterState, pod: ClaimPodFacts) -> bool:
    """Return whether all claims of a Pod are known and valid and stay, and its containers use them in a supported
    way."""
    seen = state.seen_claims
    if len(pod.entries) > MAX_CLAIMS or not seen.complete(pod) or seen.crowded(pod) is not None:
        return False
    return all(one.request is not None and not one.deleting for one in seen.of_pod(pod))


def group_of(state: ClusterState, claim: ClaimFacts, pod: ClaimPodFacts) -> tuple[ClaimFacts, ...] | None:
    """Return the claims of a Pod that have no place and are to be placed together, the hardest to place first.

    None while not all claims of the Pod are known, or one of them can get no place: then no share is booked for it.
    """
    if not _can_be_placed(state, pod):
        return None
    missing: list[ClaimFacts] = []
    for one in state.seen_claims.of_pod(pod):
        if waiting_pod(state, one) is None:
            return None
        if one.allocation is None and not state.cluster.reservations_of(TenantId(one.uid)):
            missing.append(one)
    missing.sort(key=_hardest)
    return tuple(missing) if claim in missing else None


def claim_request(state: ClusterState, claim: ClaimFacts, avoid: Mapping[str, str]) -> PlacementRequest | None:
    """Return the request of a claim and its Pod's other unplaced claims; None if another claim leads, or no Pod waits.

    `avoid`: nodes to avoid this time, each with the reason.
    """
    pod = waiting_pod(state, claim)
    group = group_of(state, claim, pod) if pod is not None else None
    if pod is None or not group or group[0].uid != claim.uid:
        return None
    needs = pod.asks or PodNeeds()
    for one in state.seen_claims.of_pod(pod):
        for node, _ in state.cluster.reservations_of(TenantId(one.uid)):
            needs = pinned(needs, node)
    first = next(state.seen_claims.of_pod(pod), None)
    requests = [_request(one, pod, needs, avoid, counts=one is first) for one in group]
    return replace(requests[0], siblings=tuple(requests[1:]))


def request_elsewhere(state: ClusterState, claim: ClaimFacts) -> PlacementRequest | None:
    """Return the request of the next Pod of a claim's controller; None for a Pod with other claims, or without a
    controller that replaces it."""
    pods = tuple(pod for pod in state.seen_claims.users(claim) if pod.runs)
    if claim.request is None or len(pods) != 1:
        return None
    pod = pods[0]
    if pod.owner is None or claim.made_for != pod.uid or len(pod.entries) != 1 or pod.asks is None:
        return None
    return _request(claim, pod, pod.asks, {}, counts=True)


def pinned(needs: PodNeeds, node: str) -> PodNeeds:
    """Return the same needs for a Pod that can only go to one node."""
    here = NodeRequirement(key="metadata.name", operator="In", values=(node,))
    terms = needs.node_affinity_terms or (NodeSelectorTerm(),)
    return replace(needs, node_affinity_terms=tuple(replace(term, fields=(*term.fields, here)) for term in terms))


def _hardest(claim: ClaimFacts) -> tuple[object, ...]:
    """Return a sort key: fewest GPUs to choose from first, then the largest share."""
    assert claim.request is not None
    gpu = claim.request.gpu
    named = bool(gpu.uuids or gpu.models or gpu.labels.affinity)
    return (not named, -gpu.count, -gpu.request_milli, -(gpu.memory or 0), claim.name)


def _request(
    claim: ClaimFacts, pod: ClaimPodFacts, needs: PodNeeds, avoid: Mapping[str, str], *, counts: bool
) -> PlacementRequest:
    """Make the request of one claim. `counts`: it is the one with which the Pod's own needs are counted."""
    assert claim.request is not None
    return PlacementRequest(
        tenant=TenantId(claim.uid),
        namespace=claim.namespace,
        name=claim.name,
        gpu=claim.request.gpu,
        pod=needs if counts else replace(needs, resources=Resources()),
        owner=pod.owner,
        default_group=pod.group,
        priority=pod.priority,
        may_preempt=pod.may_preempt,
        created=pod.created,
        claim=ClaimReference(name=claim.name, uid=claim.uid),
        avoid=avoid,
    )
