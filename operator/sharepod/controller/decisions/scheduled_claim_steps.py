"""The next step for a claim that kube-scheduler has allocated GPUs of pool `scheduler`. Pure.

kube-scheduler decides, and the operator copies its allocation into a row of the ledger. The agent serves only rows, so
a Pod runs only once its claim has a row. The operator also adds an entry of its own, the hold, to `status.reservedFor`.
The hold keeps the allocation until no process of the Pod is left on the node. So kube-scheduler counts the share until
then.

Guarantees, in any order of events:
- SC1 row-after-allocation: a row is written only for an allocation whose claim a Pod uses or waits for. The row's share
  equals the capacity that the allocation consumes.
- SC2 one place at a time: a row is written only while no ledger has another row of the claim.
- SC3 hold-after-binding: the hold is written only once a Pod with the claim is on the node. An earlier hold would stop
  kube-scheduler from deallocating the claim of a Pod that does not fit.
- SC4 row-before-hold: the hold is removed only once no ledger has a row of the claim. The allocation is removed in the
  same write, unless another Pod uses the claim by then.
- SC5 no share of a live process is released: guarantee A3 of `claim_steps` also applies to these rows.
- SC6 an unreadable row or claim blocks every decision.
- SC7 no hold blocks a Pod: a hold ties a waiting Pod to a node. If that node is deleted, or kube-scheduler has refused
  the Pod there, the hold and the row are removed once no Pod uses the claim.

`claim_steps` handles a deleted claim with a row: that row is removed in two steps.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from sharepod.api.claims.scheduled_claims import ScheduledShare
from sharepod.api.gpunode import ClaimReference
from sharepod.api.objects import device_name
from sharepod.api.units import GpuUuid, TenantId
from sharepod.controller.state.facts.claim_facts import ClaimFacts
from sharepod.placement.state.types import Reservation

from .claim_steps import ClaimSnapshot, drop
from .snapshot import ReservationSnapshot
from .steps import BeginRelease, RemovalReason, RemoveRow, Unreserve, Wait


@dataclass(frozen=True, slots=True)
class Adopt:
    """Write the share that kube-scheduler has allocated to the claim into the ledger of its node."""

    claim: ClaimFacts
    share: ScheduledShare


@dataclass(frozen=True, slots=True)
class HoldClaim:
    """Add the operator's entry to `status.reservedFor`. `node`: the node whose ledger has the row."""

    claim: ClaimFacts
    node: str


@dataclass(frozen=True, slots=True)
class LetClaimGo:
    """Remove the operator's entry from `status.reservedFor`. If no other entry is left, remove the allocation too:
    kube-controller-manager does so only after it has removed the entry of a Pod, or if the claim is being deleted."""

    claim: ClaimFacts


ScheduledClaimStep = Adopt | HoldClaim | LetClaimGo | Unreserve | BeginRelease | RemoveRow | Wait


def next_step(snapshot: ClaimSnapshot) -> ScheduledClaimStep:
    """Return the next step for a known claim that kube-scheduler allocates."""
    claim = snapshot.claim
    assert claim is not None
    if snapshot.unreadable_row or not claim.readable:  # SC6
        return Wait()
    share = claim.allocation.scheduled if claim.allocation is not None else None
    given = share if isinstance(share, ScheduledShare) else None
    mine = next((item for item in snapshot.reserved if given is not None and is_of(item, given)), None)
    for reserved in snapshot.reserved:
        if reserved is not mine and (step := drop(snapshot, reserved)) is not None:
            return step
    if mine is None:
        return _without_row(snapshot, claim, given)
    return _with_row(snapshot, claim, mine)


def _without_row(snapshot: ClaimSnapshot, claim: ClaimFacts, given: ScheduledShare | None) -> ScheduledClaimStep:
    """Return the next step for a claim that has no allocation, or whose allocation has no row."""
    if snapshot.reserved:  # SC2
        return Wait()
    if given is not None and _is_wanted(snapshot, claim) and claim.error is None:
        return Adopt(claim, given)  # SC1
    if claim.hold and (claim.consumers or not snapshot.in_use):
        return LetClaimGo(claim)  # SC4
    idle = not (claim.reserved_for or snapshot.in_use or snapshot.waited_for or claim.deleting)
    return LetClaimGo(claim) if given is not None and idle else Wait()


def _with_row(snapshot: ClaimSnapshot, claim: ClaimFacts, mine: ReservationSnapshot) -> ScheduledClaimStep:
    """Return the next step for a claim whose allocation has its row."""
    if mine.written is None:
        return Wait()
    if mine.forced and not snapshot.lives:
        return RemoveRow(mine.node, RemovalReason.FORCED)
    if any(pod.runs for pod in snapshot.pods) and not claim.hold and not claim.deleting:
        return HoldClaim(claim, mine.node)  # SC3
    if snapshot.in_use or (snapshot.waited_for and not claim.hold):
        return Wait()
    if snapshot.waited_for and mine.override is None and snapshot.now < snapshot.due:
        return Wait(snapshot.due) if snapshot.due < float("inf") else Wait()
    return drop(snapshot, mine) or Wait()  # SC7


def is_of(reserved: ReservationSnapshot, share: ScheduledShare) -> bool:
    """Return True if a row, written or only decided, has node, GPUs and amounts of a share, and is not being
    released."""
    row = reserved.wanted
    return (
        not (reserved.releasing or row.releasing)
        and reserved.node == share.node
        and tuple(map(device_name, row.gpus)) == share.devices
        and (row.request_milli, row.limit_milli, row.memory) == (share.request_milli, share.limit_milli, share.memory)
    )


def reservation(claim: ClaimFacts, share: ScheduledShare, gpus: Mapping[str, str]) -> Reservation | str:
    """Return the row for a share, or the reason why it has none. `gpus`: UUID of each GPU of the node, by the device's
    name.
    """
    missing = [device for device in share.devices if device not in gpus]
    if missing:
        return f"node {share.node} has no GPU {', '.join(missing)}: delete the pod, unless the GPU comes back"
    return Reservation(
        tenant=TenantId(claim.uid),
        namespace=claim.namespace,
        pod_name="",
        gpus=tuple(GpuUuid(gpus[device]) for device in share.devices),
        request_milli=share.request_milli,
        limit_milli=share.limit_milli,
        memory=share.memory,
        claim=ClaimReference(name=claim.name, uid=claim.uid),
    )


def _is_wanted(snapshot: ClaimSnapshot, claim: ClaimFacts) -> bool:
    """Return True if a Pod in the claim's `status.reservedFor` runs or waits to run."""
    return any(pod.uid in claim.consumers and not (pod.deleting or pod.ended) for pod in snapshot.pods)
