"""Turn history of one tenant: the spans in which the tenant could have work on its GPUs, over the last few seconds.

Guarantees:
- From the moment `since` on the history is complete: no turn is left out.
- Spans do not overlap, are in order, and are never empty.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

_KEPT_NS = 6_000_000_000
"""Nanoseconds for which spans are kept: 6 s. Utilization samples cover up to one second, and the agent reads them one
or two seconds late."""


@dataclass(frozen=True)
class TurnSpan:
    """Span in which a tenant could have work on its GPUs. Moments in nanoseconds of the clock."""

    begin: int
    end: int
    overdue: bool
    """True if the tenant had been preempted and had not drained, while other tenants held. The tenant was charged for
    this time, but must not have used it."""


@dataclass(frozen=True)
class TurnSpans:
    """Spans of one tenant, in order."""

    since: int
    """Moment before which no history is kept, in nanoseconds of the clock."""
    spans: tuple[TurnSpan, ...]


class TurnHistory:
    """Spans of one tenant since the moment `now`. Each span is kept for `_KEPT_NS`."""

    def __init__(self, now: int) -> None:
        self._since = now
        self._spans: deque[tuple[int, int, bool]] = deque()
        """(start, end, overdue): tuples instead of objects, because each hand-off adds some."""

    def add(self, begin: int, end: int, overdue: bool) -> None:
        """Add a span that ends after all earlier spans. Time that earlier spans already contain is left out."""
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
