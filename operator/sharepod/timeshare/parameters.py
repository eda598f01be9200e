"""Parameters of the token scheduler."""

from __future__ import annotations

from dataclasses import dataclass, fields
from enum import Enum, auto

_MS = 1_000_000


class Sharing(Enum):
    """How several tenants use one GPU."""

    EXCLUSIVE = auto()
    """In turns: one tenant holds at a time."""

    CONCURRENT = auto()
    """While one tenant leads, others may co-run."""


@dataclass(frozen=True)
class Parameters:
    """Durations in nanoseconds, each at least 1.

    Raises:
        ValueError: a duration is less than 1, or the shortest quantum is longer than the longest.
    """

    target_latency_ns: int = 300 * _MS
    """Time within which every runnable tenant has a turn: each turn is the tenant's part of it."""

    quantum_min_ns: int = 10 * _MS
    """Remainder of a holder's quantum when a tenant wakes with credit, and the least room under a ceiling that is worth
    a turn. A hand-off costs about 0.2 ms (benchmarks/handoff.py), 2 % of this."""

    turn_min_ns: int = 2 * _MS
    """Shortest turn, in ns: for a tenant with a small share, and the remainder of borrowed time when a tenant with
    credit arrives. About ten times the cost of a hand-off."""

    quantum_max_ns: int = 100 * _MS
    """Longest quantum while others wait or the tenant's ceiling binds."""

    grace_ns: int = 1000 * _MS
    """Grace period: a holder that has not drained this long after its deadline is preempted. Longer than all but the
    longest kernels, so that preemption is the exception."""

    assured_burst_ns: int = 1000 * _MS
    """Capacity of the assured bucket, as time at the tenant's request. It bounds how long a returning tenant can delay
    the others."""

    ceiling_burst_ns: int = 100 * _MS
    """Capacity of the ceiling bucket, as time at the tenant's limit. The bucket holds at least one longest quantum."""

    debt_ns: int = 10_000 * _MS
    """Debt cap, as time at the tenant's rate. Only one hold longer than the cap can leave more debt. The cap bounds how
    long a tenant in debt waits."""

    window_ns: int = 10_000 * _MS
    """Length of the window over which usage is reported."""

    quiet_ns: int = 1000 * _MS
    """Time after its last wait or hold for which a tenant counts as active. A holder next to inactive tenants only has
    no quantum and is not metered."""

    wake_ns: int = 1 * _MS
    """Least sleep after which a tenant with credit goes next. Longer than the time between two launches of a busy
    program."""

    idle_patience_ns: int = 1000 * _MS
    """Wait after which a GPU is no longer kept idle against a tenant with credit."""

    renew_ahead_ns: int = 3_000_000
    """Time before its deadline, in ns, at which a holder whose turn is next again is renewed. It lets the grant reach
    the program before its queue runs empty. At most a quarter of the quantum."""

    hand_off_ns: int = 1_500_000
    """Time before the expected end of a holder's last work at which the next tenant is granted, in ns. It is the time
    of a hand-off on a busy node."""

    cut_every_ns: int = 25 * _MS
    """Least average time, on each GPU, between two quanta that are cut for tenants that wake with credit: hand-offs
    stay under 1 % of the time."""

    early_every_ns: int = 8 * _MS
    """Least average time between two early turns of an interactive tenant: 125 a second, whose hand-offs of 0.2 ms are
    3 % of the time. Further wakes within it are served like other tenants'."""

    cut_burst_ns: int = 500 * _MS
    """Burst of cuts, and of early turns, after a quiet time: 20 cuts, 62 turns."""

    resume_ns: int = 50 * _MS
    """Time that a throttled tenant's ceiling must have room for before it resumes; at most half of the longest
    quantum."""

    excess_horizon_ns: int = 60_000 * _MS
    """Time, at its request, up to which a sleeping tenant that may co-run saves a claim on idle time. So idle time goes
    first to tenants that used little of their requests in the last minute."""

    sharing: Sharing = Sharing.EXCLUSIVE
    """How GPUs are shared unless the caller sets it per GPU."""

    def __post_init__(self) -> None:
        for field in fields(self):
            if field.name != "sharing" and getattr(self, field.name) < 1:
                raise ValueError(f"{field.name} is {getattr(self, field.name)}; it has to be at least 1 ns")
        if self.quantum_min_ns > self.quantum_max_ns:
            raise ValueError(f"quantum_min_ns {self.quantum_min_ns} is more than quantum_max_ns {self.quantum_max_ns}")

    @property
    def patience_ns(self) -> int:
        """Return how long a tenant waits, and is owed time, before it precedes tenants that wake with credit.

        Two thirds of the target latency: the last third is for the turns of all tenants that have waited this long.
        """
        return self.target_latency_ns * 2 // 3

    def quantum(self, part: int, whole: int, overrun_ns: int = 0) -> int:
        """Return the quantum, in nanoseconds, of a tenant of weight `part` among competing tenants of weight `whole`,
        for turns that overrun by `overrun_ns`."""
        own = self.target_latency_ns * part // max(1, whole) - overrun_ns
        return max(self.turn_min_ns, min(self.quantum_max_ns, own))
