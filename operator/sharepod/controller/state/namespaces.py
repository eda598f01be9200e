"""Namespaces: their labels, by which budgets select them, and the namespaces in deletion. The API server creates no
object in those, so nothing is placed for them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import islice
from typing import Any

_MOST_LABELS = 256
"""Number of labels of a namespace that are read."""


class EndingNamespaces:
    """Namespaces in phase Terminating.

    Guarantee: `on_changed` is called with the name of a namespace whenever `name in self` has changed.
    """

    def __init__(self) -> None:
        self._names: dict[str, str] = {}
        self._uids: dict[str, set[str]] = {}
        """By name: uids of the namespaces of this name in deletion. By name, because every step of a tenant looks its
        namespace up, and thousands of namespaces may be stuck in deletion."""
        self._versions: dict[str, int] = {}
        self.on_changed: Callable[[str], None] = lambda _name: None

    def __contains__(self, name: str) -> bool:
        return name in self._uids

    def put(self, raw: Mapping[str, Any]) -> None:
        """Record a Namespace. It is removed if it is no longer in deletion: a restore of etcd can undo a deletion."""
        uid, version = str(raw["metadata"]["uid"]), int(raw["metadata"].get("resourceVersion") or 0)
        if version < self._versions.get(uid, 0):
            return
        if (raw.get("status") or {}).get("phase") != "Terminating":
            self.drop(uid)
            return
        self._versions[uid] = version
        if uid not in self._names:
            name = self._names[uid] = str(raw["metadata"]["name"])
            self._uids.setdefault(name, set()).add(uid)
            self.on_changed(name)

    def drop(self, uid: str) -> None:
        """Remove a deleted Namespace, by its uid."""
        self._versions.pop(uid, None)
        if (name := self._names.pop(uid, None)) is not None:
            self._uids[name].discard(uid)
            if not self._uids[name]:
                del self._uids[name]
            self.on_changed(name)

    def invalidate(self) -> None:
        """Mark all cached versions stale, because etcd was restored from a backup."""
        self._versions = dict.fromkeys(self._versions, 0)


class NamespaceLabels:
    """Labels of every namespace.

    Guarantee: `on_changed` is called whenever a namespace was added, relabelled or deleted, and `on_gone` with the name
    of a deleted namespace.
    """

    def __init__(self) -> None:
        self._of: dict[str, tuple[str, Mapping[str, str]]] = {}
        """(name, labels) of each namespace, by uid."""
        self._versions: dict[str, int] = {}
        self.on_changed: Callable[[], None] = lambda: None
        self.on_gone: Callable[[str], None] = lambda _name: None

    def by_name(self) -> dict[str, Mapping[str, str]]:
        """Return the labels of each namespace."""
        return dict(self._of.values())

    def put(self, raw: Mapping[str, Any]) -> None:
        """Record a Namespace."""
        metadata = raw["metadata"]
        uid, version = str(metadata["uid"]), int(metadata.get("resourceVersion") or 0)
        if version < self._versions.get(uid, 0):
            return
        self._versions[uid] = version
        labels = metadata.get("labels")
        given = islice(labels.items(), _MOST_LABELS) if isinstance(labels, Mapping) else ()
        known = str(metadata["name"]), {str(key): str(value) for key, value in given}
        if self._of.get(uid) != known:
            self._of[uid] = known
            self.on_changed()

    def drop(self, uid: str) -> None:
        """Remove a deleted Namespace, by its uid."""
        self._versions.pop(uid, None)
        if (known := self._of.pop(uid, None)) is not None:
            self.on_gone(known[0])
            self.on_changed()

    def versions(self) -> Mapping[str, int]:
        """Return the version of each Namespace by uid, as a view that changes with the store."""
        return self._versions

    def invalidate(self) -> None:
        """Mark all cached versions stale, because etcd was restored from a backup."""
        self._versions = dict.fromkeys(self._versions, 0)
