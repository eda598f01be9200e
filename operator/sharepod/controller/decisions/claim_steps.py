"""The next step for one claim. Pure: maps a snapshot to one step.

The Pod comes first: a claim gets a place once a Pod that uses it waits for a node. Then its row is written to the
ledger, then the allocation to the claim. By the allocation kube-scheduler binds the Pod to that node.

Guarantees, in any order of events:
- A1 row-before-allocation: a claim is allocated only where the ledger, as stored in the API server, has a Reserved row
  for it.
- A2 one place at a time: a place is requested only while no ledger has a row of the claim.
- A3 no share of a live process is released: a row is removed in one step only if this process decided it. No Pod on a
  node may have been seen to use the claim. Every other row is removed in two steps, as a SharePod's.
- A4 an allocation is removed only while no Pod that kube-scheduler has assigned it to can be on a node.
- A5 an unreadable row blocks every decision about its claim.
- A6 no idle allocation: an allocation that no Pod uses or waits for is removed. So is an allocation on a deleted node
  while its Pod waits.
- A7 no eviction for a line: a claim of a line is allocated only once the node advertises enough for the lines of all
  shares there, lowered ones included.
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
"""kube-scheduler's message for a Pod that its claims keep unbound; no field contains this fact."""


def names_claims(refusal: str) -> bool:
    """Return whether kube-scheduler's refusal of a Pod names its claims as a cause."""
    return _CLAIMS.search(refusal) is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimSnapshot:
    """Facts of one claim at one moment. Times are monotonic seconds."""

    claim: ClaimFacts | None
    pods: tuple[ClaimPodFacts, ...] = ()
    """Pods that use it, waiting Pods first."""
    reserved: tuple[ReservationSnapshot, ...] = ()
    leads: bool = False
    """A Pod waits for it, and this claim requests the places of all claims of that Pod."""
    unused: bool = False
    """This process decided its row, and has seen no Pod with it since, neither given to one nor used by one."""
    allocated: bool = False
    """This process has written the allocation of its row."""
    give_up: bool = False
    """Another claim of its Pod has lost its place on the same node."""
    due: float = float("inf")
    """When the allocation is removed if no Pod was bound with it."""
    overdue: str = ""
    """Reason for that, as text that follows "the node"."""
    unseen: bool = False
    """The reason is that no scheduler has handled the Pod: another node would not help."""
    unreadable_row: bool = False
    """A row of the claim cannot be read."""
    namespace_ends: bool = False
    advertised: bool = True
    """The node of its row advertises enough for its line and the lines of the other shares there."""
    now: float = 0.0

    @property
    def waited_for(self) -> bool:
        """True if a Pod that uses it waits for a node."""
        return any(pod.waits for pod in self.pods)

    @property
    def lives(self) -> bool:
        """True if a Pod that is not being deleted runs with it."""
        return any(pod.runs and not pod.deleting for pod in self.pods)

    @property
    def in_use(self) -> bool:
        """True if a Pod may have processes that use it. A Pod that waits for a node has none."""
        waiting = {pod.uid for pod in self.pods if pod.waits}
        given = self.claim is not None and not waiting.issuperset(self.claim.consumers)
        return given or any(pod.runs for pod in self.pods)


@dataclass(frozen=True, slots=True)
class Allocate:
    """Write the allocation of the claim: the GPUs of this row."""

    claim: ClaimFacts
    node: str
    row: Tenant
    consumer: ClaimPodFacts | None = None
    """Pod to reserve the claim for, which may still name Pods that have ended. For bound Pods kube-controller-manager
    reserves an allocated claim for each bound Pod, and deallocates a claim whose last Pod has ended."""


@dataclass(frozen=True, slots=True)
class Deallocate:
    """Remove the allocation, unless kube-scheduler has assigned it to a Pod. A reservation for a waiting Pod is removed
    first, so that kube-scheduler cannot bind that Pod in between."""

    claim: ClaimFacts
    node: str | None
    """Node to stay away from for a while; None: none."""
    message: str
    unseen: bool = False
    """No scheduler has handled the Pod: the claim gets no other place for a while."""


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
        return Wait()  # kube-controller-manager takes it away with the last Pod
    if mine is None:
        return Deallocate(claim, None, "the ledger has no share for it")  # A4: the caller names this version
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
    """Return whether a written row is the share that an allocation names."""
    row = reserved.written
    return row is not None and not reserved.releasing and is_of_row(allocation, reserved.node, row)


def _unallocated(snapshot: ClaimSnapshot, claim: ClaimFacts) -> ClaimStep:
    """Return the next step for a claim that has no allocation, not yet or no longer."""
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
    """Return the step that removes the rows of a deleted claim; None once there are none."""
    for reserved in snapshot.reserved:
        if (step := drop(snapshot, reserved)) is not None:
            return step
    return Wait() if snapshot.reserved else None


def drop(snapshot: ClaimSnapshot, reserved: ReservationSnapshot) -> Unreserve | BeginRelease | RemoveRow | None:
    """Return the step by which a row ends; None while the ledger or its agent is awaited."""
    if reserved.written is None:
        return Unreserve(reserved.node)
    if reserved.forced:
        return RemoveRow(reserved.node, RemovalReason.FORCED)
    if reserved.releasing:
        return RemoveRow(reserved.node, reserved.confirmed) if reserved.confirmed is not None else None
    if snapshot.unused and not snapshot.in_use:  # A3
        return RemoveRow(reserved.node, RemovalReason.NEVER_BOUND)
    return None if reserved.wanted.releasing else BeginRelease(reserved.node)
