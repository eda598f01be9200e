"""Placement requests for the claims of a waiting Pod.

Guarantees:
- A place for a claim is requested only while a Pod that uses the claim waits for a node, and all claims of that Pod are
  known.
- All claims of a Pod without a place are requested together: either all get places on one node, or none gets any.
- If one claim of a Pod has a place, places for its other claims are requested on the same node.
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
"""Number of Pods of one claim that are checked per turn, in search of a Pod whose claims can all be placed."""
_TURN_S, _ROUND_S = 1.0, 10.0
"""Seconds until the next Pods of a claim have their turn, and, after the last Pods, until the first have it again. So a
claim of 17 Pods that cannot be placed causes two checks in eleven seconds."""


def waiting_pod(state: ClusterState, claim: ClaimFacts) -> ClaimPodFacts | None:
    """Return the waiting Pod for which a claim is placed. None if no Pod of the claim waits.

    It is the first Pod, by priority and age, whose claims can all be placed; if there is none, the first Pod. If more
    than `_MOST_LOOKED_AT` Pods wait, only the Pods with a turn are checked.
    """
    seen = state.seen_claims
    users = seen.users(claim)  # waiting Pods come first
    if not users or not users[0].waits:
        return None
    turn = seen.turns.get(claim.uid, 0)
    looked_at = takewhile(attrgetter("waits"), islice(users, turn, turn + _MOST_LOOKED_AT))
    return next((pod for pod in looked_at if _can_be_placed(state, pod)), users[0])


def next_turn(state: ClusterState, claim: ClaimFacts) -> float | None:
    """If no Pod with the turn can be placed, give the turn to the next Pods of the claim. Return the seconds until
    those are checked. None if a Pod can be placed, or no other Pod waits."""
    seen, pod = state.seen_claims, waiting_pod(state, claim)
    if pod is None or claim.request is None or claim.deleting or _can_be_placed(state, pod):
        return None
    users, turn = seen.users(claim), seen.turns.pop(claim.uid, 0) + _MOST_LOOKED_AT
    if turn < len(users) and users[turn].waits:
        seen.turns[claim.uid] = turn
        return _TURN_S
    return _ROUND_S if len(users) > _MOST_LOOKED_AT and users[_MOST_LOOKED_AT].waits else None


def _can_be_placed(state: ClusterState, pod: ClaimPodFacts) -> bool:
    """Return True if a Pod's claims can get places: all claims are known, valid and not being deleted, and its
    containers use them in a supported way.
    """
    seen = state.seen_claims
    if len(pod.entries) > MAX_CLAIMS or not seen.complete(pod) or seen.crowded(pod) is not None:
        return False
    return all(one.request is not None and not one.deleting for one in seen.of_pod(pod))


def group_of(state: ClusterState, claim: ClaimFacts, pod: ClaimPodFacts) -> tuple[ClaimFacts, ...] | None:
    """Return those claims of a Pod that have no place yet; they must be placed together. The claim that is hardest to
    place comes first: it leads, that is, its request contains the others.

    Return None if the Pod cannot be placed, or `claim` has a place already. No share is then booked for the Pod.
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
    """Return the request of a claim, with the Pod's other unplaced claims as siblings. None if another claim leads the
    group, or if no Pod waits.

    `avoid`: nodes that this request must avoid, each with the reason.
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
    """Return the request that the claim of a running Pod's replacement would have. Placement uses it to find a place to
    which the Pod could move. None for a Pod with other claims, and for a Pod that no controller replaces.
    """
    pods = tuple(pod for pod in state.seen_claims.users(claim) if pod.runs)
    if claim.request is None or len(pods) != 1:
        return None
    pod = pods[0]
    if pod.owner is None or claim.made_for != pod.uid or len(pod.entries) != 1 or pod.asks is None:
        return None
    return _request(claim, pod, pod.asks, {}, counts=True)


def pinned(needs: PodNeeds, node: str) -> PodNeeds:
    """Return a copy of the needs in which the Pod can run only on `node`."""
    here = NodeRequirement(key="metadata.name", operator="In", values=(node,))
    terms = needs.node_affinity_terms or (NodeSelectorTerm(),)
    return replace(needs, node_affinity_terms=tuple(replace(term, fields=(*term.fields, here)) for term in terms))


def _hardest(claim: ClaimFacts) -> tuple[object, ...]:
    """Return a sort key: claims that few GPUs fit first (named GPUs, models or affinity), then the largest shares."""
    assert claim.request is not None
    gpu = claim.request.gpu
    named = bool(gpu.uuids or gpu.models or gpu.labels.affinity)
    return (not named, -gpu.count, -gpu.request_milli, -(gpu.memory or 0), claim.name)


def _request(
    claim: ClaimFacts, pod: ClaimPodFacts, needs: PodNeeds, avoid: Mapping[str, str], *, counts: bool
) -> PlacementRequest:
    """Return the request of one claim. `counts`: True for the one claim of a Pod whose request includes the Pod's CPU,
    memory and other needs, so that these count once.
    """
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
