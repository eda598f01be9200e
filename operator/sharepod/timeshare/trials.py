"""Trials of co-running on one GPU: tenants co-run for a short time although no gain is predicted, to measure whether
they get more work done than in turns.

Example: ranks of one training are several tenants. In turns, the rank that holds spins while it waits for the other
rank. So it has work in flight all the time, and no gain is predicted.

Guarantees:
- A trial takes at most `TRIAL_NS`. The first trial follows a second of turns. After each failed trial the time to the
  next one doubles. So failed trials take at most 1 % of the time, and busy tenants lose 8 % of their work in them.
- In a trial a tenant's progress is a ratio of two launch rates, by its own counters (S11): launches per nanosecond
  while it co-runs, divided by launches per nanosecond held in turns. The sum of these ratios is the sum of progress.
- A gain is measured again every `_AGAIN_NS`. If the sum has changed by a third, the programs do other work now, and
  co-running ends.
"""

from __future__ import annotations

from collections.abc import Iterable

from .tenant import TokenTenant

_MS = 1_000_000
TRIAL_NS = 250 * _MS
"""Length of a trial, in nanoseconds: some steps of a training."""
_TURNS_NS = 1_000 * _MS
"""Least time of turns, in nanoseconds, before a trial. The trial is compared with these turns."""
_HELD_NS = 100 * _MS
"""Least time that each tenant must have held in the turns before a trial, in nanoseconds."""
_FIRST_NS = 2_500 * _MS
"""Time from a failed trial to the next one, in nanoseconds; it doubles each time."""
_MOST_NS = 80_000 * _MS
"""Longest time from a failed trial to the next one, in nanoseconds."""
_AGAIN_NS = 1_000 * _MS
"""Interval at which co-running after a successful trial is measured again, in nanoseconds."""
_LASTS_NS = 10_000 * _MS
"""Time in nanoseconds for which a gain is valid; then turns and a new trial follow. It doubles with each successful
trial, up to four times this."""
_QUEUED = 3
"""Launches at the start of a measurement that are not counted. They only fill the queue, and would distort the rate of
a tenant with few, long kernels."""
_RATIO_MOST = 1.0
"""Upper bound of one tenant's ratio: co-running cannot exceed the progress alone, whatever the hooks report."""


class Trials:
    """Trials of one GPU. Moments in nanoseconds of the clock."""

    def __init__(self) -> None:
        self.begun_at: int | None = None
        """Start of the present trial. None if there is none."""
        self.proven = False
        """True if a trial has shown a gain."""
        self.next_at = 0
        self.rates: dict[str, float] = {}
        """For each tenant of the present or last trial: launches per nanosecond held in turns."""
        self._wait_ns = _FIRST_NS
        self._lasts_ns = _LASTS_NS
        self._until = 0
        self._sum = 0.0
        self._turns_since: int | None = None
        self._before: dict[str, tuple[int, int]] = {}
        """For each tenant: (launches, nanoseconds held) at the start of the present turns or measurement."""

    @property
    def active(self) -> bool:
        """Return True if tenants co-run for a trial, or because a trial showed a gain."""
        return self.proven or self.begun_at is not None

    def turns(self, now: int, tenants: Iterable[TokenTenant]) -> None:
        """Record that tenants take turns, so that a later trial can be compared with these turns. The first call since
        the last trial begins the record."""
        if self._turns_since is None:
            self._turns_since = now
            self._before = {}
        for tenant in tenants:
            if tenant.id not in self._before:
                self._before[tenant.id] = _in_turns(tenant)

    def due_at(self) -> int | None:
        """Return the moment at which the next trial may begin or the present measurement ends. None if neither is
        due.
        """
        if self.begun_at is not None:
            return self.begun_at + (_AGAIN_NS if self.proven else TRIAL_NS)
        return None if self._turns_since is None else max(self.next_at, self._turns_since + _TURNS_NS)

    def may_begin(self, now: int, tenants: Iterable[TokenTenant]) -> bool:
        """Return True if a trial of these tenants may begin."""
        due_at = self.due_at()
        if self.active or due_at is None or now < due_at:
            return False
        for tenant in tenants:
            if tenant.id not in self._before:
                return False
            launches, held = _in_turns(tenant)
            launches_before, held_before = self._before[tenant.id]
            if held - held_before < _HELD_NS or launches == launches_before:
                return False
        return True

    def begin(self, now: int, tenants: Iterable[TokenTenant]) -> None:
        """Begin a trial: compute each tenant's launch rate in turns, and start the measurement."""
        self.rates = {}
        for tenant in tenants:
            launches, held = _in_turns(tenant)
            launches_before, held_before = self._before[tenant.id]
            self.rates[tenant.id] = (launches - launches_before) / (held - held_before)
        self._turns_since = None
        self._measure(now, tenants)

    def end(self, now: int, tenants: Iterable[TokenTenant]) -> None:
        """End the trial, or the co-running after it. The tenants take turns again."""
        for tenant in tenants:
            tenant.progress.prove(None)
        if not self.proven:
            self.next_at, self._wait_ns = now + self._wait_ns, min(_MOST_NS, 2 * self._wait_ns)
        self.begun_at, self.proven = None, False

    def goes_on(self, now: int, tenants: Iterable[TokenTenant], least: float, gains: float) -> bool:
        """If the measurement is over, compare it with turns. Return True if co-running may continue. Only for an active
        trial.

        Args:
            now: The present moment.
            tenants: The tenants of the GPU.
            least: Least sum of progress with which co-running continues.
            gains: Least sum of progress that counts as a gain of a trial.
        """
        assert self.begun_at is not None, "a trial is on"
        due_at = self.due_at()
        if due_at is not None and now < due_at:
            return True
        ratios = self._ratios(tenants)
        total = sum(ratios.values())
        changed = self.proven and not self._sum * 2 / 3 <= total <= self._sum * 3 / 2
        if total < (least if self.proven else gains) or changed or (self.proven and now >= self._until):
            return False
        if not self.proven:
            self.proven, self._wait_ns = True, _FIRST_NS
            self._until, self._lasts_ns = now + self._lasts_ns, min(4 * _LASTS_NS, 2 * self._lasts_ns)
        self._sum = total
        for tenant in tenants:
            if tenant.id in ratios:
                tenant.progress.prove(max(0.0, 1 - ratios[tenant.id]))
        self._measure(now, tenants)
        return True

    def _measure(self, now: int, tenants: Iterable[TokenTenant]) -> None:
        self.begun_at = now
        self._before = {tenant.id: (tenant.progress.shared_launches, tenant.progress.shared_ns) for tenant in tenants}

    def _ratios(self, tenants: Iterable[TokenTenant]) -> dict[str, float]:
        """Return each tenant's launch rate while co-running, divided by its launch rate in turns. Tenants without a
        measure are left out."""
        ratios: dict[str, float] = {}
        for tenant in tenants:
            launches, shared = self._before.get(tenant.id, (0, 0))
            elapsed = tenant.progress.shared_ns - shared
            if tenant.id in self.rates and tenant.id in self._before and elapsed > 0:
                made = max(0, tenant.progress.shared_launches - launches - _QUEUED)
                ratios[tenant.id] = min(_RATIO_MOST, made / elapsed / self.rates[tenant.id])
        return ratios


def _in_turns(tenant: TokenTenant) -> tuple[int, int]:
    """Return (launches, nanoseconds held) of a tenant while no other tenant held."""
    progress, account = tenant.progress, tenant.account
    return progress.launches - progress.shared_launches, account.held_ns - account.co_run_ns
