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


@dataclass(frozen=True)
class GpuTime:
    """Time of one GPU by use, in nanoseconds since it had its first tenant in this process."""

    held_ns: int
    anticipated_ns: int
    handed_over_ns: int
    idle_ns: int
    stalled_ns: int


class GpuBooks:
    """Books of one GPU, opened at a moment in nanoseconds of the clock."""

    def __init__(self, now: int) -> None:
        self._at = now
        self._spent = dict.fromkeys(GpuUse, 0)

    def advance(self, now: int, use: GpuUse) -> None:
        """Enter the time until `now`, which went to `use`."""
        if now > self._at:
            self._spent[use] += now - self._at
            self._at = now

    def time(self) -> GpuTime:
        """Return what has been entered."""
        spent = self._spent
        return GpuTime(
            held_ns=spent[GpuUse.HELD],
            anticipated_ns=spent[GpuUse.ANTICIPATED],
            handed_over_ns=spent[GpuUse.HANDED_OVER],
            idle_ns=spent[GpuUse.IDLE],
            stalled_ns=spent[GpuUse.STALLED],
        )
