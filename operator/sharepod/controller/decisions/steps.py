"""Steps of tenants: the next action for a tenant, as a value. `lifecycle` and `claim_steps` choose a step; the
reconcilers in `tenants/` perform it.

Guarantees:
- A step names every object that it affects: performing it reads no other state.
- Recording an end (`Ending`) is a step of its own, so it is written before any release.
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
    """Reason for the removal of a row (guarantee L4 of `lifecycle`)."""

    DRAINED = "drained"
    NODE_GONE = "the Node is deleted"
    OUT_OF_SERVICE = "the node is out of service"
    FORCED = "force-release"
    NEVER_BOUND = "no Pod of it was bound"
    POD_ELSEWHERE = "its Pod is on another node"

    @property
    def released_by(self) -> str:
        """Value of the label of `metrics.RELEASES`."""
        return {self.DRAINED: "agent", self.NEVER_BOUND: "unbound"}.get(self, "override")


@dataclass(frozen=True, slots=True)
class Forget:
    """Drop the tenant's memo: nothing of the tenant is left."""


@dataclass(frozen=True, slots=True)
class Wait:
    """Take no action now, except for the status. Decide again at `until`, in monotonic seconds, if it is set."""

    until: float | None = None


@dataclass(frozen=True, slots=True)
class CreatePod:
    """Create the Pod, behind its scheduling gate."""


@dataclass(frozen=True, slots=True)
class Place:
    """Request a node and GPUs from placement."""


@dataclass(frozen=True, slots=True)
class OpenGate:
    """Open the gate of the row's Pod: pin the Pod to the node and write its GPUs into its annotation."""

    pod: PodFacts
    node: str
    row: Tenant


@dataclass(frozen=True, slots=True)
class DeletePod:
    """Delete the Pod of a SharePod that is deleted or has ended."""

    pod: PodFacts


class TakeBackCause(Enum):
    """Cause of the withdrawal of a Pod, which decides when and where the next Pod may be placed."""

    PLACE = "place"
    """The node: kube-scheduler refused the Pod there, or its share was lost. Another node may help."""
    SCHEDULER = "scheduler"
    """The scheduler: it has not handled the Pod. Another node would not help."""
    CLAIM = "claim"
    """The ResourceClaim: it was deleted or deallocated. Another node would not help."""


@dataclass(frozen=True, slots=True)
class TakeBackPod:
    """Withdraw a Pod: delete it if it is still not bound."""

    pod: PodFacts
    message: str
    """Reason for users: kube-scheduler's own message if it refused the Pod."""
    cause: TakeBackCause = TakeBackCause.PLACE


@dataclass(frozen=True, slots=True)
class DeleteSharePod:
    """Delete the SharePod, because its ttlSecondsAfterFinished has passed."""


@dataclass(frozen=True, slots=True)
class ClearPodUid:
    """Clear `status.podUID`: the Pod was withdrawn, so another Pod may be created."""


@dataclass(frozen=True, slots=True)
class LetPodGo:
    """Remove the operator's finalizer from a Pod, so that it disappears: it was withdrawn, or is not withdrawn after
    all."""

    pod: PodFacts


@dataclass(frozen=True, slots=True)
class Finish:
    """Write a terminal phase: the SharePod has ended."""

    phase: Phase
    reason: str
    """An `EndReason`, or a kubelet's reason."""
    message: str
    absence: Absence | None = field(default=None, compare=False)
    """Object whose absence a live read must confirm."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EndRun:
    """Record the end of a run that another run follows. Its Pod no longer counts as the present run."""

    cause: EndCause
    message: str
    pod_uid: str
    node: str | None
    """Node of the run; None if it is not known."""
    attempts: int
    """Number of consecutive short runs, including this run."""
    pause_s: float
    """Seconds until the next run may begin."""
    absence: Absence | None = field(default=None, compare=False)
    """Object whose absence a live read must confirm."""


@dataclass(frozen=True, slots=True)
class Unreserve:
    """Drop a reservation that was decided but not yet written to the ledger."""

    node: str


@dataclass(frozen=True, slots=True)
class BeginRelease:
    """Set the row's state to Releasing, once a live read has confirmed that the Pod is deleted."""

    node: str


@dataclass(frozen=True, slots=True)
class RemoveRow:
    """Remove the row from the ledger, so that its share becomes free."""

    node: str
    reason: RemovalReason
    pod_node: str = ""
    """Node of the tenant's Pod, with reason `POD_ELSEWHERE`; else empty."""

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
"""Step that records an end in the status."""
