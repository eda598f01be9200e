"""Amounts of GPU time and memory, their division between months, and conversions of times and hours to text.

Guarantee:
- AM1 exact: if an amount is divided between months, the parts add up to it.
"""

from __future__ import annotations

import calendar
from collections.abc import Iterator
from dataclasses import dataclass

_MONTHS_AT_MOST = 24
"""Largest number of months between which one amount is divided, counted back from the latest. It bounds the work for a
start that is far in the past."""


@dataclass(frozen=True, slots=True)
class Amounts:
    """GPU time in milliseconds of one GPU, and reserved memory times its duration."""

    held_ms: int = 0
    """Time for which the GPU was held."""
    borrowed_ms: int = 0
    """Part of `held_ms` that exceeds the guaranteed time."""
    reserved_ms: int = 0
    """Requested fraction x time for which it was reserved."""
    memory_mib_s: int = 0
    """Reserved memory x time, in MiB x s."""

    def __add__(self, other: Amounts) -> Amounts:
        return Amounts(
            self.held_ms + other.held_ms,
            self.borrowed_ms + other.borrowed_ms,
            self.reserved_ms + other.reserved_ms,
            self.memory_mib_s + other.memory_mib_s,
        )

    def beyond(self, other: Amounts) -> Amounts:
        """Return for each amount by how much it exceeds the same amount of `other`; 0 if it does not."""
        return Amounts(
            max(0, self.held_ms - other.held_ms),
            max(0, self.borrowed_ms - other.borrowed_ms),
            max(0, self.reserved_ms - other.reserved_ms),
            max(0, self.memory_mib_s - other.memory_mib_s),
        )

    def part(self, numerator: int, denominator: int) -> Amounts:
        """Return the fraction `numerator / denominator` of each amount, rounded down."""
        return Amounts(
            self.held_ms * numerator // denominator,
            self.borrowed_ms * numerator // denominator,
            self.reserved_ms * numerator // denominator,
            self.memory_mib_s * numerator // denominator,
        )


NOTHING = Amounts()


def hours_text(milliseconds: int) -> str:
    """Format milliseconds as hours to a tenth, rounded down."""
    whole, tenth = divmod(milliseconds // 360_000, 10)
    return f"{whole}.{tenth}"


def moment_ms(timestamp: str) -> int:
    """Return a time such as `2026-01-31T23:59:59.999Z` in milliseconds since 1970. A day after the end of its month
    counts into the next month."""
    year, month, day = int(timestamp[:4]), int(timestamp[5:7]), int(timestamp[8:10])
    hour, minute, second = int(timestamp[11:13]), int(timestamp[14:16]), int(timestamp[17:19])
    return (_month_s(year, month) + (day - 1) * 86_400 + hour * 3_600 + minute * 60 + second) * 1_000 + int(
        timestamp[20:23] or 0
    )


def month_begin_ms(month: str) -> int:
    """Return the start of a month such as `2026-01`, in milliseconds since 1970."""
    return _month_s(int(month[:4]), int(month[5:7])) * 1_000


def month_after(month: str) -> str:
    """Return the month after a month such as `2026-01`."""
    year, number = int(month[:4]), int(month[5:7])
    return f"{year + number // 12:04}-{number % 12 + 1:02}"


def spread(amounts: Amounts, begin: str, end: str) -> Iterator[tuple[str, Amounts]]:
    """Yield (month, its part) of amounts that have grown evenly from `begin` to `end`, which are timestamps."""
    first, last = moment_ms(begin), moment_ms(end)
    month, until = _month_of(begin), _month_of(end)
    if first >= last or month >= until:
        yield until, amounts
        return
    left = _MONTHS_AT_MOST
    distance = (int(until[:4]) - int(month[:4])) * 12 + int(until[5:7]) - int(month[5:7])
    if distance > left:
        month = f"{int(until[:4]) - left // 12:04}-{until[5:7]}"
    done = NOTHING
    while month < until:
        passed = month_begin_ms(month_after(month)) - first
        upto = amounts.part(min(max(0, passed), last - first), last - first)
        yield month, upto.beyond(done)
        month, done = month_after(month), upto
    yield month, amounts.beyond(done)


def _month_of(timestamp: str) -> str:
    """Return the month of a timestamp. Timestamps may have month numbers that do not exist; these count as the nearest
    month."""
    return f"{timestamp[:4]}-{min(max(int(timestamp[5:7]), 1), 12):02}"


def _month_s(year: int, month: int) -> int:
    return calendar.timegm((max(year, 1970), min(max(month, 1), 12), 1, 0, 0, 0))
