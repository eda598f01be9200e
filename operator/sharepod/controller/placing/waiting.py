"""A tenant that waits in the queue of the placement loop."""

from __future__ import annotations

import heapq
import itertools
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeAlias

from sharepod.controller.state.reading.compact import once_in_all
from sharepod.placement.engine import QueueKey
from sharepod.placement.state.cluster import Cluster
from sharepod.placement.state.types import PlacementRequest, Refusal

NEVER = float("-inf")
"""Time of an event that has not happened."""


@dataclass(frozen=True, slots=True)
class WorkedOut:
    """A request, and the objects that it was computed from: while these are unchanged, the request is valid."""

    parts: tuple[object, ...]
    request: PlacementRequest
    asks: str
    """See `asks`."""
    key: QueueKey
    """Its place in the queue."""


def asks(request: PlacementRequest) -> str:
    """Return the content of a request: all that a decision depends on, except the tenant. Equal requests get the same
    answer from one cluster state, unless `who_asks_matters`."""
    who = (request.namespace, request.owner, request.priority, request.standing, request.claim is None)
    return once_in_all(repr((who, request.pod_uid is None, request.gpu, request.pod, request.avoid, request.siblings)))


def who_asks_matters(cluster: Cluster, request: PlacementRequest) -> bool:
    """Return whether another tenant with an equal request might get another answer: GPUs are reserved for one tenant,
    or holders, which are made for one tenant at a time, could make a place."""
    return any(kept.tenant == request.tenant for kept in cluster.kept()) or bool(cluster.plugin_nodes())


def _nobody(_changed: object) -> None:
    return None


@dataclass(slots=True)
class WaitingTenant:
    """A tenant in the queue. Times are monotonic seconds."""

    tenant: str
    since: float
    on_changed: Callable[[WaitingTenant], None] = _nobody
    """Called when it is to be tried whatever has changed, leaves its group, or changes its place in the queue."""
    group: RequestGroup | None = None
    """The group with which it was refused; None: it is tried separately."""
    refused_alone_at: int | None = None
    """Its `refused_at_version` while it is in no request group."""
    key: QueueKey | None = None
    """Its place in the queue, by its last request; None before the first request."""
    retry_at: float = float("inf")
    """When it is tried again even if nothing has changed."""
    arrival_counted: bool = False
    """Placement's demand has counted it."""
    room_looked_for: tuple[int, float] | None = None
    """The cluster's `room_version` and the time when preemption last found no victims for it; None: never."""
    not_kept_before: float = NEVER
    """When it may have the next one at the earliest."""
    kept_nowhere_at: float = NEVER
    """When GPUs to reserve for it were last searched for in vain."""
    explained_at: float = NEVER
    """When the reason of its refusal was last worked out."""
    explained_version: int | None = None
    """`refused_at_version` of the refusal that was explained last."""
    worked_out: WorkedOut | None = None
    """Its last request."""
    refusal: Refusal | None = None
    """Placement's last refusal, without remedies."""
    explained: Refusal | None = None
    """The same with the tenants that would have to move or end; None before the search for them."""

    @property
    def refused_at_version(self) -> int | None:
        """The cluster's `room_version` at its last refusal; None: try it whatever has changed. Setting it removes the
        request from its group."""
        return self.group.refused_at_version if self.group is not None else self.refused_alone_at

    @refused_at_version.setter
    def refused_at_version(self, version: int | None) -> None:
        if self.group is not None:
            self.group.remove(self)
        self.refused_alone_at = version
        if version is None:
            self.on_changed(self)

    @property
    def is_like_others(self) -> bool:
        """Return whether it may be tried in one group with equal requests. Its refusal was counted, and it has no time
        of its own for a retry."""
        known = self.worked_out is not None and self.key is not None
        return known and self.arrival_counted and self.retry_at == float("inf")


class ByExplanation:
    """Requests with a refusal to explain, by their last explanation.

    Adding a request, and finding the first, take constant time. `is_so`: returns whether a request is still to be
    explained; called for each that comes first.
    """

    def __init__(self, is_so: Callable[[WaitingTenant], bool]) -> None:
        self._is_so = is_so
        self._numbers = itertools.count()
        self._heap: list[tuple[float, int, WaitingTenant]] = []
        """Outdated entries are skipped when they come first."""
        self._queued: dict[str, float] = {}
        """Last explanations in this heap, by tenant."""

    def add(self, waiting: WaitingTenant) -> None:
        """Add one."""
        if self._queued.get(waiting.tenant) != waiting.explained_at:
            self._queued[waiting.tenant] = waiting.explained_at
            heapq.heappush(self._heap, (waiting.explained_at, next(self._numbers), waiting))

    @property
    def first(self) -> WaitingTenant | None:
        """The request with the oldest explanation; None if there is none."""
        while self._heap:
            at, _, first = self._heap[0]
            if first.explained_at == at and self._is_so(first):
                return first
            heapq.heappop(self._heap)
            if self._queued.get(first.tenant) == at:
                del self._queued[first.tenant]
        return None

    def due(self, latest: float) -> Iterator[WaitingTenant]:
        """Yield the requests last explained at that time or before. The caller explains or removes each."""
        yielded = None
        while (first := self.first) is not None and first is not yielded and first.explained_at <= latest:
            yield first
            yielded = first


