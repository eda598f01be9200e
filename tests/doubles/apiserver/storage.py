"""Objects of the double, their versions, and their changes.

Guarantees:
- One resourceVersion counts the writes to all objects. A write that changes nothing gets no new version.
- The storage sets `uid` and `creationTimestamp`. `generation` counts changes outside metadata and status.
- If a precondition (uid, resourceVersion) does not hold, the write changes nothing and fails with 409.
- A write to an object does not change its status. A write to the status changes nothing else.
- A watcher sees each change after its version once, in order, filtered by its selectors. After a compaction it gets
  410.
- Objects are copied when they are stored and when they are returned. With `copies=False` they are not copied, and no
  caller may change them.
- Stored objects are never changed.
"""

from __future__ import annotations

import asyncio
import datetime
import json
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from . import patches, selectors
from .copies import copied
from .errors import already_exists, bad_request, conflict, expired, invalid, not_found
from .kinds import Json, Kind

_SERVER_FIELDS = ("uid", "creationTimestamp", "generation", "resourceVersion", "deletionTimestamp")
"""Metadata that clients cannot set."""
_TEXTS = 50_000
"""Most objects whose text is cached, so that all watchers and lists send the same bytes: about 100 MB."""


@dataclass(frozen=True, slots=True)
class Change:
    """One write: the object before (None: it was created) and after (None: it was deleted) the write. `last`: the
    object that a watch shows.
    """

    version: int
    kind: Kind
    before: Json | None
    after: Json | None
    last: Json


@dataclass(frozen=True, slots=True)
class Backup:
    """Copy of all objects at one version."""

    version: int
    objects: dict[str, dict[tuple[str, str], Json]]


