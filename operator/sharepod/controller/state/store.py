"""Store of the facts of one kind of object.

Guarantees:
- Facts older than the known ones are not taken.
- An object that is known to be gone does not come back by a list or a read that was begun before: each end has the
  version at which it was seen.
- Of two objects of one name the newer is there.
- After `distrust` every version is newer than what is known.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Generic, TypeVar

from .facts.object_facts import ObjectFacts

F = TypeVar("F", bound=ObjectFacts)
V = TypeVar("V")

DISTRUSTED = 0
"""Version of what is known from a history that no longer exists: older than any of the API server's."""
REMEMBERED = 20_000
"""Objects that are gone of which something is remembered: more than vanish while one list is read, and than wait for
their end to be written. A forgotten one costs a GET at most, and a standby that writes none forgets the oldest."""


class Latest(dict[str, V]):
    """Map by uid of what was noted last: of more than `REMEMBERED` entries the oldest is forgotten."""

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
        self._distrusted: set[str] = set()
        """Objects that are known from a history that no longer exists."""

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[F]:
        return iter(list(self._items.values()))

    def get(self, uid: str) -> F | None:
        """Return an object by uid, None if it is not known."""
        return self._items.get(uid)

    def named(self, name: str, namespace: str = "") -> F | None:
        """Return an object by name, None if it is not known."""
        uid = self._names.get((namespace, name))
        return self._items.get(uid) if uid is not None else None

    def uids(self) -> set[str]:
        """Return the uids of all objects."""
        return set(self._items)

    def versions(self) -> dict[str, int]:
        """Return the version of each object by uid."""
        return {uid: self.version(item) for uid, item in self._items.items()}

    def version(self, item: F) -> int:
        """Return the version of a known object; `DISTRUSTED` while nothing newer is known of it since `distrust`."""
        return DISTRUSTED if item.uid in self._distrusted else item.version

    def knows(self, uid: str, version: int, *, sure: bool = False) -> bool:
        """True if this version of an object, a later one, or its end is known.

        `sure`: a read has just shown this version. An object that has only left what is selected is there in the very
        version in which it left; one that was deleted is never read in the version of its end.
        """
        known = self._items.get(uid)
        ended = self._ended.get(uid, -1)
        at = self.version(known) if known is not None else -1
        return version < ended or (version == ended and not sure) or version <= at

    def put(self, item: F, *, sure: bool = False) -> tuple[bool, F | None, F | None]:
        """Take in an object. `sure`: see `knows`.

        Return whether it was taken, what was known of it before, and the object of the same name that it replaces.
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
        self._distrusted.discard(item.uid)
        self._items[item.uid] = item
        self._names[key] = item.uid
        return True, known, replaced

    def amend(self, item: F) -> None:
        """Put other facts in place of those of the same version, which follow from other objects."""
        self._items[item.uid] = item

    def drop(self, uid: str, version: float = math.inf) -> F | None:
        """Take out an object that is gone; return what was known of it, with the version `DISTRUSTED` where it is.

        With `version`, it was gone, or had left what is selected, as of that version: a later version brings it back.
        If a later version is known, it stays.
        """
        known = self._items.get(uid)
        if known is not None and self.version(known) > version:
            return None
        self._ended[uid] = max(version, self._ended.get(uid, 0))
        item = self._items.pop(uid, None)
        if item is not None and self._names.get((item.namespace, item.name)) == uid:
            del self._names[(item.namespace, item.name)]
        if item is not None and uid in self._distrusted:
            self._distrusted.discard(uid)
            return replace(item, version=DISTRUSTED)
        return item

    def distrust(self) -> None:
        """Count each known version as the oldest, and forget which objects ended: the versions have gone back.

        The facts stay as they are: to copy those of 10,000 Pods would take a quarter of a second and more.
        """
        self._ended.clear()
        self._distrusted = set(self._items)
