"""Store of the facts of one kind of object, by uid and name.

Guarantees:
- Facts older than the cached ones are ignored.
- A list or GET that began before an object's deletion does not restore the object, because the store remembers each
  deletion with its version.
- Of two objects of the same name, only the newer is kept.
- After `invalidate`, every version that is put counts as newer than the cached one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Generic, TypeVar

from .facts.object_facts import ObjectFacts

F = TypeVar("F", bound=ObjectFacts)
V = TypeVar("V")

STALE = 0
"""Version of cached objects after a restore of etcd: older than any version of the API server."""
REMEMBERED = 20_000
"""Number of deleted objects that are remembered: more than are deleted while a list is read, or wait for the write of
their end. If one is forgotten, a GET must confirm its deletion. A standby writes no ends, so it forgets the oldest."""


class Latest(dict[str, V]):
    """Map by uid. Beyond `REMEMBERED` entries it drops the oldest entry."""

    def __setitem__(self, uid: str, value: V) -> None:
        super().__setitem__(uid, value)
        if len(self) > REMEMBERED:
            del self[next(iter(self))]


class Store(Generic[F]):
    """Facts of one kind of object."""

    def __init__(self) -> None:
        self._items: dict[str, F] = {}
        self._names: dict[tuple[str, str], str] = {}
        self._ended: Latest[float] = Latest()
        self._stale: set[str] = set()
        """uids of the objects that were not read again since `invalidate`."""

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[F]:
        return iter(list(self._items.values()))

    def get(self, uid: str) -> F | None:
        """Return an object by uid. None if it is not known."""
        return self._items.get(uid)

    def named(self, name: str, namespace: str = "") -> F | None:
        """Return an object by name. None if it is not known."""
        uid = self._names.get((namespace, name))
        return self._items.get(uid) if uid is not None else None

    def uids(self) -> set[str]:
        """Return the uids of all objects."""
        return set(self._items)

    def versions(self) -> dict[str, int]:
        """Return the version of each object by uid."""
        return {uid: self.version(item) for uid, item in self._items.items()}

    def version(self, item: F) -> int:
        """Return the version of a cached object. `STALE` if it was not read since `invalidate`."""
        return STALE if item.uid in self._stale else item.version

    def knows(self, uid: str, version: int, *, sure: bool = False) -> bool:
        """Return True if nothing is new: this version of an object, a later one, or its deletion is already recorded.

        `sure`: True if a GET has just returned this version. If the watch has sent DELETED with the same
        resourceVersion, the object only stopped matching the selector. A GET never returns a deleted object with that
        resourceVersion.
        """
        known = self._items.get(uid)
        ended = self._ended.get(uid, -1)
        at = self.version(known) if known is not None else -1
        return version < ended or (version == ended and not sure) or version <= at

    def put(self, item: F, *, sure: bool = False) -> tuple[bool, F | None, F | None]:
        """Record an object. `sure`: see `knows`.

        Return (True if it is newer than the cached facts, the object's former facts, the facts of an older object of
        the same name, which it replaces).
        """
        known = self._items.get(item.uid)
        if self.knows(item.uid, item.version, sure=sure):
            return False, known, None
        key = (item.namespace, item.name)
        other = self._items.get(self._names.get(key, ""))
        replaced = None
        if other is not None and other.uid != item.uid:
            if self.version(other) > item.version:
                return False, known, None
            replaced = self.drop(other.uid)
        self._ended.pop(item.uid, None)
        self._stale.discard(item.uid)
        self._items[item.uid] = item
        self._names[key] = item.uid
        return True, known, replaced

    def amend(self, item: F) -> None:
        """Replace an object's facts without a new version. For facts that also depend on other objects."""
        self._items[item.uid] = item

    def drop(self, uid: str, version: float = math.inf) -> F | None:
        """Remove a deleted object. Return its former facts; None if it is not known. They have the version `STALE` if
        the object was not read since `invalidate`.

        `version`: version at which the object was deleted or stopped matching the selector. If a later version is
        cached, the object stays. If a later version is put afterwards, the object is back.
        """
        known = self._items.get(uid)
        if known is not None and self.version(known) > version:
            return None
        self._ended[uid] = max(version, self._ended.get(uid, 0))
        item = self._items.pop(uid, None)
        if item is not None and self._names.get((item.namespace, item.name)) == uid:
            del self._names[(item.namespace, item.name)]
        if item is not None and uid in self._stale:
            self._stale.discard(uid)
            return replace(item, version=STALE)
        return item

    def invalidate(self) -> None:
        """Mark all cached versions stale, and forget deletions. Called when etcd was restored from a backup.

        The facts are not copied: for 10,000 Pods that would take at least 0.25 s.
        """
        self._ended.clear()
        self._stale = set(self._items)
