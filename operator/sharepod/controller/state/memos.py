"""What the operator remembers of a tenant and could forget: reasons to show, times, proofs. After a restart all of it
is found out again, or taken the safe way: a Pod that was taken back just before counts as one that was lost. What must
not be forgotten stands in the API server.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from sharepod.placement.state.types import Refusal


@dataclass(slots=True)
class Blocked:
    """Why its Pod cannot be made for now. `since`, and when to try again, in monotonic seconds."""

    reason: str
    message: str
    since: float
    until: float


@dataclass(slots=True)
class Eviction:
    """Of the Pod with this uid, because its share is not enforced. `since` when that is so, and `refused_since` when a
    disruption budget refuses, in monotonic seconds; `done`: why, once the API server has taken it.
    """

    pod: str
    since: float
    refused_since: float | None = None
    done: str | None = None


@dataclass(slots=True)
class TenantMemo:
    """Of one tenant. Times are monotonic seconds."""

    refusal: Refusal | None = None
    """Why it has no place."""
    resize_refusal: Refusal | None = None
    """Why its share stays as it is."""
    resize_asked: int | None = None
    """The SharePod's generation that asked for another share."""
    memory_settled: int | None = None
    """The SharePod's generation at which the memory it has by default was what it asked for."""
    blocked: Blocked | None = None
    returned: set[str] = field(default_factory=set)
    """Uids of its Pods that were taken back unbound."""
    unbound: tuple[str, float] | None = None
    """Uid of its Pod, and since when kube-scheduler is seen to refuse it."""
    avoid: dict[str, tuple[str, float]] = field(default_factory=dict)
    """Nodes that kube-scheduler refused: why, and until when to stay away."""
    give_back: bool = False
    """Its reservation is to be given back: its Pod was taken back, or could not be made for long."""
    given_back: int = 0
    not_before: float = 0.0
    """Not placed again before this."""
    release_generation: dict[str, int] = field(default_factory=dict)
    """By node: the GPUNode's generation at which its row was Releasing, or a later one."""
    eviction: Eviction | None = None
    status_written: float | None = None
    usage_written: float | None = None
    announced: dict[str, str] = field(default_factory=dict)
    """By reason: the message of the last Event."""


class TenantMemos:
    """Of all tenants."""

    def __init__(self) -> None:
        self._memos: dict[str, TenantMemo] = {}

    def of(self, tenant: str) -> TenantMemo:
        """The memo of a tenant, a new one if there is none."""
        return self._memos.setdefault(tenant, TenantMemo())

    def forget(self, tenant: str) -> None:
        self._memos.pop(tenant, None)

    def clear(self) -> None:
        """Forgets all but which Pods were taken back, which nothing else tells from those that ran and are gone."""
        self._memos = {
            tenant: TenantMemo(returned=memo.returned) for tenant, memo in self._memos.items() if memo.returned
        }
