"""Volatile memory of each tenant between two looks at it: backoffs, reasons to show, what was announced.

Guarantees:
- Forgetting a memo harms nothing: after a restart all of it is found out again or taken the safe way.
- What must not be forgotten is not here but in the API server.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from sharepod.api.sharepod import GpuRequest, KeptPlace
from sharepod.backoff import Backoff
from sharepod.placement.state.types import Refusal

LONGEST_PAUSE_S = 600.0
"""Longest time that a tenant is kept from being placed again, whatever failed: ten minutes: a person who
has fixed the cause does not wait longer than this."""


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
    """Eviction of one Pod whose share is not enforced. Times are monotonic seconds."""

    pod: str
    """Uid of the Pod."""
    since: float
    """When the share was first seen not to be enforced."""
    refused_since: float | None = None
    """When a disruption budget first refused the eviction."""
    done: str | None = None
    """Cause of its eviction in words, once the API server has accepted the eviction."""
    preempted: bool = False
    """It made room for a tenant of higher priority."""
    move_to: KeptPlace | None = None
    """Where it is restarted, if that makes room for one that waits."""


@dataclass(slots=True)
class ClaimMemo:
    """Memory of one claim. Times are monotonic seconds."""

    allocated: bool = False
    """This process has written the allocation of its row, or seen it."""
    give_up: bool = False
    """Another claim of its Pod has lost its place: its own goes too."""
    taken_back: bool = False
    """This process has taken its allocation back."""
    withdrawn: float | None = None
    """When its reservation for a Pod that waits was taken back, so that the allocation can be."""
    waits: tuple[str, float, str] | None = None
    """Uid of the Pod that waits with the claim allocated, since when, and what kube-scheduler had said by then."""
    refused_since: float | None = None
    """When kube-scheduler was first seen to say something else of that Pod."""
    not_entered: str | None = None
    """Why the ledger has no row of what kube-scheduler has given it; None if it has, or is not asked."""
    waited: bool = False
    """It was told that there is no place for it: the place that it gets is news."""


@dataclass(slots=True)
class TenantMemo:
    """Memory of one tenant. Times are monotonic seconds."""

    gone: bool = False
    """Its SharePod is gone, as a watch, a live read or a write has shown: an id never comes back."""
    refusal: Refusal | None = None
    """Last refusal of a place; None if the tenant was placed or not tried."""
    resize_refusal: Refusal | None = None
    """Refusal of the last change of its share; None if none was refused."""
    resize_asked: int | None = None
    """The SharePod's generation that asked for another share."""
    resize_counted: GpuRequest | None = None
    """Share that its Pod carries, or that no quota counts: no other is given to a SharePod."""
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
    """Uid of the Pod whose deletion the API server has accepted, and when; its watch may not have shown it yet."""
    unbound: tuple[str, float] | None = None
    """Uid of its Pod, and since when kube-scheduler is seen to refuse it."""
    unstarted: tuple[str, float] | None = None
    """Uid of its Pod, and since when it is seen with a share and without a container that was started."""
    ended: tuple[str, float] | None = None
    """The SharePod's endTime, and when that was on this process's clock."""
    avoid: dict[str, tuple[str, float]] = field(default_factory=dict)
    """Nodes that kube-scheduler refused: why, and until when to stay away."""
    failures: int = 0
    """Number of times that its Pod was taken back, or its reservation refused by the API server."""
    not_before: float = 0.0
    """Earliest time at which the SharePod is placed again."""
    release_generation: dict[str, tuple[str, int]] = field(default_factory=dict)
    """By node whose row is Releasing: uid and generation of the GPUNode at which it was, or a later generation."""
    eviction: Eviction | None = None
    status_written: float | None = None
    """Time of the last write of the status."""
    major: tuple[object, ...] | None = None
    """Origin of the deciding fields of the status at that write (`decisions.status.major`)."""
    usage_written: float | None = None
    """When `status.usage` was last written."""
    shown: tuple[object, ...] | None = None
    """What the status as it is written was made of (`decisions.status.looked_at`); None: compose it."""
    _of_claim: ClaimMemo | None = None
    announced: dict[str, str] | None = None
    """By condition type or finding: the words of the last Event; None before the first write of this process."""

    @property
    def claim(self) -> ClaimMemo:
        """Memory of a tenant that is a claim."""
        if self._of_claim is None:
            self._of_claim = ClaimMemo()
        return self._of_claim

    def is_blocked(self, now: float) -> bool:
        """Return whether its Pod cannot be created, or given its share, at a time. `now`: monotonic seconds."""
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
