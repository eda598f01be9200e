"""Fields that a version cannot say: the difference between two bodies as JSON, and its way back into a body.

A body is an object without `apiVersion`, `kind` and `metadata`. An entry names a place by keys of objects; an entry of
a list is named by its key (`{"id": "..."}`), as the schema's lists are keyed, so that it is found where rows were added
or removed meanwhile. Pure.

Guarantees:
- `restored(have, entries(have, want))` is `want`, where `accepts` accepts it.
- Entries that were written by somebody else, or are not valid, are left out; they cost a bounded number of tries.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

Json: TypeAlias = dict[str, Any]

_LIST_KEYS = ("id", "uuid", "uid", "type", "name")
"""Fields by which entries of lists are told apart; those of our schemas' keyed lists and of a Pod's."""
_TRIES = 64
"""Most attempts at restoring entries, of which some are not accepted: about five of 250 can be found for that, and
forged ones cost no more."""


def entries(have: Json, want: Json) -> list[Json]:
    """Return what makes `want` of `have`: `{"at": place, "value": ...}`, without a value where `want` has none."""
    return list(_entries(have, want, []))


def same(one: Any, other: Any) -> bool:
    """Return whether two values are the same JSON: unlike in Python, 1 is neither 1.0 nor true."""
    return next(_entries(one, other, []), None) is None


def copied(value: Any) -> Any:
    """Return a copy of a JSON value that shares nothing with it."""
    if isinstance(value, dict):
        return {key: copied(item) for key, item in value.items()}
    return [copied(item) for item in value] if isinstance(value, list) else value


def restored(have: Json, kept: Sequence[Json], accepts: Callable[[Json], bool]) -> Json:
    """Return `have` with those of the kept entries that `accepts` accepts: all of them at once, or as many as can be
    found by halves within `_TRIES`."""
    tries = 0

    def try_all(body: Json, some: Sequence[Json]) -> Json:
        nonlocal tries
        tries += 1
        if not some or tries > _TRIES:
            return body
        candidate: Json = copied(body)
        for entry in some:
            _put(candidate, entry)
        if accepts(candidate):
            return candidate
        if len(some) == 1:
            return body
        half = len(some) // 2
        return try_all(try_all(body, some[:half]), some[half:])

    return try_all(have, kept)


def written(kept: Sequence[Json]) -> str:
    """Return entries as the text of an annotation."""
    return json.dumps(kept, separators=(",", ":"), ensure_ascii=False)


def read(text: object) -> list[Json]:
    """Return the entries that a text holds; none of them if it is not such a text."""
    try:
        kept = json.loads(text) if isinstance(text, str) else []
    except (ValueError, RecursionError):
        return []
    return [entry for entry in kept if _is_entry(entry)] if isinstance(kept, list) else []


def _is_entry(entry: object) -> bool:
    if not isinstance(entry, dict) or not isinstance(entry.get("at"), list) or not entry["at"]:
        return False
    return all(isinstance(step, str) or _key_of(step) is not None for step in entry["at"])


def _key_of(step: object) -> tuple[str, str] | None:
    """Return key and value of a step into a list; None if it is none."""
    if isinstance(step, dict) and len(step) == 1:
        ((key, value),) = step.items()
        if key in _LIST_KEYS and isinstance(value, str):
            return key, value
    return None


def _entries(have: Any, want: Any, at: list[Any]) -> Iterator[Json]:
    if isinstance(have, dict) and isinstance(want, dict):
        for name in sorted(have.keys() | want.keys()):  # in an order of its own: the text is always the same
            if name not in want:
                yield {"at": [*at, name]}
            elif name not in have:
                yield {"at": [*at, name], "value": want[name]}
            else:
                yield from _entries(have[name], want[name], [*at, name])
    elif isinstance(have, list) and isinstance(want, list) and (key := _shared_key(have, want)) is not None:
        for old, new in zip(have, want, strict=True):
            yield from _entries(old, new, [*at, {key: new[key]}])
    elif type(have) is not type(want) or not _equal(have, want):
        yield {"at": at, "value": want}


def _equal(have: Any, want: Any) -> bool:
    """Return whether two values of one type that are not both objects are the same JSON."""
    if not isinstance(have, list):
        return bool(have == want)
    return len(have) == len(want) and all(same(old, new) for old, new in zip(have, want, strict=True))


def _shared_key(have: list[Any], want: list[Any]) -> str | None:
    """Return the field by which both lists have the same entries in the same order; None if there is none."""
    for key in _LIST_KEYS:
        names = _names(have, key)
        if names and names == _names(want, key):
            return key
    return None


def _names(items: list[Any], key: str) -> list[str] | None:
    """Return the values of a field that tells all entries apart; None if it does not."""
    names = [item.get(key) if isinstance(item, dict) else None for item in items]
    told_apart = all(isinstance(name, str) for name in names) and len(set(names)) == len(names)
    return [str(name) for name in names] if told_apart else None


def _put(body: Json, entry: Json) -> None:
    """Put an entry's value into a body, if its place is still there."""
    *way, last = entry["at"]
    inside: Any = body
    for step in way:
        inside = _inside(inside, step)
    if not isinstance(inside, dict) or not isinstance(last, str):
        return
    if "value" in entry:
        inside[last] = copied(entry["value"])
    else:
        inside.pop(last, None)


def _inside(value: Any, step: Any) -> Any:
    """Return what a step of a place leads to; None if it leads nowhere."""
    if isinstance(step, str):
        return value.get(step) if isinstance(value, dict) else None
    key, name = _key_of(step) or ("", "")
    items = value if isinstance(value, list) else []
    return next((item for item in items if isinstance(item, dict) and item.get(key) == name), None)
