"""Rate-limited log of objects that cannot be read, by kind."""

from __future__ import annotations

from collections.abc import Callable

import structlog

from sharepod.rate_limit import RateLimiter

_LOGGED_EVERY_S = 10.0
"""Shortest time in seconds between two log lines about one kind. A kubelet writes its Node often, and a user can create
thousands of unreadable objects."""

log = structlog.get_logger(__name__)


class UnreadableLog:
    """Rate-limited log of unreadable objects. `clock`: monotonic seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._limiters: dict[str, RateLimiter] = {}

    def warn(self, kind: str, error: str, *, follows: str = "it is passed over", **named: str) -> None:
        """Log why an object is unreadable, unless an object of its kind was logged within the last `_LOGGED_EVERY_S`.

        Args:
            kind: Kind of the object.
            error: The reason.
            follows: The consequence, as the end of the log line.
            named: Name, namespace and uid of the object.
        """
        now = self._clock()
        limiter = self._limiters.setdefault(kind, RateLimiter(now, per_s=1 / _LOGGED_EVERY_S, burst=1))
        if limiter.take(now):
            log.warning(f"object cannot be read; {follows}", kind=kind, error=error, **named)
