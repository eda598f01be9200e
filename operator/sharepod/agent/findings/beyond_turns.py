"""Busy time beyond turns: compares each utilization sample with the tenant's turns in the time that the sample covers.
Pure.

Guarantees:
- B1: A tenant whose kernels run only in its turns never has busy time beyond its turns, even if samples are missing or
  late. Assumption: all samples of one GPU have the same length, between `SHORTEST_S` and `LONGEST_S`, and end within
  `CLOCK_ERROR_S` of their time stamps.
- B2: For a tenant without a turn, the whole busy time of each sample is beyond turns, less `ROUNDING`.
- Unknown time is not counted: a sample is ignored if the turns of its time are unknown.

The driver does not report the length of its samples. Busy time beyond turns is therefore summed up for each length in
`LENGTHS`, and the length with the least growth counts, in favour of the tenant. Each entry of `LENGTHS` stands for
lengths up to `_RATIO` times as long, and the end of a sample may be off by the clock's error. The overlap with turns
that is subtracted is the largest of all these cases.

So for an offender that holds the token for a part h of the time, the result is too low by about h / 10. The clock's
error lowers it further, by h times the ratio of the error to the length of a sample.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from sharepod.agent.devices.inventory import UtilizationSample
from sharepod.timeshare import TurnSpans

from .sliding import SlidingWindow
from .utilization import READING_MAX_S

SHORTEST_S = 1 / 6
"""Shortest time in seconds that a sample covers: NVML's documentation states 1/6 s to 1 s."""
LONGEST_S = 1.5
"""Longest time in seconds that a sample covers, including drivers that report the busy time since the last request."""
CLOCK_ERROR_S = 0.02
"""Seconds by which a sample's end may differ from its time stamp. This covers a late timer of the driver, and the few
milliseconds by which the end of a turn is recorded late."""
ROUNDING = 0.01
"""Amount by which NVML's readings may be too high, as a part of the time, because they are whole per cents."""
_RATIO = 1.1
"""Ratio of one entry of `LENGTHS` to the one before."""
_LAG_S = 1.0
"""Greatest age in seconds of a reading without a time stamp. Such a reading is NVML's for a whole GPU, which repeats
the last sample."""
_AGE_MOST_S = 600.0
"""Greatest plausible age of a sample, in seconds. No driver hangs for longer between two readings, so an older time
stamp comes from another clock."""
_LAG_STEP_S = 0.1
"""Seconds between two end times that are tried for a reading without a time stamp."""


def _lengths() -> tuple[float, ...]:
    lengths = [SHORTEST_S]
    while lengths[-1] * _RATIO < LONGEST_S:
        lengths.append(lengths[-1] * _RATIO)
    return tuple(lengths)


LENGTHS = _lengths()
"""Assumed lengths of samples, in seconds. Each entry stands for all lengths up to `_RATIO` times as long."""
NOTHING = (0.0,) * len(LENGTHS)
_STAMPED = (-CLOCK_ERROR_S, 0.0, CLOCK_ERROR_S)
_UNSTAMPED = (*(-_LAG_S + step * _LAG_STEP_S for step in range(round(_LAG_S / _LAG_STEP_S) + 1)), CLOCK_ERROR_S)

Beyond = tuple[float, ...]
"""For each entry of `LENGTHS`: seconds, since a fixed moment, for which a tenant was busy beyond its turns if samples
have that length."""


class Turns:
    """Turns of one tenant.

    Args:
        turns: The turns, in nanoseconds of the clock whose seconds are in the samples.
        overdue: True: include time after a preemption, until the tenant had drained, for which it was charged.
    """

    def __init__(self, turns: TurnSpans, *, overdue: bool) -> None:
        spans = [(span.begin / 1e9, span.end / 1e9) for span in turns.spans if overdue or not span.overdue]
        self.since = turns.since / 1e9
        """Moment in seconds before which no turns are known."""
        self._begins = [begin for begin, _ in spans]
        self._ends = [end for _, end in spans]
        self._before = [0.0]
        for begin, end in spans:
            self._before.append(self._before[-1] + end - begin)

    def before(self, moment: float) -> float:
        """Return the seconds of turns from the first known turn until `moment`."""
        index = bisect_right(self._begins, moment) - 1
        return self._before[index] + min(moment, self._ends[index]) - self._begins[index] if index >= 0 else 0.0


class TurnsOfTenant:
    """Turns of one tenant at one reading, for all its GPUs. They are computed on demand, because most tenants are idle
    in most readings.

    Args:
        read: Returns the tenant's turns up to now, in nanoseconds of the clock whose seconds are in the samples.
    """

    def __init__(self, read: Callable[[], TurnSpans]) -> None:
        self._read = read

    @cached_property
    def held(self) -> Turns:
        """The turns that the tenant held."""
        return Turns(self._spans, overdue=False)

    @cached_property
    def charged(self) -> Turns:
        """The turns in `held`, with the time after a preemption until the tenant had drained. The same object as `held`
        if there is no such time."""
        return Turns(self._spans, overdue=True) if any(span.overdue for span in self._spans.spans) else self.held

    @cached_property
    def _spans(self) -> TurnSpans:
        return self._read()


