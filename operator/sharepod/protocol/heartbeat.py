"""Heartbeat of one process, read from its pulse page: when the process last had processor time, and when its work ends.

Guarantee:
- A process can write any times, so only the agent's clock is trusted. The process's times are used only relative to
  each other. Its last heartbeat is never later than the reading, nor before the agent's clock began.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from .pulse import Pulse, PulsePage

_HALF = 1 << 63
"""Half of the range of a 64-bit clock: offsets are wrapped into -2**63 to 2**63 - 1."""


class LastBeat(NamedTuple):
    """Last heartbeat of a process. Moments in nanoseconds of the agent's clock."""

    at: int
    ends_at: int | None
    """Moment at which the process's launched work is expected to end; None: not known."""
    waits: bool = False
    """True if the process waits for the token. It then still writes heartbeats."""


class CounterGrowth(NamedTuple):
    """Growth of the counters of one process's pulse between two readings."""

    samples: int
    """Random moments at which the process checked whether its work is in flight; 0: it took no samples."""
    in_flight: int
    """Samples with work in flight, at most `samples`."""
    launches: int
    several: int = 0
    """Samples with work of several streams in flight, at most `in_flight`."""


class Beat(NamedTuple):
    """Address of a process's last heartbeat, so that native code can check it without Python."""

    page: object
    """Owner of the memory. The address is valid while this object exists."""
    address: int
    """Address of its pulse (`struct shp_pulse`)."""
    offset_ns: int
    """Nanoseconds to add to a time of the process's clock to get the agent's."""
    since_ns: int
    """Moment of the agent's clock before which a silence of the process is ignored."""
    patience_ns: int
    """Longest silence that is tolerated, in nanoseconds."""
    ahead_ns: int
    """The process's silence also counts this many nanoseconds before the expected end of its work."""


class Heartbeat:
    """Heartbeats of one process.

    Args:
        pulse: Returns the last values that the process wrote.
        page: Page on which the process writes these values. None: `beat` returns None.
    """

    def __init__(self, pulse: Callable[[], Pulse], page: PulsePage | None = None) -> None:
        self._pulse = pulse
        self._page = page
        self._counted = CounterGrowth(0, 0, 0)
        """Counters at the last call of `progress`."""
        self._offset: int | None = None
        """Nanoseconds to add to a time of the process's clock to get the agent's. It is the least difference seen
        between a write and its reading, so it is too large by the fastest reading, less than 1 ms."""

    def read(self, clock: Callable[[], int]) -> LastBeat:
        """Return the last heartbeat. Also call this soon after the process has acted: such a reading shows the
        offset of the clocks. `clock` is read after the page, so a delay between the two only overestimates the offset,
        and a later reading corrects that."""
        pulse = self._pulse()
        apart = clock() - pulse.beat_at
        if self._offset is None or apart < self._offset:
            self._offset = apart
        heard = max(0, pulse.beat_at + self._offset)
        if pulse.grant_id == 0:
            return LastBeat(heard, heard, waits=pulse.ends_at != 0)
        return LastBeat(heard, pulse.ends_at + self._offset if pulse.ends_at else None)

    def progress(self) -> CounterGrowth:
        """Return the growth of the counters since the last call, or since the connection began. A process can write any
        value, so a counter that is lower than before counts as not grown. Each growth is below 2**64."""
        pulse, before = self._pulse(), self._counted
        self._counted = CounterGrowth(pulse.samples, pulse.in_flight, pulse.launches, pulse.several)
        samples = max(0, pulse.samples - before.samples)
        in_flight = min(samples, max(0, pulse.in_flight - before.in_flight))
        several = min(in_flight, max(0, pulse.several - before.several))
        return CounterGrowth(samples, in_flight, max(0, pulse.launches - before.launches), several)

    def beat(self, since_ns: int, patience_ns: int, ahead_ns: int) -> Beat | None:
        """Return the address of the heartbeat; None: there is no page, or `read` was not called yet."""
        if self._page is None or self._offset is None:
            return None
        offset = (self._offset + _HALF) % (2 * _HALF) - _HALF  # as C wraps around, whatever the process writes
        return Beat(self._page, self._page.address, offset, since_ns, patience_ns, ahead_ns)
