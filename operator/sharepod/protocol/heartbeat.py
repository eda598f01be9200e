"""Heartbeat of one process: when it last had processor time, and when its work ends, by its pulse page.

Guarantee:
- No clock but the agent's is trusted: a process's moments count by their differences, and it was never heard later than
  it was read, nor before the agent's clock began.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from .pulse import Pulse, PulsePage

_HALF = 1 << 63
"""Half of the moments that a clock of 64 bits has."""


class Sign(NamedTuple):
    """Last sign of life of a process. Moments in nanoseconds of the agent's clock."""

    at: int
    ends_at: int | None
    """Moment at which what the process has launched is expected to end; None: not known."""
    waits: bool = False
    """The process waits for the token, and goes on giving signs of life meanwhile."""


class CounterGrowth(NamedTuple):
    """Growth of the counters of one process's pulse between two readings."""

    samples: int
    """Random moments at which the process looked whether its work is in flight; 0: it took no samples."""
    in_flight: int
    """Those of them at which it was, at most `samples`."""
    launches: int
    several: int = 0
    """Those of the samples at which work of several streams was, at most `in_flight`."""


class Beat(NamedTuple):
    """Where a process writes that it lives, for one that looks without reading the rest."""

    page: object
    """Owner of the memory: while it lives the address is good."""
    address: int
    """Address of its pulse (`struct shp_pulse`)."""
    offset_ns: int
    """Nanoseconds from its clock to that of the agent."""
    since_ns: int
    """Moment of the agent's clock from which on its silence counts at the earliest."""
    patience_ns: int
    """Silence that it may keep."""
    ahead_ns: int
    """Nanoseconds before the end of its work from which on its silence matters."""


class Heartbeat:
    """Signs of life of one process.

    Args:
        pulse: Returns what the process last wrote.
        page: Page in which it does; None: it cannot be looked at but by `read`.
    """

    def __init__(self, pulse: Callable[[], Pulse], page: PulsePage | None = None) -> None:
        self._pulse = pulse
        self._page = page
        self._counted = CounterGrowth(0, 0, 0)
        """Counters at the last reading of the progress."""
        self._offset: int | None = None
        """Least time from a moment of the process's clock to its reading here: how far the clocks are apart, and less
        than a millisecond more."""

    def read(self, clock: Callable[[], int]) -> Sign:
        """Return the last sign of life. To be read soon after the process has done something, too: from that is known
        how far the clocks are apart. `clock` is asked after the page was read: a reader that is held up in between
        takes the clocks to be further apart than they are, which a later reading mends, and never closer."""
        pulse = self._pulse()
        apart = clock() - pulse.beat_at
        if self._offset is None or apart < self._offset:
            self._offset = apart
        heard = max(0, pulse.beat_at + self._offset)
        if pulse.grant_id == 0:
            return Sign(heard, heard, waits=pulse.ends_at != 0)
        return Sign(heard, pulse.ends_at + self._offset if pulse.ends_at else None)

    def progress(self) -> CounterGrowth:
        """Return by how much the counters have grown since the last call, or since the connection began. Counters that
        went back have not grown: a process can write anything. It cannot say more than 2**64 of each."""
        pulse, before = self._pulse(), self._counted
        self._counted = CounterGrowth(pulse.samples, pulse.in_flight, pulse.launches, pulse.several)
        samples = max(0, pulse.samples - before.samples)
        in_flight = min(samples, max(0, pulse.in_flight - before.in_flight))
        several = min(in_flight, max(0, pulse.several - before.several))
        return CounterGrowth(samples, in_flight, max(0, pulse.launches - before.launches), several)

    def beat(self, since_ns: int, patience_ns: int, ahead_ns: int) -> Beat | None:
        """Return where to look for signs of life; None where that is not known, or the process was not read yet."""
        if self._page is None or self._offset is None:
            return None
        offset = (self._offset + _HALF) % (2 * _HALF) - _HALF  # as C counts, whatever the process writes
        return Beat(self._page, self._page.address, offset, since_ns, patience_ns, ahead_ns)
