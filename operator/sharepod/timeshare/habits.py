"""Habits of one tenant: how long it pauses between two turns, and how far its turns run over.

Guarantees:
- Learned from the tenant's own turns alone: constant space, and nothing that the tenant says.
- A pause counts for as long as the tenant makes some hundreds more; half of the weight is with the last 90.
"""

from __future__ import annotations

from bisect import bisect_left

_BOUNDS_NS = tuple(int(250_000 * 2 ** (step / 2)) for step in range(25))
"""Upper bounds of the classes of pauses: from 0.25 ms by factors of the root of 2 to 1 s. Longer pauses count as 1 s:
no kernel that is waited for is longer (the grace period)."""
_ONE = 1 << 16
"""Weight of one pause when it is learned."""
_LEAST = 4 * _ONE - _ONE // 8
"""Weight before any pause is foretold: about four pauses."""
_FORGET_SHIFT = 7
"""Each pause takes a 128th of the weight of the earlier ones."""
_OVERRUN_FORGET = 32
"""An overrun is forgotten by a 32nd at each shorter one: a turn of whole kernels, which ends on time, says little about
one that is cut."""
_AVERAGED = 16
"""Number of steps, and of overruns, that an average is taken over."""
_UNLIKE = 4
"""A step more than this many times as long as the average counts as just so long, and one this many times shorter moves
it by a quarter: a night without work, or the hour that a program trained before it serves, is soon forgotten."""
_DEARER = 4
"""Price of time for which a tenant waits beyond what it can, beside time for which a GPU is idle at its expense."""
_SHORT_NS = 15_000_000
"""Pauses of less on average are short: 15 ms, so that pauses of 10 ms on average are, exponential ones too (a class
counts as its bound, and an average of some hundred varies). They are waited through for any work."""
_DEAR = 10
"""A loss that is so many times a pause is worth a window of four times the pause instead of two: of exponential pauses
the longer window misses one in thousands fewer."""


class Habits:
    """Pauses and overruns of one tenant. Times in nanoseconds."""

    __slots__ = ("_cycle_ns", "_held_before", "_weights", "_work_ns", "mean_overrun_ns", "overrun_ns")

    def __init__(self) -> None:
        self._weights = [0] * len(_BOUNDS_NS)
        """Weight by class of pauses."""
        self._cycle_ns = 0
        """Average time of one step: held, then paused."""
        self._work_ns = 0
        """Average time held in one step."""
        self._held_before: int | None = None
        """Time held up to the last pause, in all; None: nothing since the tenant's processes came."""
        self.mean_overrun_ns = 0
        """Average time of holds beyond the end of their turns."""
        self.overrun_ns = 0
        """How long the tenant is expected to hold beyond the end of a turn that is cut: its longest lately."""

    def begin(self, held_ns: int) -> None:
        """Begin with the first step of the tenant's processes, if this is it. `held_ns`: time held before, in all."""
        if self._held_before is None:
            self._held_before = held_ns

    def paused(self, pause_ns: int, held_ns: int) -> None:
        """Learn a pause: from the end of a hold until the tenant wanted the next. `held_ns`: time held up to it, in
        all. Before the first step there is none."""
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
        """Learn by how much a hold ended after the end of its turn."""
        self.mean_overrun_ns += (late_ns - self.mean_overrun_ns) // _AVERAGED
        self.overrun_ns = max(late_ns, self.overrun_ns - self.overrun_ns // _OVERRUN_FORGET)

    def overran_by_work(self, late_ns: int) -> None:
        """Learn by how much the known work of a tenant that has no processor time outlasts its turn: what it could put
        off by that is when it drains, and not when its kernels end. Of one that would have ended in time nothing is
        known."""
        if late_ns > 0:
            self.overran(late_ns)

    def forget_pauses(self) -> None:
        """Forget all pauses: the processes that made them are gone."""
        self._weights = [0] * len(_BOUNDS_NS)
        self._cycle_ns = self._work_ns = 0
        self._held_before = None

    def works_briefly(self, held_ns: int, most_ns: int) -> bool:
        """Return whether the tenant pauses after `most_ns` of work at most, on average and since its last pause.
        `held_ns`: time held until now, in all."""
        since = held_ns if self._held_before is None else held_ns - self._held_before
        return 0 < self._work_ns <= most_ns and since <= most_ns

    @property
    def rests(self) -> bool:
        """Return whether the tenant holds for less than half of the time: it serves requests."""
        return 2 * self._work_ns < self._cycle_ns

    def tolerated_ns(self, request_milli: int) -> int:
        """Return how long the tenant can wait in each of its steps and still get its request of the time in which it
        would work, less a quarter for what averages hide."""
        return self._cycle_ns * (1000 - request_milli) // request_milli * 3 // 4

    def window(self, overrun_ns: int, turn_ns: int, most_ns: int) -> int:
        """Return how long after the end of its hold the tenant is worth waiting for; 0: not at all.

        Waiting until `d` saves the other's turn less the pause for each pause of at most `d`, and costs `d` for each
        longer one. The best `d` is the bound of a class of pauses; some times that covers the tail beyond what was
        seen. Where pauses are not short, what a step idles on average is no more than its work, and than the delay
        that is saved: what is left of the other's turn after the pause, or half of a kernel.

        Args:
            overrun_ns: How long another that was let in would outstay its turn.
            turn_ns: How long that turn would be at least.
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
        """Return how long a GPU would be idle in all pauses, of their weight, if each were waited through for
        `window_ns` at most."""
        return sum([weight * min(bound, window_ns) for bound, weight in zip(_BOUNDS_NS, self._weights, strict=True)])


def _average(mean_ns: int, step_ns: int) -> int:
    """Return the average with one more step; 0: it is the first."""
    if not mean_ns:
        return step_ns
    parts = _UNLIKE if step_ns * _UNLIKE < mean_ns else _AVERAGED
    return mean_ns + (min(step_ns, _UNLIKE * mean_ns) - mean_ns) // parts
