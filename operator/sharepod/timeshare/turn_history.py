"""Turn history of one tenant: when it could have work on its GPUs by the rules, in the last few seconds.

Guarantees:
- What is told begins at `since`, and is complete from there on: no turn is left out.
- Each moment stands in one span at most; spans are in order and none is empty.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

_KEPT_NS = 6_000_000_000
"""Nanoseconds for which spans are kept: a sample of a second that is read when the agent comes to it a second or two
late, and a reading as late as that."""


@dataclass(frozen=True)
class TurnSpan:
    """Time without a break during which a tenant could have work on its GPUs. Moments in nanoseconds of the clock."""

    begin: int
    end: int
    overdue: bool
    """The tenant was preempted and others held: it was charged for that time, and it was not the tenant's."""


@dataclass(frozen=True)
class TurnSpans:
    """Spans of one tenant, in order."""

    since: int
    """Moment before which nothing is known, in nanoseconds of the clock."""
    spans: tuple[TurnSpan, ...]


class TurnHistory:
    """Spans of one tenant, kept from the moment `now` on for as long as samples of its utilization may be read."""

    def __init__(self, now: int) -> None:
        self._since = now
        self._spans: deque[tuple[int, int, bool]] = deque()
        """Begin, end, and whether overdue: no objects, because each hand-off adds some."""

    def add(self, begin: int, end: int, overdue: bool) -> None:
        """Add a span, later than those before; what has been added before is left out of it."""
        if self._spans:
            last_begin, last_end, last_overdue = self._spans[-1]
            begin = max(begin, last_end)
            if begin >= end:
                return
            if begin == last_end and overdue == last_overdue:
                self._spans[-1] = (last_begin, end, overdue)
                return
        if begin < end:
            self._spans.append((begin, end, overdue))
            while self._spans[0][1] < end - _KEPT_NS:
                self._spans.popleft()

    def spans(self, now: int) -> TurnSpans:
        """Return the spans of the last seconds before `now`."""
        since = max(self._since, now - _KEPT_NS)
        kept = tuple(TurnSpan(begin, end, overdue) for begin, end, overdue in self._spans if end > since)
        return TurnSpans(since, kept)
