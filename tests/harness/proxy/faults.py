"""Faults of a connection to the API server, and the rules that select the affected calls.

Guarantees: nothing is random. A rule applies to its matching calls in their order, as often as `times` states.
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

from .calls import Call


class Fault:
    """Fault of one call."""


@dataclass(frozen=True, slots=True)
class Refuse(Fault):
    """Answer by the proxy instead of the API server, which does not get the call. `retry_after`: seconds of the
    header."""

    code: int
    reason: str = ""
    message: str = "bad weather"
    retry_after: int | None = None


@dataclass(frozen=True, slots=True)
class ErrorEvent(Fault):
    """ERROR event as the first and last event of a watch that was answered with 200."""

    code: int
    reason: str = ""
    message: str = "bad weather"

    @property
    def line(self) -> bytes:
        """Return the event as a line of the watch."""
        return json.dumps({"type": "ERROR", "object": status(self.code, self.reason, self.message)}).encode() + b"\n"


@dataclass(frozen=True, slots=True)
class Words(Fault):
    """Last bytes of a watch, with any content: lines that are no events, or events that a real API server does not
    send."""

    line: bytes


@dataclass(frozen=True, slots=True)
class Reset(Fault):
    """Connection reset before the API server sees the call."""


@dataclass(frozen=True, slots=True)
class LoseAnswer(Fault):
    """Connection reset once the API server has answered: the client never learns the outcome of its call."""


@dataclass(frozen=True, slots=True)
class Mute(Fault):
    """Connection that stays open and delivers no byte of an answer. The API server does not get the call."""


@dataclass(frozen=True, slots=True)
class Slow(Fault):
    """Answer that is delivered at `bytes_per_s`."""

    bytes_per_s: int


class Hold(Fault):
    """Answer that the API server gives at once, and that the client gets after `release`, which any thread may call.

    `held` is set while at least one answer is held back.
    """

    def __init__(self) -> None:
        self.held = threading.Event()
        self._lock = threading.Lock()
        self._released = False
        self._waiting: list[Callable[[], object]] = []

    def release(self) -> None:
        """Deliver all answers, earlier and later ones, to the client."""
        with self._lock:
            self._released = True
            waiting, self._waiting = self._waiting, []
        for go_on in waiting:
            with contextlib.suppress(RuntimeError):  # the proxy has ended
                go_on()

    def when_released(self, go_on: Callable[[], object]) -> None:
        """Call `go_on` once answers may be delivered; at once if they may be already."""
        with self._lock:
            if not self._released:
                self._waiting.append(go_on)
                return
        go_on()


@dataclass(slots=True, eq=False)
class Rule:
    """Rule: `fault` affects the first `times` matching calls (None: all).

    `verbs`, `resources`: empty means all. `where`: a further condition.
    """

    fault: Fault
    verbs: Collection[str] = ()
    resources: Collection[str] = ()
    times: int | None = None
    where: Callable[[Call], bool] = field(default=lambda _call: True)
    met: int = 0
    """Number of calls that met the fault."""

    def matches(self, call: Call) -> bool:
        """Return whether the fault affects the call: the conditions hold, and fewer than `times` calls were
        affected."""
        return (
            (self.times is None or self.met < self.times)
            and (not self.verbs or call.verb in self.verbs)
            and (not self.resources or call.resource in self.resources)
            and self.where(call)
        )


def status(code: int, reason: str, message: str) -> dict[str, Any]:
    """Return a Status object of a failed call."""
    return {
        "kind": "Status",
        "apiVersion": "v1",
        "metadata": {},
        "status": "Failure",
        "message": message,
        "reason": reason,
        "code": code,
    }


def expired(version: str = "1") -> ErrorEvent:
    """Return the event of a watch whose resourceVersion etcd has compacted."""
    return ErrorEvent(410, "Expired", f"too old resource version: {version}")
