"""The next step for one claim, from a snapshot of the claim, its Pods and its ledger rows. Pure.

The order of steps:
1. A Pod that uses the claim waits for a node. Before that, no place is requested.
2. The claim's row is written to the ledger of a node.
3. The allocation is written to the claim. It names the node, so kube-scheduler binds the Pod there.

Guarantees, in any order of events:
- A1 row-before-allocation: a claim is allocated only where the ledger, as stored in the API server, has a Reserved row
  for it.
- A2 one place at a time: a place is requested only while no ledger has a row of the claim.
- A3 no share of a live process is released: a row is removed in one step only if this process decided the row and has
  seen no Pod on a node use the claim. Any other row becomes Releasing first. It is removed once the agent confirms that
  no process is left.
- A4 an allocation is removed only while no Pod in the claim's `status.reservedFor` can be on a node.
- A5 an unreadable row blocks every decision about its claim.
- A6 no idle allocation: an allocation is removed if no Pod uses it or waits for it, or if its node is deleted while its
  Pod waits.
- A7 no eviction for a resource line: the claim of a line is allocated only once the node advertises enough for the
  lines of all shares there, including lowered shares.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from sharepod.api.gpunode import Tenant
from sharepod.controller.state.facts.claim_facts import Allocation, ClaimFacts, ClaimPodFacts

from .advertised import SOON_S
from .share_claim_steps import is_of_row
from .snapshot import ReservationSnapshot
from .steps import BeginRelease, Forget, Place, RemovalReason, RemoveRow, Unreserve, Wait

_CLAIMS = re.compile("cannot allocate all claims|resourceclaim", re.IGNORECASE)
"""Text in kube-scheduler's message for a Pod that stays unbound because of its claims. No field of the Pod states this
cause, so the message is searched."""


def names_claims(refusal: str) -> bool:
    """Return True if kube-scheduler's refusal of a Pod names the Pod's claims as a cause."""
    return _CLAIMS.search(refusal) is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimSnapshot:
    """Facts of one claim at one moment. Times are monotonic seconds."""

    claim: ClaimFacts | None
    pods: tuple[ClaimPodFacts, ...] = ()
    """Pods that use the claim, waiting Pods first."""
    reserved: tuple[ReservationSnapshot, ...] = ()
    leads: bool = False
    """True if a Pod waits for the claim, and the places of all claims of that Pod are requested through this claim."""
    unused: bool = False
    """True if this process decided the row and has since seen no Pod that uses the claim or is in its
    `status.reservedFor`."""
    allocated: bool = False
    """True if this process has written the allocation of the claim's row."""
    give_up: bool = False
    """True if another claim of its Pod has lost its place on the same node. This claim must then leave that node
    too."""
    due: float = float("inf")
    """Time at which the allocation is removed if no Pod was bound by then."""
    overdue: str = ""
    """Reason for the removal at `due`, as the rest of a message that begins "the node"."""
    unseen: bool = False
    """True if the removal at `due` is because no scheduler has handled the Pod. Another node would not help then."""
    unreadable_row: bool = False
    """True if a row of the claim is unreadable."""
    namespace_ends: bool = False
    advertised: bool = True
    """True if the node of its row advertises enough for the claim's line and the lines of the other shares there."""
    now: float = 0.0

    @property
    def waited_for(self) -> bool:
        """True if a Pod that uses the claim waits for a node."""
        return any(pod.waits for pod in self.pods)

    @property
    def lives(self) -> bool:
        """True if a Pod that is not being deleted runs with the claim."""
        return any(pod.runs and not pod.deleting for pod in self.pods)

    @property
    def in_use(self) -> bool:
        """True if a Pod may have processes that use the claim. A Pod that waits for a node has no processes."""
        waiting = {pod.uid for pod in self.pods if pod.waits}
        given = self.claim is not None and not waiting.issuperset(self.claim.consumers)
        return given or any(pod.runs for pod in self.pods)


@dataclass(frozen=True, slots=True)
class Allocate:
    """Write the allocation of the claim: node and GPUs of its row."""

    claim: ClaimFacts
    node: str
    row: Tenant
    consumer: ClaimPodFacts | None = None
    """Pod to enter in `status.reservedFor`. None leaves the entry to kube-controller-manager, which adds each bound Pod
    of an allocated claim. That controller deallocates a claim whose listed Pods have all ended, so a list of ended Pods
    needs a live Pod added."""


@dataclass(frozen=True, slots=True)
class Deallocate:
    """Remove the allocation. An entry of `status.reservedFor` for a waiting Pod is removed first, so that
    kube-scheduler cannot bind the Pod in between."""

    claim: ClaimFacts
    node: str | None
    """Node that the claim must avoid for some time. None if there is none."""
    message: str
    unseen: bool = False
    """True if no scheduler has handled the Pod. The claim then gets no other place for some time."""


