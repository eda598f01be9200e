"""Progress of one tenant: the work done while other tenants hold too, relative to its work alone.

Guarantees:
- S11 own-measure: A tenant's measures follow from its own counters only.
- Launch rates show the loss of a tenant with one process and one stream. With several, one stream with many small
  launches would hide another's loss. The progress of such a tenant is at most its part of the GPU over the part that it
  needs alone.
- If launch rates are not conclusive, or the tenant's phase has changed since its measure, its loss is predicted. It is
  the part of the GPU that the hardware gives to others while it has work in flight.
- A tenant is measured alone in holds of at least `LEARN_NS`, where there are any: shorter holds begin after a pause.

The tenant's hook samples at random moments while its gate is open or its work is unfinished; counters stand still in
between. `in_flight` is the part of the time with unfinished work; `rate` is launches per nanosecond.
"""

from __future__ import annotations

from dataclasses import dataclass

_MS = 1_000_000
LEARN_NS = 5 * _MS
"""Shortest span, in nanoseconds, from which a tenant that holds alone is measured."""
PROBE_NS = 25 * _MS
"""Time for which a lead holds alone to be measured again, in nanoseconds: 50 samples at one each 0.5 ms."""
_PROBES_MOST_NS = 2_000 * _MS
"""Longest time between two probes, in nanoseconds. It bounds how long a new phase stays unnoticed."""
_PROBES_LEAST_NS = 500 * _MS
"""Shortest time between two probes, in nanoseconds: a probe of 25 ms takes 5 % of that."""
_PROBES_SOONEST_NS = 100 * _MS
"""Shortest time between two probes of a tenant that launches faster than alone, in nanoseconds."""
_KNOWN_NS = 30_000 * _MS
"""Time for which a measure is valid, in nanoseconds."""
_OLD_NS = 10_000 * _MS
"""Age, in nanoseconds, from which a measure has no weight in the next one."""
_LOSS_KNOWN_NS = 5_000 * _MS
"""Time for which measured losses are valid, in nanoseconds."""
_SWITCHING = 1.09
"""Cost factor of time slices: 1.09, since a switch of 91 us follows each slice of 1,024 us."""
_SLACK = 0.02
"""Difference of two parts of time in flight that is no change."""
_LAUNCHES_LEAST = 15
"""Launches that the tenant alone would make in a window, from which launch rates count: fewer are chance."""
_LOSS_MOST = 0.95
"""Greatest loss: every holder gets some work done."""
_STEADY = 0.15
"""Relative change of the launch rate up to which the next probe may be later."""
_FASTER = 1.2
"""Launch rate relative to the rate alone, from which the tenant's phase has changed since its measure."""
_SHIFTED = 0.25
"""Change of the time in flight between two windows from which the phase has changed."""
_SEVERAL = 0.1
"""Part of the time with work of several streams in flight, from which launches may hide a loss: an occasional copy
stays below it."""
_ALWAYS = 0.8
"""Time in flight from which only the launch rate shows whether a tenant is slowed."""


@dataclass(frozen=True)
class Samples:
    """Counters of a tenant's hooks, summed over its processes. Lower counters than before are those of new
    processes."""

    looks: int
    """Samples: moments at which a hook checked for work in flight."""
    flying: int
    """Samples with work in flight."""
    launches: int
    """Launches of kernels and graphs."""
    processes: int = 1
    """Processes that hold. The hardware gives each its own time slices."""
    several: int = 0
    """Samples of `flying` with work of several streams of one process in flight."""


