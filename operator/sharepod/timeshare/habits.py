"""Habits of one tenant: how long it pauses between turns, and how long its turns overrun. They decide for how long a
GPU is kept idle during a pause.

Guarantees:
- Habits follow from the tenant's own turns only, never from its messages, and take constant space.
- Newer pauses have more weight: the last 90 pauses have half of it, and a pause is forgotten after some hundreds of
  others.
"""

from __future__ import annotations

from bisect import bisect_left

_BOUNDS_NS = tuple(int(250_000 * 2 ** (step / 2)) for step in range(25))
"""Upper bounds of the classes of pauses: 0.25 ms to 1 s, by factors of the square root of 2. Longer pauses count as 1
s, the grace period, because no GPU is kept idle longer than a kernel may overrun."""
_ONE = 1 << 16
"""Weight of one pause when it is learned, in fixed point: 2**16."""
_LEAST = 4 * _ONE - _ONE // 8
"""Least total weight of learned pauses with which pauses are predicted: about four pauses."""
_FORGET_SHIFT = 7
"""Each new pause reduces the weight of the earlier ones by a 128th, 2**-7."""
_OVERRUN_FORGET = 32
"""A shorter overrun lowers the expected overrun by a 32nd only. Many turns end between two kernels and so on time,
which shows little about a turn that ends within a kernel."""
_AVERAGED = 16
"""Number of steps, and of overruns, over which moving averages are taken. A step is a hold and the pause after it."""
_UNLIKE = 4
"""Factor by which a step may differ from the average: 4. A longer step counts as four times the average, a shorter step
as a quarter of it. So unusual phases, such as a night without work or an hour of training before serving, are soon
forgotten."""
_DEARER = 4
"""Cost of a nanosecond that the tenant waits too long, relative to the cost of a nanosecond of idle GPU time that it
pays for."""
_SHORT_NS = 15_000_000
"""Average below which pauses count as short: 15 ms. For short pauses the GPU may be kept idle whatever the tenant's
work per step. Pauses of 10 ms with an exponential distribution stay below this bound, although each counts as the bound
of its class."""
_DEAR = 10
"""Ratio of the cost of a missed pause to the best window from which `window` returns four times the best window instead
of twice. A longer window also covers pauses that are longer than those seen."""


