"""Errors of the API server, by kind: a caller can tell "refused" from "outcome unknown"."""

from __future__ import annotations

import json


class ApiError(Exception):
    """Call that the API server did not carry out, or whose outcome is unknown."""

    def __init__(self, call: str, status: int, reason: str, message: str) -> None:
        super().__init__(f"{call}: {status} {reason}: {message}")
        self.status = status
        """HTTP status; 0 without an answer."""
        self.reason = reason
        """Reason of the server's Status object; without an answer, the name of the exception."""
        self.message = message
        """The server's own words."""


class ForbiddenError(ApiError):
    """403: RBAC, a quota or an admission policy."""


class NotFoundError(ApiError):
    """404."""


class ConflictError(ApiError):
    """409: a precondition does not hold; usually the object has changed."""


class AlreadyExistsError(ApiError):
    """409 on create."""


class GoneError(ApiError):
    """410: the resourceVersion is too old to continue from."""


class InvalidError(ApiError):
    """400, 413, 415 or 422: the object or the patch is not valid, and would not be if sent again."""


class UnavailableError(ApiError):
    """No answer, or one that says to try again later. The outcome of a write is unknown."""


def refusal(call: str, status: int, answer: bytes) -> ApiError:
    """Return the error for an answer with this HTTP status."""
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
