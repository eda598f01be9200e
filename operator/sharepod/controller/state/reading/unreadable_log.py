"""Log lines about objects that cannot be read: few of each kind, however often they are written."""

from __future__ import annotations

from collections.abc import Callable

import structlog

from sharepod.rate_limit import RateLimiter

_SAID_EVERY_S = 10.0
"""Least seconds between two log lines about objects of one kind: a kubelet writes its Node often, and a user can make
thousands of objects that cannot be read."""

log = structlog.get_logger(__name__)


class UnreadableLog:
    """Log of what cannot be read. `clock`: monotonic seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._limiters: dict[str, RateLimiter] = {}

    def say(self, kind: str, error: str, *, follows: str = "it is passed over", **named: str) -> None:
        """Log why an object cannot be read, unless one of its kind was named a moment ago.

        Args:
            kind: Its kind.
            error: Why.
            follows: What follows from it.
            named: What it is called: name, namespace, uid.
        """
        now = self._clock()
        limiter = self._limiters.setdefault(kind, RateLimiter(now, per_s=1 / _SAID_EVERY_S, burst=1))
        if limiter.take(now):
            log.warning(f"object cannot be read; {follows}", kind=kind, error=error, **named)
