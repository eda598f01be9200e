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
    """Request of a tenant, computed from the objects in `parts`. It is valid as long as the cluster state has these
    same objects.
    """

    parts: tuple[object, ...]
    request: PlacementRequest
    asks: str
    """Content of the request, as the function `asks` returns it."""
    key: QueueKey
    """Its place in the queue."""


def asks(request: PlacementRequest) -> str:
    """Return the content of a request: a text of everything that a decision depends on, except the tenant. Requests of
    equal content get the same answer from one cluster state, unless `who_asks_matters` returns True."""
    who = (request.namespace, request.owner, request.priority, request.standing, request.claim is None)
    return once_in_all(repr((who, request.pod_uid is None, request.gpu, request.pod, request.avoid, request.siblings)))


def who_asks_matters(cluster: Cluster, request: PlacementRequest) -> bool:
    """Return True if the answer to a request also depends on the tenant. It does if GPUs are reserved for this tenant.
    It also does if nodes could take a plugin holder, as a holder is created for one tenant at a time."""
    return any(kept.tenant == request.tenant for kept in cluster.kept()) or bool(cluster.plugin_nodes())


def _nobody(_changed: object) -> None:
    return None


@dataclass(slots=True)
class WaitingTenant:
    """Tenant in the queue. Times are monotonic seconds."""

    tenant: str
    since: float
    on_changed: Callable[[WaitingTenant], None] = _nobody
    """Called when the tenant must be tried although nothing else has changed, when it leaves its group, and when its
    place in the queue changes."""
    group: RequestGroup | None = None
    """Group of requests with equal content with which the tenant was refused. None: it is tried separately."""
    refused_alone_at: int | None = None
    """`refused_at_version` while the tenant is in no group."""
    key: QueueKey | None = None
    """Sort key of its last request in the queue. None before the first request."""
    retry_at: float = float("inf")
    """Time at which the tenant is tried again even if nothing has changed. Infinity: no such time."""
    arrival_counted: bool = False
    """True once this request was counted in the demand by which placement computes its weights."""
    room_looked_for: tuple[int, float] | None = None
    """(`room_version`, time) of the last search that found no victims to preempt for it. None before such a search."""
    not_kept_before: float = NEVER
    """Time before which it gets no head-of-queue reservation."""
    kept_nowhere_at: float = NEVER
    """Time of the last search that found no GPUs to reserve for it."""
    explained_at: float = NEVER
    """Time at which the reason of its refusal was last computed."""
    explained_version: int | None = None
    """`refused_at_version` of the refusal that was explained last."""
    worked_out: WorkedOut | None = None
    """Its last request, computed and cached."""
    refusal: Refusal | None = None
    """Last refusal by placement, without remedies."""
    explained: Refusal | None = None
    """`refusal` with the tenants whose move or end would help. None until the search for them is done."""

    @property
    def refused_at_version(self) -> int | None:
        """The cluster's `room_version` at the last refusal. None: the request must be tried even if nothing has
        changed. Setting it removes the tenant from its group."""
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
        """True if the tenant may be in a group with requests of equal content: its request was computed and counted,
        and it has no set time of a next try.
        """
        known = self.worked_out is not None and self.key is not None
        return known and self.arrival_counted and self.retry_at == float("inf")


class ByExplanation:
    """Queue of waiting tenants whose refusal must be explained, in the order of their last explanation.

    `is_so`: returns True if a tenant's refusal must still be explained. It is called for the first tenant of the queue,
    which is skipped if it returns False.
    """

    def __init__(self, is_so: Callable[[WaitingTenant], bool]) -> None:
        self._is_so = is_so
        self._numbers = itertools.count()
        self._heap: list[tuple[float, int, WaitingTenant]] = []
        """(last explanation, sequence number, tenant). Outdated entries are skipped when they come first."""
        self._queued: dict[str, float] = {}
        """For each tenant in the heap: time of the last explanation in its valid entry."""

    def add(self, waiting: WaitingTenant) -> None:
        """Add a waiting tenant."""
        if self._queued.get(waiting.tenant) != waiting.explained_at:
            self._queued[waiting.tenant] = waiting.explained_at
            heapq.heappush(self._heap, (waiting.explained_at, next(self._numbers), waiting))

    @property
    def first(self) -> WaitingTenant | None:
        """Tenant whose refusal was explained longest ago, or never; None if the queue is empty."""
        while self._heap:
            at, _, first = self._heap[0]
            if first.explained_at == at and self._is_so(first):
                return first
            heapq.heappop(self._heap)
            if self._queued.get(first.tenant) == at:
                del self._queued[first.tenant]
        return None

    def due(self, latest: float) -> Iterator[WaitingTenant]:
        """Yield the tenants whose last explanation was at `latest` or before. The caller must explain or remove
        each.
        """
        yielded = None
        while (first := self.first) is not None and first is not yielded and first.explained_at <= latest:
            yield first
            yielded = first


