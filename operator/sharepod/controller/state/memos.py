"""Memos: what the operator remembers about each tenant between two reconciliations, in memory only: back-offs, reasons
to report, written Events.

Guarantees:
- The loss of a memo is harmless: its content is derived again, or the safe case is assumed.
- Facts that must survive a restart are in the API server, not here.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from sharepod.api.sharepod import GpuRequest, KeptPlace
from sharepod.backoff import Backoff
from sharepod.placement.state.types import Refusal

LONGEST_PAUSE_S = 600.0
"""Longest pause in seconds before a tenant is placed again after a failure. So a tenant is placed at most ten minutes
after an administrator has fixed the cause."""


class BlockedReason(StrEnum):
    """Reason why a Pod cannot be created, or cannot get its share, for now. Users see it in the condition PodReady."""

    FORBIDDEN = "PodForbidden"
    """A quota or an admission policy forbids it, or the namespace is being deleted."""
    NAME_TAKEN = "PodNameTaken"
    """A Pod of this name exists that does not belong to the SharePod."""
    TERMINATING = "PodTerminating"
    """The SharePod's former Pod of this name is still being deleted."""


@dataclass(slots=True)
class Blocked:
    """Failed creation of a Pod, or failed opening of its gate. It is tried again. Times are monotonic seconds."""

    reason: BlockedReason
    message: str
    until: float
    """Time of the next try."""
    tries: int = 1
    """Number of consecutive refusals."""
    pod: str | None = None
    """uid of the Pod whose gate could not be opened. None if the Pod could not be created."""


@dataclass(slots=True)
class Eviction:
    """Eviction of one Pod: for an unenforced share, or by preemption or a move. Times are monotonic seconds."""

    pod: str
    """Uid of the Pod."""
    since: float
    """Time at which this process first saw the cause."""
    refused_since: float | None = None
    """Time at which a PodDisruptionBudget first refused the eviction."""
    done: str | None = None
    """Cause of the eviction as text, once the API server has accepted the eviction."""
    preempted: bool = False
    """True if the Pod was evicted for a request of higher priority."""
    move_to: KeptPlace | None = None
    """Place where the tenant restarts, if it moves to free a place for a waiting request."""


@dataclass(slots=True)
class ClaimMemo:
    """Memo of a tenant that is a claim. Times are monotonic seconds."""

    allocated: bool = False
    """True if this process has written or seen the allocation of the claim's row."""
    give_up: bool = False
    """True if another claim of its Pod has lost its place. This claim must then give up its place on that node too."""
    taken_back: bool = False
    """True if this process has removed its allocation."""
    withdrawn: float | None = None
    """Time at which its reservation in `status.reservedFor` for a waiting Pod was removed, so that it can be
    deallocated."""
    waits: tuple[str, float, str] | None = None
    """(uid, since, message) of the Pod that waits for a node although the claim is allocated. `message`:
    kube-scheduler's message when the wait began."""
    refused_since: float | None = None
    """Time at which kube-scheduler's message for that Pod was first seen to differ from `waits`."""
    not_entered: str | None = None
    """Reason why kube-scheduler's allocation has no row in the ledger. None if it has a row, or needs none."""
    waited: bool = False
    """True if an Event has reported that it has no place, so that the next place is reported too."""


@dataclass(slots=True)
class TenantMemo:
    """Memo of one tenant. Times are monotonic seconds."""

    tenant_deleted: bool = False
    """True if a watch, a GET or a write has shown that its SharePod, Pod or claim is deleted. A uid is never reused."""
    refusal: Refusal | None = None
    """Last refusal of a place. None if the tenant was placed or not tried."""
    resize_refusal: Refusal | None = None
    """Refusal of the last requested change of its share. None if none was refused."""
    resize_asked: int | None = None
    """`wish` of the last request for another share (`Resizes.want`). None before such a request."""
    resize_counted: GpuRequest | None = None
    """Requested share that the quota check has allowed. Placement applies no other share."""
    memory_settled: int | None = None
    """See `ResizeWish.memory_settled`."""
    blocked: Blocked | None = None
    """Reason why its Pod cannot be created, or cannot get its share, for now. None if there is none."""
    unanswered: bool = False
    """True if the last creation of its Pod got no answer in time, until one succeeds."""
    gate_unanswered: bool = False
    """True if the last opening of its Pod's gate got no answer in time, until one succeeds."""
    opened: tuple[str, float] | None = None
    """(uid, time) of the last opening of a Pod's gate by this process."""
    deleted: tuple[str, float] | None = None
    """(uid, time) of the Pod whose deletion the API server has accepted. It bridges the time until the watch shows
    it."""
    unbound: tuple[str, float] | None = None
    """(uid of its Pod, time at which kube-scheduler was first seen to refuse the Pod)."""
    unstarted: tuple[str, float] | None = None
    """(uid of its Pod, time at which the Pod was first seen with a share and without a started container)."""
    ended: tuple[str, float] | None = None
    """(endTime of the SharePod, the same time on this process's monotonic clock)."""
    avoid: dict[str, tuple[str, float]] = field(default_factory=dict)
    """For each node that the tenant must avoid: (reason, time until which it must)."""
    failures: int = 0
    """Number of times that its Pod was withdrawn, or its row refused by the API server. It sets the next pause."""
    not_before: float = 0.0
    """Earliest time at which the SharePod is placed again."""
    release_generation: dict[str, tuple[str, int]] = field(default_factory=dict)
    """(uid of the GPUNode, generation since which it has the Releasing row), by node."""
    eviction: Eviction | None = None
    status_written: float | None = None
    """Time of the last write of the status."""
    major: tuple[object, ...] | None = None
    """Inputs of the status at that write on which the next steps depend (`decisions.status.major`)."""
    usage_written: float | None = None
    """Time of the last write of `status.usage`."""
    shown: tuple[object, ...] | None = None
    """Inputs of the status at the last write (`decisions.status.looked_at`). None: the status must be composed
    again."""
    _of_claim: ClaimMemo | None = None
    announced: dict[str, str] | None = None
    """Message of the last Event, by condition type or finding. None before this process has written the status."""

    @property
    def claim(self) -> ClaimMemo:
        """Part of the memo for a tenant that is a claim."""
        if self._of_claim is None:
            self._of_claim = ClaimMemo()
        return self._of_claim

    def is_blocked(self, now: float) -> bool:
        """Return True if its Pod must not be created, or its gate not opened, at `now` (monotonic seconds)."""
        return self.blocked is not None and now < self.blocked.until

    def next_pause_s(self, first_s: float) -> float:
        """Count one more failure. Return the pause in seconds: `first_s` after the first failure, then twice as long
        each time.
        """
        self.failures += 1
        return Backoff(first_s, LONGEST_PAUSE_S).pause_s(self.failures)


class TenantMemos:
    """Memos by tenant."""

    def __init__(self) -> None:
        self._memos: dict[str, TenantMemo] = {}

    def of(self, tenant: str) -> TenantMemo:
        """Return the memo of a tenant, a new one if there is none."""
        return self._memos.setdefault(tenant, TenantMemo())

    def forget(self, tenant: str) -> None:
        """Drop the memo of a tenant that has no object and no row any more."""
        self._memos.pop(tenant, None)

    def clear(self) -> None:
        """Drop all memos."""
        self._memos = {}
