"""Compact forms of values kept for many objects. Equal short texts and models have one copy, models no records of set
fields; rarely read parts are JSON.

Guarantees:
- The compact form equals the original.
- A value is freed when no object has it any longer.
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
"""Longest text, in characters, of which one copy serves all objects: ids, names and enum values recur in several."""
_FLAT = frozenset({int, bool, float, type(None)})
"""Types of values that have no parts."""
_NOTHING_SET: set[str] = set()
_REMEMBERED = 8192
"""Models remembered for reuse by equal ones: a few MB. Conditions of one second and shares of one size recur in many
objects."""
_models: dict[Any, Any] = {}
_TEXTS = 1 << 16
"""Texts remembered where Python itself never frees interned texts: the texts of 10,000 SharePods, about 7 MB."""
_texts: dict[str, str] = {}
_BY_JSON = b" "
"""Beginning of a text that the fast library could not write, and would read otherwise."""


def remembered(text: str) -> str:
    """Return the existing copy of an equal text."""
    if len(_texts) >= _TEXTS:
        _texts.clear()
    return _texts.setdefault(text, text)


once_in_all: Callable[[str], str] = remembered if sys.version_info[:2] == (3, 12) else sys.intern
"""Returns the one copy of a text for all objects. Python 3.12 never frees a text that `sys.intern` has returned: each
uid would stay in memory."""


def shared(value: Any) -> Any:
    """Return a JSON value with one copy of field names and short texts for all objects."""
    kind = type(value)
    if kind is str:
        return once_in_all(value) if len(value) <= _SHORT else value
    if kind is dict:
        return {once_in_all(key): item if type(item) in _FLAT else shared(item) for key, item in value.items()}
    return [shared(item) for item in value] if kind is list else value


def packed(value: Mapping[str, Any]) -> bytes:
    """Return a JSON object as text, by a fast library where it takes the object. Raises as `json.dumps` does."""
    try:
        return bytes(memoryview(orjson.dumps(value)))  # a copy: orjson's result keeps its larger buffer
    except TypeError:  # half a pair, a number of more than 64 bits, 250 levels
        text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
        return _BY_JSON + text.encode("utf-8", "surrogatepass")


def unpacked(text: bytes) -> dict[str, Any]:
    """Return the JSON object that was packed."""
    found: dict[str, Any] = json.loads(text) if text.startswith(_BY_JSON) else orjson.loads(text)
    return found


def without_notes(model: M) -> M:
    """Drop pydantic's sets of explicitly set fields of a model and its parts: at least 200 bytes each, and unused here.
    Keep one copy of short texts for all objects."""
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
    """Replace each model within this one by an existing equal model."""
    fields = model.__dict__
    for name, value in fields.items():
        if isinstance(value, BaseModel):
            fields[name] = once(value)
        elif type(value) is tuple and value and isinstance(value[0], BaseModel):
            fields[name] = tuple([once(item) for item in value])
    return model


def once(model: H) -> H:
    """Return the existing equal model or value."""
    known: H | None = _models.get(model)
    if known is not None:
        return known
    if len(_models) >= _REMEMBERED:
        _models.clear()
    _models[model] = model
    return model
