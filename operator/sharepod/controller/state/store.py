"""Store of the facts of one kind of object.

Guarantees:
- Facts older than the cached ones are ignored.
- A list or GET that began before an object's deletion does not restore the object, because each deletion is kept with
  its version.
- Of two objects with the same name, only the newer is kept.
- After `invalidate` every version is newer than the cached ones.
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
"""Version of cached objects after a restore of etcd. It is older than any version of the API server."""
REMEMBERED = 20_000
"""Most deleted objects that are remembered. It exceeds the number of objects that are deleted during one list, or whose
end is not yet written. If one is forgotten, a GET is needed. A standby writes no ends, so it forgets the oldest."""


class Latest(dict[str, V]):
    """Map by uid. Beyond `REMEMBERED` entries it drops the oldest entry."""

    def __setitem__(self, uid: str, value: V) -> None:
        super().__setitem__(uid, value)
        if len(self) > REMEMBERED:
            del self[next(iter(self))]


class Store(Generic[F]):
    """Facts of one kind, by uid and by name."""

    def __init__(self) -> None:
        self._items: dict[str, F] = {}
        self._names: dict[tuple[str, str], str] = {}
        self._ended: Latest[float] = Latest()
        self._stale: set[str] = set()
        """Uids of objects that were read before a restore of etcd, and not since."""

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
        """Return True if this version of an object, a later version, or its deletion is already recorded.

        `sure`: True if a GET has just returned this version. Then a DELETED event with the same resourceVersion was not
        a deletion: the object only stopped matching the selector. A deleted object cannot be read at the
        resourceVersion of its DELETED event.
        """
        known = self._items.get(uid)
        ended = self._ended.get(uid, -1)
        at = self.version(known) if known is not None else -1
        return version < ended or (version == ended and not sure) or version <= at

    def put(self, item: F, *, sure: bool = False) -> tuple[bool, F | None, F | None]:
        """Record an object. `sure`: see `knows`.

        Return (True if it was newer than the cached facts, the former facts of the object, the object of the same name
        that it replaces).
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
        """Replace the facts of an object's present version. Needed for facts that also follow from other objects."""
        self._items[item.uid] = item

    def drop(self, uid: str, version: float = math.inf) -> F | None:
        """Remove a deleted object. Return its former facts, with version `STALE` if it was not read since `invalidate`.
        None if it is not known.

        `version`: version at which the object was deleted or stopped matching the selector. If a later version is
        cached, the object stays. A later version that is put afterwards restores it.
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
        """Mark all cached versions stale and forget deletions. Called when the API server's versions went back.

        The facts are not copied: for 10,000 Pods that would take at least 0.25 s.
        """
        self._ended.clear()
        self._stale = set(self._items)
