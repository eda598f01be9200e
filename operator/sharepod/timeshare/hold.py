"""A hold: one grant of the token, until its tenant has drained."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

from .account import Charge


class HoldPhase(Enum):
    """Phase of a hold. Holds move downwards in this list, may skip phases, and end when the tenant has drained.

    A hold that was preempted without processor time is SUSPENDED once its last work ends, and PREEMPTED again once its
    tenant runs.
    """

    RUNNING = auto()
    """The tenant may launch. The hold may be renewed."""

    REVOKED = auto()
    """A revocation was sent: the tenant must drain."""

    DRAINING = auto()
    """The tenant's gate is closed, and its last work is ending. No further process joins, and the hold is not
    renewed."""

    YIELDING = auto()
    """DRAINING, and the tenant's GPUs may be granted to others already."""

    SUSPENDED = auto()
    """The tenant has no processor time and cannot drain. Its gate is barred, and its known work has ended. Its GPUs may
    be granted to others; it pays nothing."""

    PREEMPTED = auto()
    """The grace period has expired, and the tenant's GPUs may be granted to others. Or the hold was suspended, and its
    tenant runs again without having drained."""


class HoldPlace(Enum):
    """Role of a tenant among the holders of one GPU."""

    LEAD = auto()
    """The present turn is this tenant's. A GPU has at most one lead."""

    CO_RUNNER = auto()
    """The tenant holds while another leads, until revoked. It still waits for its own turn, and then becomes the lead
    without draining."""


class CoRunEnd(Enum):
    """Reason why a tenant stopped co-running. Its values are label values of the metric."""

    NO_GAIN = "no_gain"
    """Together the tenants got no more done than one alone."""

    OWED = "owed"
    """The lead, or another co-runner, was owed time and lost work."""

    PROBE = "probe"
    """The lead is being measured alone."""

    LIMIT = "limit"
    """The co-runner's ceiling has no room for a shortest quantum."""

    WAKE = "wake"
    """A tenant that woke with credit leads next."""

    EXCLUSIVE = "exclusive"
    """The lead is interactive or takes exclusive turns, or the co-runner may no longer co-run."""

    LEADS = "leads"
    """The co-runner has become the lead."""

    DRAINED = "drained"
    """The co-runner has no more work, has left, or was preempted."""


_SUSPENDED, _PREEMPTED = HoldPhase.SUSPENDED, HoldPhase.PREEMPTED


class Metering(Enum):
    """Bound of the tenant's queue of launched work during one hold."""

    UNMETERED = auto()
    """The tenant may launch any amount: no other tenant is connected, and no limit binds."""

    METERED_LATER = auto()
    """The bound began during the hold: the tenant may have launched any amount before."""

    METERED_FROM_START = auto()
    """Everything launched under the hold was launched into a bounded queue."""


@dataclass(slots=True)
class Hold:
    """A grant whose tenant has not drained. Moments in nanoseconds of the scheduler's clock."""

    grant_id: int
    granted_at: int
    """Start of the present quantum."""
    begun_at: int
    """Start of the first quantum."""
    deadline: int | None
    """End of the quantum; None: until another tenant wants one of the GPUs."""
    metering: Metering
    given_as: Charge
    """Kind of the granted time: guaranteed or lent."""
    renewal_considered: bool
    """True once the renewal was considered for this deadline."""
    told_longer: bool = False
    """The holder was sent a later deadline than it now has, so it must be revoked."""
    phase: HoldPhase = HoldPhase.RUNNING
    yields_at: int | None = None
    """Moment from which the next tenant may be granted; None unless the hold is draining."""
    ends_at: int | None = None
    """Announced end of the last work; None unless the hold is draining."""
    silent: bool = False
    """The tenant has no processor time: the hold is suspended at `ends_at`."""
    starved: bool = False
    """The tenant was without processor time at some moment of the hold. Its overrun is then learned from the work
    launched by that moment, not from the end of the hold."""
    seen_late: bool = False
    """The scheduler ran after the hold should have drained, so the tenant was late, not the scheduler."""
    co_run_end: CoRunEnd = CoRunEnd.DRAINED
    """Why the tenant stops co-running."""
    holds_up_group: bool = True
    """Other members of the tenant's group wait until it has drained."""
    place: HoldPlace = HoldPlace.LEAD
    waited_since: int | None = None
    """Start of the wait of a draining co-runner: if it wants more, it has waited since then."""
    quiet_until: int = 0
    """Moment until which no other tenant fills this tenant's gaps."""
    charged_ns: int = 0
    """Time charged to the account in the present quantum, including work of the tenant's own preempted hold."""

    @property
    def metered(self) -> bool:
        """Return whether the holder must keep its queue bounded."""
        return self.metering is not Metering.UNMETERED

    @property
    def co_runs(self) -> bool:
        """Return whether the tenant holds while another leads."""
        return self.place is HoldPlace.CO_RUNNER

    @property
    def displaced(self) -> bool:
        """Return whether the tenant has lost its GPUs before it has drained."""
        return self.phase is _SUSPENDED or self.phase is _PREEMPTED
