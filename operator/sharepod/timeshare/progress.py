"""Progress of one tenant: the work that it gets done while other tenants hold too, divided by the work that it gets
done alone in the same time.

Guarantees:
- S11 own-measure: A tenant's measures follow only from the counters of its own hooks, so no tenant can change
  another's.
- For a tenant with one process and one stream, a lower launch rate shows the loss of work. With several streams, a
  stream with many small launches could hide the loss of another. The progress of such a tenant is therefore at most the
  part of the GPU that it got, divided by the part that it needs alone.
- The loss is predicted if there are too few launches, or if the program does other work than when it was measured alone
  (another phase). The prediction is the part of the GPU that the hardware gives to others while the tenant has work in
  flight.
- A tenant is measured alone only in holds of at least `LEARN_NS`, once it has had such a hold. Shorter holds are not
  typical, because the program pauses after them.

A tenant's hook takes samples at random moments while its gate is open or it has work in flight; at other times its
counters do not change. `in_flight` is the part of samples with work in flight. `rate` is launches per nanosecond.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

_MS = 1_000_000
LEARN_NS = 5 * _MS
"""Shortest span of holding alone, in nanoseconds, that counts as a measure: 5 ms, about ten samples."""
PROBE_NS = 25 * _MS
"""Time for which a lead holds alone to be measured again (a probe), in nanoseconds: 50 samples of one per 0.5 ms."""
_PROBES_MOST_NS = 2_000 * _MS
"""Longest time between two probes, in nanoseconds. A new phase of the program is noticed within this time."""
_PROBES_LEAST_NS = 500 * _MS
"""Shortest usual time between two probes, in nanoseconds. A probe of 25 ms takes 5 % of it."""
_PROBES_SOONEST_NS = 100 * _MS
"""Shortest time between two probes, in nanoseconds. It applies if the tenant launches faster while it co-runs than it
did alone, so that the measure alone is out of date."""
_KNOWN_NS = 30_000 * _MS
"""Time for which a measure is valid, in nanoseconds."""
_OLD_NS = 10_000 * _MS
"""Age of a measure, in nanoseconds, from which it does not affect the next measure."""
_LOSS_KNOWN_NS = 5_000 * _MS
"""Time for which measured losses are valid, in nanoseconds."""
_SWITCHING = 1.09
"""Factor by which the hardware's time slices lengthen work: 1.09, because a switch of 91 us follows each slice of 1,024
us."""
_SLACK = 0.02
"""Error of `in_flight` that is tolerated when a loss is computed from it."""
_LAUNCHES_LEAST = 15
"""Number of launches that the tenant must make in a window, when alone, for its launch rate to be used. Fewer are too
random."""
_LOSS_MOST = 0.95
"""Upper bound of a loss, because every holder gets some work done."""
_STEADY = 0.15
"""Relative change of the launch rate, between two measures alone, up to which the time to the next probe doubles."""
_FASTER = 1.2
"""Launch rate, relative to the rate alone, from which the program counts as being in another phase than when it was
measured."""
_SHIFTED = 0.25
"""Change of `in_flight` between two windows from which the program counts as being in another phase."""
_SEVERAL = 0.1
"""If work of several streams is in flight for more than this part of the time, launch rates may hide a loss. Occasional
copies stay below it."""
_ALWAYS = 0.8
"""Value of `in_flight` from which only the launch rate can show a loss: `in_flight` cannot grow further."""


@dataclass(frozen=True)
class Samples:
    """Counters of a tenant's hooks, summed over its processes. A counter that is lower than before means that processes
    were replaced."""

    looks: int
    """Samples: moments at which a hook checked for work in flight."""
    flying: int
    """Samples with work in flight."""
    launches: int
    """Launches of kernels and graphs."""
    processes: int = 1
    """Number of the tenant's processes that hold the token. The hardware gives time slices to each process."""
    several: int = 0
    """Number of samples in `flying` with work of several streams of one process in flight."""


