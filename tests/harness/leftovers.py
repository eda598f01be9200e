"""Objects that the users of a cluster leave on it, deleted before its next user.

Guarantees:
- After `delete_contents` and `delete_rest`, the cluster has only the objects of the snapshot, apart from Events and
  Leases, which expire.
- An object of the snapshot that was changed or deleted is not restored.
"""

from __future__ import annotations

import time
from contextlib import suppress

from harness.api import Api, ApiError
from harness.errors import HarnessError

_EXPIRING = {"events", "leases"}
_NAMESPACES = "/api/v1/namespaces"


class Leftovers:
    """Snapshot of a cluster's objects. Objects that come later are leftovers."""

    def __init__(self, api: Api) -> None:
        self._api = api
        self._before = self._objects()

    def delete_contents(self, *, timeout: float = 60.0) -> None:
        """Delete later namespaces, and later objects in other namespaces. Wait until the namespaces are deleted, which
        needs the controllers of their objects. Raises HarnessError after `timeout` seconds.
        """
        deadline = time.monotonic() + timeout
        for path in self._later():
            if "/namespaces/" in path:
                self._delete(path)
        while open_ones := {path for path in self._listed(_NAMESPACES) if path not in self._before}:
            if time.monotonic() > deadline:
                raise HarnessError(f"{sorted(open_ones)} still exist after {timeout:.0f} s")
            time.sleep(0.2)

    def delete_rest(self) -> None:
        """Delete all later objects, also cluster-scoped ones."""
        for path in self._later():
            self._delete(path)

    def _later(self) -> set[str]:
        return self._objects() - self._before

    def _delete(self, path: str) -> None:
        with suppress(ApiError):  # another client has deleted the object, or its deletion is under way
            self._api.delete(path, grace=0)

    def _objects(self) -> set[str]:
        """Return the path of each object that can be listed and deleted."""
        versions = ["/api/v1"]
        versions += [f"/apis/{group['preferredVersion']['groupVersion']}" for group in self._api.get("/apis")["groups"]]
        found: set[str] = set()
        for version in versions:
            for kind in self._api.get(version)["resources"]:
                if {"list", "delete"} <= set(kind["verbs"]) and kind["name"] not in _EXPIRING:
                    found |= self._listed(f"{version}/{kind['name']}")
        return found

    def _listed(self, collection: str) -> set[str]:
        version, _, kind = collection.rpartition("/")
        try:
            items = self._api.get(collection)["items"]
        except ApiError:  # the kind is no longer served
            return set()
        return {
            f"{version}/namespaces/{space}/{kind}/{meta['name']}" if space else f"{collection}/{meta['name']}"
            for meta, space in ((item["metadata"], item["metadata"].get("namespace")) for item in items)
        }
