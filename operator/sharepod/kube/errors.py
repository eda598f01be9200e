"""Errors of the API server, by kind, so that a caller can distinguish "refused" from "outcome unknown"."""

from __future__ import annotations

import json
from email.utils import parsedate_to_datetime

_ADMISSION = ("ValidatingAdmissionPolicy ", "admission webhook ", "failed calling webhook ")
"""Beginnings of Kubernetes' messages for a denial by a policy or a webhook, or for a webhook that could not be
called."""


_NOT_SERVED = ("the server could not find the requested resource", "404 page not found")
"""Beginnings of an API server's message for a path that it does not serve."""


class ApiError(Exception):
    """The API server did not carry out a call, or the outcome of the call is unknown."""

    def __init__(
        self,
        call: str,
        status: int,
        reason: str,
        message: str,
        *,
        retry_after_s: float | None = None,
        names_fields: bool = False,
    ) -> None:
        super().__init__(f"{call}: {status} {reason}: {message}")
        self.status = status
        """HTTP status; 0 without an answer."""
        self.reason = reason
        """Reason of the server's Status object; without an answer, the name of the exception."""
        self.message = message
        """Message of the server, verbatim."""
        self.retry_after_s = retry_after_s
        """Seconds after which the server asks for a retry; None if it does not."""
        self.names_fields = names_fields
        """The server has named fields of the object as the cause."""

    @property
    def was_not_begun(self) -> bool:
        """True if the server refused the call before processing it, and names a time for the retry. So a write had no
        effect."""
        return self.retry_after_s is not None and self.status in (429, 503)

    @property
    def was_not_answered(self) -> bool:
        """True if the call timed out: the server may have received and processed it."""
        return self.status == 0 and self.reason == "TimeoutError"

    @property
    def of_resource(self) -> bool:
        """True if the server does not serve the resource, so the error is not about one object. A CRD is not served in
        the first seconds after the API server's start, nor between its deletion and its creation. A 404 without a
        reason also counts: a load balancer sends such answers, and an API server gives a reason for each missing
        object."""
        return self.status == 404 and (not self.reason or self.message.startswith(_NOT_SERVED))

    @property
    def of_admission(self) -> bool:
        """True if a policy or a webhook has denied the call, or a webhook could not be called. Whatever the HTTP
        status, a retry may be allowed."""
        return any(words in self.message for words in _ADMISSION)

    @property
    def of_object(self) -> bool:
        """True if the server finds the object itself invalid, so that a retry would be refused too."""
        if self.of_admission:
            return False
        return (self.status == 422 and self.names_fields) or (self.status == 400 and self.reason == "BadRequest")


class UnauthorizedError(ApiError):
    """401: the credentials are missing, wrong, or have expired. They are read again before the next call."""


class ForbiddenError(ApiError):
    """403: RBAC, a quota or an admission policy."""


class NotFoundError(ApiError):
    """404: the object does not exist, or the resource is not served (`of_resource`)."""


class ConflictError(ApiError):
    """409: a precondition does not hold; usually the object has changed."""


class AlreadyExistsError(ApiError):
    """409 on create: an object of this name exists."""


class GoneError(ApiError):
    """410: the resourceVersion is too old to continue from."""


class InvalidError(ApiError):
    """400, 413, 415 or 422: the object or the patch is not valid, or a policy denies it (`of_object` distinguishes
    them)."""


class UnavailableError(ApiError):
    """No answer, or an answer that asks for a retry. The outcome of a write is unknown."""


class ErrorEventError(UnavailableError):
    """ERROR event of a watch, other than 410: the API server cannot continue the watch."""


class SilentError(UnavailableError):
    """The server has not ended a watch in time, so its connection counts as broken."""


LONGEST_MESSAGE = 1024
"""Characters of a server's message that are kept. The message may quote an object of a user, of any length."""


def refusal(call: str, status: int, answer: bytes, retry_after: str | None = None, date: str | None = None) -> ApiError:
    """Return the error for an answer with this HTTP status and these headers Retry-After and Date."""
    details: object = None
    causes: object = None
    try:
        body = json.loads(answer)
        reason, message = str(body.get("reason", "")), str(body.get("message", ""))
        details = body.get("details")
    except (ValueError, AttributeError, RecursionError):
        reason, message = "", answer[:LONGEST_MESSAGE].decode(errors="replace").strip()
    wait_s = _seconds(retry_after, date)
    if wait_s is None and isinstance(details, dict) and details.get("retryAfterSeconds"):
        wait_s = _seconds(str(details["retryAfterSeconds"]), None)
    if isinstance(details, dict):
        causes = details.get("causes")
    names_fields = isinstance(causes, list) and any(isinstance(cause, dict) and cause.get("field") for cause in causes)
    kinds: dict[int, type[ApiError]] = {
        400: InvalidError,
        401: UnauthorizedError,
        403: ForbiddenError,
        404: NotFoundError,
        409: AlreadyExistsError if reason == "AlreadyExists" else ConflictError,
        410: GoneError,
        413: InvalidError,
        415: InvalidError,
        422: InvalidError,
    }
    kind = kinds.get(status, UnavailableError)
    return kind(call, status, reason, message[:LONGEST_MESSAGE], retry_after_s=wait_s, names_fields=names_fields)


def _seconds(retry_after: str | None, date: str | None) -> float | None:
    """Return the seconds of a header Retry-After. A date there is compared with `date`, the server's own time of the
    answer, so this machine's clock does not matter. None if either cannot be read."""
    if retry_after is None:
        return None
    if retry_after.isdecimal():
        return float(retry_after) if len(retry_after) < 6 else None
    try:
        return max(0.0, (parsedate_to_datetime(retry_after) - parsedate_to_datetime(date or "")).total_seconds())
    except (TypeError, ValueError, OverflowError):  # not a date, or a date without a time zone
        return None
