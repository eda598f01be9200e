"""Leaky bucket: limits the average rate of events, and allows a burst after a quiet time.

Guarantees:
- Events that take `ns` each are allowed once per `ns` on average.
- After a quiet time, a full burst plus one event is allowed at once.
"""

from __future__ import annotations


class LeakyBucket:
    """Bucket that events fill and time empties. Only the moment at which it will be empty is stored (virtual scheduling
    algorithm, ITU-T I.371). Moments and lengths are nanoseconds of one clock. The bucket starts empty."""

    def __init__(self) -> None:
        self._empty_at = 0

    def has_room(self, now: int, burst_ns: int) -> bool:
        """Return True if an event is allowed at `now`: at most `burst_ns` of earlier events have not leaked away."""
        return self._empty_at <= now + burst_ns

    def add(self, now: int, ns: int) -> None:
        """Record an event. It counts against the burst until `ns` nanoseconds of leaking have removed it."""
        self._empty_at = max(now, self._empty_at) + ns
