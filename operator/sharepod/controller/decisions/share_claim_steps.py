"""Steps for the ResourceClaim through which the GPUs of a SharePod's Pod are attached. Pure.

The Pod's spec names its claim. The order of steps:
1. The claim is created, because the row must contain its uid.
2. A share is reserved: the row is written to the ledger.
3. The claim is allocated to the GPUs of the row.
4. The Pod's gate opens.

Guarantees:
- AC1 row-before-allocation: the claim is allocated only to the GPUs of a row that is stored in the API server and names
  the claim.
- AC2 allocation-before-gate: a gate opens only while the claim has the allocation of the row.
- AC3 one place at a time: if the claim has the allocation of another place, that is removed first. No Pod has used it,
  because the gate is closed.
"""

from __future__ import annotations

from dataclasses import dataclass

from sharepod.api.gpunode import ClaimReference, Tenant
from sharepod.api.objects import device_name
from sharepod.controller.state.facts.claim_facts import Allocation, ClaimFacts
from sharepod.controller.state.facts.pod_facts import PodFacts


@dataclass(frozen=True, slots=True)
class MakeClaim:
    """Create the claim that a Pod behind its gate names."""

    pod: PodFacts


@dataclass(frozen=True, slots=True)
class AllocateClaim:
    """Allocate the claim of a Pod to the GPUs of the row that names it."""

    pod: PodFacts
    claim: ClaimFacts
    node: str
    row: Tenant


@dataclass(frozen=True, slots=True)
class FreeClaim:
    """Remove the claim's allocation to a former place."""

    pod: PodFacts
    claim: ClaimFacts


ShareClaimStep = MakeClaim | AllocateClaim | FreeClaim


def names_claim(reference: ClaimReference | None, pod: PodFacts, claim: ClaimFacts | None) -> bool:
    """Return True if a row and its Pod agree on the attachment: the row names the claim of the Pod, or no claim if the
    Pod uses CSI.
    """
    if pod.claim is None:
        return reference is None
    return claim is not None and not claim.deleting and reference is not None and reference.uid == claim.uid


def before_place(pod: PodFacts, claim: ClaimFacts | None) -> MakeClaim | FreeClaim | None:
    """Return the step that the claim needs before a place is requested. None if it needs none. `claim`: last known
    state of the Pod's claim.
    """
    if pod.claim is None:
        return None
    if claim is None:
        return MakeClaim(pod)
    return FreeClaim(pod, claim) if claim.allocation is not None else None


def before_gate(pod: PodFacts, claim: ClaimFacts | None, node: str, row: Tenant) -> AllocateClaim | FreeClaim | None:
    """Return the step that the claim needs before the Pod's gate opens (AC2). None if it has the allocation of the
    row."""
    if pod.claim is None or claim is None:
        return None
    if claim.allocation is None:
        return AllocateClaim(pod, claim, node, row)  # AC1
    return None if is_of_row(claim.allocation, node, row) else FreeClaim(pod, claim)  # AC3


def lost(pod: PodFacts, claim: ClaimFacts | None) -> str | None:
    """Return the reason why a Pod with an open gate can never be bound: its claim is missing, being deleted or not
    allocated. None if it can be bound."""
    if pod.claim is None or pod.node is not None:
        return None
    if claim is None or claim.deleting:
        return f"a user or controller has deleted its ResourceClaim {pod.claim}"
    return f"its ResourceClaim {pod.claim} has lost its allocation" if claim.allocation is None else None


def is_of_row(allocation: Allocation, node: str, row: Tenant) -> bool:
    """Return True if an allocation names exactly the GPUs of a row, as devices of SharePod's driver."""
    named = [device for _, _, device in allocation.devices]
    return allocation.ours and allocation.node == node and named == [device_name(uuid) for uuid in row.gpus]
