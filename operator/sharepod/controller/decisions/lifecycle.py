"""The next step for one tenant. Pure: a snapshot of what is known goes in, one step comes out.

The Pod comes first, behind a scheduling gate: whatever the API server demands of a Pod (quota, Pod Security, priority,
policies) has been decided before a share is booked. Then the share is reserved for that Pod, and the gate opened.

Guarantees, whatever order things happen in:
- L1 no work runs twice: a gate is opened only where the ledger, as the API server has it, says Reserved for that very
  Pod; a Pod is created only while neither the ledger nor `status.podUID` has one on record.
- L2 an end is on record first: a terminal phase is written before the reservation begins to be released.
- L3 an unreadable row decides nothing: nothing is concluded while a row of the tenant cannot be read, nor from the
  absence of the Pod of a SharePod whose status cannot be read.
- L4 no share is given away under a process: a row is removed only when its agent has confirmed that nothing is left,
  when that is overridden (the Node is gone, its out-of-service taint, force-release), or when no Pod of the tenant was
  ever bound to that node.
- L5 a Pod is taken back only while it is not bound.
- L6 nobody waits with a share: a share is asked for only while a Pod of the tenant waits behind its gate, and not in a
  namespace that is being deleted.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from enum import Enum, StrEnum

from sharepod.api.gpunode import Tenant, TenantState
from sharepod.api.sharepod import CONDITION_POD_READY, Phase
from sharepod.controller.state.facts import PodFacts, SharePodFacts
from sharepod.placement.state.types import Reservation

_REASON_LIMIT = 128
"""Characters of a reason that are kept: as many as events.k8s.io/v1 takes."""


class EndReason(StrEnum):
    """Reason for a SharePod's end, as users see it in conditions and Events; a kubelet's own may stand instead."""

    COMPLETED = "Completed"
    EVICTED = "Evicted"
    INVALID = "Invalid"
    POD_FAILED = "PodFailed"
    POD_LOST = "PodLost"
    POD_REFUSED = "PodRefused"
    RESERVATION_LOST = "ReservationLost"


class Absence(Enum):
    """Thing that must be missing for an end to be true. A live read confirms that before the end is written."""

    POD = "pod"
    ROW = "row"


class RemovalReason(Enum):
    """Reason for removing a row (L4)."""

    DRAINED = "drained"
    NODE_GONE = "the Node is gone"
    OUT_OF_SERVICE = "the node is out of service"
    FORCED = "force-release"
    NEVER_BOUND = "no Pod of it was bound"
    POD_ELSEWHERE = "its Pod is on another node"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReservationSnapshot:
    """One reservation of the tenant, on one node."""

    node: str
    wanted: Reservation
    """The reservation as placement has it."""
    written: Tenant | None
    """Its row as the API server has it; None while it is only decided."""
    drained: bool = False
    """The agent has reported, for this release, that nothing is left."""
    override: RemovalReason | None = None
    """Reason that the agent's report need not be awaited: `NODE_GONE` or `OUT_OF_SERVICE`."""
    forced: bool = False
    """An admin has named the tenant in force-release."""

    @property
    def releasing(self) -> bool:
        """True if the row, as written, is being released."""
        return self.written is not None and self.written.state is TenantState.RELEASING

    @property
    def confirmed(self) -> RemovalReason | None:
        """Reason by which nothing is left on the node; None if nothing confirms that."""
        return self.override or (RemovalReason.DRAINED if self.drained else None)


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantSnapshot:
    """Everything known of one tenant at one moment. Times are monotonic seconds."""

    sharepod: SharePodFacts | None
    pod: PodFacts | None
    reserved: tuple[ReservationSnapshot, ...]
    lost: PodFacts | None = None
    """Its Pod as last seen, if it is gone."""
    returned: frozenset[str] = frozenset()
    """Uids of Pods that this process took back before they were bound."""
    unbound_since: float | None = None
    """When kube-scheduler was first seen to refuse its Pod."""
    blocked_until: float = 0.0
    """When to try again to create its Pod."""
    now: float = 0.0
    bind_timeout: float = 60.0
    """Seconds after which a Pod that kube-scheduler refuses is taken back."""
    namespace_ends: bool = False
    """Its namespace is being deleted."""
    unreadable_row: bool = False
    """A row of the tenant cannot be read, so what it holds is not known."""


@dataclass(frozen=True, slots=True)
class Forget:
    """Nothing of the tenant is left."""


@dataclass(frozen=True, slots=True)
class Wait:
    """Only show how it stands; look again at `until` (monotonic seconds), if that is set."""

    until: float | None = None


@dataclass(frozen=True, slots=True)
class CreatePod:
    """Create the Pod, behind its scheduling gate."""


@dataclass(frozen=True, slots=True)
class Place:
    """Ask placement for a node and GPUs."""


@dataclass(frozen=True, slots=True)
class OpenGate:
    """Open the gate of the Pod that this row is for: pin the Pod to the node and name its GPUs."""

    pod: PodFacts
    node: str
    row: Tenant


