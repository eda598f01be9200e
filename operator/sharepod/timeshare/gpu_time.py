"""Books of one GPU: what each nanosecond of it went to.

Guarantee:
- TS6: The parts add up to the time that has passed since the GPU had its first tenant, to the nanosecond.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto


class GpuUse(Enum):
    """State of a GPU."""

    HELD = auto()
    """A tenant pays for it."""

    ANTICIPATED = auto()
    """Kept idle for a tenant that pauses, at its expense."""

    HANDED_OVER = auto()
    """Nobody holds it, and a tenant waits: for the token to pass, or for a gang's other GPUs."""

    IDLE = auto()
    """Nobody holds it, and nobody waits."""

    STALLED = auto()
    """The agent was late: what was due to end had ended, and nothing could begin. Charged to nobody."""


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
    """Several tenants held it at once, and none of them had work in flight."""


class GpuBooks:
    """Books of one GPU, opened at a moment in nanoseconds of the clock."""

    def __init__(self, now: int) -> None:
        self.at = now
        """Moment up to which all time is entered."""
        self._held = self._anticipated = self._handed_over = self._idle = self._stalled = self._gap = 0

    def advance(self, now: int, use: GpuUse) -> None:
        """Enter the time until `now`, which went to `use`."""
        spent = now - self.at
        if spent <= 0:
            return
        self.at = now
        # Five numbers and no mapping: the hash of an enum's member is Python's, some five times in each hand-off.
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
        """Enter the time until `now`, in which several tenants held: `held_ns` of it is theirs, the rest a gap."""
        self._held += held_ns
        self._gap += now - self.at - held_ns
        self.at = now

    def time(self) -> GpuTime:
        """Return what has been entered."""
        return GpuTime(
            held_ns=self._held,
            anticipated_ns=self._anticipated,
            handed_over_ns=self._handed_over,
            idle_ns=self._idle,
            stalled_ns=self._stalled,
            gap_ns=self._gap,
        )
