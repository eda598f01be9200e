"""Silence: decides whether a tenant that holds a GPU, while other tenants wait, gets no processor time. Pure.

Guarantees:
- E2 silent-holder: a tenant is silent if none of its undrained processes has written a heartbeat for the *patience*,
  and the end of their launched work is known and near. Before that end, suspending the tenant would help no other
  tenant, because its work still occupies the GPU.
- The patience is between `PATIENCE_LEAST_NS` and `PATIENCE_MOST_NS`. It is short only for a tenant that was silent
  within the last `FORGET_NS`, for at least `PATIENCE_MOST_NS`. So a tenant whose thread is late occasionally keeps its
  turns.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from sharepod.protocol import LastBeat

PATIENCE_MOST_NS = 5_000_000
"""Longest patience: nanoseconds without a heartbeat after which a process counts as having no processor time. The
value is ten times the pause between two heartbeats, and a twentieth of the period of a CPU quota."""
PATIENCE_LEAST_NS = 1_000_000
"""Shortest patience, for a tenant that loses its processor time repeatedly. It covers two heartbeats, and the
rounding of timers on a loop other than the agent's (agent/on_time.py)."""
FORGET_NS = 250_000_000
"""Nanoseconds after which the patience is the longest again: 250 ms, two and a half periods of a CPU quota. On a busy
node a thread is late by `PATIENCE_MOST_NS` about once a second."""
AHEAD_NS = 2_500_000
"""Nanoseconds before the end of a tenant's work at which its silence is decided, so that the next tenant starts when
the work ends. They cover the time of a hand-off on a busy node, and the possible delay of a timer of the event loop."""


@dataclass(frozen=True)
class LookAgain:
    """Verdict: the tenant is not silent, or its launched work still occupies the GPU. `at`: moment of the next check,
    in nanoseconds of the clock."""

    at: int


@dataclass(frozen=True)
class Silent:
    """Verdict: the tenant gets no processor time. `ends_at`: moment at which its launched work ends or has ended, in
    nanoseconds of the clock."""

    ends_at: int


class Silence:
    """Silence of one tenant: its patience, and its current silence if it is silent."""

    def __init__(self) -> None:
        self.patience_ns = PATIENCE_MOST_NS
        self._ran_at = 0
        """Moment at which the tenant last ran again after at least `PATIENCE_MOST_NS` without a heartbeat."""
        self._since: int | None = None
        """Moment of the last heartbeat before the tenant became silent, or of its grant. None if it has written one
        since then."""
        self._took_note = False
        """True if a heartbeat after the grant, or in the wait for it, shows when the silence began. Only then can
        patience rise."""

    def judge(self, now: int, beats: Iterable[tuple[LastBeat | None, int]]) -> LookAgain | Silent:
        """Decide whether a tenant is silent, by its processes that have not drained. If it is `Silent`, the caller must
        bar its gates.

        Args:
            beats: For each process: its last heartbeat (None if it writes none), and the start of its silence. The
            start is the time of its grant frame, or its last heartbeat before that if it wrote some while it waited.
        """
        if now - self._ran_at > FORGET_NS:
            self.patience_ns = PATIENCE_MOST_NS
        last, ends_at, took_note = 0, 0, False
        for beat, since in beats:
            if beat is None:
                return LookAgain(now + PATIENCE_MOST_NS)
            heard = max(beat.at, since)
            if heard > now - self.patience_ns:
                return LookAgain(heard + self.patience_ns)
            if beat.ends_at is None:
                return LookAgain(now + PATIENCE_MOST_NS)
            took_note = took_note or beat.at >= since
            last, ends_at = max(last, heard), max(ends_at, beat.ends_at)
        if ends_at - AHEAD_NS > now:
            return LookAgain(ends_at - AHEAD_NS)
        if self._since is None:
            self._since, self._took_note = last, took_note
        return Silent(ends_at)

    def spoke(self, now: int) -> None:
        """Record that a tenant runs, because a frame about its grant has arrived. If it was silent, halve its patience
        after a long silence, double it after a short one."""
        if self._since is None:
            return
        if now - self._since >= PATIENCE_MOST_NS:
            self.patience_ns, self._ran_at = max(PATIENCE_LEAST_NS, self.patience_ns // 2), now
        elif self._took_note:
            self.patience_ns = min(PATIENCE_MOST_NS, 2 * self.patience_ns)
        self._since = None