def beyond_turns(sample: UtilizationSample, turns: Turns, shifts: Sequence[float] = _STAMPED) -> Beyond | None:
    """Return, for each entry of `LENGTHS`, the part (0 to 1) of a sample's time that was busy and cannot lie within
    turns. None if the turns of that time are unknown.

    Args:
        turns: The tenant's turns.
        shifts: Offsets from the sample's time stamp, in seconds and in order, at which the sample may end.
    """
    first = sample.until + shifts[0]
    if first - LENGTHS[-1] * _RATIO < turns.since:
        return None
    # how much longer the overlap can be if the sample ends between two of the shifts
    between = max(later - sooner for sooner, later in pairwise(shifts)) / 2
    held_until = [(sample.until + shift, turns.before(sample.until + shift)) for shift in shifts]
    until_last = held_until[-1][1]
    beyond: list[float] = []
    for length in LENGTHS:
        longer = length * _RATIO
        around = until_last - turns.before(first - longer)
        if around <= 0:
            beyond.append(max(0.0, sample.part - ROUNDING))
            continue
        within = max(held - turns.before(end - longer) for end, held in held_until) + between
        beyond.append(max(0.0, sample.part - ROUNDING - min(within, around) / length))
    return tuple(beyond)


@dataclass(frozen=True)
class BeyondSums:
    """Seconds for which one tenant was busy beyond its turns on one GPU, in two sums."""

    held: Beyond = NOTHING
    """Busy time beyond the turns that the tenant held."""
    charged: Beyond = NOTHING
    """Busy time beyond all charged time, which also includes the time after a preemption until the tenant had
    drained."""


class BeyondTurnsMeter:
    """Meter of one tenant's busy time beyond its turns on one GPU. It sums over readings, each of which stands for the
    time since the last one."""

    def __init__(self) -> None:
        self._at: float | None = None
        self._sums = BeyondSums()

    def observe(
        self, now: float, samples: Sequence[UtilizationSample], part: float, turns: TurnsOfTenant
    ) -> BeyondSums:
        """Add a reading. Return the sums so far.

        Args:
            now: Time of the reading, in seconds.
            samples: The reading's samples of the tenant's processes on the GPU.
            part: Part of the time in which the tenant's kernels ran. Used only if there are no samples.
            turns: The tenant's turns up to now; computed only if its kernels ran.
        """
        elapsed = min(READING_MAX_S, now - self._at) if self._at is not None else 0.0
        self._at = now
        if part > 0 and elapsed > 0:
            seen = _of_all_processes(samples) or [UtilizationSample(now + _LAG_S, part)]
            held = charged = _mean_beyond(now, seen, turns.held)
            if turns.charged is not turns.held:
                charged = _mean_beyond(now, seen, turns.charged)
            self._sums = BeyondSums(
                _grown(self._sums.held, elapsed, held), _grown(self._sums.charged, elapsed, charged)
            )
        return self._sums


def _grown(sums: Beyond, elapsed: float, part: Beyond) -> Beyond:
    return tuple(before + elapsed * each for before, each in zip(sums, part, strict=True))


def _mean_beyond(now: float, samples: Sequence[UtilizationSample], turns: Turns) -> Beyond:
    """Return the mean of `beyond_turns` over the samples whose turns are known; `NOTHING` if there are none. A sample
    that ends in the future or long ago has a wrong time stamp, so it counts as one without time stamp."""
    judged = [
        beyond_turns(sample, turns)
        if now - _AGE_MOST_S < sample.until <= now + CLOCK_ERROR_S
        else beyond_turns(UtilizationSample(now, sample.part), turns, _UNSTAMPED)
        for sample in samples
    ]
    known = [each for each in judged if each is not None]
    return tuple(sum(each) / len(known) for each in zip(*known, strict=True)) if known else NOTHING


def _of_all_processes(samples: Sequence[UtilizationSample]) -> list[UtilizationSample]:
    """Merge samples of several processes that end at the same time. The result is in order."""
    together: list[UtilizationSample] = []
    for sample in sorted(samples, key=lambda each: each.until):
        if together and sample.until - together[-1].until <= CLOCK_ERROR_S / 2:
            both = min(1.0, together[-1].part + sample.part)
            together[-1] = UtilizationSample(together[-1].until, both)
        else:
            together.append(sample)
    return together


class SlidingBeyond(SlidingWindow[Beyond]):
    """Growth of `Beyond` over the last `seconds`, for the length of samples with the least growth. This is the tenant's
    certain busy time beyond its turns."""

    @property
    def rate(self) -> float:
        """Part of the time (0 to 1) busy beyond turns. 0 before there are two values."""
        if self.span <= 0:
            return 0.0
        (_, before), (_, after) = self._marks[0], self._marks[-1]
        return min(new - old for old, new in zip(before, after, strict=True)) / self.span
