"""Pulse page: one page of a memfd that one client writes and the agent maps read-only. It shows the agent that the
client gets processor time, and when its work ends.

Guarantees:
- A client cannot resize the page: the seals are set before it gets the descriptor.
- A client can write any bytes: `read` returns seven unchecked numbers, and its caller decides how far to trust them.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from typing import NamedTuple

from sharepod.protocol._wire import ffi as _ffi

from .frames import PULSE_BYTES

_SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW

assert _ffi.sizeof("struct shp_pulse") <= PULSE_BYTES, "the page holds the struct"


class Pulse(NamedTuple):
    """Last values that a client wrote. Moments in nanoseconds of the client's clock."""

    grant_id: int
    """Id of the grant that it holds or has not drained; 0: none."""
    ends_at: int
    """Moment at which the work launched so far is expected to end; 0: not known."""
    beat_at: int
    """Moment of the write; 0: nothing was written yet."""
    samples: int = 0
    """Random moments under concurrent grants at which the client checked whether its work is in flight. This counter
    and the next three begin at 0 with the connection, and stay 0 for versions before `CONCURRENT_VERSION`."""
    in_flight: int = 0
    """Samples with unfinished launched work."""
    launches: int = 0
    """Launches, as of the last sample, or of the last DRAINED."""
    several: int = 0
    """Samples with unfinished work in several streams."""


class PulsePage:
    """Pulse page of one client. The client gets `fd`, which is closed once it has been sent; the page stays mapped.

    Raises `OSError` where no descriptor or no memory is left.
    """

    def __init__(self) -> None:
        self.fd = os.memfd_create("sharepod-pulse", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self.fd, PULSE_BYTES)
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, _SEALS)
            self._map = mmap.mmap(self.fd, PULSE_BYTES, mmap.MAP_SHARED, mmap.PROT_READ)
        except OSError:
            os.close(self.fd)
            raise
        self._pulse = _ffi.cast("struct shp_pulse *", _ffi.from_buffer(self._map))
        self.address = int(_ffi.cast("uintptr_t", self._pulse))
        """Address of the client's values, valid while this object lives."""

    def read(self) -> Pulse:
        """Return the last values that the client wrote. During a write, some values may still be from the write
        before."""
        pulse = self._pulse
        counters = (pulse.samples, pulse.in_flight, pulse.launches, pulse.several)
        return Pulse(pulse.grant_id, pulse.ends_at, pulse.beat_at, *counters)

    def close_fd(self) -> None:
        """Close the descriptor after it was sent, or if it will not be sent."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
