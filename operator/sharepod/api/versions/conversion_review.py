"""Answers to ConversionReviews (apiextensions.k8s.io/v1): documents in, documents out. Pure.

Guarantees:
- The objects come back in their order, or none of them with the reason: a review has no answer for one object alone.
  An API server asks for each object by itself when it reads what is stored or takes what a user writes.
- A message names the object and says what to do; it is bounded, whatever the object holds.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sharepod.api.bounds import MAX_MESSAGE, clipped
from sharepod.api.objects import GROUP

from .kept_fields import Json
from .kind_versions import ConversionError, KindVersions, convert

REVIEW_VERSION = "apiextensions.k8s.io/v1"
REVIEW_KIND = "ConversionReview"


class ReviewError(ValueError):
    """Document that is no ConversionReview. The message says what is missing."""


def answer(review: Any, kinds: Mapping[str, KindVersions]) -> Json:
    """Return the review with its response.

    Raise `ReviewError` if it cannot be answered at all, `RecursionError` where an object nests too deep.
    """
    request = review.get("request") if isinstance(review, dict) else None
    if not isinstance(request, dict) or review.get("kind") != REVIEW_KIND or review.get("apiVersion") != REVIEW_VERSION:
        raise ReviewError(f"send a {REVIEW_KIND} of {REVIEW_VERSION} with a request; only an API server asks here")
    uid, desired, objects = (request.get(name) for name in ("uid", "desiredAPIVersion", "objects"))
    if not isinstance(uid, str) or not isinstance(desired, str) or not isinstance(objects, list):
        raise ReviewError("the request needs uid, desiredAPIVersion and objects")
    try:
        return _answer(uid, {"status": "Success"}, _converted(objects, desired, kinds))
    except ConversionError as error:
        return failure(uid, error)


def failure(uid: str, error: ConversionError) -> Json:
    """Return the answer to a review of which an object cannot be converted."""
    return _answer(uid, {"status": "Failure", "message": clipped(str(error), MAX_MESSAGE)}, [])


def why_failed(reviewed: Json) -> str:
    """Return why an object of an answered review could not be converted; empty: all could."""
    return str(reviewed["response"]["result"].get("message", ""))


def _answer(uid: str, result: Json, converted: list[Json]) -> Json:
    response = {"uid": uid, "result": result, "convertedObjects": converted}
    return {"apiVersion": REVIEW_VERSION, "kind": REVIEW_KIND, "response": response}


def _converted(objects: list[Any], desired: str, kinds: Mapping[str, KindVersions]) -> list[Json]:
    group, _slash, to = desired.rpartition("/")
    if group != GROUP:
        raise ConversionError(f"{clipped(desired, 128)} is not of the group {GROUP}; correct the CRD's conversion")
    if any(not isinstance(item, dict) for item in objects):
        raise ConversionError("an entry of objects is no object; an API server sends whole objects")
    return [convert(item, to, kinds) for item in objects]
