"""Memos: the operator's volatile notes about each tenant between two reconciliations: back-offs, reasons to report,
written Events.

Guarantees:
- The loss of a memo is harmless: after a restart its content is derived again, or the safe case is assumed.
- Facts that must survive a restart are in the API server, not here.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from sharepod.api.sharepod import GpuRequest, KeptPlace
from sharepod.backoff import Backoff
from sharepod.placement.state.types import Refusal

LONGEST_PAUSE_S = 600.0
"""Longest pause in seconds before a tenant is placed again after a failure. Ten minutes: the longest delay after an
admin has fixed the cause."""


class BlockedReason(StrEnum):
    """Reason for which a Pod cannot be created, or cannot get its share, for now. Users see it in the condition
    PodReady.
    """

    FORBIDDEN = "PodForbidden"
    """A quota or an admission policy forbids it, or the namespace is being deleted."""
    NAME_TAKEN = "PodNameTaken"
    """A Pod that does not belong to the SharePod has the name."""
    TERMINATING = "PodTerminating"
    """The former pod of that name is being deleted."""


@dataclass(slots=True)
class Blocked:
    """Failed creation of a Pod, or failed opening of its gate, which is tried again. Times are monotonic seconds."""

    reason: BlockedReason
    message: str
    until: float
    """Time of the next try."""
    tries: int = 1
    """Number of consecutive refusals."""
    pod: str | None = None
    """Uid of the Pod whose gate could not be opened. None if the Pod could not be created."""


@dataclass(slots=True)
class Eviction:
    """Eviction of one Pod: for an unenforced share, or by preemption or a move. Times are monotonic seconds."""

    pod: str
    """Uid of the Pod."""
    since: float
    """Time at which the cause was first seen."""
    refused_since: float | None = None
    """Time at which a PodDisruptionBudget first refused the eviction."""
    done: str | None = None
    """Cause of the eviction as text, once the API server has accepted the eviction."""
    preempted: bool = False
    """True if the Pod was preempted by a tenant of higher priority."""
    move_to: KeptPlace | None = None
    """Place where the tenant restarts, if it moves to free a place for a waiting request."""


@dataclass(slots=True)
class ClaimMemo:
    """Memo of a tenant that is a claim. Times are monotonic seconds."""

    allocated: bool = False
    """True if this process has written or seen the allocation of the claim's row."""
    give_up: bool = False
    """True if another claim of its Pod has lost its place, so that this claim must give up its place."""
    taken_back: bool = False
    """True if this process has removed its allocation."""
    withdrawn: float | None = None
    """Time at which its reservation for a waiting Pod was removed, so that it can be deallocated."""
    waits: tuple[str, float, str] | None = None
    """(uid of the Pod that waits while the claim is allocated, time since which it waits, kube-scheduler's message at
    that time)."""
    refused_since: float | None = None
    """Time at which kube-scheduler's message for that Pod was first seen to change."""
    not_entered: str | None = None
    """Reason for which kube-scheduler's allocation has no row in the ledger. None if it has a row, or needs none."""
    waited: bool = False
    """True if its owner was notified that it has no place, so that a new place must be reported too."""


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
    """Generation of the SharePod that last requested another share."""
    resize_counted: GpuRequest | None = None
    """Requested share that the quota check has allowed. Only this share is applied."""
    memory_settled: int | None = None
    """See `ResizeWish.memory_settled`."""
    blocked: Blocked | None = None
    """Reason for which its Pod cannot be created, or cannot get its share, for now. None if there is none."""
    unanswered: bool = False
    """True if the creation of its Pod got no answer in time and has not succeeded since."""
    gate_unanswered: bool = False
    """True if the opening of its Pod's gate got no answer in time and has not succeeded since."""
    opened: tuple[str, float] | None = None
    """(uid of the Pod whose gate this process has opened, time of that)."""
    deleted: tuple[str, float] | None = None
    """(uid of the Pod whose deletion the API server has accepted, time of that). The watch may not have shown it
    yet."""
    unbound: tuple[str, float] | None = None
    """(uid of its Pod, time since which kube-scheduler is seen to refuse the Pod)."""
    unstarted: tuple[str, float] | None = None
    """(uid of its Pod, time since which the Pod is seen with a share and without a started container)."""
    ended: tuple[str, float] | None = None
    """(the SharePod's endTime, the same time on this process's monotonic clock)."""
    avoid: dict[str, tuple[str, float]] = field(default_factory=dict)
    """For each node that the tenant must avoid: (reason, time until which to avoid it)."""
    failures: int = 0
    """Number of times that its Pod was withdrawn or the API server refused its row."""
    not_before: float = 0.0
    """Earliest time at which the SharePod is placed again."""
    release_generation: dict[str, tuple[str, int]] = field(default_factory=dict)
    """For each node with a Releasing row: uid and generation of the GPUNode with that row, or of a later generation."""
    eviction: Eviction | None = None
    status_written: float | None = None
    """Time of the last write of the status."""
    major: tuple[object, ...] | None = None
    """Inputs of the deciding fields of the status at that write (`decisions.status.major`)."""
    usage_written: float | None = None
    """Time of the last write of `status.usage`."""
    shown: tuple[object, ...] | None = None
    """Inputs of the status at the last write (`decisions.status.looked_at`). None: the status must be composed."""
    _of_claim: ClaimMemo | None = None
    announced: dict[str, str] | None = None
    """For each condition type or finding: message of the last Event. None before this process's first write of the
    status."""

    @property
    def claim(self) -> ClaimMemo:
        """Memory of a tenant that is a claim."""
        if self._of_claim is None:
            self._of_claim = ClaimMemo()
        return self._of_claim

    def is_blocked(self, now: float) -> bool:
        """Return True if its Pod must not be created, or must not get its share, at `now` (monotonic seconds)."""
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
        """Drop the memo of a tenant of which nothing is left."""
        self._memos.pop(tenant, None)

    def clear(self) -> None:
        """Drop all memos."""
        self._memos = {}
