"""Entries of an object's lists, read one by one into models.

Guarantees:
- An unreadable entry does not affect other entries, and its id is kept in `unreadable`.
- An entry that has not changed since the version before is reused. So reading takes time in proportion to the change.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from pydantic import ValidationError

from sharepod.api.bounds import MAX_NAME, clipped
from sharepod.api.objects import Model
from sharepod.setting_faults import first_fault

from .compact import shared, without_notes

A = TypeVar("A", bound=Model)

_KEYS = ("id", "uuid", "type", "series")
"""Fields that identify an entry of SharePod's lists: tenants and plugin holders, GPUs, conditions, consumption."""


@dataclass(frozen=True, slots=True)
class Entries(Generic[A]):
    """Entries of one list of an API object. `read`: (raw form, model) of each readable entry, by key. `unreadable`: ids
    of the other entries."""

    models: tuple[A, ...] = ()
    read: Mapping[str, tuple[Any, A]] = field(default_factory=dict)
    unreadable: frozenset[str] = frozenset()


def entries(
    kind: type[A], raw: Mapping[str, Any], name: str, most: int, faults: list[str], before: Entries[A]
) -> Entries[A]:
    """Read the list `name` of an object.

    Args:
        kind: Model of an entry.
        raw: The object.
        name: Field of the list.
        most: Largest number of entries that are read.
        faults: The errors of unreadable entries are appended to this list.
        before: The list as read from an earlier version of the object. Entries that have not changed are taken from it
            and not parsed again.
    """
    listed = raw.get(name) or ()
    if not isinstance(listed, list | tuple):
        faults.append(f"{name}: is not a list")
        return Entries()
    models: list[A] = []
    read: dict[str, tuple[Any, A]] = {}
    unreadable: set[str] = set()
    former = list(before.read.items())
    for number, entry in enumerate(listed[:most]):
        try:
            known: tuple[Any, A] | None
            # usually the entry is at the same position as in the version before, so no look-up by key is needed
            if number < len(former) and former[number][1][0] == entry:
                key, known = former[number]
            else:
                key = _key(entry)
                known = before.read.get(key)
                if known is None or known[0] != entry:
                    kept = shared(entry)
                    known = (kept, without_notes(kind.model_validate(kept, extra="ignore")))
        except Exception as error:
            faults.append(f"{name}[{number}].{_first(error)}")
            unreadable.add(_id(entry))
            continue
        read[key] = known
        models.append(known[1])
    if len(listed) > most:
        faults.append(f"{name}: has {len(listed)} entries; at most {most} are read")
        unreadable.update(map(_id, listed[most : 10 * most]))
    return Entries(tuple(models), read, frozenset(unreadable))


def with_lists(kind: type[A], raw: Mapping[str, Any], faults: list[str], **lists: object) -> A:
    """Read an object into a model. `lists`: its lists, by the model's field, which are already read."""
    rest = {key: value for key, value in raw.items() if key not in lists}
    try:
        found = kind.model_validate(rest, extra="ignore")
    except Exception as error:
        faults.append(_first(error))
        found = kind()
    return found.model_copy(update=lists)


def _first(error: Exception) -> str:
    if not isinstance(error, ValidationError):
        return clipped(f"{type(error).__name__}: {error}")
    return first_fault(error)


def _key(entry: object) -> str:
    if isinstance(entry, dict):
        for name in _KEYS:
            if isinstance(value := entry.get(name), str):
                return value[:MAX_NAME]
    return ""


def _id(entry: object) -> str:
    return str(entry.get("id") or "")[:MAX_NAME] if isinstance(entry, Mapping) else ""
