"""Compact forms of what is kept of many objects: short texts and equal models once, models without what pydantic notes
beside them, what is seldom looked at as JSON.

Guarantees: what is returned equals what was given.
"""

from __future__ import annotations

import json
from collections.abc import Hashable, Mapping
from sys import intern
from typing import Any, TypeVar

import orjson
from pydantic import BaseModel

M = TypeVar("M", bound=BaseModel)
H = TypeVar("H", bound=Hashable)

_SHORT = 64
"""Characters of a text that is kept once for all objects: ids, names and words are in several of them each."""
_NOTHING_SET: set[str] = set()
_REMEMBERED = 8192
"""Models that are remembered, to be taken again where an equal one comes: some MB. Conditions of one second, and shares
of one size, are equal in many objects."""
_models: dict[Any, Any] = {}


def shared(value: Any) -> Any:
    """Return a JSON value whose field names and short texts are kept once for all objects."""
    kind = type(value)
    if kind is str:
        return intern(value) if len(value) <= _SHORT else value
    if kind is dict:
        return {intern(key): shared(item) for key, item in value.items()}
    return [shared(item) for item in value] if kind is list else value


def packed(value: Mapping[str, Any]) -> bytes:
    """Return a JSON object as text, by a fast library where it takes the object. Raises as `json.dumps` does."""
    try:
        return bytes(memoryview(orjson.dumps(value)))  # a copy: what orjson has made keeps the room that it was made in
    except TypeError:  # half a pair, a number of more than 64 bits, 250 levels
        return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "surrogatepass")


def unpacked(text: bytes) -> dict[str, Any]:
    """Return the JSON object that was packed."""
    try:
        found: dict[str, Any] = orjson.loads(text)
    except orjson.JSONDecodeError:
        found = json.loads(text)
    return found


def without_notes(model: M) -> M:
    """Drop the sets in which pydantic notes which fields were given, of this model and of those in it: 200 bytes and
    more for each. Nothing here asks for them. Short texts are kept once for all objects."""
    object.__setattr__(model, "__pydantic_fields_set__", _NOTHING_SET)
    fields = model.__dict__
    for name, value in fields.items():
        kind = type(value)
        if value is None or kind is int:
            continue
        if kind is str:
            if len(value) <= _SHORT:
                fields[name] = intern(value)
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
