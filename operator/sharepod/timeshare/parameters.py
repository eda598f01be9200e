"""What the token scheduler can be set to. All durations in nanoseconds."""

from __future__ import annotations

from dataclasses import dataclass, fields

_MS = 1_000_000


@dataclass(frozen=True)
class Parameters:
    """Durations in nanoseconds, each at least 1. Raises `ValueError` for values that contradict each other."""

    target_latency_ns: int = 300 * _MS
    """Everyone who can run should have had a turn within this time: the quantum is this over the number of runnable
    tenants."""

    quantum_min_ns: int = 10 * _MS
    """No quantum is shorter."""

    quantum_max_ns: int = 100 * _MS
    """No quantum is longer while others wait or the ceiling binds."""

    grace_ns: int = 1000 * _MS
    """A holder that has not drained this long after its quantum is overtaken."""

    assured_burst_ns: int = 1000 * _MS
    """The assured bucket holds at most this long of its rate."""

    ceiling_burst_ns: int = 100 * _MS
    """The ceiling bucket holds at most this long of its rate, and at least a quantum."""

    debt_ns: int = 10_000 * _MS
    """Over-use is debt of at most this long of the tenant's rate, but for one over-long hold."""

    window_ns: int = 10_000 * _MS
    """TimeUsage is shown over the last window of this length."""

    quiet_ns: int = 1000 * _MS
    """A GPU whose other tenants have not wanted it for this long counts as its holder's alone: no quantum, no
    metering."""

    wake_ns: int = 1 * _MS
    """A tenant that has not wanted the token for this long, and has credit, goes next when it wants it again."""

    patience_ns: int = 1000 * _MS
    """A tenant with credit that has waited for so long goes before those that wake with credit."""

    renew_ahead_ns: int = 3_000_000
    """So long before its quantum ends (a quarter of it at most) a holder whose turn it is again is told to go on."""

    hand_off_ns: int = 1_500_000
    """So long before the last work of a holder is expected to end the next is granted."""

    cut_every_ns: int = 25 * _MS
    """The quantum of a holder is cut for those who wake with credit no more often than this, on each GPU."""

    cut_burst_ns: int = 500 * _MS
    """After a while without cuts they may follow each other until they are so much ahead of that."""

    resume_ns: int = 50 * _MS
    """Who waits for its ceiling waits until it can run for so long."""

    def __post_init__(self) -> None:
        for field in fields(self):
            if getattr(self, field.name) < 1:
                raise ValueError(f"{field.name} is {getattr(self, field.name)}; it has to be at least 1 ns")
        if self.quantum_min_ns > self.quantum_max_ns:
            raise ValueError(f"quantum_min_ns {self.quantum_min_ns} is more than quantum_max_ns {self.quantum_max_ns}")

    def quantum(self, runnable: int) -> int:
        """The quantum where so many tenants can run."""
        return max(self.quantum_min_ns, min(self.quantum_max_ns, self.target_latency_ns // max(1, runnable)))