@dataclass(frozen=True, slots=True)
class DeletePod:
    """Begin to delete the Pod of a SharePod that is gone, or that has ended."""

    pod: PodFacts


@dataclass(frozen=True, slots=True)
class TakeBackPod:
    """Delete a Pod that was not bound, unless it has been by now."""

    pod: PodFacts
    message: str
    """Reason for users: kube-scheduler's own words where it refused the Pod."""


@dataclass(frozen=True, slots=True)
class ClearPodUid:
    """Empty `status.podUID`: that Pod was taken back, and another may be created."""


@dataclass(frozen=True, slots=True)
class Finish:
    """Write a terminal phase."""

    phase: Phase
    reason: str
    """An `EndReason`, or a kubelet's reason."""
    message: str
    absence: Absence | None = field(default=None, compare=False)
    """Object whose absence a live read must confirm."""


@dataclass(frozen=True, slots=True)
class Unreserve:
    """Forget a reservation that is only decided."""

    node: str


@dataclass(frozen=True, slots=True)
class BeginRelease:
    """Set the row's state to Releasing, once a live read has confirmed that the Pod is gone."""

    node: str


@dataclass(frozen=True, slots=True)
class RemoveRow:
    """Remove the row: its share is given away."""

    node: str
    reason: RemovalReason
    pod_node: str = ""
    """With `POD_ELSEWHERE`: where its Pod is."""

    @property
    def text(self) -> str:
        """Reason in words, for Events and logs."""
        return f"its Pod is on {self.pod_node}" if self.pod_node else self.reason.value


Step = (
    Forget
    | Wait
    | CreatePod
    | Place
    | OpenGate
    | DeletePod
    | TakeBackPod
    | ClearPodUid
    | Finish
    | Unreserve
    | BeginRelease
    | RemoveRow
)


def decide(snapshot: TenantSnapshot) -> Step:
    """Return the next step for a tenant."""
    if snapshot.unreadable_row:  # L3
        return Wait()
    sharepod = snapshot.sharepod
    if sharepod is None or sharepod.deleting or sharepod.ended:
        return _end(snapshot)
    if snapshot.pod is not None and snapshot.pod.waits_for_share and not snapshot.pod.deleting:
        return _behind_gate(snapshot, sharepod, snapshot.pod)
    if snapshot.pod is not None:
        return _with_pod(snapshot, snapshot.pod)
    if not sharepod.readable:  # L3
        return Wait()
    return _without_pod(snapshot, sharepod)


def _end(snapshot: TenantSnapshot) -> Step:
    """Return the next step for a SharePod that is gone or has ended: its Pod goes first, then its reservations."""
    for reserved in snapshot.reserved:
        if reserved.written is None:
            return Unreserve(reserved.node)
    pod = snapshot.pod
    stuck = pod is not None and not pod.ended
    if pod is not None and not pod.ended and not pod.deleting:
        return DeletePod(pod)
    for reserved in snapshot.reserved:
        if reserved.forced:
            return RemoveRow(reserved.node, RemovalReason.FORCED)
        if stuck:
            continue
        if not reserved.releasing:
            if reserved.wanted.releasing:
                continue  # on its way to the ledger
            return BeginRelease(reserved.node)
        if reserved.confirmed is not None:
            return RemoveRow(reserved.node, reserved.confirmed)
    return Forget() if not snapshot.reserved and pod is None else Wait()


def _behind_gate(snapshot: TenantSnapshot, sharepod: SharePodFacts, pod: PodFacts) -> Step:
    """Return the next step for a SharePod whose Pod waits for a share: reserve one for it, then open the gate."""
    mine: ReservationSnapshot | None = None
    for reserved in _kept_first(snapshot.reserved):
        ends = reserved.releasing or reserved.wanted.releasing
        if mine is None and reserved.wanted.pod_uid == pod.uid and not ends and not snapshot.namespace_ends:
            mine = reserved
        elif (step := _drop(reserved)) is not None:
            return step
    if mine is None:
        may_ask = sharepod.error is None and not snapshot.namespace_ends
        return Place() if may_ask and not snapshot.reserved else Wait()
    if mine.written is None or mine.written.pod_uid != pod.uid:
        return Wait()  # on its way to the ledger
    return OpenGate(pod, mine.node, mine.written)  # L1


def _kept_first(reserved: tuple[ReservationSnapshot, ...]) -> list[ReservationSnapshot]:
    """Sort reservations so that every operator keeps the same one."""
    return sorted(reserved, key=lambda item: (item.written is None, item.releasing, item.node))


def _drop(reserved: ReservationSnapshot) -> Step | None:
    """Return the step by which a reservation ends that no Pod of the tenant ran on; None while its agent is awaited."""
    if reserved.written is None:
        return Unreserve(reserved.node)
    if not reserved.releasing:
        return RemoveRow(reserved.node, RemovalReason.NEVER_BOUND)
    confirmed = reserved.confirmed or (RemovalReason.DRAINED if reserved.forced else None)
    return RemoveRow(reserved.node, confirmed) if confirmed is not None else None


