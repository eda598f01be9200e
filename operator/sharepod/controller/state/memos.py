"""Volatile memory of each tenant between two steps: back-offs, reasons for its status, announced Events.

Guarantees:
- Losing a memo is harmless: after a restart its content is derived again, or the safe case is assumed.
- Facts that must survive a restart are in the API server, not here.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from sharepod.api.sharepod import GpuRequest, KeptPlace
from sharepod.backoff import Backoff
from sharepod.placement.state.types import Refusal

LONGEST_PAUSE_S = 600.0
"""Longest pause before a tenant is placed again, after any failure. Ten minutes: an admin who has fixed the cause waits
no longer than this."""


class BlockedReason(StrEnum):
    """Reason that a Pod cannot be created, or given its share, for now, as users see it in the condition PodReady."""

    FORBIDDEN = "PodForbidden"
    """By a quota, an admission policy, or because the namespace is being deleted."""
    NAME_TAKEN = "PodNameTaken"
    """By a pod that does not belong to the SharePod."""
    TERMINATING = "PodTerminating"
    """The former pod of that name is being deleted."""


@dataclass(slots=True)
class Blocked:
    """Creation of a Pod, or opening of its gate, that failed and is tried again. Times are monotonic seconds."""

    reason: BlockedReason
    message: str
    until: float
    """When to try again."""
    tries: int = 1
    """Number of refusals in a row."""
    pod: str | None = None
    """Uid of the Pod that was refused its share; None: no Pod could be created."""


@dataclass(slots=True)
class Eviction:
    """Eviction of one Pod with an unenforced share. Times are monotonic seconds."""

    pod: str
    """Uid of the Pod."""
    since: float
    """When the share was first seen not to be enforced."""
    refused_since: float | None = None
    """When a disruption budget first refused the eviction."""
    done: str | None = None
    """Cause of its eviction as text, once the API server has accepted the eviction."""
    preempted: bool = False
    """It was preempted by a tenant of higher priority."""
    move_to: KeptPlace | None = None
    """Where it restarts, if that frees a place for a waiting request."""


@dataclass(slots=True)
class ClaimMemo:
    """Memory of one claim. Times are monotonic seconds."""

    allocated: bool = False
    """This process has written the allocation of its row, or seen it."""
    give_up: bool = False
    """Another claim of its Pod has lost its place, so this claim gives up its own."""
    taken_back: bool = False
    """This process has taken its allocation back."""
    withdrawn: float | None = None
    """When its reservation for a waiting Pod was withdrawn, to allow deallocation."""
    waits: tuple[str, float, str] | None = None
    """Uid of the Pod that waits with the claim allocated, since when, and kube-scheduler's message at that time."""
    refused_since: float | None = None
    """When kube-scheduler's message for that Pod was first seen to change."""
    not_entered: str | None = None
    """Why kube-scheduler's allocation has no row in the ledger; None if it has a row, or needs none."""
    waited: bool = False
    """It was reported as without a place, so that a new place is news."""


@dataclass(slots=True)
class TenantMemo:
    """Memory of one tenant. Times are monotonic seconds."""

    tenant_deleted: bool = False
    """Its SharePod, Pod or claim is deleted, by a watch, a live read or a write: an id is never reused."""
    refusal: Refusal | None = None
    """Last refusal of a place; None if the tenant was placed or not tried."""
    resize_refusal: Refusal | None = None
    """Refusal of the last change of its share; None if none was refused."""
    resize_asked: int | None = None
    """Generation of the SharePod that requested another share."""
    resize_counted: GpuRequest | None = None
    """Share that the quota already counts, or that no quota applies to; the SharePod gets no other share."""
    memory_settled: int | None = None
    """See `ResizeWish.memory_settled`."""
    blocked: Blocked | None = None
    """Reason that its Pod cannot be created, or given its share, for now; None if it can."""
    unanswered: bool = False
    """The creation of its Pod was not answered in time, and has not succeeded since."""
    gate_unanswered: bool = False
    """The opening of its Pod's gate was not answered in time, and has not succeeded since."""
    opened: tuple[str, float] | None = None
    """Uid of the Pod whose gate this process has opened, and when."""
    deleted: tuple[str, float] | None = None
    """Uid of the Pod whose deletion the API server has accepted, and when; the watch may not have shown it yet."""
    unbound: tuple[str, float] | None = None
    """Uid of its Pod, and since when kube-scheduler is seen to refuse it."""
    unstarted: tuple[str, float] | None = None
    """Uid of its Pod, and since when it is seen with a share and without a container that was started."""
    ended: tuple[str, float] | None = None
    """The SharePod's endTime, and when that was on this process's clock."""
    avoid: dict[str, tuple[str, float]] = field(default_factory=dict)
    """Nodes that kube-scheduler refused: why, and until when to stay away."""
    failures: int = 0
    """How often its Pod was withdrawn or its reservation refused by the API server."""
    not_before: float = 0.0
    """Earliest time at which the SharePod is placed again."""
    release_generation: dict[str, tuple[str, int]] = field(default_factory=dict)
    """By node with a Releasing row: uid and generation of the GPUNode with that row, or of a later generation."""
    eviction: Eviction | None = None
    status_written: float | None = None
    """Time of the last write of the status."""
    major: tuple[object, ...] | None = None
    """Origin of the deciding fields of the status at that write (`decisions.status.major`)."""
    usage_written: float | None = None
    """When `status.usage` was last written."""
    shown: tuple[object, ...] | None = None
    """Inputs of the status as last written (`decisions.status.looked_at`); None: compose the status."""
    _of_claim: ClaimMemo | None = None
    announced: dict[str, str] | None = None
    """Messages of the last Events by condition type or finding; None before this process's first write."""

    @property
    def claim(self) -> ClaimMemo:
        """Memory of a tenant that is a claim."""
        if self._of_claim is None:
            self._of_claim = ClaimMemo()
        return self._of_claim

    def is_blocked(self, now: float) -> bool:
        """Return whether its Pod must not be created or get its share at `now`, in monotonic seconds."""
        return self.blocked is not None and now < self.blocked.until

    def next_pause_s(self, first_s: float) -> float:
        """Count one more failure and return how long to stay away: `first_s`, then twice as long each time."""
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
        """Drop all of them."""
        self._memos = {}
