"""Time record of one GPU: the use of each nanosecond.

Guarantee:
- TS6: The times of all uses add up to the time since the GPU had its first tenant, to the nanosecond.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto


class GpuUse(Enum):
    """Use of a GPU's time."""

    HELD = auto()
    """Held by a tenant, which pays for it."""

    ANTICIPATED = auto()
    """Kept idle for a pausing tenant, which pays."""

    HANDED_OVER = auto()
    """Held by no tenant while a tenant waits: the token is in transit, or a gang waits for its other GPUs."""

    IDLE = auto()
    """Held by no tenant, and no tenant waits."""

    STALLED = auto()
    """The agent did not run for a while, so no new turn could begin after the end of the last one. No tenant is
    charged."""


_HELD, _ANTICIPATED, _HANDED_OVER, _IDLE = GpuUse.HELD, GpuUse.ANTICIPATED, GpuUse.HANDED_OVER, GpuUse.IDLE


@dataclass(frozen=True)
class GpuTime:
    """Time of one GPU by use, in nanoseconds since it had its first tenant in this process."""

    held_ns: int
    anticipated_ns: int
    handed_over_ns: int
    idle_ns: int
    stalled_ns: int
    gap_ns: int = 0
    """Time in which tenants co-ran on the GPU and none had work in flight."""


class GpuBooks:
    """Time record of one GPU. It begins at `now`, in nanoseconds of the clock."""

    def __init__(self, now: int) -> None:
        self.at = now
        """Moment up to which all time is recorded."""
        self._held = self._anticipated = self._handed_over = self._idle = self._stalled = self._gap = 0

    def advance(self, now: int, use: GpuUse) -> None:
        """Record the time until `now` under `use`."""
        spent = now - self.at
        if spent <= 0:
            return
        self.at = now
        # Five numbers instead of a mapping: Python hashes enum members slowly, about five times per hand-off.
        if use is _HELD:
            self._held += spent
        elif use is _HANDED_OVER:
            self._handed_over += spent
        elif use is _IDLE:
            self._idle += spent
        elif use is _ANTICIPATED:
            self._anticipated += spent
        else:
            self._stalled += spent

    def share(self, now: int, held_ns: int) -> None:
        """Record the time until `now`, in which tenants co-ran. `held_ns`: nanoseconds with work in flight, counted as
        held. The rest counts as a gap."""
        self._held += held_ns
        self._gap += now - self.at - held_ns
        self.at = now

    def time(self) -> GpuTime:
        """Return the recorded time."""
        return GpuTime(
            held_ns=self._held,
            anticipated_ns=self._anticipated,
            handed_over_ns=self._handed_over,
            idle_ns=self._idle,
            stalled_ns=self._stalled,
            gap_ns=self._gap,
        )