class RequestGroup:
    """Requests of one namespace with equal content that were refused together. A pass tries one of them, and its
    refusal counts for all.

    Args:
        asks: Content of the requests, as the function `asks` returns it.
        refused_at_version: The `refused_at_version` of all members.
        on_changed: Called with the group when members are added or removed.
    """

    def __init__(
        self, asks: str, refused_at_version: int | None, on_changed: Callable[[RequestGroup], None] = _nobody
    ) -> None:
        self.asks = asks
        self.refused_at_version = refused_at_version
        self._on_changed = on_changed
        self._members: OrderedDict[str, WaitingTenant] = OrderedDict()
        """Members by tenant. The oldest member comes first."""
        self._unexplained = ByExplanation(self._is_unexplained)
        """Members whose refusal may have to be explained."""
        self._explained: list[WaitingTenant] = []
        """Members that have left `_unexplained` since the last refusal, because they were explained."""

    def __len__(self) -> int:
        return len(self._members)

    def __iter__(self) -> Iterator[WaitingTenant]:
        return iter(self._members.values())

    @property
    def oldest(self) -> WaitingTenant | None:
        return next(iter(self._members.values()), None)

    @property
    def first_unexplained(self) -> WaitingTenant | None:
        """Member whose refusal must be explained next. None if all were explained."""
        return self._unexplained.first

    def _is_unexplained(self, waiting: WaitingTenant) -> bool:
        if waiting.group is not self:
            return False
        if waiting.explained_version != self.refused_at_version:
            return True
        self._explained.append(waiting)
        return False

    def add(self, waiting: list[WaitingTenant]) -> None:
        """Add waiting tenants. Each must have a key and must have been refused at the group's version."""
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
        """Record that all members were refused at this `room_version`."""
        self.refused_at_version = version
        explained, self._explained = self._explained, []
        for waiting in explained:
            self.not_explained(waiting)

    def remove(self, waiting: WaitingTenant) -> None:
        """Remove a member. It keeps its refusal and is tried separately from now on."""
        waiting.group, waiting.refused_alone_at = None, self.refused_at_version
        del self._members[waiting.tenant]
        self._on_changed(self)
        waiting.on_changed(waiting)

    def take_apart(self) -> list[WaitingTenant]:
        """Remove all members, and return them. Each is tried separately from now on."""
        members = list(self._members.values())
        for waiting in members:
            self.remove(waiting)
        return members

    def explained(self, waiting: WaitingTenant) -> None:
        """Record that the refusal of a member was explained now."""
        self._explained.append(waiting)

    def not_explained(self, waiting: WaitingTenant) -> None:
        """Record that the refusal of a member may have to be explained."""
        self._unexplained.add(waiting)

    def due(self, latest: float) -> Iterator[WaitingTenant]:
        """Yield the members whose last explanation was at `latest` or before. The caller must report each to
        `explained`.
        """
        return self._unexplained.due(latest)


def _age(waiting: WaitingTenant) -> QueueKey:
    assert waiting.key is not None
    return waiting.key


Asked: TypeAlias = tuple[int, int | None, str]
"""(present `room_version`, `room_version` of the last refusal or None, content of the request); see `asked_of`."""


def asked_of(cluster: Cluster, waiting: WaitingTenant, request: PlacementRequest) -> Asked | None:
    """Return the key under which this pass can look up the refusal of a request with equal content. None if the answer
    depends on the tenant.
    """
    if waiting.worked_out is None or who_asks_matters(cluster, request):
        return None
    return cluster.room_version, waiting.refused_at_version, waiting.worked_out.asks
