"""A hold: one grant of the token, until its tenant has drained."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

from .account import Charge


class HoldPhase(Enum):
    """Phase of a hold, in order. A hold may skip phases, never returns to an earlier one, and ends when the tenant has
    drained.

    Exception: a PREEMPTED hold whose tenant has no processor time becomes SUSPENDED once its last work ends, and
    PREEMPTED again once its tenant runs.
    """

    RUNNING = auto()
    """The tenant may launch. The hold may be renewed."""

    REVOKED = auto()
    """A revocation was sent: the tenant must drain."""

    DRAINING = auto()
    """The tenant's hooks launch nothing more, and its last work is ending. No further process of the tenant may launch,
    and the hold is not renewed."""

    YIELDING = auto()
    """As DRAINING, and its last work is about to end. The next tenant is therefore granted the GPUs already."""

    SUSPENDED = auto()
    """The tenant gets no processor time, so its hooks cannot report that it has drained. They are barred from
    launching, and its known work has ended. Its GPUs may be granted to others, and it pays nothing."""

    PREEMPTED = auto()
    """The grace period has expired, and the tenant's GPUs may be granted to others. A suspended hold also enters this
    phase when its tenant runs again before it has drained."""


class HoldPlace(Enum):
    """Role of a tenant among the holders of one GPU."""

    LEAD = auto()
    """The tenant to which the present turn belongs. A GPU has at most one lead."""

    CO_RUNNER = auto()
    """A tenant that holds during another tenant's turn, until it is revoked. It still waits for its own turn. When that
    turn comes, it becomes the lead without draining."""


class CoRunEnd(Enum):
    """Reason why a tenant stopped co-running. Its values are label values of the metric."""

    NO_GAIN = "no_gain"
    """The sum of progress was no higher than that of one tenant alone."""

    OWED = "owed"
    """The lead, or another co-runner, was owed time and lost work by co-running."""

    PROBE = "probe"
    """The lead must hold alone for a while, so that its progress alone is measured again."""

    LIMIT = "limit"
    """The co-runner has less time left under its limit than the shortest quantum."""

    WAKE = "wake"
    """A tenant that woke with credit leads next."""

    EXCLUSIVE = "exclusive"
    """The lead is interactive or takes exclusive turns, or the co-runner may no longer co-run."""

    GROUP = "group"
    """The tenant co-ran with members of its group, and none of them holds the GPU or is late to drain any more."""

    LEADS = "leads"
    """The co-runner has become the lead."""

    DRAINED = "drained"
    """The co-runner has no more work, has left, or was preempted."""


_SUSPENDED, _PREEMPTED = HoldPhase.SUSPENDED, HoldPhase.PREEMPTED


class Metering(Enum):
    """Bound of the tenant's queue of launched work during one hold."""

    UNMETERED = auto()
    """The tenant may launch any amount: no other tenant is connected, and its limit is the whole GPU."""

    METERED_LATER = auto()
    """The bound began during the hold. The tenant may have launched any amount before."""

    METERED_FROM_START = auto()
    """Everything launched under the hold was launched into a bounded queue."""


@dataclass(slots=True)
class Hold:
    """One grant and its state, until the tenant has drained. Moments in nanoseconds of the scheduler's clock."""

    grant_id: int
    granted_at: int
    """Start of the present quantum."""
    begun_at: int
    """Start of the first quantum."""
    deadline: int | None
    """End of the quantum. None: the hold lasts until another tenant wants one of the GPUs."""
    metering: Metering
    given_as: Charge
    """How the granted time is charged: as guaranteed or as borrowed."""
    renewal_considered: bool
    """True once the scheduler has decided, for this deadline, whether to renew the hold."""
    told_longer: bool = False
    """True if the holder knows only a later deadline than the present one. The scheduler must therefore revoke it at
    the deadline."""
    phase: HoldPhase = HoldPhase.RUNNING
    yields_at: int | None = None
    """Moment from which the next tenant may get the token. None unless the hold is draining."""
    ends_at: int | None = None
    """Expected end of the tenant's last work: announced by its hooks, or computed if the tenant has no processor time.
    None unless the hold is draining."""
    silent: bool = False
    """True if the tenant has no processor time. The hold is then suspended at `ends_at`."""
    starved: bool = False
    """True if the tenant had no processor time at some moment of the hold. The end of the hold then shows no overrun of
    kernels, so the overrun is learned from the expected end of the launched work."""
    seen_late: bool = False
    """True once the scheduler has run after the time at which the hold should have drained. A later drain is then the
    tenant's delay, not the scheduler's, so the tenant pays for it."""
    co_run_end: CoRunEnd = CoRunEnd.DRAINED
    """Reason for which the tenant stops co-running."""
    holds_up_group: bool = True
    """True while the turn of other members of the tenant's group is delayed until this tenant has drained."""
    place: HoldPlace = HoldPlace.LEAD
    accompanies: bool = False
    """The tenant co-runs because another member of its group holds the GPU."""
    waited_since: int | None = None
    """For a draining co-runner: start of its wait for its own turn. If it wants the token again after draining, its
    wait counts from that moment."""
    quiet_until: int = 0
    """Moment before which no other tenant fills this tenant's gaps."""
    charged_ns: int = 0
    """Nanoseconds charged to the account in the present quantum, including work of an earlier hold of the tenant that
    was preempted."""

    @property
    def metered(self) -> bool:
        """Return True if the holder must keep its queue bounded."""
        return self.metering is not Metering.UNMETERED

    @property
    def co_runs(self) -> bool:
        """Return True if the tenant holds while another tenant leads."""
        return self.place is HoldPlace.CO_RUNNER

    @property
    def displaced(self) -> bool:
        """Return True if the tenant was preempted or suspended, so that it has lost its GPUs before it has drained."""
        return self.phase is _SUSPENDED or self.phase is _PREEMPTED
