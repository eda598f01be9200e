"""Refusals of the double, with the messages of a real API server."""

from __future__ import annotations

from typing import Any, TypeAlias

Json: TypeAlias = dict[str, Any]


class Refused(Exception):  # noqa: N818 - an answer, not a fault of the program
    """Request that fails and is answered with a Status object."""

    def __init__(
        self, code: int, reason: str, message: str, *, retry_after: int | None = None, fields: tuple[str, ...] = ()
    ) -> None:
        super().__init__(f"{code} {reason}: {message}")
        self.code = code
        self.reason = reason
        self.message = message
        self.retry_after = retry_after
        self.fields = fields
        """Fields of the object that the answer names as the cause."""

    def status(self) -> Json:
        """Return the body of the answer: a Kubernetes Status object."""
        return {
            "kind": "Status",
            "apiVersion": "v1",
            "status": "Failure",
            "code": self.code,
            "reason": self.reason,
            "message": self.message,
            **({"details": {"causes": [{"field": name} for name in self.fields]}} if self.fields else {}),
        }


def not_found(plural: str, name: str) -> Refused:
    return Refused(404, "NotFound", f'{plural} "{name}" not found')


def already_exists(plural: str, name: str) -> Refused:
    return Refused(409, "AlreadyExists", f'{plural} "{name}" already exists')


def conflict(plural: str, name: str, why: str) -> Refused:
    return Refused(409, "Conflict", f'Operation cannot be fulfilled on {plural} "{name}": {why}')


def invalid(message: str) -> Refused:
    return Refused(422, "Invalid", message)


def bad_request(message: str) -> Refused:
    return Refused(400, "BadRequest", message)


def expired(message: str) -> Refused:
    return Refused(410, "Expired", message)