class Habits:
    """Pauses and overruns of one tenant. Times in nanoseconds."""

    __slots__ = ("_cycle_ns", "_held_before", "_weights", "_work_ns", "mean_overrun_ns", "overrun_ns")

    def __init__(self) -> None:
        self._weights = [0] * len(_BOUNDS_NS)
        """Weight of each class of pauses."""
        self._cycle_ns = 0
        """Average length of a step: a hold and the pause after it."""
        self._work_ns = 0
        """Average time held in one step."""
        self._held_before: int | None = None
        """Total time held up to the last pause. None before the first pause of the tenant's present processes."""
        self.mean_overrun_ns = 0
        """Average overrun of turns."""
        self.overrun_ns = 0
        """Expected overrun of a turn that ends within a kernel: the longest recent one."""

    def begin(self, held_ns: int) -> None:
        """Begin the first step of the tenant's present processes. No effect on later calls. `held_ns`: total time held
        before.
        """
        if self._held_before is None:
            self._held_before = held_ns

    def paused(self, pause_ns: int, held_ns: int) -> None:
        """Learn a pause: from the end of a hold until the tenant wanted the token again. `held_ns`: total time held up
        to the pause. A pause before the first step is ignored."""
        if self._held_before is None:
            return
        work = held_ns - self._held_before
        self._held_before = held_ns
        self._work_ns = _average(self._work_ns, work)
        self._cycle_ns = _average(self._cycle_ns, pause_ns + work)
        weights = self._weights
        for place, weight in enumerate(weights):
            if weight:
                weights[place] = weight - (weight + (1 << _FORGET_SHIFT) - 1 >> _FORGET_SHIFT)
        weights[min(bisect_left(_BOUNDS_NS, pause_ns), len(weights) - 1)] += _ONE

    def overran(self, late_ns: int) -> None:
        """Learn an overrun: the nanoseconds from the deadline of a turn until the tenant had drained."""
        self.mean_overrun_ns += (late_ns - self.mean_overrun_ns) // _AVERAGED
        self.overrun_ns = max(late_ns, self.overrun_ns - self.overrun_ns // _OVERRUN_FORGET)

    def overran_by_work(self, late_ns: int) -> None:
        """Learn the overrun of a tenant without processor time, from its deadline to the expected end of its launched
        work.

        Such a tenant drains late although its kernels end in time, so only the end of its work counts. If the work ends
        within the turn, nothing is learned.
        """
        if late_ns > 0:
            self.overran(late_ns)

    def forget_pauses(self) -> None:
        """Forget all pauses: the processes that made them have exited."""
        self._weights = [0] * len(_BOUNDS_NS)
        self._cycle_ns = self._work_ns = 0
        self._held_before = None

    def works_briefly(self, held_ns: int, most_ns: int) -> bool:
        """Return True if the tenant works for at most `most_ns` between two pauses, both on average and since its last
        pause. `held_ns`: total time held until now."""
        since = held_ns if self._held_before is None else held_ns - self._held_before
        return 0 < self._work_ns <= most_ns and since <= most_ns

    @property
    def rests(self) -> bool:
        """Return True if the tenant holds for less than half of the time, as services do."""
        return 2 * self._work_ns < self._cycle_ns

    def tolerated_ns(self, request_milli: int) -> int:
        """Return the nanoseconds that the tenant can wait in each step and still hold for its request of the time. A
        quarter is subtracted for variance."""
        return self._cycle_ns * (1000 - request_milli) // request_milli * 3 // 4

    def window(self, overrun_ns: int, turn_ns: int, most_ns: int) -> int:
        """Return the nanoseconds after the end of the tenant's hold for which the GPU is worth keeping idle for it. 0:
        not at all.

        How it is chosen, with `d` as the length of the window:
        - A pause of at most `d` saves the tenant the wait for the other's turn, less the pause.
        - A longer pause costs `d` of idle GPU time.
        - The best `d` is the bound of a class of pauses. The result is twice or four times the best `d`, to cover
          longer pauses than those seen.
        - If pauses are not short, the average idle time of a step must not exceed the work of a step, nor the delay
          that is saved. That delay is the rest of the other's turn after the pause, or half of a kernel.

        Args:
            overrun_ns: Overrun of the turn of another tenant that would run instead.
            turn_ns: Least length of that turn.
            most_ns: Longest window.
        """
        whole = left = sum(self._weights)
        if left < _LEAST:
            return 0
        short = self._idle(most_ns) <= whole * _SHORT_NS
        loss, residual, work = turn_ns + overrun_ns, overrun_ns // 2, whole * self._work_ns
        dear = _DEARER * loss
        best = gain = saved = idle = delay = delay_at_best = 0
        for bound, weight in zip(_BOUNDS_NS, self._weights, strict=True):
            if bound > most_ns or bound >= dear or left <= 0:
                break
            if not weight:
                continue
            left -= weight
            saved += weight * (dear - bound)
            idle += weight * bound
            delay += weight * max(loss - bound, residual)
            if saved - left * bound > gain and (short or idle + left * bound <= min(delay, work)):
                best, gain, delay_at_best = bound, saved - left * bound, delay
        window = min((4 if dear >= _DEAR * best else 2) * best, most_ns)
        return window if short or self._idle(window) <= min(delay_at_best, work) else best

    def _idle(self, window_ns: int) -> int:
        """Return the weighted idle time of the GPU if it were kept idle in each pause for at most `window_ns`."""
        return sum([weight * min(bound, window_ns) for bound, weight in zip(_BOUNDS_NS, self._weights, strict=True)])


def _average(mean_ns: int, step_ns: int) -> int:
    """Return the average after one more step. `mean_ns`: the average before; 0 before the first step."""
    if not mean_ns:
        return step_ns
    parts = _UNLIKE if step_ns * _UNLIKE < mean_ns else _AVERAGED
    return mean_ns + (min(step_ns, _UNLIKE * mean_ns) - mean_ns) // parts