class Storage:
    """Store of all objects of the double. `admit(kind, before, after)` may refuse a write by raising `Refused`.

    Args:
        copies: Return copies of objects. Pass False for speed if no caller changes an object.
        remembered: Number of changes that are kept for watches; None: all.
    """

    def __init__(self, *, copies: bool = True, remembered: int | None = None) -> None:
        self._copy: Callable[[Any], Any] = copied if copies else lambda value: value
        self._remembered = remembered
        self._objects: defaultdict[str, dict[tuple[str, str], Json]] = defaultdict(dict)
        self._sorted: dict[str, list[Json]] = {}
        """For each kind: its existing objects, sorted by namespace and name."""
        self._spoiled: dict[str, bytes] = {}
        """For each uid: text that replaces the object's spec in answers. Tests use text that a client cannot parse."""
        self._texts: OrderedDict[str, tuple[Json, bytes]] = OrderedDict()
        """Cache of JSON texts. For each resourceVersion: the object and its text."""
        self._owners: dict[str, dict[patches.Path, str]] = {}
        self._version = 100
        self._compacted = 0
        self._uids = 0
        self._changed = asyncio.Event()
        self.history: list[Change] = []
        self.listeners: list[Callable[[Change], None]] = []
        """Functions that are called with each change after it is stored."""
        self.admit: Callable[[Kind, Json | None, Json], None] = lambda kind, before, after: None

    @property
    def version(self) -> int:
        """resourceVersion of the last write."""
        return self._version

    def get(self, kind: Kind, namespace: str, name: str) -> Json:
        """Return one object. Raises `Refused` (404) if it does not exist."""
        found: Json = self._copy(self._find(kind, namespace, name))
        return found

    def select(self, kind: Kind, namespace: str, labels: str = "", fields: str = "") -> list[Json]:
        """Return the selected objects by namespace and name. An empty namespace selects from all namespaces."""
        if kind.plural not in self._sorted:
            self._sorted[kind.plural] = [item for _, item in sorted(self._objects[kind.plural].items(), key=_name)]
        return [
            self._copy(item)
            for item in self._sorted[kind.plural]
            if namespace in ("", item["metadata"].get("namespace")) and selectors.matches(item, labels, fields)
        ]

    def text(self, item: Json) -> bytes:
        """Return an object as JSON. The text of a stored object is cached."""
        if (spec := self._spoiled.get(str(item["metadata"].get("uid")))) is not None:
            head = {"apiVersion": item.get("apiVersion"), "kind": item.get("kind"), "metadata": item["metadata"]}
            return b'%s,"spec":%s}' % (json.dumps(head)[:-1].encode(), spec)
        version = str(item["metadata"].get("resourceVersion"))
        known = self._texts.get(version)
        if known is not None and known[0] is item:
            return known[1]
        text = json.dumps(item, separators=(",", ":")).encode()
        self._texts[version] = (item, text)
        if len(self._texts) > _TEXTS:
            self._texts.popitem(last=False)
        return text

    def create(self, kind: Kind, namespace: str, body: Json) -> Json:
        """Store a new object. Raises `Refused`: 409 if the name is taken, 422 if the schema refuses it."""
        item = {**self._copy(body)}
        metadata = item["metadata"] = dict(item.get("metadata") or {})
        if metadata.get("resourceVersion"):
            raise bad_request("resourceVersion should not be set on objects to be created")
        name = metadata.get("name") or f"{metadata.get('generateName', '')}{self._uids:05x}"
        if (namespace, name) in self._objects[kind.plural]:
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
        """Store the result of `change` as the object, or as its status. uid and resourceVersion in the result are
        preconditions."""
        before = self._find(kind, namespace, name)
        wanted = change(self._copy(before))
        return self._update(kind, before, wanted, status=status)

    def apply(
        self, kind: Kind, namespace: str, name: str, body: Json, manager: str, *, force: bool, status: bool
    ) -> Json:
        """Apply `body` to an existing object or its status by server-side apply."""
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
        """Delete an object. An object with finalizers, and a bound Pod that has not ended, are only marked."""
        before = self._find(kind, namespace, name)
        self._check(kind, before, uid, resource_version)
        metadata = before["metadata"]
        bound = (before.get("spec") or {}).get("nodeName")
        ended = (before.get("status") or {}).get("phase") in ("Succeeded", "Failed")
        if metadata.get("finalizers") or (kind.graceful and bound and not ended):
            if metadata.get("deletionTimestamp"):
                marked: Json = self._copy(before)
                return marked
            after = {**before, "metadata": {**metadata, "deletionTimestamp": _now()}}
            return self._write(kind, before, after)
        return self._remove(kind, before)

    def finish_deletion(self, kind: Kind, namespace: str, name: str) -> None:
        """Remove a marked object, as the kubelet does with a Pod after its containers have ended."""
        self._remove(kind, self._find(kind, namespace, name))

    def spoil(self, item: Json, spec: bytes) -> None:
        """Replace the spec of an object in all answers by this text, for a spec that is too deep or too large for a
        reader."""
        self._spoiled[item["metadata"]["uid"]] = spec

    def backup(self) -> Backup:
        """Return a copy of all objects, with the resourceVersion of the last write."""
        return Backup(self._version, {plural: dict(items) for plural, items in self._objects.items()})

    def restore(self, backup: Backup) -> None:
        """Restore the objects and the resourceVersion of a backup, as a restored etcd does. Later writes are lost."""
        self._version = backup.version
        self._objects = defaultdict(dict, {plural: dict(items) for plural, items in backup.objects.items()})
        self.history = [change for change in self.history if change.version <= backup.version]
        self._sorted.clear()
        self._texts.clear()

    def compact(self) -> None:
        """Drop all changes up to now: a watch from an earlier version gets 410."""
        self._compacted = self._version

    async def wait(self, since: int) -> None:
        """Wait until an object is written after version `since`."""
        while self._version <= since:
            await self._changed.wait()

    def changes(self, kind: Kind, namespace: str, since: int, labels: str, fields: str) -> list[tuple[str, Json]]:
        """Return the watch events (type, object) after a version, filtered by these selectors. Raises `Refused` (410).

        The objects are the stored ones, and must not be changed.
        """
        if since < self._compacted:
            raise expired(f"too old resource version: {since} ({self._compacted})")
        events = []
        news = max(0, self._version - since)  # each version is one change, of any kind
        for change in self.history[-news:] if news else ():
            if change.kind is not kind:
                continue
            if namespace not in ("", change.last["metadata"].get("namespace", "")):
                continue
            was, now = (
                item is not None and selectors.matches(item, labels, fields) for item in (change.before, change.after)
            )
            if was or now:
                name = "MODIFIED" if was and now else "ADDED" if now else "DELETED"
                events.append((name, change.last))
        return events

    def _find(self, kind: Kind, namespace: str, name: str) -> Json:
        found = self._objects[kind.plural].get((namespace if kind.namespaced else "", name))
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
            after = {**before, "status": wanted.get("status") or {}}
        else:
            own = {key: value for key, value in metadata.items() if key not in _SERVER_FIELDS}
            served = {key: before["metadata"][key] for key in _SERVER_FIELDS if key in before["metadata"]}
            after = {**wanted, "metadata": own | served}
            if kind.status:
                after.pop("status", None)
                if "status" in before:
                    after["status"] = before["status"]
        after |= {"apiVersion": kind.api_version, "kind": kind.kind}
        written = self._write(kind, before, after)
        if metadata_is_done(written):
            return self._remove(kind, written)
        return written

    def _write(self, kind: Kind, before: Json | None, after: Json) -> Json:
        after = kind.pruned(after)
        if kind.strategy is not None:
            after = kind.strategy(before, after)
        if before is not None and _content(before) == _content(after):
            same: Json = self._copy(before)
            return same
        if (fault := kind.fault(after)) is not None:
            raise invalid(f'{kind.kind} "{after["metadata"]["name"]}" is invalid: {fault}')
        self.admit(kind, before, after)
        metadata = dict(after["metadata"])
        if before is not None and _desired(before) != _desired(after):
            metadata["generation"] = before["metadata"]["generation"] + 1
        self._next()
        metadata["resourceVersion"] = str(self._version)
        after = {**after, "metadata": metadata}
        self._objects[kind.plural][metadata.get("namespace", ""), metadata["name"]] = after
        self._record(Change(self._version, kind, before, after, after))
        written: Json = self._copy(after)
        return written

    def _remove(self, kind: Kind, before: Json) -> Json:
        metadata = before["metadata"]
        self._next()
        before = self._objects[kind.plural].pop((metadata.get("namespace", ""), metadata["name"]))
        self._owners.pop(metadata["uid"], None)
        last = {**before, "metadata": {**before["metadata"], "resourceVersion": str(self._version)}}
        self._record(Change(self._version, kind, before, None, last))
        removed: Json = self._copy(last)
        return removed

    def _next(self) -> None:
        self._version += 1

    def _record(self, change: Change) -> None:
        self.history.append(change)
        if self._remembered is not None and len(self.history) > 2 * self._remembered:
            del self.history[: self._remembered]
            self._compacted = max(self._compacted, self._version - len(self.history))
        self._sorted.pop(change.kind.plural, None)
        self._changed.set()
        self._changed = asyncio.Event()
        for listener in self.listeners:
            listener(change)


def _name(entry: tuple[tuple[str, str], Json]) -> tuple[str, str]:
    return entry[0]


def metadata_is_done(item: Json) -> bool:
    """Return whether an object can be removed: its deletion was requested, it has no finalizer left, and it is no bound
    Pod.
    """
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
