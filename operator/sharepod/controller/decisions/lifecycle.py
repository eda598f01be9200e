"""What to do next for one tenant. Pure: what is known in, one step out.

Guarantees, whatever order things happen in:
- a Pod is made only where the ledger, as the API server has it, says Reserved, and only while `status.podUID` is
  empty: no work runs twice;
- a terminal phase is written before the reservation begins to end;
- nothing is taken as lost while a row of the tenant cannot be read;
- a row of the ledger is removed only when its agent has confirmed that nothing is left, when that is overridden (the
  Node is gone, its out-of-service taint, force-release), or when no Pod of the tenant was ever bound to that node;
- a Pod is taken back only while it is not bound.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from sharepod.api.gpunode import Tenant, TenantState
from sharepod.api.sharepod import CONDITION_POD_READY, Phase
from sharepod.controller.state.facts import PodFacts, SharePodFacts
from sharepod.placement.state.types import Reservation

EVICTED = "Evicted"
POD_LOST = "PodLost"
POD_FAILED = "PodFailed"
COMPLETED = "Completed"
RESERVATION_LOST = "ReservationLost"
NODE_GONE = "the Node is gone"
FORCED = "force-release"


@dataclass(frozen=True, slots=True, kw_only=True)
class Reserved:
    """A reservation of the tenant on one node. `written`: the row as the API server has it, None while it is only
    decided; `drained`: its agent reported, for this release, that nothing is left; `override`: why that need not be
    awaited; `forced`: an admin has named the tenant in force-release.
    """

    node: str
    wanted: Reservation
    written: Tenant | None
    drained: bool = False
    override: str | None = None
    forced: bool = False

    @property
    def releasing(self) -> bool:
        """Whether the row, as written, is being released."""
        return self.written is not None and self.written.state is TenantState.RELEASING


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantSnapshot:
    """What is known of one tenant. Times are monotonic seconds.

    `lost`: its Pod as last seen, if it is gone; `returned`: uids of Pods that this process took back before they were
    bound; `unbound_since`: when kube-scheduler was first seen to refuse its Pod; `give_back`: its Pod was taken back,
    or could not be made for long, so that its reservation is to be given back; `blocked_until`: not to try to make it
    before; `unreadable_row`: a row of it cannot be read, so what it holds is not known.
    """

    sharepod: SharePodFacts | None
    pod: PodFacts | None
    reserved: tuple[Reserved, ...]
    lost: PodFacts | None = None
    returned: frozenset[str] = frozenset()
    unbound_since: float | None = None
    give_back: bool = False
    blocked_until: float = 0.0
    now: float = 0.0
    bind_timeout: float = 60.0
    unreadable_row: bool = False


@dataclass(frozen=True, slots=True)
class Forget:
    """Nothing of the tenant is left."""


@dataclass(frozen=True, slots=True)
class Wait:
    """Nothing to do but to show how it stands; look again at `until`, if that is set."""

    until: float | None = None


@dataclass(frozen=True, slots=True)
class Place:
    """Ask placement for a node and GPUs."""


@dataclass(frozen=True, slots=True)
class CreatePod:
    """Make the Pod of this reservation."""

    node: str
    row: Tenant


@dataclass(frozen=True, slots=True)
class DeletePod:
    """Begin to end the Pod of a SharePod that is gone, or that has ended."""

    pod: PodFacts


@dataclass(frozen=True, slots=True)
class TakeBack:
    """Delete a Pod that was not bound, unless it has been by now."""

    pod: PodFacts
    why: str


@dataclass(frozen=True, slots=True)
class ClearPod:
    """The Pod in `status.podUID` was taken back: it may be made anew."""


@dataclass(frozen=True, slots=True)
class Finish:
    """Write a terminal phase."""

    phase: Phase
    reason: str
    message: str


@dataclass(frozen=True, slots=True)
class Unreserve:
    """Forget a reservation that is only decided."""

    node: str


@dataclass(frozen=True, slots=True)
class BeginRelease:
    """Set the row's state to Releasing, once the Pod's absence is confirmed."""

    node: str


@dataclass(frozen=True, slots=True)
class Remove:
    """Remove the row: its share is given away."""

    node: str
    why: str


Step = Forget | Wait | Place | CreatePod | DeletePod | TakeBack | ClearPod | Finish | Unreserve | BeginRelease | Remove

NEVER_BOUND = "no Pod of it was bound"


def decide(snapshot: TenantSnapshot) -> Step:
    """The next step for a tenant."""
    if snapshot.unreadable_row:
        return Wait()
    sharepod = snapshot.sharepod
    if sharepod is None or sharepod.deleting or sharepod.ended:
        return _end(snapshot)
    if snapshot.pod is not None:
        return _with_pod(snapshot, snapshot.pod)
    return _without_pod(snapshot, sharepod)


def _end(snapshot: TenantSnapshot) -> Step:
    """The SharePod is gone or has ended: so must its Pod, then its reservations."""
    for reserved in snapshot.reserved:
        if reserved.written is None:
            return Unreserve(reserved.node)
    pod = snapshot.pod
    stuck = pod is not None and not pod.ended
    if pod is not None and not pod.ended and not pod.deleting:
        return DeletePod(pod)
    for reserved in snapshot.reserved:
        if reserved.forced:
            return Remove(reserved.node, FORCED)
        if stuck:
            continue
        if not reserved.releasing:
            if reserved.wanted.releasing:
                continue  # on its way to the ledger
            return BeginRelease(reserved.node)
        if reserved.drained or reserved.override:
            return Remove(reserved.node, reserved.override or "drained")
    return Forget() if not snapshot.reserved and pod is None else Wait()


def _with_pod(snapshot: TenantSnapshot, pod: PodFacts) -> Step:
    if pod.ended:
        return ended(pod)
    if pod.deleting:
        if any(reserved.forced for reserved in snapshot.reserved):
            reason = EVICTED if pod.disrupted else POD_LOST
            return Finish(Phase.FAILED, reason, "an admin gave its share away while its pod was being deleted")
        return Wait()
    place = pod.node or pod.pin
    here: Reserved | None = None
    for reserved in snapshot.reserved:
        if reserved.node == place:
            here = reserved
        elif reserved.written is None:
            return Unreserve(reserved.node)
        elif not reserved.releasing:
            return Remove(reserved.node, f"its Pod is on {place}")
        elif reserved.drained or reserved.override:
            return Remove(reserved.node, reserved.override or "drained")
    if here is None or here.releasing:
        if pod.node is None:
            return TakeBack(pod, "its reservation is gone")
        return Finish(
            Phase.FAILED, RESERVATION_LOST, f"the ledger of {place} has no reservation for it any more; make it anew"
        )
    if here.written is None or pod.node is not None or snapshot.unbound_since is None:
        return Wait()
    due = snapshot.unbound_since + snapshot.bind_timeout
    if snapshot.now < due:
        return Wait(due)
    return TakeBack(pod, pod.unschedulable)


def _without_pod(snapshot: TenantSnapshot, sharepod: SharePodFacts) -> Step:
    if sharepod.status.pod_uid is not None:
        if sharepod.status.pod_uid in snapshot.returned:
            return ClearPod()
        return _lost(snapshot, sharepod)
    if snapshot.lost is not None and snapshot.lost.node is not None and snapshot.lost.uid not in snapshot.returned:
        return _lost(snapshot, sharepod)  # it was bound, and is gone before `podUID` was written
    if not snapshot.reserved:
        return Place() if sharepod.error is None else Wait()
    kept = min(snapshot.reserved, key=lambda reserved: (reserved.written is None, reserved.releasing, reserved.node))
    for reserved in snapshot.reserved:
        if reserved is not kept or sharepod.error is not None:
            return Unreserve(reserved.node) if reserved.written is None else Remove(reserved.node, NEVER_BOUND)
    if kept.written is None:
        return Wait()
    if kept.releasing:
        done = kept.drained or kept.override or kept.forced
        return Remove(kept.node, kept.override or "drained") if done else Wait()
    if snapshot.give_back:
        return Remove(kept.node, NEVER_BOUND)
    if snapshot.now < snapshot.blocked_until:
        return Wait(snapshot.blocked_until)
    return CreatePod(kept.node, kept.written)


def ended(pod: PodFacts) -> Finish:
    """What a Pod in a terminal phase means for its SharePod."""
    if pod.disrupted and (pod.deleting or pod.phase == "Failed"):
        return Finish(Phase.FAILED, EVICTED, pod.disrupted)
    if pod.reason == EVICTED:
        return Finish(Phase.FAILED, EVICTED, pod.message or "the kubelet evicted the pod")
    if pod.phase == "Succeeded" and not (pod.deleting and pod.restarts):
        return Finish(Phase.SUCCEEDED, COMPLETED, "all containers ended with exit code 0")
    if pod.deleting:
        return Finish(Phase.FAILED, POD_LOST, "the pod was deleted before it had ended; nothing is run a second time")
    return Finish(Phase.FAILED, _reason(pod.reason), pod.message or "a container failed")


def _reason(said: str) -> str:
    """A kubelet's reason, such as `OutOfephemeral-storage`, as a condition's: those allow fewer characters."""
    kept = re.sub(r"[^A-Za-z0-9_]", "_", said)[:128]
    return kept if re.match("[A-Za-z]", kept) else POD_FAILED


def _lost(snapshot: TenantSnapshot, sharepod: SharePodFacts) -> Finish:
    """Its Pod was made and is gone."""
    lost = snapshot.lost
    if lost is not None and sharepod.status.pod_uid in (None, lost.uid):
        if lost.ended:
            return ended(lost)
        if lost.disrupted:
            return Finish(Phase.FAILED, EVICTED, lost.disrupted)
    for condition in sharepod.status.conditions:
        if condition.type == CONDITION_POD_READY and condition.reason == EVICTED:
            return Finish(Phase.FAILED, EVICTED, condition.message)
    return Finish(Phase.FAILED, POD_LOST, "the pod is gone and had not ended; nothing is run a second time")