class RequestGroup:
    """Equal requests of one namespace that were refused together: a pass records a result for all of them once.

    Args:
        asks: Their content, from `asks`.
        refused_at_version: The `refused_at_version` of each of them.
        on_changed: Called when requests were added or removed.
    """

    def __init__(
        self, asks: str, refused_at_version: int | None, on_changed: Callable[[RequestGroup], None] = _nobody
    ) -> None:
        self.asks = asks
        self.refused_at_version = refused_at_version
        self._on_changed = on_changed
        self._members: OrderedDict[str, WaitingTenant] = OrderedDict()
        """The oldest first."""
        self._unexplained = ByExplanation(self._is_unexplained)
        """Requests with a refusal to explain."""
        self._explained: list[WaitingTenant] = []
        """Requests explained since the last refusal, which are not among the unexplained."""

    def __len__(self) -> int:
        return len(self._members)

    def __iter__(self) -> Iterator[WaitingTenant]:
        return iter(self._members.values())

    @property
    def oldest(self) -> WaitingTenant | None:
        return next(iter(self._members.values()), None)

    @property
    def first_unexplained(self) -> WaitingTenant | None:
        """The request whose refusal is to be explained next; None if all were."""
        return self._unexplained.first

    def _is_unexplained(self, waiting: WaitingTenant) -> bool:
        if waiting.group is not self:
            return False
        if waiting.explained_version != self.refused_at_version:
            return True
        self._explained.append(waiting)
        return False

    def add(self, waiting: list[WaitingTenant]) -> None:
        """Take some in, which know their keys and have the request group's version."""
        by_age = sorted(waiting, key=_age)
        youngest, oldest = next(reversed(self._members.values()), None), self.oldest
        self._on_changed(self)
        for each in by_age:
            each.group = self
            self._members[each.tenant] = each
            self.not_explained(each)
        if oldest is None or youngest is None or _age(youngest) < _age(by_age[0]):
            return
        if _age(by_age[-1]) < _age(oldest):
            for each in reversed(by_age):
                self._members.move_to_end(each.tenant, last=False)
            return
        self._members = OrderedDict((each.tenant, each) for each in sorted(self._members.values(), key=_age))

    def refused(self, version: int) -> None:
        """Note that all of them were refused at this `room_version`."""
        self.refused_at_version = version
        explained, self._explained = self._explained, []
        for waiting in explained:
            self.not_explained(waiting)

    def remove(self, waiting: WaitingTenant) -> None:
        """Remove a request: it is then separate, with the same refusal."""
        waiting.group, waiting.refused_alone_at = None, self.refused_at_version
        del self._members[waiting.tenant]
        self._on_changed(self)
        waiting.on_changed(waiting)

    def take_apart(self) -> list[WaitingTenant]:
        """Let all of them go; return them."""
        members = list(self._members.values())
        for waiting in members:
            self.remove(waiting)
        return members

    def explained(self, waiting: WaitingTenant) -> None:
        """Note that the refusal of one of them was explained just now."""
        self._explained.append(waiting)

    def not_explained(self, waiting: WaitingTenant) -> None:
        """Note that the refusal of one of them may have to be explained."""
        self._unexplained.add(waiting)

    def due(self, latest: float) -> Iterator[WaitingTenant]:
        """Yield the requests to explain whose last explanation was before that time, while the caller marks each
        `explained`."""
        return self._unexplained.due(latest)


def _age(waiting: WaitingTenant) -> QueueKey:
    assert waiting.key is not None
    return waiting.key


Asked: TypeAlias = tuple[int, int | None, str]
"""See `asked_of`."""


def asked_of(cluster: Cluster, waiting: WaitingTenant, request: PlacementRequest) -> Asked | None:
    """Return the content of a request with the cluster states between which it is known to be refused. None if the
    answer depends on the tenant."""
    if waiting.worked_out is None or who_asks_matters(cluster, request):
        return None
    return cluster.room_version, waiting.refused_at_version, waiting.worked_out.asks
