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
    """Target latency: time within which every tenant that waits for a GPU has one turn. The length of a tenant's turn
    is its part of this time, in proportion to its request."""

    quantum_min_ns: int = 10 * _MS
    """Shortest quantum. When a tenant wakes with credit, the holder's quantum is cut to this. A tenant starts only if
    it can hold for this long without exceeding its limit. A hand-off takes about 0.2 ms (benchmarks/handoff.py), 2 % of
    this."""

    turn_min_ns: int = 2 * _MS
    """Shortest turn: that of a tenant with a small share, and of a holder on borrowed time when a tenant with credit
    begins to wait. About ten times the time of a hand-off."""

    quantum_max_ns: int = 100 * _MS
    """Longest quantum, while other tenants wait or the tenant has a limit below the whole GPU."""

    grace_ns: int = 1000 * _MS
    """Grace period: a holder that has not drained this long after its deadline is preempted. Longer than all but the
    longest kernels, so that preemption is the exception."""

    assured_burst_ns: int = 1000 * _MS
    """Capacity of the assured bucket: credit of this much time at the tenant's request. It bounds how long a tenant
    that returns after a pause can delay other tenants."""

    ceiling_burst_ns: int = 100 * _MS
    """Capacity of the ceiling bucket: this much time at the tenant's limit, but at least one longest quantum."""

    debt_ns: int = 10_000 * _MS
    """Debt cap of each bucket, as time at the bucket's rate. It bounds how long a tenant in debt waits. Only a single
    hold longer than the cap can leave more debt."""

    window_ns: int = 10_000 * _MS
    """Length of the window over which usage is reported."""

    quiet_ns: int = 1000 * _MS
    """Time after its last wait or hold for which a tenant counts as active. If all other tenants are inactive, a holder
    has no quantum and is not metered."""

    wake_ns: int = 1 * _MS
    """Least sleep after which a tenant with credit goes next. Longer than the pause between two launches of a busy
    program."""

    idle_patience_ns: int = 1000 * _MS
    """Longest wait of a tenant with credit during which a GPU may be kept idle for a pausing tenant. Afterwards the
    waiting tenant gets its turn."""

    renew_ahead_ns: int = 3_000_000
    """Time before its deadline at which a holder is renewed if its turn is next again, so that the grant reaches the
    program before its queue runs empty. It is at most a quarter of the quantum."""

    hand_off_ns: int = 1_500_000
    """Time before the announced end of a holder's last work at which the next tenant is granted. It is the time that a
    hand-off takes on a busy node."""

    cut_every_ns: int = 25 * _MS
    """Least average time, on each GPU, between two cuts for tenants that wake with credit. So the hand-offs of cuts
    take less than 1 % of the time."""

    early_every_ns: int = 8 * _MS
    """Least average time between two early turns of an interactive tenant. So it has at most 125 early turns a second,
    whose hand-offs of 0.2 ms take 3 % of the time. If it wakes more often, it is served like other tenants."""

    cut_burst_ns: int = 500 * _MS
    """Burst of cuts, and of early turns, after a quiet time: 20 cuts, 62 turns."""

    resume_ns: int = 50 * _MS
    """Time that a throttled tenant, one at its limit, must be able to hold again before it runs. At most half of the
    longest quantum."""

    excess_horizon_ns: int = 60_000 * _MS
    """Largest claim on lent time that a tenant that may co-run keeps while it sleeps, as time at its request. So lent
    time goes first to tenants that used little of their requests in the last minute."""

    sharing: Sharing = Sharing.EXCLUSIVE
    """Default for GPUs without a call of `Scheduler.set_sharing`."""

    def __post_init__(self) -> None:
        for field in fields(self):
            if field.name != "sharing" and getattr(self, field.name) < 1:
                raise ValueError(f"{field.name} is {getattr(self, field.name)}; it has to be at least 1 ns")
        if self.quantum_min_ns > self.quantum_max_ns:
            raise ValueError(f"quantum_min_ns {self.quantum_min_ns} is more than quantum_max_ns {self.quantum_max_ns}")

    @property
    def patience_ns(self) -> int:
        """Return the nanoseconds that a tenant must have waited, and must be owed, to precede tenants that wake with
        credit.

        It is two thirds of the target latency. The last third is left for the turns of all tenants that have waited
        this long.
        """
        return self.target_latency_ns * 2 // 3

    def quantum(self, part: int, whole: int, overrun_ns: int = 0) -> int:
        """Return the quantum, in nanoseconds, of a tenant with weight `part` among competing tenants whose weights sum
        up to `whole`. `overrun_ns`: time by which the tenant's turns usually overrun; it is subtracted from the
        quantum."""
        own = self.target_latency_ns * part // max(1, whole) - overrun_ns
        return max(self.turn_min_ns, min(self.quantum_max_ns, own))
