"""Steps for the claim by which the GPUs of a SharePod's Pod are attached. Pure.

The Pod names its claim from the start. The claim is created before a share is reserved, because the row names the
claim's uid. It is allocated once the row is in the ledger, and the Pod's gate opens after that.

Guarantees:
- AC1 row-before-allocation: the claim is allocated only to the GPUs of a row, as the API server has it, that names it.
- AC2 allocation-before-gate: a gate opens only while the claim has the allocation of the row.
- AC3 one place at a time: a claim with another allocation loses that first; no Pod has used it, as the gate is closed.
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
    """Take the allocation of a former place back."""

    pod: PodFacts
    claim: ClaimFacts


ShareClaimStep = MakeClaim | AllocateClaim | FreeClaim


def names_claim(reference: ClaimReference | None, pod: PodFacts, claim: ClaimFacts | None) -> bool:
    """Return whether a row has the attachment of its Pod: by the Pod's claim, or by CSI."""
    if pod.claim is None:
        return reference is None
    return claim is not None and not claim.deleting and reference is not None and reference.uid == claim.uid


def before_place(pod: PodFacts, claim: ClaimFacts | None) -> MakeClaim | FreeClaim | None:
    """Return the claim's step before a place is requested; None if none is needed. `claim`: last known facts."""
    if pod.claim is None:
        return None
    if claim is None:
        return MakeClaim(pod)
    return FreeClaim(pod, claim) if claim.allocation is not None else None


def before_gate(pod: PodFacts, claim: ClaimFacts | None, node: str, row: Tenant) -> AllocateClaim | FreeClaim | None:
    """Return the step that a Pod with a row needs before its gate opens; None if it needs none (AC2)."""
    if pod.claim is None or claim is None:
        return None
    if claim.allocation is None:
        return AllocateClaim(pod, claim, node, row)  # AC1
    return None if is_of_row(claim.allocation, node, row) else FreeClaim(pod, claim)  # AC3


def lost(pod: PodFacts, claim: ClaimFacts | None) -> str | None:
    """Return why a Pod with an open gate can never be bound: its claim is missing, is being deleted or has no
    allocation."""
    if pod.claim is None or pod.node is not None:
        return None
    if claim is None or claim.deleting:
        return f"a user or controller has deleted its ResourceClaim {pod.claim}"
    return f"its ResourceClaim {pod.claim} has lost its allocation" if claim.allocation is None else None


def is_of_row(allocation: Allocation, node: str, row: Tenant) -> bool:
    """Return whether an allocation names the GPUs of a row, as devices of SharePod's driver."""
    named = [device for _, _, device in allocation.devices]
    return allocation.ours and allocation.node == node and named == [device_name(uuid) for uuid in row.gpus]
