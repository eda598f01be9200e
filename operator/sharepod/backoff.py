"""Exponential back-off: pauses between tries, which double with each failure in a row. Pure: callers count and wait."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count

_MOST_DOUBLED = 10
"""Doublings of a pause: none is longer than 1,024 times the first."""


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
        """Return the pause after so many failures in a row, from 1 on."""
        return min(self.longest_s, self.first_s * 2.0 ** min(failures - 1, _MOST_DOUBLED))

    def spread_s(self, failures: int, drawn: float) -> float:
        """Return that pause less up to half of it. `drawn`: number from 0 to 1; a random one spreads the callers."""
        return self.pause_s(failures) * (0.5 + drawn / 2)

    def __iter__(self) -> Iterator[float]:
        return map(self.pause_s, count(1))
