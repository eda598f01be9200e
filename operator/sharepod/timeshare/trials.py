"""Trials of one GPU: whether tenants get more done at once than in turns, where nothing but a measurement shows it.

Ranks of one training that run as several tenants are an example. Each spins while its peer waits for a turn: work is in
flight all the time, and no gain is foretold.

Guarantees:
- A trial takes `TRIAL_NS` at most. The first follows a second of turns; after each that fails the next one is twice as
  far away. So trials that fail take 1 % of the time at most, of which busy tenants lose 8 %.
- Launches of one tenant for each nanosecond that it held in turns are compared with those for each nanosecond in which
  others held too, for each tenant by its own counters (S11). The sum of these ratios is the sum of progress.
- A gain is measured again each `_AGAIN_NS`. A sum that has changed by a third is another phase and ends it.
"""

from __future__ import annotations

from collections.abc import Iterable

from .tenant import TokenTenant

_MS = 1_000_000
TRIAL_NS = 250 * _MS
"""Length of a trial, in nanoseconds: some steps of a training."""
_TURNS_NS = 1_000 * _MS
"""Least time of turns, in nanoseconds, that a trial is compared with."""
_HELD_NS = 100 * _MS
"""Least time of these that each tenant held, in nanoseconds."""
_FIRST_NS = 2_500 * _MS
"""Time from a trial that fails to the next one, in nanoseconds; it doubles each time."""
_MOST_NS = 80_000 * _MS
"""Longest such time, in nanoseconds."""
_AGAIN_NS = 1_000 * _MS
"""Time after which a gain is measured again, in nanoseconds."""
_LASTS_NS = 10_000 * _MS
"""Time for which the first gain counts, in nanoseconds; it doubles each time up to four times that."""
_QUEUED = 3
"""Launches of a measurement that say nothing: they fill the queue, and would outweigh those of long kernels."""
_RATIO_MOST = 1.0
"""Ratio of one tenant that counts at most: none gets more done next to others than alone, whatever its hooks say."""


class Trials:
    """Trials of one GPU. Moments in nanoseconds of the clock."""

    def __init__(self) -> None:
        self.begun_at: int | None = None
        """Begin of the trial that is on; None: none is."""
        self.proven = False
        """A trial has shown a gain."""
        self.next_at = 0
        self.rates: dict[str, float] = {}
        """Launches for each nanosecond that a tenant held in turns, of the tenants of the present or last trial."""
        self._wait_ns = _FIRST_NS
        self._lasts_ns = _LASTS_NS
        self._until = 0
        self._sum = 0.0
        self._turns_since: int | None = None
        self._before: dict[str, tuple[int, int]] = {}
        """Launches, and time held, at the begin of the turns or of the measurement that is on."""

    @property
    def active(self) -> bool:
        """Return whether tenants hold at once for a trial, or since one has shown a gain."""
        return self.proven or self.begun_at is not None

    def turns(self, now: int, tenants: Iterable[TokenTenant]) -> None:
        """Note that tenants take turns, from the first such call on."""
        if self._turns_since is None:
            self._turns_since = now
            self._before = {}
        for tenant in tenants:
            if tenant.id not in self._before:
                self._before[tenant.id] = _in_turns(tenant)

    def due_at(self) -> int | None:
        """Return when the next trial may begin, or a measurement ends; None: not as it is now."""
        if self.begun_at is not None:
            return self.begun_at + (_AGAIN_NS if self.proven else TRIAL_NS)
        return None if self._turns_since is None else max(self.next_at, self._turns_since + _TURNS_NS)

    def may_begin(self, now: int, tenants: Iterable[TokenTenant]) -> bool:
        """Return whether a trial of these tenants may begin."""
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
        """Begin a trial."""
        self.rates = {}
        for tenant in tenants:
            launches, held = _in_turns(tenant)
            launches_before, held_before = self._before[tenant.id]
            self.rates[tenant.id] = (launches - launches_before) / (held - held_before)
        self._turns_since = None
        self._measure(now, tenants)

    def end(self, now: int, tenants: Iterable[TokenTenant]) -> None:
        """End the trial, or what follows from its gain: tenants take turns again."""
        for tenant in tenants:
            tenant.progress.prove(None)
        if not self.proven:
            self.next_at, self._wait_ns = now + self._wait_ns, min(_MOST_NS, 2 * self._wait_ns)
        self.begun_at, self.proven = None, False

    def goes_on(self, now: int, tenants: Iterable[TokenTenant], least: float, gains: float) -> bool:
        """Return whether tenants hold on at once. To be called while a trial is on.

        Args:
            now: The present moment.
            tenants: The tenants of the GPU.
            least: Sum of progress with which they go on.
            gains: The same with which a trial has shown a gain.
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
        """Return the launch rate of each tenant while others held too, over that in turns."""
        ratios: dict[str, float] = {}
        for tenant in tenants:
            launches, shared = self._before.get(tenant.id, (0, 0))
            elapsed = tenant.progress.shared_ns - shared
            if tenant.id in self.rates and tenant.id in self._before and elapsed > 0:
                made = max(0, tenant.progress.shared_launches - launches - _QUEUED)
                ratios[tenant.id] = min(_RATIO_MOST, made / elapsed / self.rates[tenant.id])
        return ratios


def _in_turns(tenant: TokenTenant) -> tuple[int, int]:
    """Return a tenant's launches, and its time held, while no other tenant held."""
    progress, account = tenant.progress, tenant.account
    return progress.launches - progress.shared_launches, account.held_ns - account.co_run_ns
