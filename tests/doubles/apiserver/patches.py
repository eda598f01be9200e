"""The three patches of Kubernetes: JSON Patch (RFC 6902), merge patch (RFC 7386), server-side apply. Pure.

Server-side apply records the manager of each leaf: each field of a map, and of each entry in a list of objects with a
`type` (conditions). Every other list is one leaf.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any, TypeAlias

from .copies import copied
from .errors import bad_request, conflict, invalid
from .kinds import Json

Path: TypeAlias = tuple[str, ...]

_REJECTED = "the server rejected our request due to an error in our request"


def json_patch(item: Json, operations: list[Json]) -> Json:
    """Apply all operations of a JSON Patch, or none. Raises `Refused` (422) if a `test` fails or a path does not
    exist."""
    root = {"": copied(item)}
    for operation in operations:
        kind = operation.get("op")
        try:
            if kind in ("copy", "move"):
                value = _read(root, operation["from"])
                if kind == "move":
                    _remove(root, operation["from"])
                _add(root, operation["path"], copied(value))
            elif kind == "add":
                _add(root, operation["path"], copied(operation["value"]))
            elif kind == "remove":
                _remove(root, operation["path"])
            elif kind == "replace":
                _read(root, operation["path"])
                _remove(root, operation["path"])
                _add(root, operation["path"], copied(operation["value"]))
            elif kind == "test":
                if _read(root, operation["path"]) != operation["value"]:
                    raise invalid(f"{_REJECTED}: testing value {operation['path']} failed")
            else:
                raise bad_request(f"no such operation: {kind!r}")
        except (KeyError, IndexError, ValueError, TypeError):
            raise invalid(f"{_REJECTED}: {kind} {operation.get('path')}: no such path") from None
    patched: Json = root[""]
    return patched


def _split(pointer: str) -> list[str]:
    if pointer and not pointer.startswith("/"):
        raise ValueError(pointer)
    return [part.replace("~1", "/").replace("~0", "~") for part in pointer.split("/")]


def _parent(root: Json, pointer: str) -> tuple[Any, str]:
    *parents, last = _split(pointer)
    found: Any = root
    for part in parents:
        found = found[_index(found, part)] if isinstance(found, list) else found[part]
    return found, last


def _index(items: list[Any], part: str, *, insert: bool = False) -> int:
    if insert and part == "-":
        return len(items)
    index = int(part)
    if not 0 <= index < len(items) + insert:
        raise IndexError(part)
    return index


def _read(root: Json, pointer: str) -> Any:
    parent, last = _parent(root, pointer)
    return parent[_index(parent, last)] if isinstance(parent, list) else parent[last]


def _add(root: Json, pointer: str, value: Any) -> None:
    parent, last = _parent(root, pointer)
    if isinstance(parent, list):
        parent.insert(_index(parent, last, insert=True), value)
    else:
        parent[last] = value


def _remove(root: Json, pointer: str) -> None:
    parent, last = _parent(root, pointer)
    del parent[_index(parent, last) if isinstance(parent, list) else last]


def merge_patch(item: Any, patch: Any) -> Any:
    """Apply a merge patch (RFC 7386): maps are merged, null removes a field, and every other value replaces."""
    if not isinstance(patch, dict):
        return copied(patch)
    merged = dict(item) if isinstance(item, dict) else {}
    for key, value in patch.items():
        if value is None:
            merged.pop(key, None)
        else:
            merged[key] = merge_patch(merged.get(key), value)
    return merged


def apply(item: Json, body: Json, owners: dict[Path, str], manager: str, *, force: bool) -> Json:
    """Apply `body` as `manager` by server-side apply. `owners` (by leaf: the manager) is updated.

    Fields that the manager set before, and that `body` lacks, are removed. Raises `Refused` (409) if another manager
    owns a field with another value, unless `force`.
    """
    wanted = dict(_leaves(body, ()))
    result: Json = copied(item)
    foreign = [
        path
        for path, value in wanted.items()
        if owners.get(path, manager) != manager and _leaf(result, path) not in (None, value)
    ]
    if foreign and not force:
        fields = ", ".join(".".join(path) for path in foreign)
        raise conflict("object", "", f"Apply failed: conflict with another manager: {fields}")
    dropped = [path for path, owner in owners.items() if owner == manager and path not in wanted]
    # Paths find an entry of a list by its `type`. So the other fields of an entry are removed first.
    for path in sorted(dropped, key=lambda path: path[-1] == "type"):
        _drop_leaf(result, path)
        del owners[path]
    for path, value in wanted.items():
        _set_leaf(result, path, value)
        owners[path] = manager
    return result


def _keyed(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(item, dict) and "type" in item for item in value)


def _leaves(value: Any, path: Path) -> Iterator[tuple[Path, Any]]:
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _leaves(item, (*path, key))
    elif _keyed(value):
        for item in value:
            yield from _leaves(item, (*path, f"[{item['type']}]"))
    else:
        yield path, value


def _child(parent: Any, part: str) -> Any:
    if part.startswith("["):
        return next((item for item in parent or () if item.get("type") == part[1:-1]), None)
    return parent.get(part) if isinstance(parent, dict) else None


def _leaf(item: Any, path: Path) -> Any:
    for part in path:
        item = _child(item, part)
    return item


def _set_leaf(item: Any, path: Path, value: Any) -> None:
    for here, after in itertools.pairwise(path):
        found = _child(item, here)
        if found is None:
            found = [] if after.startswith("[") else {}
            if here.startswith("["):
                found = {"type": here[1:-1]}
                item.append(found)
            else:
                item[here] = found
        item = found
    item[path[-1]] = copied(value)


def _drop_leaf(item: Any, path: Path) -> None:
    chain = [item]
    for part in path[:-1]:
        chain.append(_child(chain[-1], part))
        if chain[-1] is None:
            return
    chain[-1].pop(path[-1], None)
    for parent, part, child in reversed(list(zip(chain[:-1], path[:-1], chain[1:], strict=True))):
        if child in ({}, []):
            if part.startswith("["):
                parent.remove(child)
            else:
                del parent[part]
