"""Namespaces that are being deleted: nothing new is created in them, so nobody in them gets a share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any


class EndingNamespaces:
    """Namespaces that are being deleted, by the watch of those in phase Terminating.

    Guarantee: `on_changed` is called with the name of a namespace whenever its answer to `in` has changed.
    """

    def __init__(self) -> None:
        self._names: dict[str, str] = {}
        self._versions: dict[str, int] = {}
        self.on_changed: Callable[[str], None] = lambda _name: None

    def __contains__(self, name: str) -> bool:
        return name in self._names.values()

    def put(self, raw: Mapping[str, Any]) -> None:
        """Take in a Namespace that is being deleted, as it was read."""
        uid, version = str(raw["metadata"]["uid"]), int(raw["metadata"].get("resourceVersion") or 0)
        if version < self._versions.get(uid, 0):
            return
        self._versions[uid] = version
        if uid not in self._names:
            self._names[uid] = str(raw["metadata"]["name"])
            self.on_changed(self._names[uid])

    def drop(self, uid: str) -> None:
        """Take out a Namespace that is gone, by its uid."""
        self._versions.pop(uid, None)
        if (name := self._names.pop(uid, None)) is not None:
            self.on_changed(name)

    def versions(self) -> Mapping[str, int]:
        """Return the version of each Namespace by uid. A live view."""
        return self._versions

    def distrust(self) -> None:
        """Count each known version as the oldest: the API server's versions have gone back."""
        self._versions = dict.fromkeys(self._versions, 0)
