"""A hold: one grant of the token, from the moment it is given until its tenant has drained."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

from .account import Charge


class HoldPhase(Enum):
    """Progress of a hold. A hold moves downwards in this list, and may skip phases; it ends when the tenant has
    drained. One that was preempted without processor time is SUSPENDED once its last work ends, and PREEMPTED again
    once its tenant runs."""

    RUNNING = auto()
    """The tenant may launch. The hold may be renewed."""

    REVOKED = auto()
    """The tenant was told to drain."""

    DRAINING = auto()
    """The tenant's gate is closed and its last work is ending. No further process joins, and the hold is not
    renewed."""

    YIELDING = auto()
    """DRAINING, and the tenant's GPUs may have been granted to others already."""

    SUSPENDED = auto()
    """The tenant has no processor time and cannot drain; its gate is barred and its last work has ended, as far as is
    known. Its GPUs may have been granted to others. It pays nothing."""

    PREEMPTED = auto()
    """The grace period has expired, and the tenant's GPUs may have been granted to others. Or the hold was suspended
    and its tenant runs again, without having drained."""


class HoldPlace(Enum):
    """HoldPlace of a tenant among those that hold a GPU at once."""

    LEAD = auto()
    """Its turn it is. A GPU has at most one lead."""

    CO_RUNNER = auto()
    """It holds while another leads, until it is revoked. It still waits for its own turn, and then becomes the lead
    without draining."""


class CoRunEnd(Enum):
    """Reason why a tenant ceased to co-run. Its values are label values of the metric."""

    NO_GAIN = "no_gain"
    """Together the tenants did no more than one alone."""

    OWED = "owed"
    """The lead, or another co-runner, was owed time and lost work."""

    PROBE = "probe"
    """The lead is measured alone."""

    LIMIT = "limit"
    """Its limit is reached."""

    WAKE = "wake"
    """A tenant that woke with credit leads next."""

    EXCLUSIVE = "exclusive"
    """A tenant that takes exclusive turns leads, is interactive, or is the co-runner itself."""

    LEADS = "leads"
    """It has become the lead."""

    DRAINED = "drained"
    """It has no more work, has left, or was preempted."""


_SUSPENDED, _PREEMPTED = HoldPhase.SUSPENDED, HoldPhase.PREEMPTED


class Metering(Enum):
    """Bound of the tenant's queue of launched work during one hold."""

    UNMETERED = auto()
    """The tenant may launch any amount: no other tenant is connected, and no limit binds."""

    METERED_LATER = auto()
    """The tenant was told to bound its queue after it could have launched any amount."""

    METERED_FROM_START = auto()
    """Everything launched under the hold was launched into a bounded queue."""


@dataclass(slots=True)
class Hold:
    """A grant that has not been drained. Moments in nanoseconds of the scheduler's clock."""

    grant_id: int
    granted_at: int
    """Begin of the present quantum."""
    begun_at: int
    """Begin of the first."""
    deadline: int | None
    """End of the quantum; None: until another tenant wants one of the GPUs."""
    metering: Metering
    given_as: Charge
    """Kind of the time given: guaranteed or lent."""
    renewal_considered: bool
    """True once it was considered, for this deadline, whether the holder's turn is next again."""
    told_longer: bool = False
    """The holder was told a later deadline than it has, so it has to be revoked."""
    phase: HoldPhase = HoldPhase.RUNNING
    yields_at: int | None = None
    """Moment from which the next tenant may be granted; None unless the hold is draining."""
    ends_at: int | None = None
    """Moment at which the last work is announced to end; None unless the hold is draining."""
    silent: bool = False
    """The tenant has no processor time: the hold is suspended at `ends_at`."""
    starved: bool = False
    """The tenant was without processor time at some moment of the hold, so that its end says nothing about its work:
    what had been launched by then does."""
    seen_late: bool = False
    """The scheduler was there when the hold had not drained although it should have."""
    co_run_end: CoRunEnd = CoRunEnd.DRAINED
    """Why it ceases to co-run."""
    holds_up_group: bool = True
    """Other members of the tenant's group wait until it has drained."""
    place: HoldPlace = HoldPlace.LEAD
    waited_since: int | None = None
    """Begin of the wait of a co-runner that drains: it waits on from then if it wants more."""
    quiet_until: int = 0
    """Moment until which no other tenant fills the gaps of this one."""
    charged_ns: int = 0
    """Time charged to the account in the present quantum, and for work of a preempted hold that it goes on with."""

    @property
    def metered(self) -> bool:
        """Return whether the holder was told to keep its queue bounded."""
        return self.metering is not Metering.UNMETERED

    @property
    def co_runs(self) -> bool:
        """Return whether the tenant holds while another leads."""
        return self.place is HoldPlace.CO_RUNNER

    @property
    def displaced(self) -> bool:
        """Return whether the tenant has lost its GPUs before it has drained."""
        return self.phase is _SUSPENDED or self.phase is _PREEMPTED