def _with_pod(snapshot: TenantSnapshot, pod: PodFacts) -> Step:
    """Return the next step for a SharePod whose Pod is there and does not wait for its share."""
    if pod.ended:
        return ended(pod)
    if pod.deleting:
        if any(reserved.forced for reserved in snapshot.reserved):
            reason = EndReason.EVICTED if pod.disrupted else EndReason.POD_LOST
            return Finish(Phase.FAILED, reason, "an admin gave its share away while its pod was being deleted")
        return Wait()
    place = pod.node or pod.pin
    here: ReservationSnapshot | None = None
    for reserved in snapshot.reserved:
        if reserved.node == place:
            here = reserved
        elif reserved.written is None:
            return Unreserve(reserved.node)
        elif not reserved.releasing:
            return RemoveRow(reserved.node, RemovalReason.POD_ELSEWHERE, str(place))
        elif reserved.confirmed is not None:
            return RemoveRow(reserved.node, reserved.confirmed)
    if here is None or here.releasing:
        if pod.node is None:
            return TakeBackPod(pod, "its reservation is gone")
        lost = f"the ledger of {place} no longer has a reservation for it; create the SharePod again"
        return Finish(Phase.FAILED, EndReason.RESERVATION_LOST, lost, Absence.ROW)
    if here.written is None or pod.node is not None or snapshot.unbound_since is None:
        return Wait()
    due = snapshot.unbound_since + snapshot.bind_timeout
    if snapshot.now < due:
        return Wait(due)
    return TakeBackPod(pod, pod.unschedulable)  # L5: the caller deletes this version of the Pod only


def _without_pod(snapshot: TenantSnapshot, sharepod: SharePodFacts) -> Step:
    """Return the next step for a SharePod that has no Pod, not yet or no longer."""
    if sharepod.status.pod_uid is not None:
        if sharepod.status.pod_uid in snapshot.returned:
            return ClearPodUid()
        return _lost(snapshot, sharepod)
    if snapshot.lost is not None and snapshot.lost.node is not None and snapshot.lost.uid not in snapshot.returned:
        return _lost(snapshot, sharepod)  # it was bound, and is gone before `podUID` was written
    for reserved in snapshot.reserved:
        on_record = reserved.written.pod_uid if reserved.written is not None and not reserved.releasing else None
        if on_record is not None and on_record not in snapshot.returned:
            return _lost(snapshot, sharepod)  # its gate may have been opened
    for reserved in _kept_first(snapshot.reserved):
        if (step := _drop(reserved)) is not None:
            return step
    if snapshot.reserved or sharepod.error is not None or snapshot.namespace_ends:
        return Wait()
    if snapshot.now < snapshot.blocked_until:
        return Wait(snapshot.blocked_until)
    return CreatePod()  # L1


def ended(pod: PodFacts) -> Finish:
    """Return what a Pod in a terminal phase means for its SharePod."""
    if pod.disrupted and (pod.deleting or pod.phase == "Failed"):
        return Finish(Phase.FAILED, EndReason.EVICTED, pod.disrupted)
    if pod.reason == EndReason.EVICTED:
        return Finish(Phase.FAILED, EndReason.EVICTED, pod.message or "the kubelet evicted the pod")
    if pod.phase == "Succeeded" and not (pod.deleting and pod.restarts):
        return Finish(Phase.SUCCEEDED, EndReason.COMPLETED, "all containers ended with exit code 0")
    if pod.deleting:
        early = "the pod was deleted before it had ended; nothing is run a second time"
        return Finish(Phase.FAILED, EndReason.POD_LOST, early)
    return Finish(Phase.FAILED, _condition_reason(pod.reason), pod.message or "a container failed")


def _condition_reason(reason: str) -> str:
    """Return a kubelet's reason (`OutOfephemeral-storage`) in the characters that a condition's reason allows."""
    kept = re.sub(r"[^A-Za-z0-9_]", "_", reason)[:_REASON_LIMIT]
    return kept if re.match("[A-Za-z]", kept) else EndReason.POD_FAILED


def _lost(snapshot: TenantSnapshot, sharepod: SharePodFacts) -> Finish:
    """Return the end of a SharePod whose Pod was created and is gone: as the Pod last stood, or as lost."""
    lost = snapshot.lost
    if lost is not None and sharepod.status.pod_uid in (None, lost.uid):
        if lost.ended:
            return replace(ended(lost), absence=Absence.POD)
        if lost.disrupted:
            return Finish(Phase.FAILED, EndReason.EVICTED, lost.disrupted, Absence.POD)
    for condition in sharepod.status.conditions:
        if condition.type == CONDITION_POD_READY and condition.reason == EndReason.EVICTED:
            return Finish(Phase.FAILED, EndReason.EVICTED, condition.message, Absence.POD)
    gone = "the pod is gone and had not ended; nothing is run a second time"
    return Finish(Phase.FAILED, EndReason.POD_LOST, gone, Absence.POD)
