"""Steps of tenants: what is done next for one, as values. Chosen by `lifecycle` and `claim_steps`, acted on in tenants/

Guarantees:
- A step names every object that it is about: acting on it needs no other look at what is known.
- The record of an end (`Ending`) is a step of its own, so it is written before anything is released.
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
    NODE_GONE = "the Node is gone"
    OUT_OF_SERVICE = "the node is out of service"
    FORCED = "force-release"
    NEVER_BOUND = "no Pod of it was bound"
    POD_ELSEWHERE = "its Pod is on another node"


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


class TakeBackCause(Enum):
    """Cause for which a Pod is taken back. It says when and where the next one may be placed."""

    PLACE = "place"
    """Its place: kube-scheduler refused it there, or its share is gone. Another node may help."""
    SCHEDULER = "scheduler"
    """Its scheduler, which has not looked at it. Another node would not help."""
    CLAIM = "claim"
    """Its ResourceClaim, which somebody has deleted or emptied. Another node would not help."""


@dataclass(frozen=True, slots=True)
class TakeBackPod:
    """Delete a Pod that was not bound, unless it has been by now."""

    pod: PodFacts
    message: str
    """Reason for users: kube-scheduler's own words where it refused the Pod."""
    cause: TakeBackCause = TakeBackCause.PLACE


@dataclass(frozen=True, slots=True)
class DeleteSharePod:
    """Delete the SharePod: its time after its end is over."""


@dataclass(frozen=True, slots=True)
class ClearPodUid:
    """Empty `status.podUID`: that Pod was taken back, and another may be created."""


@dataclass(frozen=True, slots=True)
class LetPodGo:
    """Let a Pod go that was, or was to be, taken back."""

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
    """Runs in a row that did not last, this one included."""
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
