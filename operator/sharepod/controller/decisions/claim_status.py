"""Status of a claim: its allocation, the share in `status.devices`, and the Events for its owner. Pure.

Guarantees:
- The allocation names one node, and one device for each GPU of the row, in the row's order.
- Objects are plain JSON with sorted keys, because the API server compares parts of them byte by byte.
- An Event with the same message is not repeated while its cause lasts: the caller's Event recorder drops it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from sharepod.api.bounds import clipped
from sharepod.api.gpunode import Tenant
from sharepod.api.objects import CLAIM_DRIVER, device_name
from sharepod.api.sharepod import SpecError
from sharepod.controller.state.facts.claim_facts import ClaimFacts
from sharepod.placement.state.types import Refusal
from sharepod.placement.wording import of_claims, of_lines

from .claim_steps import ClaimSnapshot, holds
from .conditions import granted, share

Json = dict[str, Any]

CONDITION_GRANTED = "Granted"
CONDITION_RESIZED = "Resized"
LOST = "ReservationLost"
"""Reason of the Event about a Pod that is bound to a node but has no share there."""

_CONDITION_MESSAGE = 32768


@dataclass(frozen=True, slots=True)
class Note:
    """One Event, written about a claim and about the Pods that wait for it. `warning`: True for type Warning, False for
    Normal.
    """

    warning: bool
    reason: str
    action: str
    message: str


def allocation(node: str, row: Tenant, names: Sequence[str], now: str) -> Json:
    """Return `status.allocation` for a row. `names`: name of the claim's device request for each GPU of the row. `now`:
    RFC 3339, in whole seconds."""
    results = [
        {"device": device_name(uuid), "driver": CLAIM_DRIVER, "pool": node, "request": name}
        for name, uuid in zip(names, row.gpus, strict=True)
    ]
    here = {"key": "metadata.name", "operator": "In", "values": [node]}
    return {
        "allocationTimestamp": now,
        "devices": {"results": results},
        "nodeSelector": {"nodeSelectorTerms": [{"matchFields": [here]}]},
    }


def devices(node: str, row: Tenant, resize: Refusal | SpecError | None, before: Sequence[Any], now: str) -> list[Json]:
    """Return `status.devices` for a row: the applied share of each GPU.

    Args:
        node: Name of the node.
        row: The row in the ledger.
        resize: Refusal of a requested change of the share, or the error of an unreadable request; None if neither.
        before: The present entries. A condition whose status stays the same keeps its transition time.
        now: RFC 3339, in whole seconds.
    """
    known = {
        (entry.get("device"), item.get("type")): item
        for entry in before
        for item in entry.get("conditions") or ()
        if isinstance(item, dict)
    }
    return [
        {
            "conditions": [
                _since(condition, known.get((device_name(uuid), condition["type"])), now)
                for condition in _conditions(row, resize)
            ],
            "data": granted(row),
            "device": device_name(uuid),
            "driver": CLAIM_DRIVER,
            "pool": node,
        }
        for uuid in row.gpus
    ]


def _conditions(row: Tenant, resize: Refusal | SpecError | None) -> Iterator[Json]:
    yield {"message": share(row), "reason": "Reserved", "status": "True", "type": CONDITION_GRANTED}
    if resize is not None:
        if isinstance(resize, SpecError):
            reason, text = "Invalid", str(resize)
        else:
            reason, text = resize.outlook.value, of_claims(resize.message)
        yield {"message": text[:_CONDITION_MESSAGE], "reason": reason, "status": "False", "type": CONDITION_RESIZED}


def _since(condition: Json, former: Json | None, now: str) -> Json:
    same = former is not None and former.get("status") == condition["status"]
    return condition | {"lastTransitionTime": former["lastTransitionTime"] if same and former is not None else now}


def without_times(entries: Sequence[Any]) -> list[Json]:
    """Return entries of `status.devices` without times."""
    return [
        {
            "conditions": [
                {key: value for key, value in item.items() if key != "lastTransitionTime"}
                for item in entry.get("conditions") or ()
            ],
            **{key: entry.get(key) for key in ("data", "device", "pool")},
        }
        for entry in entries
    ]


def unlisted(snapshot: ClaimSnapshot) -> Note | None:
    """Return the Event about a claim whose waiting Pod lists it in no container, so no container would get its GPUs."""
    claim = snapshot.claim
    if claim is None or not (claim.ours or claim.scheduled) or claim.deleting:
        return None
    idle = min((pod.name for pod in snapshot.pods if pod.waits and claim.name in pod.unlisted), default=None)
    if idle is None:
        return None
    text = (
        f"no container of pod {idle} lists it, so none gets its GPUs: add it to a container's resources.claims, and "
        "create the pod again"
    )
    return Note(True, "ClaimNotListed", "Place", text)


def notes(snapshot: ClaimSnapshot, refusal: Refusal | None, blocked: str | None, *, waited: bool) -> Iterator[Note]:
    """Yield the Events for the owner of a claim.

    Args:
        snapshot: The claim.
        refusal: Last refusal of a place, for this claim or for the claim that leads its Pod's claims. None if there is
            none.
        blocked: Reason why no place is requested although a Pod waits; None if a place is requested.
        waited: True if an Event has reported that there is no place.
    """
    claim = snapshot.claim
    if claim is not None and claim.scheduled:
        yield from _notes_of_scheduled(claim, blocked, lives=snapshot.lives)
    if claim is None or not claim.ours or claim.deleting:
        return
    if claim.allocation is not None:
        mine = next((item.written for item in snapshot.reserved if holds(item, claim.allocation)), None)
        if mine is not None and waited:
            yield Note(False, "Placed", "Place", f"on {claim.allocation.node}: {share(mine)}")
        elif not claim.allocation.ours:
            text = f"another allocator allocated it, so its pod gets no GPU; delete its ResourceSlice of {CLAIM_DRIVER}"
            yield Note(True, "ForeignAllocation", "Place", text)
        elif mine is None and snapshot.lives:
            text = "its pod has no share: the ledger has no row for the claim; delete the pod to have it placed again"
            yield Note(True, LOST, "Place", text)
    elif snapshot.lives and not snapshot.waited_for:
        text = "its pod is on a node without a share; delete the pod and create it again without spec.nodeName"
        yield Note(True, LOST, "Place", text)
    if claim.error is not None:
        yield Note(True, "Invalid", "Place", str(claim.error))
    elif claim.allocation is None and snapshot.waited_for and not snapshot.reserved:
        if blocked is not None:
            yield Note(True, "Waiting", "Place", blocked)
        elif refusal is not None:
            count = claim.request.gpu.count if claim.request is not None else 1
            text = of_lines(refusal.brief, count) if claim.by_line else of_claims(refusal.brief)
            yield Note(True, refusal.outlook.value, "Place", clipped(text))


def _notes_of_scheduled(claim: ClaimFacts, not_entered: str | None, *, lives: bool) -> Iterator[Note]:
    """Yield the Events for the owner of a claim that kube-scheduler allocates.

    Args:
        claim: The claim.
        not_entered: Reason why its allocation has no row in the ledger; None if it has a row.
        lives: True if a Pod on a node uses the claim.
    """
    given = claim.allocation.scheduled if claim.allocation is not None else None
    error = given if isinstance(given, SpecError) else claim.error
    if error is not None:
        yield Note(True, "Invalid", "Place", str(error))
    elif given is not None and not_entered is not None:
        text = f"its allocation gives no share yet: {not_entered}"
        yield Note(True, LOST if lives else "Waiting", "Place", text)
