"""Filing of those that wait: by rank and namespace, each namespace's in the order of the queue, lots as one.

Guarantees:
- What a pass costs before its first decision grows with those that have changed since the pass before, not with those
  that wait: they stay filed.
- Of a namespace the first is taken that was not refused at the present version of the room.
- Those that ask the same and were refused at the same version are one lot.
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
from .waiting import Lot, WaitingTenant

_AT_ONCE = 64
"""Those that have changed that are filed between two looks at the time: some 200 us of work."""

Rank: TypeAlias = tuple[int, int]
"""Priority and standing, as a queue key begins."""
Entry: TypeAlias = tuple[QueueKey, int, WaitingTenant, Lot | None]
"""Key, number of the entry, and one that waits, with the lot of which it is the oldest."""


class NamespaceLine:
    """Those of one namespace and rank that are tried alone, and lots, in the order of the queue.

    Those before `_next` have had their turn at `_version` of the room.
    """

    def __init__(self) -> None:
        self._entries: list[Entry] = []
        self._next = 0
        self._version: int | None = None

    def begin(self, version: int) -> None:
        """Begin a pass: at another version than that of the last one everybody has a turn."""
        if version != self._version:
            self._version, self._next = version, 0

    def add(self, entry: Entry, *, refused: bool) -> bool:
        """File an entry; return whether it is to have a turn, and those behind it have had theirs. `refused`: it was,
        at the version of this pass."""
        at = bisect.bisect_left(self._entries, entry[:2], key=_place)
        self._entries.insert(at, entry)
        if at < self._next or (refused and at == self._next):
            self._next += 1
            return not refused
        return False

    def remove(self, entry: Entry) -> None:
        """Take an entry out."""
        at = bisect.bisect_left(self._entries, entry[:2], key=_place)
        del self._entries[at]
        if at < self._next:
            self._next -= 1

    @property
    def first(self) -> Entry | None:
        """The entry whose turn is next; None if all had theirs."""
        return self._entries[self._next] if self._next < len(self._entries) else None

    def take(self) -> None:
        """Count the turn of the first."""
        self._next += 1

    def __iter__(self) -> Iterator[Entry]:
        return iter(self._entries)

    def __len__(self) -> int:
        """Return how many are still to have their turn."""
        return len(self._entries) - self._next

    @property
    def is_empty(self) -> bool:
        """True if nobody is filed."""
        return not self._entries


@dataclass(slots=True)
class _Filed:
    """Where one is filed. `asks`: what it asked then; None of a lot."""

    where: tuple[Rank, str]
    entry: Entry
    asks: str | None


class Filing:
    """Files of those that wait.

    Args:
        has: Returns whether one waits still.
        know_key: Returns the key of one that waits; None if it asks for nothing any more, and leaves.
        arrived: Set while others have come.
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
        self.lines: dict[tuple[Rank, str], NamespaceLine] = {}
        self.untried: set[str] = set()
        """Those that were never refused, or are to be tried whatever has changed since."""
        self._changed: dict[str, WaitingTenant] = {}
        """Those to be filed, or filed anew."""
        self._changed_lots: dict[Lot, None] = {}
        self._filed: dict[str, _Filed] = {}
        self._filed_lots: dict[Lot, _Filed] = {}
        self._asking: dict[str, dict[str, WaitingTenant]] = {}
        """Those that are filed alone, by what they ask and by tenant."""
        self._lots: dict[str, list[Lot]] = {}
        """Lots by what is asked: empty ones may be among them."""
        self._timed: dict[str, WaitingTenant] = {}
        """Those that are tried again at a time."""
        self._numbers = itertools.count()

    @property
    def lots(self) -> Iterator[Lot]:
        """All lots: empty ones may be among them."""
        return itertools.chain.from_iterable(self._lots.values())

    def changed(self, waiting: WaitingTenant) -> None:
        """Have one filed anew before the next pass, if it waits still."""
        if self._has(waiting):
            self._changed[waiting.tenant] = waiting

    def lot_changed(self, lot: Lot) -> None:
        """Have a lot filed anew before the next pass."""
        self._changed_lots[lot] = None

    def leave(self, waiting: WaitingTenant) -> None:
        """Take one out."""
        if waiting.lot is not None:
            waiting.lot.remove(waiting)
        self._unfile(waiting.tenant)
        self.untried.discard(waiting.tenant)
        self._changed.pop(waiting.tenant, None)
        self._timed.pop(waiting.tenant, None)

    def clear(self) -> None:
        """Take all out."""
        self.let_go_of_lots()
        for part in (
            self.lines,
            self.untried,
            self._changed,
            self._changed_lots,
            self._filed,
            self._filed_lots,
            self._asking,
            self._lots,
            self._timed,
        ):
            part.clear()

    def let_go_of_lots(self) -> None:
        """Have each be tried alone."""
        for lot in self.lots:
            lot.take_apart()

    def tried(self, waiting: WaitingTenant, version: int) -> None:
        """Note that one had its turn, at this version of the room. Where it was refused it stays as it is filed, unless
        others ask the same or it asks for something else by now."""
        if waiting.retry_at < float("inf"):
            self._timed[waiting.tenant] = waiting
        else:
            self._timed.pop(waiting.tenant, None)
        asks, filed = _asks(waiting), self._filed.get(waiting.tenant)
        stays = filed is not None and (filed.asks, filed.entry[0]) == (asks, waiting.key)
        if not stays or waiting.refused_at_version != version or len(self._asking[asks]) > 1 or self._lots.get(asks):
            self.changed(waiting)

    def came_back(self, waiting: WaitingTenant, lot: Lot) -> None:
        """Note that one is in the lot again that it was taken from for its turn: if nothing else has changed both stay
        as they are filed."""
        filed = self._filed_lots.get(lot)
        alone = len(self._lots.get(lot.asks, ())) == 1 and lot.asks not in self._asking
        if filed is not None and filed.entry[2] is waiting and lot.oldest is waiting and alone:
            self._changed_lots.pop(lot, None)
            self._changed.pop(waiting.tenant, None)

    def retry_at(self) -> float:
        """Return when the first is tried again at a time, monotonic seconds; infinity if none is."""
        return min((waiting.retry_at for waiting in self._timed.values()), default=float("inf"))

    async def file(self, version: int, now: float, may_join: Callable[[WaitingTenant], bool]) -> list[Entry]:
        """File those that have changed, for a pass at this version of the room; return those to be tried whose turn in
        their line is over. Others have turns meanwhile.

        Args:
            version: The `room_version`.
            now: Monotonic seconds.
            may_join: Returns whether one may be tried as one with others that ask the same.
        """
        for line in self.lines.values():
            line.begin(version)
        for waiting in self._timed.values():
            if now >= waiting.retry_at:
                self.changed(waiting)
        late: list[Entry] = []
        began, number = time.monotonic(), 0
        while self._changed or self._changed_lots:
            number += 1
            if not number % _AT_ONCE:
                began = await slices.turns_of_others(began, self._arrived)
            if self._changed:
                self._file_anew(self._changed.pop(next(iter(self._changed))), version, now, may_join, late)
            elif self._changed_lots:
                self._file_lot(next(iter(self._changed_lots)), version, may_join, late)
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
        if not self._has(waiting) or waiting.lot is not None or (key := self._know_key(waiting)) is None:
            return
        if not self._joins(waiting, may_join):
            self._file(waiting, key, version, now, late)

    def _joins(self, waiting: WaitingTenant, may_join: Callable[[WaitingTenant], bool]) -> bool:
        """Put one into the lot of those that ask the same and were refused at the same version; return False if there
        are none."""
        version, known = waiting.refused_at_version, waiting.worked_out
        if version is None or known is None or not may_join(waiting):
            return False
        for lot in self._lots.get(known.asks, ()):
            if len(lot) and lot.refused_at_version == version:
                lot.add([waiting])
                return True
        same = self._same(known.asks, version, may_join)
        if not same:
            return False
        lot = Lot(known.asks, version, self.lot_changed)
        self._lots.setdefault(known.asks, []).append(lot)
        lot.add([waiting, *same])
        return True

    def _same(self, asks: str, version: int, may_join: Callable[[WaitingTenant], bool]) -> list[WaitingTenant]:
        """Take those out that are filed alone, ask this and were refused at this version."""
        same = [
            each
            for each in self._asking.get(asks, {}).values()
            if each.refused_at_version == version and _asks(each) == asks and may_join(each)
        ]
        for each in same:
            self._unfile(each.tenant)
            self._changed.pop(each.tenant, None)
        return same

    def _file(self, waiting: WaitingTenant, key: QueueKey, version: int, now: float, late: list[Entry]) -> None:
        entry: Entry = (key, next(self._numbers), waiting, None)
        asks = _asks(waiting)
        self._filed[waiting.tenant] = _Filed(_where(key), entry, asks)
        self._asking.setdefault(asks, {})[waiting.tenant] = waiting
        if waiting.refused_at_version is None:
            self.untried.add(waiting.tenant)
        refused = waiting.refused_at_version == version and now < waiting.retry_at
        if self._line(key, version).add(entry, refused=refused):
            late.append(entry)

    def _file_lot(self, lot: Lot, version: int, may_join: Callable[[WaitingTenant], bool], late: list[Entry]) -> None:
        """File a lot, with all others that ask the same and were refused at the same version, by its oldest."""
        self._changed_lots.pop(lot, None)
        self._unfile_lot(lot)
        alike = self._lots.get(lot.asks, [])
        if len(lot) and lot.refused_at_version is not None:
            for other in alike:
                if other is not lot and len(other) and other.refused_at_version == lot.refused_at_version:
                    lot.add(other.take_apart())
            if same := self._same(lot.asks, lot.refused_at_version, may_join):
                lot.add(same)
            self._changed_lots.pop(lot, None)
        oldest = lot.oldest
        if oldest is None or oldest.key is None:
            if lot in alike:
                alike.remove(lot)
            if not alike:
                self._lots.pop(lot.asks, None)
            return
        entry: Entry = (oldest.key, next(self._numbers), oldest, lot)
        self._filed_lots[lot] = _Filed(_where(oldest.key), entry, None)
        if lot.refused_at_version is None:
            self.untried.add(oldest.tenant)
        if self._line(oldest.key, version).add(entry, refused=lot.refused_at_version == version):
            late.append(entry)

    def _line(self, key: QueueKey, version: int) -> NamespaceLine:
        line = self.lines.get(_where(key))
        if line is None:
            line = self.lines[_where(key)] = NamespaceLine()
            line.begin(version)
        return line

    def _unfile(self, tenant: str) -> None:
        if (filed := self._filed.pop(tenant, None)) is None:
            return
        assert filed.asks is not None
        asking = self._asking[filed.asks]
        del asking[tenant]
        if not asking:
            del self._asking[filed.asks]
        self._remove(filed)

    def _unfile_lot(self, lot: Lot) -> None:
        if (filed := self._filed_lots.pop(lot, None)) is not None:
            self._remove(filed)

    def _remove(self, filed: _Filed) -> None:
        line = self.lines[filed.where]
        line.remove(filed.entry)
        if line.is_empty:
            del self.lines[filed.where]


def _place(entry: Entry) -> tuple[QueueKey, int]:
    return entry[0], entry[1]


def _where(key: QueueKey) -> tuple[Rank, str]:
    return (key[0], key[1]), key[3]


def _asks(waiting: WaitingTenant) -> str:
    return waiting.worked_out.asks if waiting.worked_out is not None else ""
