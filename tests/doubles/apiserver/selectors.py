"""Label and field selectors of lists and watches. Pure."""

from __future__ import annotations

import re
from typing import Any

from .errors import bad_request
from .kinds import Json


def matches(item: Json, labels: str, fields: str) -> bool:
    """Return whether an object is selected. Raises `Refused` (400) for a selector of a form that is not served."""
    own = item["metadata"].get("labels") or {}
    return all(_label(own, term) for term in _terms(labels)) and all(_field(item, term) for term in _terms(fields))


def _terms(selector: str) -> list[str]:
    return [term for term in re.split(r",(?![^(]*\))", selector) if term]


def _label(own: Json, term: str) -> bool:
    if found := re.fullmatch(r"(\S+) (in|notin) \(([^)]*)\)", term):
        listed = own.get(found[1]) in [value.strip() for value in found[3].split(",")]
        return listed == (found[2] == "in")
    if found := re.fullmatch(r"([^=!]+)!=([^=]*)", term):
        return bool(own.get(found[1]) != found[2])
    if found := re.fullmatch(r"([^=!]+)==?([^=]*)", term):
        return bool(own.get(found[1]) == found[2])
    if re.fullmatch(r"!?[^=!]+", term):
        return (term.lstrip("!") in own) != term.startswith("!")
    raise bad_request(f"unable to parse requirement: {term!r}")


def _field(item: Json, term: str) -> bool:
    found = re.fullmatch(r"([^=!]+)(!=|==?)([^=]*)", term)
    if found is None:
        raise bad_request(f"unable to parse field selector: {term!r}")
    value: Any = item
    for part in found[1].split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return (str(value or "") == found[3]) == (found[2] != "!=")
