"""Label and field selectors of lists and watches. Pure."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any, TypeAlias

from .errors import bad_request
from .kinds import Json

Test: TypeAlias = Callable[[Json], bool]


def matches(item: Json, labels: str, fields: str) -> bool:
    """Return whether an object matches the selectors. Raises `Refused` (400) for a form of selector that is not
    supported.
    """
    return all(test(item) for test in _tests(labels, fields)) if labels or fields else True


@functools.lru_cache(maxsize=256)
def _tests(labels: str, fields: str) -> tuple[Test, ...]:
    return (*map(_label, _terms(labels)), *map(_field, _terms(fields)))


def _terms(selector: str) -> list[str]:
    return [term for term in re.split(r",(?![^(]*\))", selector) if term]


def _labels_of(item: Json) -> Json:
    return item["metadata"].get("labels") or {}


def _label(term: str) -> Test:
    if found := re.fullmatch(r"(\S+) (in|notin) \(([^)]*)\)", term):
        key, listed, negated = found[1], {value.strip() for value in found[3].split(",")}, found[2] == "notin"
        return lambda item: (_labels_of(item).get(key) in listed) != negated
    if found := re.fullmatch(r"([^=!]+)(!=|==?)([^=]*)", term):
        key, value, negated = found[1], found[3], found[2] == "!="
        return lambda item: (_labels_of(item).get(key) == value) != negated
    if re.fullmatch(r"!?[^=!]+", term):
        key, negated = term.lstrip("!"), term.startswith("!")
        return lambda item: (key in _labels_of(item)) != negated
    raise bad_request(f"unable to parse requirement: {term!r}")


def _field(term: str) -> Test:
    found = re.fullmatch(r"([^=!]+)(!=|==?)([^=]*)", term)
    if found is None:
        raise bad_request(f"unable to parse field selector: {term!r}")
    parts, wanted, negated = found[1].split("."), found[3], found[2] == "!="

    def test(item: Json) -> bool:
        value: Any = item
        for part in parts:
            value = value.get(part) if isinstance(value, dict) else None
        return (str(value or "") == wanted) != negated

    return test
