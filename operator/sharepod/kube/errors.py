"""What can come back from the API server instead of an answer, so that a caller can tell "refused" from "outcome
unknown"."""

from __future__ import annotations

import json


class ApiError(Exception):
    """The API server refused. `status` is the HTTP status, `message` the server's own words."""

    def __init__(self, call: str, status: int, reason: str, message: str) -> None:
        super().__init__(f"{call}: {status} {reason}: {message}")
        self.status = status
        self.reason = reason
        self.message = message


class ForbiddenError(ApiError):
    """403: RBAC, a quota or an admission policy."""


class NotFoundError(ApiError):
    """404."""


class ConflictError(ApiError):
    """409: a precondition does not hold, the object has changed."""


class AlreadyExistsError(ApiError):
    """409 on create."""


class GoneError(ApiError):
    """410: the resource version is too old to go on from."""


class InvalidError(ApiError):
    """400 or 422: the object or the patch is not accepted, and would not be if sent again."""


class UnavailableError(ApiError):
    """No answer, or one that says try again later. What became of a write is unknown."""


def refusal(call: str, status: int, answer: bytes) -> ApiError:
    """The error for an answer with this HTTP status."""
    try:
        said = json.loads(answer)
        reason, message = str(said.get("reason", "")), str(said.get("message", ""))
    except (ValueError, AttributeError):
        reason, message = "", answer[:500].decode(errors="replace").strip()
    kinds: dict[int, type[ApiError]] = {
        400: InvalidError,
        403: ForbiddenError,
        404: NotFoundError,
        409: AlreadyExistsError if reason == "AlreadyExists" else ConflictError,
        410: GoneError,
        413: InvalidError,
        415: InvalidError,
        422: InvalidError,
    }
    return kinds.get(status, UnavailableError)(call, status, reason, message)
