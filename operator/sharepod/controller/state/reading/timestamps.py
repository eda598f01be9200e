"""Time stamps of Kubernetes: RFC 3339 in UTC, with whole seconds when written.

Pure: decisions use this module, so it must not import `datetime`, which can read the clock.
"""

from __future__ import annotations

import re
from functools import lru_cache

_FORM = re.compile(r"(\d{4})-(\d\d)-(\d\d)T(\d\d):(\d\d):(\d\d)(\.\d{1,9})?Z", re.ASCII)
_LONGEST = 40
"""Characters of a timestamp that are read."""
_REMEMBERED = 1024
"""Number of timestamps that are cached after parsing. Equal ones occur in many objects."""
_DAY_S = 86_400
_ERA_DAYS = 146_097
"""Days in 400 years, after which the Gregorian calendar repeats."""
_EPOCH_DAYS = 719_468
"""Days from 1 March of the year 0 to 1 January 1970."""


def seconds(text: str | None) -> float | None:
    """Return a timestamp in seconds since 1970; None if it is unreadable."""
    return _seconds(text[:_LONGEST]) if text else None


@lru_cache(_REMEMBERED)
def _seconds(text: str) -> float | None:
    found = _FORM.fullmatch(text)
    if found is None:
        return None
    year, month, day, hour, minute, second = (int(part) for part in found.groups()[:6])
    if not (1 <= month <= 12 and 1 <= day <= 31 and hour < 24 and minute < 60 and second <= 60):
        return None
    years = year - (month <= 2)  # counted from March, a year has its leap day at its end
    of_year = (153 * ((month + 9) % 12) + 2) // 5 + day - 1
    days = years * 365 + years // 4 - years // 100 + years // 400 + of_year - _EPOCH_DAYS
    return float(days * _DAY_S + hour * 3600 + minute * 60 + second) + float(found[7] or 0)


def text_of(time_s: float) -> str:
    """Return a time, in seconds since 1970, as Kubernetes writes it. Fractions of a second are rounded up."""
    days, rest = divmod(int(-(-time_s // 1)), _DAY_S)
    era, of_era = divmod(days + _EPOCH_DAYS, _ERA_DAYS)
    years = (of_era - of_era // 1460 + of_era // 36_524 - of_era // 146_096) // 365
    of_year = of_era - (365 * years + years // 4 - years // 100)
    shifted = (5 * of_year + 2) // 153
    day, month = of_year - (153 * shifted + 2) // 5 + 1, (shifted + 2) % 12 + 1
    year = years + 400 * era + (month <= 2)
    return f"{year:04d}-{month:02d}-{day:02d}T{rest // 3600:02d}:{rest // 60 % 60:02d}:{rest % 60:02d}Z"
