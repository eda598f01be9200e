"""Index of the queue: the pending requests by rank (priority and standing) and namespace, in queue order. A request
group (requests of equal content that were refused together) is one entry.

Guarantees:
- Before the first decision of a pass, only the requests that changed since the last pass cause work. The other waiting
  requests stay indexed.
- `NamespaceQueue.first` skips requests that were already refused at the present version of capacity (`room_version`).
- Equal requests that were refused at the same version form one request group.
"""

from __future__ import annotations

import asyncio
import bisect
import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeAlias

from sharepod.placement.engine import QueueKey

from . import slices
from .waiting import RequestGroup, WaitingTenant

_AT_ONCE = 64
"""Number of changed requests that are indexed between two checks of the time: about 200 us of work."""

Rank: TypeAlias = tuple[int, int]
"""(priority, standing): the first two parts of a queue key."""
Entry: TypeAlias = tuple[QueueKey, int, WaitingTenant, RequestGroup | None]
"""(queue key, sequence number, waiting tenant, group or None). If there is a group, the tenant is its oldest member."""


class NamespaceQueue:
    """Requests and request groups of one namespace and rank, in queue order.

    Entries before index `_next` have had their turn at version `_version` of the capacity.
    """

    def __init__(self) -> None:
        self._entries: list[Entry] = []
        self._next = 0
        self._version: int | None = None

    def begin(self, version: int) -> None:
        """Begin a pass at a version of capacity. If it is not the version of the last pass, every entry gets a turn
        again."""
        if version != self._version:
            self._version, self._next = version, 0

    def add(self, entry: Entry, *, refused: bool) -> bool:
        """Insert an entry. Return True if entries behind it have already had their turn, so the caller must try it
        separately. `refused`: True if the entry was refused at the version of this pass.
        """
        at = bisect.bisect_left(self._entries, entry[:2], key=_place)
        self._entries.insert(at, entry)
        if at < self._next or (refused and at == self._next):
            self._next += 1
            return not refused
        return False

    def remove(self, entry: Entry) -> None:
        """Remove an entry."""
        at = bisect.bisect_left(self._entries, entry[:2], key=_place)
        del self._entries[at]
        if at < self._next:
            self._next -= 1

    @property
    def first(self) -> Entry | None:
        """Entry with the next turn; None if all entries had their turn."""
        return self._entries[self._next] if self._next < len(self._entries) else None

    def take(self) -> None:
        """Record that the first entry had its turn."""
        self._next += 1

    def __iter__(self) -> Iterator[Entry]:
        return iter(self._entries)

    def __len__(self) -> int:
        """Return the number of entries whose turn is still to come."""
        return len(self._entries) - self._next

    @property
    def is_empty(self) -> bool:
        """True if no entry is indexed."""
        return not self._entries


@dataclass(slots=True)
class _Indexed:
    """Place of an entry in the index. `asks`: content of the request when it was indexed; None for a request group."""

    where: tuple[Rank, str]
    entry: Entry
    asks: str | None


