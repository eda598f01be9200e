"""Objects of the double, their versions, and what changed when.

Guarantees:
- One resourceVersion counts the writes to all objects. A write that changes nothing gets no new one.
- `uid` and `creationTimestamp` are the storage's. `generation` counts changes outside metadata and status.
- A precondition (uid, resourceVersion) that does not hold changes nothing: 409.
- A write to an object leaves its status alone, a write to its status everything else.
- A watcher sees each change after its version once, in order, as its selectors see it; 410 after a compaction.
- Objects go in and out as copies.
"""

from __future__ import annotations

import asyncio
import copy
import datetime
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from . import patches, selectors
from .errors import already_exists, bad_request, conflict, expired, invalid, not_found
from .kinds import Json, Kind

_SERVER_FIELDS = ("uid", "creationTimestamp", "generation", "resourceVersion", "deletionTimestamp")
"""Metadata that no client sets."""


@dataclass(frozen=True, slots=True)
class Change:
    """One write: the object before (None: created) and after (None: deleted) it; `last` is what a watch shows."""

    version: int
    kind: Kind
    before: Json | None
    after: Json | None
    last: Json


class Storage:
    """All objects. `admit(kind, before, after)` may refuse a write by raising `Refused`."""

    def __init__(self) -> None:
        self._objects: dict[tuple[str, str, str], Json] = {}
        self._owners: dict[str, dict[patches.Path, str]] = {}
        self._version = 100
        self._compacted = 0
        self._uids = 0
        self._changed = asyncio.Event()
        self.history: list[Change] = []
        self.admit: Callable[[Kind, Json | None, Json], None] = lambda kind, before, after: None

    @property
    def version(self) -> int:
        """The resourceVersion of the last write."""
        return self._version

    def get(self, kind: Kind, namespace: str, name: str) -> Json:
        """One object. Raises `Refused` (404)."""
        return copy.deepcopy(self._find(kind, namespace, name))

    def select(self, kind: Kind, namespace: str, labels: str = "", fields: str = "") -> list[Json]:
        """The selected objects by namespace and name; an empty namespace selects from all."""
        found = [
            item
            for (plural, where, _), item in sorted(self._objects.items())
            if plural == kind.plural and namespace in ("", where) and selectors.matches(item, labels, fields)
        ]
        return copy.deepcopy(found)

    def create(self, kind: Kind, namespace: str, body: Json) -> Json:
        """Store a new object. Raises `Refused`: 409 if the name is taken, 422 if the schema refuses it."""
        item = copy.deepcopy(body)
        metadata = item.setdefault("metadata", {})
        if metadata.get("resourceVersion"):
            raise bad_request("resourceVersion should not be set on objects to be created")
        name = metadata.get("name") or f"{metadata.get('generateName', '')}{self._uids:05x}"
        if (kind.plural, namespace, name) in self._objects:
            raise already_exists(kind.plural, name)
        if kind.status:
            item.pop("status", None)
        self._uids += 1
        for field in _SERVER_FIELDS:
            metadata.pop(field, None)
        metadata |= {
            "name": name,
            "uid": f"uid-{kind.plural}-{self._uids}",
            "creationTimestamp": _now(),
            "generation": 1,
        }
        if kind.namespaced:
            metadata["namespace"] = namespace
        item |= {"apiVersion": kind.api_version, "kind": kind.kind}
        return self._write(kind, None, item)

    def update(
        self, kind: Kind, namespace: str, name: str, change: Callable[[Json], Json], *, status: bool = False
    ) -> Json:
        """Store what `change` makes of the object, or of its status. uid and resourceVersion in what it returns are
        preconditions.
        """
        before = self._find(kind, namespace, name)
        wanted = change(copy.deepcopy(before))
        return self._update(kind, before, wanted, status=status)

    def apply(
        self, kind: Kind, namespace: str, name: str, body: Json, manager: str, *, force: bool, status: bool
    ) -> Json:
        """Server-side apply to an existing object or its status."""
        before = self._find(kind, namespace, name)
        uid = before["metadata"]["uid"]
        owners = dict(self._owners.get(uid, {}))
        fields = {"status": body.get("status", {})} if status else {k: v for k, v in body.items() if k != "status"}
        fields = {key: value for key, value in fields.items() if key not in ("apiVersion", "kind", "metadata")}
        wanted = patches.apply(before, fields, owners, manager, force=force)
        wanted["metadata"] |= {
            key: value for key, value in body.get("metadata", {}).items() if key in ("uid", "resourceVersion")
        }
        after = self._update(kind, before, wanted, status=status)
        self._owners[uid] = owners
        return after

    def delete(
        self, kind: Kind, namespace: str, name: str, uid: str | None = None, resource_version: str | None = None
    ) -> Json:
        """Delete an object; one with finalizers, and a Pod that is bound and has not ended, is only marked."""
        before = self._find(kind, namespace, name)
        self._check(kind, before, uid, resource_version)
        metadata = before["metadata"]
        bound = (before.get("spec") or {}).get("nodeName")
        ended = (before.get("status") or {}).get("phase") in ("Succeeded", "Failed")
        if metadata.get("finalizers") or (kind.graceful and bound and not ended):
            if metadata.get("deletionTimestamp"):
                return copy.deepcopy(before)
            after = copy.deepcopy(before)
            after["metadata"]["deletionTimestamp"] = _now()
            return self._write(kind, before, after)
        return self._remove(kind, before)

    def finish_deletion(self, kind: Kind, namespace: str, name: str) -> None:
        """Remove an object that is marked, as the kubelet does with a Pod once its containers have ended."""
        self._remove(kind, self._find(kind, namespace, name))

    def compact(self) -> None:
        """Forget all changes up to now: a watch from an earlier version gets 410."""
        self._compacted = self._version

    async def wait(self, since: int) -> None:
        """Wait until something was written after version `since`."""
        while self._version <= since:
            await self._changed.wait()

    def changes(self, kind: Kind, namespace: str, since: int, labels: str, fields: str) -> list[tuple[str, Json]]:
        """The watch events (type, object) after a version, as these selectors see them. Raises `Refused` (410)."""
        if since < self._compacted:
            raise expired(f"too old resource version: {since} ({self._compacted})")
        events = []
        for change in self.history:
            if change.version <= since or change.kind is not kind:
                continue
            if namespace not in ("", change.last["metadata"].get("namespace", "")):
                continue
            was, now = (
                item is not None and selectors.matches(item, labels, fields) for item in (change.before, change.after)
            )
            if was or now:
                name = "MODIFIED" if was and now else "ADDED" if now else "DELETED"
                events.append((name, copy.deepcopy(change.last)))
        return events

    def _find(self, kind: Kind, namespace: str, name: str) -> Json:
        found = self._objects.get((kind.plural, namespace if kind.namespaced else "", name))
        if found is None:
            raise not_found(kind.plural, name)
        return found

    @staticmethod
    def _check(kind: Kind, item: Json, uid: str | None, resource_version: str | None) -> None:
        metadata = item["metadata"]
        if uid is not None and uid != metadata["uid"]:
            why = f"Precondition failed: UID in precondition: {uid}, UID in object meta: {metadata['uid']}"
            raise conflict(kind.plural, metadata["name"], why)
        if resource_version and resource_version != metadata["resourceVersion"]:
            why = "the object has been modified; please apply your changes to the latest version and try again"
            raise conflict(kind.plural, metadata["name"], why)

    def _update(self, kind: Kind, before: Json, wanted: Json, *, status: bool) -> Json:
        metadata = wanted.get("metadata") or {}
        self._check(kind, before, metadata.get("uid"), metadata.get("resourceVersion"))
        if metadata.get("name", before["metadata"]["name"]) != before["metadata"]["name"]:
            raise bad_request("the name of the object does not match the name on the URL")
        if status and not kind.status:
            raise not_found(f"{kind.plural}/status", before["metadata"]["name"])
        if status:
            after = {**copy.deepcopy(before), "status": copy.deepcopy(wanted.get("status") or {})}
        else:
            after = copy.deepcopy(wanted)
            for field in _SERVER_FIELDS:
                after["metadata"].pop(field, None)
                if field in before["metadata"]:
                    after["metadata"][field] = before["metadata"][field]
            if kind.status:
                after.pop("status", None)
                if "status" in before:
                    after["status"] = copy.deepcopy(before["status"])
        after |= {"apiVersion": kind.api_version, "kind": kind.kind}
        written = self._write(kind, before, after)
        if metadata_is_done(written):
            return self._remove(kind, written)
        return written

    def _write(self, kind: Kind, before: Json | None, after: Json) -> Json:
        after = kind.pruned(after)
        if before is not None and _content(before) == _content(after):
            return copy.deepcopy(before)
        if (fault := kind.fault(after)) is not None:
            raise invalid(f'{kind.kind} "{after["metadata"]["name"]}" is invalid: {fault}')
        self.admit(kind, before, after)
        if before is not None and _desired(before) != _desired(after):
            after["metadata"]["generation"] = before["metadata"]["generation"] + 1
        metadata = after["metadata"]
        self._next()
        metadata["resourceVersion"] = str(self._version)
        self._objects[(kind.plural, metadata.get("namespace", ""), metadata["name"])] = after
        self._record(Change(self._version, kind, before, after, after))
        return copy.deepcopy(after)

    def _remove(self, kind: Kind, before: Json) -> Json:
        metadata = before["metadata"]
        self._next()
        del self._objects[(kind.plural, metadata.get("namespace", ""), metadata["name"])]
        last = copy.deepcopy(before)
        last["metadata"]["resourceVersion"] = str(self._version)
        self._record(Change(self._version, kind, before, None, last))
        return copy.deepcopy(last)

    def _next(self) -> None:
        self._version += 1

    def _record(self, change: Change) -> None:
        self.history.append(change)
        self._changed.set()
        self._changed = asyncio.Event()


def metadata_is_done(item: Json) -> bool:
    """Return whether an object that is being deleted has lost its last finalizer."""
    metadata = item["metadata"]
    graceful = (item.get("spec") or {}).get("nodeName") is not None
    return bool(metadata.get("deletionTimestamp")) and not metadata.get("finalizers") and not graceful


def _content(item: Json) -> Any:
    metadata = {key: value for key, value in item["metadata"].items() if key != "resourceVersion"}
    return {**item, "metadata": metadata}


def _desired(item: Json) -> Any:
    return {key: value for key, value in item.items() if key not in ("metadata", "status")}


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
