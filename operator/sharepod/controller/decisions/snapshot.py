"""Snapshot: all facts about one tenant at one moment, as the input of the decision on its next step.

Guarantees:
- A snapshot does not change, so two decisions on one snapshot give the same answer.
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
    """The reservation in the cluster state, written or only decided."""
    written: Tenant | None
    """Its row as stored in the API server. None while the reservation is only decided."""
    drained: bool = False
    """True if the agent has reported, for this release of the row, that no process of the tenant is left."""
    override: RemovalReason | None = None
    """Reason why the row can be removed without the agent's report: `NODE_GONE` or `OUT_OF_SERVICE`. None: the report
    is needed."""
    forced: bool = False
    """True if an admin has listed the tenant in the annotation force-release."""

    @property
    def releasing(self) -> bool:
        """True if the written row has the state Releasing."""
        return self.written is not None and self.written.state is TenantState.RELEASING

    @property
    def confirmed(self) -> RemovalReason | None:
        """Reason to conclude that no process of the tenant is left on the node. None if nothing confirms it."""
        return self.override or (RemovalReason.DRAINED if self.drained else None)


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantSnapshot:
    """Facts of one tenant at one moment. Times are monotonic seconds."""

    sharepod: SharePodFacts | None
    pod: PodFacts | None
    reserved: tuple[ReservationSnapshot, ...]
    claim: ClaimFacts | None = None
    """Claim by which the Pod's GPUs are attached. None if the Pod has none, or it is not known yet."""
    lost: PodFacts | None = None
    """Last facts of its Pod, if the Pod was deleted; None otherwise."""
    unbound_since: float | None = None
    """Time at which this process first saw that kube-scheduler refuses its Pod."""
    unstarted_since: float | None = None
    """Time at which this process first saw its Pod with a share and without a started container."""
    ended_since: float | None = None
    """Time at which the SharePod ended. None if it has not ended, or its status has no end time. It was converted from
    the time of day once, so that a change of the clock has no effect."""
    blocked_until: float = 0.0
    """Time before which the operator does not try to create its Pod again."""
    refused_until: float = 0.0
    """Time before which the operator does not try to open its Pod's gate again, after a refusal by the API server."""
    now: float = 0.0
    wall: float = 0.0
    """Time of day in seconds since the epoch, for comparison with times in the status."""
    bind_timeout: float = 60.0
    """Seconds after which a Pod that kube-scheduler refuses is withdrawn."""
    start_timeout: float = 1800.0
    """Seconds after which a Pod without a started container loses its share."""
    namespace_ends: bool = False
    """True if its namespace is being deleted."""
    unreadable_row: bool = False
    """True if a row of the tenant is unreadable. Its share is then unknown."""
    gpu_failed: bool = False
    """True if one of the GPUs of its row has failed."""
    advertised: bool = True
    """True if the node of its row advertises enough for its Pod's line and the lines of the other shares there."""

    @property
    def between_runs(self) -> bool:
        """True if the status records the end of its last run, and nothing shows that another run has begun."""
        if self.sharepod is None or (last := self.sharepod.status.last_end) is None:
            return False
        if self.pod is not None:
            return self.pod.uid == last.pod_uid
        begun = [self.sharepod.status.pod_uid]
        if self.lost is not None and self.lost.node is not None:
            begun.append(self.lost.uid)
        begun += [item.written.pod_uid for item in self.reserved if item.written is not None and not item.releasing]
        return all(uid in (None, last.pod_uid) for uid in begun)