class QueueIndex:
    """Index of pending requests.

    Args:
        has: Returns True if a tenant still waits.
        know_key: Computes the queue key of a waiting tenant. Returns None if the tenant no longer requests anything; it
            has then left the queue.
        arrived: Event that is set while new requests have arrived.
    """

    def __init__(
        self,
        has: Callable[[WaitingTenant], bool],
        know_key: Callable[[WaitingTenant], QueueKey | None],
        arrived: asyncio.Event,
    ) -> None:
        self._has = has
        self._arrived = arrived
        self._know_key = know_key
        self.lines: dict[tuple[Rank, str], NamespaceQueue] = {}
        self.untried: set[str] = set()
        """Tenants whose request was never refused, or must be tried even if nothing has changed."""
        self._changed: dict[str, WaitingTenant] = {}
        """Tenants that must be indexed, or indexed again, before the next pass."""
        self._changed_groups: dict[RequestGroup, None] = {}
        self._indexed: dict[str, _Indexed] = {}
        self._indexed_groups: dict[RequestGroup, _Indexed] = {}
        self._asking: dict[str, dict[str, WaitingTenant]] = {}
        """For each content of a request: the waiting tenants with that content outside groups, by id."""
        self._groups: dict[str, list[RequestGroup]] = {}
        """Request groups by content of their requests, including empty groups."""
        self._timed: dict[str, WaitingTenant] = {}
        """Waiting tenants that must be tried again at a set time, by id."""
        self._numbers = itertools.count()

    @property
    def groups(self) -> Iterator[RequestGroup]:
        """All request groups, including empty groups."""
        return itertools.chain.from_iterable(self._groups.values())

    def changed(self, waiting: WaitingTenant) -> None:
        """Mark a tenant, if it still waits, to be indexed again before the next pass."""
        if self._has(waiting):
            self._changed[waiting.tenant] = waiting

    def group_changed(self, group: RequestGroup) -> None:
        """Mark a request group to be indexed again before the next pass."""
        self._changed_groups[group] = None

    def leave(self, waiting: WaitingTenant) -> None:
        """Remove a tenant from the index."""
        if waiting.group is not None:
            waiting.group.remove(waiting)
        self._unfile(waiting.tenant)
        self.untried.discard(waiting.tenant)
        self._changed.pop(waiting.tenant, None)
        self._timed.pop(waiting.tenant, None)

    def clear(self) -> None:
        """Remove all tenants and groups."""
        self.dissolve_groups()
        for part in (
            self.lines,
            self.untried,
            self._changed,
            self._changed_groups,
            self._indexed,
            self._indexed_groups,
            self._asking,
            self._groups,
            self._timed,
        ):
            part.clear()

    def dissolve_groups(self) -> None:
        """Dissolve all groups, so that each of their requests is indexed separately."""
        for group in self.groups:
            group.take_apart()

    def tried(self, waiting: WaitingTenant, version: int) -> None:
        """Record that a request had its turn at this version of capacity. A refused request keeps its entry.
        Exceptions: its content or key has changed, or other requests have the same content. Then it is indexed again.
        """
        if waiting.retry_at < float("inf"):
            self._timed[waiting.tenant] = waiting
        else:
            self._timed.pop(waiting.tenant, None)
        asks, indexed = _asks(waiting), self._indexed.get(waiting.tenant)
        stays = indexed is not None and (indexed.asks, indexed.entry[0]) == (asks, waiting.key)
        if not stays or waiting.refused_at_version != version or len(self._asking[asks]) > 1 or self._groups.get(asks):
            self.changed(waiting)

    def came_back(self, waiting: WaitingTenant, group: RequestGroup) -> None:
        """Record that a request was refused and has rejoined the group that it had left for its turn. If the group is
        otherwise unchanged, its entry stays.
        """
        indexed = self._indexed_groups.get(group)
        alone = len(self._groups.get(group.asks, ())) == 1 and group.asks not in self._asking
        if indexed is not None and indexed.entry[2] is waiting and group.oldest is waiting and alone:
            self._changed_groups.pop(group, None)
            self._changed.pop(waiting.tenant, None)

    def retry_at(self) -> float:
        """Return the earliest time at which a waiting tenant must be tried again. Infinity if none has such a time."""
        return min((waiting.retry_at for waiting in self._timed.values()), default=float("inf"))

    async def refresh(self, version: int, now: float, may_join: Callable[[WaitingTenant], bool]) -> list[Entry]:
        """Index the changed requests for a pass at this version of capacity. Yields to other tasks.

        Return the entries that still need a turn although entries behind them in their namespace have had theirs. The
        caller must add them to the pass.

        Args:
            version: The cluster's `room_version`.
            now: Monotonic seconds.
            may_join: Returns True if a request may be in a group with requests of equal content.
        """
        for line in self.lines.values():
            line.begin(version)
        for waiting in self._timed.values():
            if now >= waiting.retry_at:
                self.changed(waiting)
        late: list[Entry] = []
        began, number = time.monotonic(), 0
        while self._changed or self._changed_groups:
            number += 1
            if not number % _AT_ONCE:
                began = await slices.turns_of_others(began, self._arrived)
            if self._changed:
                self._file_anew(self._changed.pop(next(iter(self._changed))), version, now, may_join, late)
            elif self._changed_groups:
                self._insert_group(next(iter(self._changed_groups)), version, may_join, late)
        return late

    def _file_anew(
        self,
        waiting: WaitingTenant,
        version: int,
        now: float,
        may_join: Callable[[WaitingTenant], bool],
        late: list[Entry],
    ) -> None:
        self._unfile(waiting.tenant)
        if not self._has(waiting) or waiting.group is not None or (key := self._know_key(waiting)) is None:
            return
        if not self._joins(waiting, may_join):
            self._insert(waiting, key, version, now, late)

    def _joins(self, waiting: WaitingTenant, may_join: Callable[[WaitingTenant], bool]) -> bool:
        """Add a request to the group of requests with equal content that were refused at the same version. If there is
        no group but another such request, create the group. Return True if the request is now in a group.
        """
        version, known = waiting.refused_at_version, waiting.worked_out
        if version is None or known is None or not may_join(waiting):
            return False
        for group in self._groups.get(known.asks, ()):
            if len(group) and group.refused_at_version == version:
                group.add([waiting])
                return True
        same = self._same(known.asks, version, may_join)
        if not same:
            return False
        group = RequestGroup(known.asks, version, self.group_changed)
        self._groups.setdefault(known.asks, []).append(group)
        group.add([waiting, *same])
        return True

    def _same(self, asks: str, version: int, may_join: Callable[[WaitingTenant], bool]) -> list[WaitingTenant]:
        """Remove requests outside groups from the index, and return them. These requests have the content `asks`, were
        refused at `version`, and may join a group.
        """
        same = [
            each
            for each in self._asking.get(asks, {}).values()
            if each.refused_at_version == version and _asks(each) == asks and may_join(each)
        ]
        for each in same:
            self._unfile(each.tenant)
            self._changed.pop(each.tenant, None)
        return same

    def _insert(self, waiting: WaitingTenant, key: QueueKey, version: int, now: float, late: list[Entry]) -> None:
        entry: Entry = (key, next(self._numbers), waiting, None)
        asks = _asks(waiting)
        self._indexed[waiting.tenant] = _Indexed(_where(key), entry, asks)
        self._asking.setdefault(asks, {})[waiting.tenant] = waiting
        if waiting.refused_at_version is None:
            self.untried.add(waiting.tenant)
        refused = waiting.refused_at_version == version and now < waiting.retry_at
        if self._queue_of(key, version).add(entry, refused=refused):
            late.append(entry)

    def _insert_group(
        self, group: RequestGroup, version: int, may_join: Callable[[WaitingTenant], bool], late: list[Entry]
    ) -> None:
        """Index a group under its oldest request. Before that, add all other requests of equal content that were
        refused at the group's version.
        """
        self._changed_groups.pop(group, None)
        self._remove_group(group)
        alike = self._groups.get(group.asks, [])
        if len(group) and group.refused_at_version is not None:
            for other in alike:
                if other is not group and len(other) and other.refused_at_version == group.refused_at_version:
                    group.add(other.take_apart())
            if same := self._same(group.asks, group.refused_at_version, may_join):
                group.add(same)
            self._changed_groups.pop(group, None)
        oldest = group.oldest
        if oldest is None or oldest.key is None:
            if group in alike:
                alike.remove(group)
            if not alike:
                self._groups.pop(group.asks, None)
            return
        entry: Entry = (oldest.key, next(self._numbers), oldest, group)
        self._indexed_groups[group] = _Indexed(_where(oldest.key), entry, None)
        if group.refused_at_version is None:
            self.untried.add(oldest.tenant)
        if self._queue_of(oldest.key, version).add(entry, refused=group.refused_at_version == version):
            late.append(entry)

    def _queue_of(self, key: QueueKey, version: int) -> NamespaceQueue:
        line = self.lines.get(_where(key))
        if line is None:
            line = self.lines[_where(key)] = NamespaceQueue()
            line.begin(version)
        return line

    def _unfile(self, tenant: str) -> None:
        if (indexed := self._indexed.pop(tenant, None)) is None:
            return
        assert indexed.asks is not None
        asking = self._asking[indexed.asks]
        del asking[tenant]
        if not asking:
            del self._asking[indexed.asks]
        self._remove(indexed)

    def _remove_group(self, group: RequestGroup) -> None:
        if (indexed := self._indexed_groups.pop(group, None)) is not None:
            self._remove(indexed)

    def _remove(self, indexed: _Indexed) -> None:
        line = self.lines[indexed.where]
        line.remove(indexed.entry)
        if line.is_empty:
            del self.lines[indexed.where]


def _place(entry: Entry) -> tuple[QueueKey, int]:
    return entry[0], entry[1]


def _where(key: QueueKey) -> tuple[Rank, str]:
    return (key[0], key[1]), key[3]


def _asks(waiting: WaitingTenant) -> str:
    return waiting.worked_out.asks if waiting.worked_out is not None else ""