class Progress:
    """Measures of one tenant of one GPU. Times in nanoseconds of one clock."""

    def __init__(self, read: Callable[[], Samples] | None = None) -> None:
        """`read`: returns the hooks' counters as of now. None: the caller passes the counters to `sampled`."""
        self._read = read
        self.processes = 1
        self.alone_in_flight: float | None = None
        """`in_flight` while the tenant holds alone. None before the first measure."""
        self.alone_rate = 0.0
        """Launches per nanosecond while the tenant holds alone."""
        self.measured_at = 0
        self.probe_at = 0
        """Moment of the next probe: from then on the tenant, when it leads, holds alone for `PROBE_NS`."""
        self.in_flight = 1.0
        """`in_flight` of the last sampled span."""
        self._loss = 0.0
        """Part of its work that the tenant lost in the last window, 0 to 1."""
        self._mean_loss: float | None = None
        """Moving average of the losses of all windows."""
        self._lost_at = 0
        self.window_ns = 0
        """Time with other holders since the last window."""
        self._probes_ns = _PROBES_LEAST_NS
        self.launches = 0
        """Launches so far."""
        self.shared_ns = 0
        """Time with other holders so far."""
        self.shared_launches = 0
        """Launches in `shared_ns`."""
        self._proven_loss: float | None = None
        """Loss that a trial measured. None if no trial showed a gain."""
        self._sampled: Samples | None = None
        self._looks = self._flying = self._overlaps = self._launches = 0
        """Growth of the counters since the last call of `span`."""
        self._several = 0.0
        """Part of the time with work of several streams in flight: a moving average over 100 samples."""
        self._ratio: float | None = None
        """Launch rate with other holders, divided by the rate alone: a moving average."""
        self._alone_ns, self._alone_flying, self._alone_launches = 0, 0.0, 0
        self._window_flying, self._window_launches = 0.0, 0
        self._window_in_flight: float | None = None
        self._since_made, self._since_sure, self._since_launches = 0.0, 0.0, 0
        """Sums since the last measure alone, over time with other holders: progress that was charged, least possible
        progress (both in nanoseconds), and launches."""
        if read is not None:
            self.sampled(read())

    def sampled(self, samples: Samples) -> None:
        """Add the growth of the hooks' counters since the last call. The first counters, and counters that are lower
        than before, only set the starting point."""
        before, self._sampled, self.processes = self._sampled, samples, max(1, samples.processes)
        if before is None or samples.looks < before.looks or samples.launches < before.launches:
            return
        self._looks += samples.looks - before.looks
        self._flying += max(0, samples.flying - before.flying)
        self._overlaps += max(0, samples.several - before.several)
        self._launches += samples.launches - before.launches
        self.launches += samples.launches - before.launches

    def span(self) -> int:
        """End a span of holding. Set `in_flight` from the samples of the span, and return its launches."""
        if self._read is not None:
            self.sampled(self._read())
        if self._looks:
            self.in_flight = min(1.0, self._flying / self._looks * self.processes)
            self._several += min(0.5, self._looks / 100) * (self._overlaps / self._looks - self._several)
        launches = self._launches
        self._looks = self._flying = self._overlaps = self._launches = 0
        return launches

    def alone(self, now: int, elapsed: int) -> int:
        """Add a span in which the tenant held alone. If the new measure shows that the tenant was charged for more
        progress than it made while co-running, return the difference in nanoseconds, else 0.
        """
        launches = self.span()
        self._alone_ns += elapsed
        self._alone_flying += self.in_flight * elapsed
        self._alone_launches += launches
        return self._learn(now) if self._alone_ns >= PROBE_NS else 0

    def joined(self, now: int) -> int:
        """End a span in which the tenant held alone: from `now` other tenants hold too, or the turn is over. Return the
        same as `alone`."""
        if self._alone_ns < LEARN_NS and self.alone_in_flight is None:
            return 0
        lost = self._learn(now) if self._alone_ns >= LEARN_NS else 0
        self._alone_ns, self._alone_flying, self._alone_launches = 0, 0.0, 0
        return lost

    def shared(self, elapsed: int, launches: int) -> None:
        """Add a span in which other tenants held too, and the launches of the tenant in that span."""
        self.shared_ns += elapsed
        self.shared_launches += launches
        self.window_ns += elapsed
        self._window_flying += self.in_flight * elapsed
        self._window_launches += launches

    def judge(self, now: int, others: float, request_milli: int) -> float:
        """Return the part of its work, 0 to `_LOSS_MOST`, that the tenant lost in the window that ends now. Begin the
        next window.

        If the program has changed its phase since it was measured alone, the tenant is charged for the least possible
        progress. The return value is then its average loss so far.

        Args:
            now: The present moment.
            others: Number of processes of other tenants on the GPU, divided by the number of all processes that hold
                it.
            request_milli: Guaranteed share, in thousandths. A tenant that may miss it is probed more often.
        """
        in_flight = self._window_flying / self.window_ns
        bound = loss = in_flight * others * _SWITCHING
        sure = True
        if self.alone_rate * self.window_ns >= _LAUNCHES_LEAST:
            ratio = min(2.0, self._window_launches / self.window_ns / self.alone_rate)
            self._ratio = ratio if self._ratio is None else self._ratio + 0.3 * (ratio - self._ratio)
            loss = max(0.0, 1 - self._ratio)
            if self.alone_in_flight is not None:
                loss = min(loss, max(0.0, in_flight - self._ratio * self.alone_in_flight) + _SLACK)
            if self._ratio > _FASTER:
                self.probe_at = min(self.probe_at, max(now, self.measured_at + _PROBES_SOONEST_NS))
                loss, sure = bound, False
            if self.hides_losses:
                loss = max(loss, self._least_given(in_flight, others))
        elif self.hides_losses:
            loss = self._least_given(in_flight, others)
        elif self._proven_loss is not None:
            loss = min(bound, self._proven_loss)
        if self._window_in_flight is not None and abs(in_flight - self._window_in_flight) > _SHIFTED:
            self.probe_at = min(self.probe_at, max(now, self.measured_at + _PROBES_LEAST_NS))
            self._probes_ns = _PROBES_LEAST_NS
        elif in_flight > _ALWAYS and (1 - bound) * 1000 < request_milli:
            self.probe_at = min(self.probe_at, self.measured_at + _PROBES_LEAST_NS)
        loss = min(_LOSS_MOST, loss)
        self._since_made += (1 - loss) * self.window_ns
        self._since_sure += (1 - min(_LOSS_MOST, bound)) * self.window_ns
        self._since_launches += self._window_launches
        self._window_in_flight = in_flight
        self._loss = loss
        mean = self.known_loss(now)
        if sure:
            self._mean_loss = loss if mean is None else mean + 0.3 * (loss - mean)
        self._lost_at = now
        self._clear_window()
        return loss if sure else mean or 0.0

    def skip_window(self) -> None:
        """Begin the next window without measuring a loss, because the tenant has held only with members of its
        group."""
        self._clear_window()

    def _least_given(self, in_flight: float, others: float) -> float:
        """Return the loss, 0 to 1, of a tenant that gets only its even part of the hardware's time slices while it has
        work in flight. 0 if the tenant alone needs less than that part."""
        bound = in_flight * others * _SWITCHING
        if not self.alone_in_flight:
            return bound
        return min(bound, max(0.0, 1 - in_flight * (1 - others) / _SWITCHING / self.alone_in_flight))

    def prove(self, loss: float | None) -> None:
        """Set the loss that a trial of co-running measured. `judge` uses it in windows with too few launches. None:
        remove it."""
        self._proven_loss = loss

    @property
    def hides_losses(self) -> bool:
        """Return True if launch rates may hide losses, because small launches of one process or stream may outweigh
        the launches of other processes."""
        return self.processes > 1 or self._several > _SEVERAL

    @property
    def conclusive(self) -> bool:
        """Return True if a window of 25 ms has enough launches to show a loss."""
        return self.alone_rate * 25 * _MS >= _LAUNCHES_LEAST

    @property
    def until_measured_ns(self) -> int:
        """Return the nanoseconds that the tenant must still hold alone to be measured."""
        return PROBE_NS - self._alone_ns

    def known(self, now: int) -> float | None:
        """Return `alone_in_flight`. None if it was never measured, or more than 30 s ago."""
        return None if now - self.measured_at > _KNOWN_NS else self.alone_in_flight

    def loss(self, now: int) -> float | None:
        """Return the part of its work, 0 to 1, that the tenant lost in the last window. None if that window is too
        old.
        """
        return None if self._window_in_flight is None or now - self._lost_at > _LOSS_KNOWN_NS else self._loss

    def known_loss(self, now: int) -> float | None:
        """Return the average loss over all windows. None if the last window is too old."""
        return None if now - self._lost_at > _LOSS_KNOWN_NS else self._mean_loss

    def _clear_window(self) -> None:
        self.window_ns, self._window_flying, self._window_launches = 0, 0.0, 0

    def _learn(self, now: int) -> int:
        span = self._alone_ns
        in_flight, rate = self._alone_flying / span, self._alone_launches / span
        before, weight = self.alone_rate, 1.0
        if self.alone_in_flight is not None and now - self.measured_at < _OLD_NS:
            weight = min(0.5, span / (100 * _MS))
        was = 0.0 if self.alone_in_flight is None else self.alone_in_flight
        self.alone_in_flight = was + weight * (in_flight - was)
        self.alone_rate += weight * (rate - self.alone_rate)
        steady = before > 0 and abs(rate - before) < _STEADY * before
        self._probes_ns = min(_PROBES_MOST_NS, 2 * self._probes_ns) if steady else _PROBES_LEAST_NS
        self.measured_at, self.probe_at = now, now + self._probes_ns
        self._ratio = None
        self._alone_ns, self._alone_flying, self._alone_launches = 0, 0.0, 0
        return self._lost_unseen(rate, before)

    def _lost_unseen(self, rate: float, before: float) -> int:
        """Return the nanoseconds of progress that the tenant was charged for since the last measure alone but did not
        make.

        If the tenant now launches much faster than at the measure before, that measure was out of date. Its progress is
        then computed again with the new rate.
        """
        made = self._since_made
        real = max(self._since_sure, self._since_launches / rate) if rate > _FASTER * before > 0 else made
        self._since_made, self._since_sure, self._since_launches = 0.0, 0.0, 0
        return max(0, int(made - real))


