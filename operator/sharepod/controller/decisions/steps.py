"""Steps of tenants: the next action for a tenant, as a value. `lifecycle` and `claim_steps` choose steps, tenants/
performs them.

Guarantees:
- A step names every object that it affects: performing it reads no other state.
- Recording an end (`Ending`) is a separate step, so the record precedes every release.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from sharepod.api.gpunode import Tenant
from sharepod.api.sharepod import Phase
from sharepod.controller.state.facts.pod_facts import PodFacts

from .ends import Absence, EndCause
from .share_claim_steps import ShareClaimStep


class RemovalReason(Enum):
    """Reason for removing a row (L4)."""

    DRAINED = "drained"
    NODE_GONE = "the Node is deleted"
    OUT_OF_SERVICE = "the node is out of service"
    FORCED = "force-release"
    NEVER_BOUND = "no Pod of it was bound"
    POD_ELSEWHERE = "its Pod is on another node"


@dataclass(frozen=True, slots=True)
class Forget:
    """Nothing of the tenant is left."""


@dataclass(frozen=True, slots=True)
class Wait:
    """Only write the status; reconsider at `until` (monotonic seconds), if set."""

    until: float | None = None


@dataclass(frozen=True, slots=True)
class CreatePod:
    """Create the Pod, behind its scheduling gate."""


@dataclass(frozen=True, slots=True)
class Place:
    """Request a node and GPUs from placement."""


@dataclass(frozen=True, slots=True)
class OpenGate:
    """Open the gate of the Pod that this row is for: pin the Pod to the node and name its GPUs."""

    pod: PodFacts
    node: str
    row: Tenant


@dataclass(frozen=True, slots=True)
class DeletePod:
    """Begin to delete the Pod of a SharePod that is deleted or has ended."""

    pod: PodFacts


class TakeBackCause(Enum):
    """Cause for withdrawing a Pod. It decides when and where the next Pod may be placed."""

    PLACE = "place"
    """Its place: kube-scheduler refused it there, or its share is lost. Another node may help."""
    SCHEDULER = "scheduler"
    """Its scheduler, which has not handled it. Another node would not help."""
    CLAIM = "claim"
    """Its ResourceClaim, which was deleted or deallocated. Another node would not help."""


@dataclass(frozen=True, slots=True)
class TakeBackPod:
    """Delete a Pod that was not bound, unless it has been by now."""

    pod: PodFacts
    message: str
    """Reason for users: kube-scheduler's own message if it refused the Pod."""
    cause: TakeBackCause = TakeBackCause.PLACE


@dataclass(frozen=True, slots=True)
class DeleteSharePod:
    """Delete the SharePod: its time after its end is over."""


@dataclass(frozen=True, slots=True)
class ClearPodUid:
    """Empty `status.podUID`: that Pod was withdrawn, and another may be created."""


@dataclass(frozen=True, slots=True)
class LetPodGo:
    """Remove the finalizer of a Pod that was withdrawn, or was to be."""

    pod: PodFacts


@dataclass(frozen=True, slots=True)
class Finish:
    """Write a terminal phase."""

    phase: Phase
    reason: str
    """An `EndReason`, or a kubelet's reason."""
    message: str
    absence: Absence | None = field(default=None, compare=False)
    """Object whose absence a live read must confirm."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EndRun:
    """Record the end of a run that another will follow: the Pod is no longer the SharePod's run."""

    cause: EndCause
    message: str
    pod_uid: str
    node: str | None
    """Node of the run; None if it is not known."""
    attempts: int
    """Runs in a row that did not last, including this one."""
    pause_s: float
    """Seconds until the next run may begin."""
    absence: Absence | None = field(default=None, compare=False)
    """Object whose absence a live read must confirm."""


@dataclass(frozen=True, slots=True)
class Unreserve:
    """Forget a reservation that is only decided."""

    node: str


@dataclass(frozen=True, slots=True)
class BeginRelease:
    """Set the row's state to Releasing, once a live read has confirmed that the Pod is deleted."""

    node: str


@dataclass(frozen=True, slots=True)
class RemoveRow:
    """Remove the row: its share becomes free."""

    node: str
    reason: RemovalReason
    pod_node: str = ""
    """With `POD_ELSEWHERE`: where its Pod is."""

    @property
    def text(self) -> str:
        """Reason as text, for Events and logs."""
        return f"its Pod is on {self.pod_node}" if self.pod_node else self.reason.value


Step = (
    Forget
    | Wait
    | CreatePod
    | Place
    | OpenGate
    | DeletePod
    | DeleteSharePod
    | TakeBackPod
    | ClearPodUid
    | LetPodGo
    | Finish
    | EndRun
    | Unreserve
    | BeginRelease
    | RemoveRow
    | ShareClaimStep
)

Ending = Finish | EndRun
"""Record of an end, which the status carries."""
