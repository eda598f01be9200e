"""Facts of one tenant at one moment: the input of the decision about its next step.

Guarantees:
- A snapshot does not change: deciding twice on one snapshot gives one answer.
- Written and decided states are separate fields (`ReservationSnapshot.written`, `wanted`).
"""

from __future__ import annotations

from dataclasses import dataclass

from sharepod.api.gpunode import Tenant, TenantState
from sharepod.controller.state.facts.claim_facts import ClaimFacts
from sharepod.controller.state.facts.pod_facts import PodFacts
from sharepod.controller.state.facts.sharepod_facts import SharePodFacts
from sharepod.placement.state.types import Reservation

from .steps import RemovalReason


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
    """An admin has listed the tenant in force-release."""

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
    """Facts of one tenant at one moment. Times are monotonic seconds."""

    sharepod: SharePodFacts | None
    pod: PodFacts | None
    reserved: tuple[ReservationSnapshot, ...]
    claim: ClaimFacts | None = None
    """Claim by which its Pod's GPUs are attached, if it has one and that is known."""
    lost: PodFacts | None = None
    """Last facts of its Pod, if that is deleted."""
    unbound_since: float | None = None
    """When kube-scheduler was first seen to refuse its Pod."""
    unstarted_since: float | None = None
    """When its Pod was first seen with a share and without a container that was started."""
    ended_since: float | None = None
    """When it ended, if it has and its status contains the time. Converted from wall time once, so that a clock change
    causes no delay."""
    blocked_until: float = 0.0
    """When to try again to create its Pod."""
    refused_until: float = 0.0
    """When to try again to give its Pod a share: the API server has refused the patch that does."""
    now: float = 0.0
    wall: float = 0.0
    """Time of day, seconds since the epoch: the times in a status are compared with it."""
    bind_timeout: float = 60.0
    """Seconds after which a Pod that kube-scheduler refuses is withdrawn."""
    start_timeout: float = 1800.0
    """Seconds after which a Pod of which no container was started gives its share back."""
    namespace_ends: bool = False
    """Its namespace is being deleted."""
    unreadable_row: bool = False
    """A row of the tenant is unreadable, so its share is unknown."""
    gpu_failed: bool = False
    """One of the GPUs of its row has failed."""
    advertised: bool = True
    """The node of its row advertises enough for its Pod's line and the lines of the other shares there."""

    @property
    def between_runs(self) -> bool:
        """True if its last run has ended, as is on record, and nothing shows that another has begun."""
        if self.sharepod is None or (last := self.sharepod.status.last_end) is None:
            return False
        if self.pod is not None:
            return self.pod.uid == last.pod_uid
        begun = [self.sharepod.status.pod_uid]
        if self.lost is not None and self.lost.node is not None:
            begun.append(self.lost.uid)
        begun += [item.written.pod_uid for item in self.reserved if item.written is not None and not item.releasing]
        return all(uid in (None, last.pod_uid) for uid in begun)
