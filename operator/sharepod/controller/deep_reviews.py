"""ConversionReviews of objects that nest too deep to be parsed: text in, text out. Pure.

Any user may store such an object: its managedFields, and some fields of a Pod, hold whatever somebody wrote there.

Guarantees:
- An object that nests too deep hinders nobody else: one that fails would hide all others of its list.
- Its managedFields are neither parsed nor answered: of the metadata of an answer an API server takes labels and
  annotations alone.
- An object whose other fields nest too deep passes as it is, but for its `apiVersion`.
- The work is linear in the length of the text, and a text of too many parts is refused.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final, TypeVar

from sharepod.api.objects import GROUP
from sharepod.api.versions.conversion_review import ReviewError, answer, failure, why_failed
from sharepod.api.versions.kind_versions import ConversionError, KindVersions, convert
from sharepod.kube.json_spans import elements, members

MOST_PARTS: Final = 1 << 16
"""Members and objects of a review that are looked at one by one: a tenth of a second."""

Json = dict[str, Any]
_Part = TypeVar("_Part")


class _PartLimit:
    """Counter of the parts of a review. Raises `ReviewError` for one too many."""

    def __init__(self) -> None:
        self._left = MOST_PARTS

    def of(self, parts: Iterable[_Part]) -> Iterator[_Part]:
        """Yield parts, and count them."""
        for part in parts:
            self._left -= 1
            if self._left < 0:
                raise ReviewError(f"the review nests deep and has more than {MOST_PARTS} parts; list fewer at a time")
            yield part


def deep_answer(text: str, kinds: Mapping[str, KindVersions]) -> tuple[str, str]:
    """Return the answer to a review, and why an object of it could not be converted; empty: all could.

    Raise `ReviewError` if it cannot be answered at all, `ValueError` if it is not JSON.
    """
    parts = _PartLimit()
    at = _begin_of(text, parts, 0, "request")
    request = _loaded(text, parts, at, but="objects")
    objects = _begin_of(text, parts, at, "objects")
    reviewed = answer({**_loaded(text, parts, 0, but="request"), "request": {**request, "objects": []}}, kinds)
    if why := why_failed(reviewed):
        return json.dumps(reviewed), why
    to = request["desiredAPIVersion"].rpartition("/")[2]
    try:
        converted = [_converted(text[begin:end], to, kinds, parts) for begin, end in parts.of(elements(text, objects))]
    except ConversionError as error:
        reviewed = failure(request["uid"], error)
        return json.dumps(reviewed), why_failed(reviewed)
    head = json.dumps(reviewed).removesuffix("[]}}")
    return f"{head}[{','.join(converted)}]}}}}", ""


def _converted(text: str, to: str, kinds: Mapping[str, KindVersions], parts: _PartLimit) -> str:
    """Return an object in the version `to`."""
    spans = {key: (begin, end) for key, begin, end in parts.of(members(text, 0))}
    metadata = _loaded(text, parts, spans["metadata"][0], but="managedFields") if "metadata" in spans else None
    try:
        body = {key: json.loads(text[slice(*span)]) for key, span in spans.items() if key != "metadata"}
        return json.dumps(convert({**body, "metadata": metadata}, to, kinds))
    except RecursionError:
        named: Json = {key: json.loads(text[slice(*spans[key])]) for key in ("apiVersion", "kind") if key in spans}
        convert({**named, "metadata": metadata}, to, kinds)  # raises where there is no such version
        begin, end = spans["apiVersion"]
        return f"{text[:begin]}{json.dumps(f'{GROUP}/{to}')}{text[end:]}"


def _loaded(text: str, parts: _PartLimit, at: int, *, but: str) -> Json:
    """Return the object at `at` without the member `but`."""
    return {key: json.loads(text[begin:end]) for key, begin, end in parts.of(members(text, at)) if key != but}


def _begin_of(text: str, parts: _PartLimit, at: int, name: str) -> int:
    """Return where the value of a member begins. Raise `ReviewError` where there is none."""
    found = next((begin for key, begin, _end in parts.of(members(text, at)) if key == name), None)
    if found is None:
        raise ReviewError(f"{name} is missing; only an API server asks here")
    return found
