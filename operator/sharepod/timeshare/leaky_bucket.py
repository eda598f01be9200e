"""Leaky bucket: events that are allowed so often on average, and several at once after a time without any.

Guarantees:
- Events of `ns` each are allowed once each `ns` on average.
- After a time without any, as many follow at once as fit into a burst, and one more.
"""

from __future__ import annotations


class LeakyBucket:
    """Bucket that events fill and time empties, as the moment at which it is empty (a virtual scheduling algorithm,
    ITU-T I.371). Moments and lengths are nanoseconds of one clock; at first it is empty."""

    def __init__(self) -> None:
        self._empty_at = 0

    def has_room(self, now: int, burst_ns: int) -> bool:
        """Return whether an event is allowed at `now`: what is left of earlier ones is at most `burst_ns`."""
        return self._empty_at <= now + burst_ns

    def add(self, now: int, ns: int) -> None:
        """Take note of an event, which takes `ns` to leak away."""
        self._empty_at = max(now, self._empty_at) + ns
