"""Compact forms of values that are kept for many objects. Equal short texts, and equal models, are one Python object.
Models drop `model_fields_set`, pydantic's record of the fields that were given. Rarely read parts are JSON text.

Guarantees:
- The compact form equals the original.
- A value is freed when no object refers to it.
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
"""Longest text, in characters, for which equal texts share one copy. Ids, names and enum values occur in many
objects."""
_FLAT = frozenset({int, bool, float, type(None)})
"""Types of values that have no parts."""
_NOTHING_SET: set[str] = set()
_REMEMBERED = 8192
"""Number of models that are remembered for sharing: a few MB. Conditions of the same second, and shares of the same
size, occur in many objects."""
_models: dict[Any, Any] = {}
_TEXTS = 1 << 16
"""Number of texts that are remembered on Python versions that never free interned texts: enough for 10,000 SharePods,
about 7 MB."""
_texts: dict[str, str] = {}
_BY_JSON = b" "
"""First byte of a JSON text that the standard library has written and must read, because orjson cannot."""


def remembered(text: str) -> str:
    """Return the remembered text that equals `text`, so that equal texts share memory. Without one, remember `text`."""
    if len(_texts) >= _TEXTS:
        _texts.clear()
    return _texts.setdefault(text, text)


once_in_all: Callable[[str], str] = remembered if sys.version_info[:2] == (3, 12) else sys.intern
"""Function that returns one Python object for all equal texts: `sys.intern`. Exception: Python 3.12 never frees an
interned text, so every uid would stay in memory."""


def shared(value: Any) -> Any:
    """Return a copy of a JSON value. Field names and short texts that are equal are one Python object in all such
    copies (`once_in_all`)."""
    kind = type(value)
    if kind is str:
        return once_in_all(value) if len(value) <= _SHORT else value
    if kind is dict:
        return {once_in_all(key): item if type(item) in _FLAT else shared(item) for key, item in value.items()}
    return [shared(item) for item in value] if kind is list else value


def packed(value: Mapping[str, Any]) -> bytes:
    """Return a JSON object as text. orjson writes it, or the standard library if orjson refuses it. Raises the errors
    of `json.dumps`.
    """
    try:
        # a copy, because orjson's result keeps its larger buffer in memory
        return bytes(memoryview(orjson.dumps(value)))
    except TypeError:  # orjson refuses half a surrogate pair, a number of more than 64 bits, and more than 250 levels
        text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
        return _BY_JSON + text.encode("utf-8", "surrogatepass")


def unpacked(text: bytes) -> dict[str, Any]:
    """Return the JSON object that `packed` has written."""
    found: dict[str, Any] = json.loads(text) if text.startswith(_BY_JSON) else orjson.loads(text)
    return found


def without_notes(model: M) -> M:
    """Drop pydantic's record of the given fields in a model and its parts, and return the model. The record is unused
    here and takes at least 200 bytes each. Short texts are replaced by their shared copies."""
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
    """Replace each inner model of a model by a remembered equal model; return the model."""
    fields = model.__dict__
    for name, value in fields.items():
        if isinstance(value, BaseModel):
            fields[name] = once(value)
        elif type(value) is tuple and value and isinstance(value[0], BaseModel):
            fields[name] = tuple([once(item) for item in value])
    return model


def once(model: H) -> H:
    """Return the remembered model that equals this one, so that equal models share memory. Without one, remember this
    one."""
    known: H | None = _models.get(model)
    if known is not None:
        return known
    if len(_models) >= _REMEMBERED:
        _models.clear()
    _models[model] = model
    return model
