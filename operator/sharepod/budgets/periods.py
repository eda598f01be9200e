"""Periods of a budget: days, weeks and months of the calendar, in UTC. Times are milliseconds since 1970.

Guarantees:
- Periods of one kind follow each other without a gap: the end of each is the start of the next.
- The start of a period belongs to the period, its end does not: `start <= time < end`.
"""

from __future__ import annotations

from dataclasses import dataclass

from sharepod.api.gpubudget import BudgetPeriod

DAY_MS = 86_400_000
_EPOCH_WEEKDAY = 3
"""Weekday of 1970-01-01, a Thursday, with Monday as 0."""


@dataclass(frozen=True, slots=True)
class Span:
    """Interval from `start_ms` until just before `end_ms`."""

    start_ms: int
    end_ms: int

    @property
    def length_ms(self) -> int:
        """Milliseconds from start to end."""
        return self.end_ms - self.start_ms


def span_of(period: BudgetPeriod, at_ms: int) -> Span:
    """Return the period that contains a time."""
    day = at_ms // DAY_MS
    if period is BudgetPeriod.DAY:
        return Span(day * DAY_MS, (day + 1) * DAY_MS)
    if period is BudgetPeriod.WEEK:
        monday = day - (day + _EPOCH_WEEKDAY) % 7
        return Span(monday * DAY_MS, (monday + 7) * DAY_MS)
    year, month = _year_and_month(day)
    after = (year + 1, 1) if month == 12 else (year, month + 1)
    return Span(_first_day(year, month) * DAY_MS, _first_day(*after) * DAY_MS)


def _year_and_month(day: int) -> tuple[int, int]:
    """Return year and month (1 to 12) of a day, counted from 1970-01-01, in the Gregorian calendar."""
    year = 1970 + day // 366  # at most a few years too early
    while _first_day(year + 1, 1) <= day:
        year += 1
    while _first_day(year, 1) > day:
        year -= 1
    month = 1
    while month < 12 and _first_day(year, month + 1) <= day:
        month += 1
    return year, month


def _first_day(year: int, month: int) -> int:
    """Return the number of a month's first day, counted from 1970-01-01.

    The computation lets a year begin in March, so that the leap day is the last day of the year.
    """
    shifted = year - (month <= 2)
    of_year = (153 * ((month + 9) % 12) + 2) // 5
    return 365 * shifted + shifted // 4 - shifted // 100 + shifted // 400 + of_year - 719_468
