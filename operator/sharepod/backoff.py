"""Exponential back-off: pauses between attempts, which double with each failure in a row. Pure: callers count and
wait."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count

_MOST_DOUBLED = 10
"""Most doublings of a pause, so that none is longer than 1,024 times the first."""


@dataclass(frozen=True, slots=True)
class Backoff:
    """Pauses in seconds; iterating yields them without end.

    Args:
        first_s: Pause after the first failure.
        longest_s: Longest pause.
    """

    first_s: float
    longest_s: float

    def pause_s(self, failures: int) -> float:
        """Return the pause after this many failures in a row (at least 1), in seconds."""
        return min(self.longest_s, self.first_s * 2.0 ** min(failures - 1, _MOST_DOUBLED))

    def spread_s(self, failures: int, drawn: float) -> float:
        """Return `pause_s`, shortened by up to half. `drawn`: a number from 0 to 1. Random numbers spread callers."""
        return self.pause_s(failures) * (0.5 + drawn / 2)

    def __iter__(self) -> Iterator[float]:
        return map(self.pause_s, count(1))
