"""Parameters of the token scheduler."""

from __future__ import annotations

from dataclasses import dataclass, fields
from enum import Enum, auto

_MS = 1_000_000


class Sharing(Enum):
    """How several tenants use one GPU."""

    EXCLUSIVE = auto()
    """One after the other: one tenant holds at a time."""

    CONCURRENT = auto()
    """While one tenant leads, others may co-run."""


@dataclass(frozen=True)
class Parameters:
    """Durations in nanoseconds, each at least 1.

    Raises:
        ValueError: a duration is less than 1, or the shortest quantum is longer than the longest.
    """

    target_latency_ns: int = 300 * _MS
    """Within this time every runnable tenant has had a turn: each turn is the tenant's part of it."""

    quantum_min_ns: int = 10 * _MS
    """What a holder keeps of its quantum when a tenant wakes with credit, and the least room under a ceiling that is
    worth a turn. A hand-off costs about 0.2 ms (benchmarks/handoff.py), which is 2 % of it."""

    turn_min_ns: int = 2 * _MS
    """Shortest turn: of a tenant with a small share, and what a holder of borrowed time keeps of its quantum when a
    tenant with credit comes. Some ten times what a hand-off costs."""

    quantum_max_ns: int = 100 * _MS
    """Longest quantum while others wait or the tenant's ceiling binds."""

    grace_ns: int = 1000 * _MS
    """Grace period: a holder that has not drained this long after its deadline is preempted. Longer than all but the
    longest kernels, so that preemption is the exception."""

    assured_burst_ns: int = 1000 * _MS
    """Capacity of the assured bucket, as time at the tenant's request. It bounds for how long a tenant that returns
    can delay the others."""

    ceiling_burst_ns: int = 100 * _MS
    """Capacity of the ceiling bucket, as time at the tenant's limit. The bucket holds at least one longest quantum."""

    debt_ns: int = 10_000 * _MS
    """Debt cap, as time at the tenant's rate. Only one hold that was longer can leave more debt. It bounds how long a
    tenant in debt waits."""

    window_ns: int = 10_000 * _MS
    """Length of the window over which usage is reported."""

    quiet_ns: int = 1000 * _MS
    """A tenant counts as active this long after it last waited or held. A holder whose neighbours are all inactive has
    no quantum and is not metered."""

    wake_ns: int = 1 * _MS
    """A tenant with credit that wants the token after not wanting it for at least this long goes next. Longer than the
    time between two launches of a busy program."""

    idle_patience_ns: int = 1000 * _MS
    """A tenant with credit that has waited this long finds no GPU kept idle for another."""

    renew_ahead_ns: int = 3_000_000
    """Time before its deadline, in ns, at which a holder whose turn is next again is renewed: enough for the grant to
    reach the program, so that its queue does not run empty. A quarter of its quantum at most."""

    hand_off_ns: int = 1_500_000
    """Time before the expected end of a holder's last work at which the next tenant is granted, in ns: what a hand-off
    takes on a busy node."""

    cut_every_ns: int = 25 * _MS
    """Least average time, on each GPU, between two quanta cut short for tenants that wake with credit: hand-offs stay
    under 1 % of the time."""

    early_every_ns: int = 8 * _MS
    """Least average time between two early turns of an interactive tenant: 125 a second, whose hand-offs of 0.2 ms are
    3 % of the time. A tenant that wakes more often is served as any other meanwhile."""

    cut_burst_ns: int = 500 * _MS
    """How far cuts, and early turns, may run ahead of their average after a time without any: 20 cuts, 62 turns."""

    resume_ns: int = 50 * _MS
    """A tenant that is throttled by its ceiling resumes once it can run for at least this long (half of the longest
    quantum at most)."""

    excess_horizon_ns: int = 60_000 * _MS
    """Time, at its request, for which a tenant that may co-run saves up a claim on idle time while it sleeps: one that
    used little of its request in the last minute goes first."""

    sharing: Sharing = Sharing.EXCLUSIVE
    """How GPUs are shared of which the caller says nothing else."""

    def __post_init__(self) -> None:
        for field in fields(self):
            if field.name != "sharing" and getattr(self, field.name) < 1:
                raise ValueError(f"{field.name} is {getattr(self, field.name)}; it has to be at least 1 ns")
        if self.quantum_min_ns > self.quantum_max_ns:
            raise ValueError(f"quantum_min_ns {self.quantum_min_ns} is more than quantum_max_ns {self.quantum_max_ns}")

    @property
    def patience_ns(self) -> int:
        """Return how long a tenant is owed time, and waits, before it goes before tenants that wake with credit: two
        thirds of the target latency. The last third is for the turns of all tenants that have waited this long."""
        return self.target_latency_ns * 2 // 3

    def quantum(self, part: int, whole: int, overrun_ns: int = 0) -> int:
        """Return the quantum in nanoseconds of a tenant of weight `part` of the `whole` that competes, whose
        turns last `overrun_ns` longer than told."""
        own = self.target_latency_ns * part // max(1, whole) - overrun_ns
        return max(self.turn_min_ns, min(self.quantum_max_ns, own))