def divide(elapsed: int, in_flight: list[float]) -> list[int]:
    """Divide a span of nanoseconds among its holders, in proportion to the part of the span in which each had work in
    flight.

    The parts add up to `elapsed`. If the values of `in_flight` add up to less than 1, the parts add up to less, and the
    rest is a gap.
    """
    flights = [min(elapsed, int(elapsed * part)) for part in in_flight]
    whole = sum(flights)
    if whole <= elapsed:
        return flights
    parts = [elapsed * flight // whole for flight in flights]
    for place in range(elapsed - sum(parts)):
        parts[place] += 1
    return parts


def foretell(demands: list[float]) -> list[float]:
    """Return the predicted progress of each tenant if all held at once. `demands`: `in_flight` of each tenant alone.
    The model divides the GPU by max-min fairness. If the demands exceed the GPU, only 0.92 of it is divided, because
    the hardware switches between time slices.
    """
    left, whole = 1.0, sum(demands)
    if whole <= 0.9:
        return [1.0] * len(demands)
    if whole > 1:
        left = 0.92
    progress = [1.0] * len(demands)
    for done, place in enumerate(sorted(range(len(demands)), key=lambda place: demands[place])):
        got = min(demands[place], left / (len(demands) - done))
        progress[place] = got / demands[place] if demands[place] > 0 else 1.0
        left -= got
    return progress
