"""Compact forms of what is kept of many objects: short texts and equal models once, models without what pydantic notes
beside them, what is seldom looked at as JSON.

Guarantees:
- What is returned equals what was given.
- Nothing is kept for good of what no object has any longer.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Hashable, Mapping
from typing import Any, TypeVar

import orjson
from pydantic import BaseModel

M = TypeVar("M", bound=BaseModel)
H = TypeVar("H", bound=Hashable)

_SHORT = 64
"""Characters of a text that is kept once for all objects: ids, names and words are in several of them each."""
_FLAT = frozenset({int, bool, float, type(None)})
"""Types of values that have no parts."""
_NOTHING_SET: set[str] = set()
_REMEMBERED = 8192
"""Models that are remembered, to be taken again where an equal one comes: some MB. Conditions of one second, and shares
of one size, are equal in many objects."""
_models: dict[Any, Any] = {}
_TEXTS = 1 << 16
"""Texts that are remembered where Python itself frees none: those of 10,000 SharePods, some 7 MB."""
_texts: dict[str, str] = {}
_BY_JSON = b" "
"""Beginning of a text that the fast library could not write, and would read otherwise."""


def remembered(text: str) -> str:
    """Return the text that is kept already of those that equal this one."""
    if len(_texts) >= _TEXTS:
        _texts.clear()
    return _texts.setdefault(text, text)


once_in_all: Callable[[str], str] = remembered if sys.version_info[:2] == (3, 12) else sys.intern
"""Returns the one text that is kept for all objects of those that equal this one. Python 3.12 never frees a text that
`sys.intern` has returned: each uid would stay."""


def shared(value: Any) -> Any:
    """Return a JSON value whose field names and short texts are kept once for all objects."""
    kind = type(value)
    if kind is str:
        return once_in_all(value) if len(value) <= _SHORT else value
    if kind is dict:
        return {once_in_all(key): item if type(item) in _FLAT else shared(item) for key, item in value.items()}
    return [shared(item) for item in value] if kind is list else value


def packed(value: Mapping[str, Any]) -> bytes:
    """Return a JSON object as text, by a fast library where it takes the object. Raises as `json.dumps` does."""
    try:
        return bytes(memoryview(orjson.dumps(value)))  # a copy: what orjson has made keeps the room that it was made in
    except TypeError:  # half a pair, a number of more than 64 bits, 250 levels
        text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
        return _BY_JSON + text.encode("utf-8", "surrogatepass")


def unpacked(text: bytes) -> dict[str, Any]:
    """Return the JSON object that was packed."""
    found: dict[str, Any] = json.loads(text) if text.startswith(_BY_JSON) else orjson.loads(text)
    return found


def without_notes(model: M) -> M:
    """Drop the sets in which pydantic notes which fields were given, of this model and of those in it: 200 bytes and
    more for each. Nothing here asks for them. Short texts are kept once for all objects."""
    object.__setattr__(model, "__pydantic_fields_set__", _NOTHING_SET)
    fields = model.__dict__
    for name, value in fields.items():
        kind = type(value)
        if kind in _FLAT:
            continue
        if kind is str:
            if len(value) <= _SHORT:
                fields[name] = once_in_all(value)
        elif kind is tuple:
            for item in value:
                if isinstance(item, BaseModel):
                    without_notes(item)
        elif isinstance(value, BaseModel):
            without_notes(value)
    return model


def with_parts_once(model: M) -> M:
    """Put one of those kept already in place of each model within this one that equals it."""
    fields = model.__dict__
    for name, value in fields.items():
        if isinstance(value, BaseModel):
            fields[name] = once(value)
        elif type(value) is tuple and value and isinstance(value[0], BaseModel):
            fields[name] = tuple([once(item) for item in value])
    return model


def once(model: H) -> H:
    """Return the model or value that is kept already of those that equal this one."""
    known: H | None = _models.get(model)
    if known is not None:
        return known
    if len(_models) >= _REMEMBERED:
        _models.clear()
    _models[model] = model
    return model