class Progress:
    """Measures of one tenant of one GPU. Times in nanoseconds of one clock."""

    def __init__(self) -> None:
        self.processes = 1
        self.alone_in_flight: float | None = None
        """Part of the time in flight while the tenant holds alone; None: not measured yet."""
        self.alone_rate = 0.0
        """Launches per nanosecond while the tenant holds alone."""
        self.measured_at = 0
        self.probe_at = 0
        """Moment at which the tenant, if it leads, must hold alone again for `PROBE_NS`."""
        self.in_flight = 1.0
        """Part of the time in flight, in the last sampled span."""
        self._loss = 0.0
        """Part of its work that the tenant lost in the last window."""
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
        """Loss that a trial measured; None: no trial showed a gain."""
        self._sampled: Samples | None = None
        self._looks = self._flying = self._overlaps = self._launches = 0
        """Counts since the last span."""
        self._several = 0.0
        """Part of the time with work of several streams in flight: a moving average over 100 samples."""
        self._ratio: float | None = None
        """Launch rate with other holders, relative to the rate alone."""
        self._alone_ns, self._alone_flying, self._alone_launches = 0, 0.0, 0
        self._window_flying, self._window_launches = 0.0, 0
        self._window_in_flight: float | None = None
        self._since_made, self._since_sure, self._since_launches = 0.0, 0.0, 0
        """Since the tenant was measured alone: its charged progress with other holders, its least progress, and its
        launches."""

    def sampled(self, samples: Samples) -> None:
        """Read the hooks' counters. First counters, and lower ones than before, start a span and end none."""
        before, self._sampled, self.processes = self._sampled, samples, max(1, samples.processes)
        if before is None or samples.looks < before.looks or samples.launches < before.launches:
            return
        self._looks += samples.looks - before.looks
        self._flying += max(0, samples.flying - before.flying)
        self._overlaps += max(0, samples.several - before.several)
        self._launches += samples.launches - before.launches
        self.launches += samples.launches - before.launches

    def span(self) -> int:
        """End a span of holding: set `in_flight` from its samples, and return its launches."""
        if self._looks:
            self.in_flight = min(1.0, self._flying / self._looks * self.processes)
            self._several += min(0.5, self._looks / 100) * (self._overlaps / self._looks - self._several)
        launches = self._launches
        self._looks = self._flying = self._overlaps = self._launches = 0
        return launches

    def alone(self, now: int, elapsed: int) -> int:
        """Add a span in which the tenant held alone. Return progress that it lost unnoticed before, in ns."""
        launches = self.span()
        self._alone_ns += elapsed
        self._alone_flying += self.in_flight * elapsed
        self._alone_launches += launches
        return self._learn(now) if self._alone_ns >= PROBE_NS else 0

    def joined(self, now: int) -> int:
        """End a span in which the tenant held alone: other tenants hold too from `now`, or its turn is over. Returns as
        `alone`."""
        if self._alone_ns < LEARN_NS and self.alone_in_flight is None:
            return 0
        lost = self._learn(now) if self._alone_ns >= LEARN_NS else 0
        self._alone_ns, self._alone_flying, self._alone_launches = 0, 0.0, 0
        return lost

    def shared(self, elapsed: int, launches: int) -> None:
        """Add a span with other holders, and its launches."""
        self.shared_ns += elapsed
        self.shared_launches += launches
        self.window_ns += elapsed
        self._window_flying += self.in_flight * elapsed
        self._window_launches += launches

    def judge(self, now: int, others: float, request_milli: int) -> float:
        """Return the tenant's loss in the window that ends now, 0 to `_LOSS_MOST` of its work, and begin the next
        window.

        If its phase has changed since its measure, the tenant is charged for the least progress. It then keeps its
        former progress for the sum.

        Args:
            now: The present moment.
            others: Part of the GPU's processes that belong to other tenants, 0 to 1.
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

    def _least_given(self, in_flight: float, others: float) -> float:
        """Return the loss of a tenant that got its part of the GPU, and no more, while it had work in flight. A tenant
        that needs less than that part alone loses nothing."""
        bound = in_flight * others * _SWITCHING
        if not self.alone_in_flight:
            return bound
        return min(bound, max(0.0, 1 - in_flight * (1 - others) / _SWITCHING / self.alone_in_flight))

    def prove(self, loss: float | None) -> None:
        """Set the loss that a trial measured, for windows with too few launches; None: remove it."""
        self._proven_loss = loss

    @property
    def hides_losses(self) -> bool:
        """Return whether launches may hide losses: small launches of one process or stream hide the losses of
        others."""
        return self.processes > 1 or self._several > _SEVERAL

    @property
    def conclusive(self) -> bool:
        """Return whether a window of 25 ms has enough launches to show a loss."""
        return self.alone_rate * 25 * _MS >= _LAUNCHES_LEAST

    @property
    def until_measured_ns(self) -> int:
        """Return how much longer the tenant must hold alone to be measured, in nanoseconds."""
        return PROBE_NS - self._alone_ns

    def known(self, now: int) -> float | None:
        """Return the part of the time in flight while the tenant holds alone; None: the measure is too old."""
        return None if now - self.measured_at > _KNOWN_NS else self.alone_in_flight

    def loss(self, now: int) -> float | None:
        """Return the loss of the last window, 0 to 1 of its work; None: the window is too old."""
        return None if self._window_in_flight is None or now - self._lost_at > _LOSS_KNOWN_NS else self._loss

    def known_loss(self, now: int) -> float | None:
        """Return the average loss of all windows; None: the last one is too old."""
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
        """Return the progress since the last measure that the tenant was charged for and did not get, in ns.

        The tenant now launches so much faster alone that it was slowed in between.
        """
        made = self._since_made
        real = max(self._since_sure, self._since_launches / rate) if rate > _FASTER * before > 0 else made
        self._since_made, self._since_sure, self._since_launches = 0.0, 0.0, 0
        return max(0, int(made - real))


def divide(elapsed: int, in_flight: list[float]) -> list[int]:
    """Divide a span of nanoseconds among its holders, by the part of the span that each had work in flight.

    The parts add up to `elapsed` exactly, or to less if the parts in flight add up to less than one.
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
    """Return the predicted progress of tenants that would hold at once, from each tenant's part of time in flight
    alone. The GPU is divided max-min; time slices of several busy tenants leave 0.92 of it."""
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
