"""A tenant that waits in the queue of the placement loop."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TypeAlias

from sharepod.placement.engine import QueueKey
from sharepod.placement.state.cluster import Cluster
from sharepod.placement.state.types import PlacementRequest, Refusal


@dataclass(frozen=True, slots=True)
class WorkedOut:
    """A request, and the objects that it was worked out from: while they are the same ones, it is what is asked for."""

    parts: tuple[object, ...]
    request: PlacementRequest
    asks: str
    """See `asks`."""
    key: QueueKey
    """Where it stands in the queue."""


def asks(request: PlacementRequest) -> str:
    """Return all that a decision about a request depends on, but for who asks: those who ask the same get the same
    answer of one state of the cluster, unless `who_asks_matters`."""
    who = (request.namespace, request.owner, request.priority, request.standing, request.claim is None)
    return sys.intern(repr((who, request.pod_uid is None, request.gpu, request.pod, request.avoid, request.beside)))


def who_asks_matters(cluster: Cluster, request: PlacementRequest) -> bool:
    """Return whether another who asks the same might get another answer: GPUs are kept for one, or holders make places,
    of which a tenant waits for one at a time."""
    return any(kept.tenant == request.tenant for kept in cluster.kept()) or bool(cluster.plugin_nodes())


@dataclass(slots=True)
class WaitingTenant:
    """A tenant in the queue. Times are monotonic seconds."""

    tenant: str
    since: float
    refused_at_version: int | None = None
    """The cluster's `room_version` at its last refusal; None: try it whatever has changed."""
    key: QueueKey | None = None
    """Where it stands in the queue, as its last request said; None: no request was worked out."""
    retry_at: float = float("inf")
    """When it is tried again even if nothing has changed."""
    arrival_counted: bool = False
    """Placement's demand has counted it."""
    room_looked_for: tuple[int, float] | None = None
    """The cluster's `room_version` and when preemption last found nobody to make room for it; None: it has not."""
    kept_in_vain: int = 0
    """Head-of-line reservations for it that ended before it was placed."""
    not_kept_before: float = float("-inf")
    """When it may have the next one at the earliest."""
    kept_nowhere_at: float = float("-inf")
    """When GPUs to keep for it were last looked for in vain."""
    explained_at: float = float("-inf")
    """When the reason of its refusal was last worked out."""
    worked_out: WorkedOut | None = None
    """Its last request."""
    refusal: Refusal | None = None
    """Last refusal as placement worded it, without what would help."""

    @property
    def is_like_others(self) -> bool:
        """Return whether it may be tried as one with others that ask the same: it was counted, and no time is set at
        which it is tried again."""
        known = self.worked_out is not None and self.key is not None
        return known and self.arrival_counted and self.retry_at == float("inf")


Asked: TypeAlias = tuple[int, int | None, str]
"""See `asked_of`."""


def asked_of(cluster: Cluster, waiting: WaitingTenant, request: PlacementRequest) -> Asked | None:
    """Return what is asked of which state of the cluster, and since which state it was known to be in vain. None where
    the answer depends on who asks."""
    if waiting.worked_out is None or who_asks_matters(cluster, request):
        return None
    return cluster.room_version, waiting.refused_at_version, waiting.worked_out.asks
