"""Rate-limited log of unreadable objects, by kind."""

from __future__ import annotations

from collections.abc import Callable

import structlog

from sharepod.rate_limit import RateLimiter

_LOGGED_EVERY_S = 10.0
"""Least seconds between two log lines about objects of one kind. A kubelet writes its Node often, and a user can create
thousands of unreadable objects."""

log = structlog.get_logger(__name__)


class UnreadableLog:
    """Rate-limited log of unreadable objects. `clock`: monotonic seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._limiters: dict[str, RateLimiter] = {}

    def warn(self, kind: str, error: str, *, follows: str = "it is passed over", **named: str) -> None:
        """Log why an object is unreadable, unless another of its kind was logged within the last `_SAID_EVERY_S`.

        Args:
            kind: Its kind.
            error: Why.
            follows: The consequence.
            named: Its name, namespace and uid.
        """
        now = self._clock()
        limiter = self._limiters.setdefault(kind, RateLimiter(now, per_s=1 / _LOGGED_EVERY_S, burst=1))
        if limiter.take(now):
            log.warning(f"object cannot be read; {follows}", kind=kind, error=error, **named)