ClaimStep = Forget | Wait | Place | Allocate | Deallocate | Unreserve | BeginRelease | RemoveRow


def next_step(snapshot: ClaimSnapshot) -> ClaimStep:
    """Return the next step for a claim."""
    if snapshot.unreadable_row:  # A5
        return Wait()
    claim = snapshot.claim
    if claim is None:
        return _release(snapshot) or Forget()
    if not claim.readable:  # A5
        return Wait()
    if claim.allocation is not None:
        return _allocated(snapshot, claim, claim.allocation)
    return _unallocated(snapshot, claim)


def _allocated(snapshot: ClaimSnapshot, claim: ClaimFacts, allocation: Allocation) -> ClaimStep:
    """Return the next step for a claim that has an allocation."""
    mine = next((item for item in snapshot.reserved if holds(item, allocation)), None)
    for reserved in snapshot.reserved:
        if reserved is not mine and not snapshot.in_use and (step := drop(snapshot, reserved)) is not None:
            return step
    if mine is not None and mine.forced and not snapshot.lives:
        return RemoveRow(mine.node, RemovalReason.FORCED)
    if snapshot.in_use or claim.deleting or not allocation.ours:
        return Wait()  # in use or being deleted: kube-controller-manager removes the allocation with the last Pod
    if mine is None:
        return Deallocate(claim, None, "the ledger has no share for it")  # A4: the write applies to this version only
    if snapshot.give_up:
        return Deallocate(claim, mine.node, "another claim of its pod has lost its place there")
    if not snapshot.waited_for:
        return Deallocate(claim, None, "no pod waits for it any more")  # A6
    if mine.override is not None:
        return Deallocate(claim, mine.node, f"takes no pods any more: {mine.override.value}")
    if snapshot.now >= snapshot.due:
        return Deallocate(claim, mine.node, snapshot.overdue, snapshot.unseen)
    return Wait(snapshot.due) if snapshot.due < float("inf") else Wait()


def holds(reserved: ReservationSnapshot, allocation: Allocation) -> bool:
    """Return True if the ledger has stored this row, not Releasing, with the node and GPUs that the allocation
    names."""
    row = reserved.written
    return row is not None and not reserved.releasing and is_of_row(allocation, reserved.node, row)


def _unallocated(snapshot: ClaimSnapshot, claim: ClaimFacts) -> ClaimStep:
    """Return the next step for a claim without an allocation."""
    wanted = snapshot.waited_for and not claim.deleting and claim.request is not None and not snapshot.namespace_ends
    mine: ReservationSnapshot | None = None
    for reserved in sorted(snapshot.reserved, key=lambda item: (item.written is None, item.releasing, item.node)):
        fresh = snapshot.unused and not snapshot.allocated and not snapshot.give_up
        ends = reserved.releasing or reserved.wanted.releasing or reserved.forced or reserved.override is not None
        if mine is None and wanted and fresh and not ends:
            mine = reserved
        elif (step := drop(snapshot, reserved)) is not None:
            return step
    if mine is not None:
        if mine.written is None:
            return Wait()
        if not snapshot.advertised:  # A7
            return Wait(snapshot.now + SOON_S)
        waiting = next((pod for pod in snapshot.pods if pod.waits), None)
        return Allocate(claim, mine.node, mine.written, waiting if claim.made_for is None else None)  # A1
    if snapshot.reserved or not (wanted and snapshot.leads):
        return Wait()
    return Place()  # A2


def _release(snapshot: ClaimSnapshot) -> ClaimStep | None:
    """Return the step that removes the rows of a deleted claim. None once it has no row."""
    for reserved in snapshot.reserved:
        if (step := drop(snapshot, reserved)) is not None:
            return step
    return Wait() if snapshot.reserved else None


def drop(snapshot: ClaimSnapshot, reserved: ReservationSnapshot) -> Unreserve | BeginRelease | RemoveRow | None:
    """Return the next step towards the removal of a row. None while a write of the ledger or the agent's confirmation
    is pending.
    """
    if reserved.written is None:
        return Unreserve(reserved.node)
    if reserved.forced:
        return RemoveRow(reserved.node, RemovalReason.FORCED)
    if reserved.releasing:
        return RemoveRow(reserved.node, reserved.confirmed) if reserved.confirmed is not None else None
    if snapshot.unused and not snapshot.in_use:  # A3
        return RemoveRow(reserved.node, RemovalReason.NEVER_BOUND)
    return None if reserved.wanted.releasing else BeginRelease(reserved.node)
