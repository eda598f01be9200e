"""User documents with arbitrary values in any place, and the properties of their refusals."""

from __future__ import annotations

import copy
from typing import Any

from sharepod.api.bounds import MAX_FIELD, MAX_MESSAGE
from sharepod.api.sharepod import SpecError


def with_value(document: Any, value: Any, place: int) -> Any:
    """Return a copy of the document in which `value` replaces one value at any depth. `place` numbers the values,
    modulo their count."""
    changed = copy.deepcopy(document)
    *parents, last = (paths := _paths(changed))[place % len(paths)]
    inner = changed
    for key in parents:
        inner = inner[key]
    inner[last] = value
    return changed


def assert_fits_an_event(refused: SpecError) -> None:
    """Check that field and message of a refusal are no longer than an Event allows."""
    assert len(refused.field) <= MAX_FIELD
    assert len(refused.message) <= MAX_MESSAGE


def _paths(value: Any, above: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    found = [above] if above else []
    entries = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in entries:
        found += _paths(item, (*above, key))
    return found
