"""Tenants that wait for the token: those that may be granted it, those that wait for their ceiling, those that starve.

Guarantees:
- S6: A tenant is runnable only if its ceiling leaves room for a shortest quantum; one that is throttled runs again once
  there is room for more, and has waited for the others since then.
- A preempted tenant that has waited in vain for the debt cap starves: it is served, whatever it owes.
"""

from __future__ import annotations

from .co_running import CoRunning
from .hold import HoldPhase
from .occupancy import Occupancy
from .parameters import Parameters
from .tenant import TokenTenant
from .transitions import HoldTransitions
from .turns import TurnPolicy


class WaitingTenants:
    """All tenants that wait, as far as something comes due for them."""

    def __init__(
        self,
        parameters: Parameters,
        occupancy: Occupancy,
        policy: TurnPolicy,
        holds: HoldTransitions,
        co_running: CoRunning,
        changed_gpus: set[str],
    ) -> None:
        self._parameters = parameters
        self._occupancy = occupancy
        self._policy = policy
        self._holds = holds
        self._co_running = co_running
        self._changed_gpus = changed_gpus
        """GPUs on which a turn may begin; tenants that begin to wait, or are served otherwise than before, add
        theirs."""
        self._preempted: dict[str, TokenTenant] = {}
        """Preempted tenants that wait. What they have not drained may depend on what they would launch next, while
        what they owe grows without end: they have to be served at some time."""
        self._throttled: dict[str, TokenTenant] = {}

    def add(self, now: int, tenant: TokenTenant, *, woke: bool, since: int | None = None) -> None:
        """Let a tenant begin to wait. Its account is settled. `woke`: it has slept, as `TokenTenant.wakes` says.
        `since`: begin of its wait, if that was before `now`."""
        if woke or tenant.account.grants == 0:
            self._policy.raise_to_min(tenant)  # before it competes: the minimum is that of the others
        tenant.waiting_since = now if since is None else since
        tenant.asleep_since = None
        tenant.woke_at = now if woke else tenant.woke_at
        tenant.woke_with_credit = woke and tenant.account.assured > 0
        self.watch_preempted(tenant)
        self.classify(now, tenant)

    def remove(self, tenant: TokenTenant) -> None:
        """Let a tenant cease to wait: it was granted, or wants no more."""
        tenant.waiting_since, tenant.woke_with_credit, tenant.starving, tenant.hurries = None, False, False, False
        self._preempted.pop(tenant.id, None)
        tenant.throttled, tenant.throttled_until = False, None
        self._throttled.pop(tenant.id, None)

    def watch_preempted(self, tenant: TokenTenant) -> None:
        """Let a tenant starve if it is preempted and waits for too long."""
        if tenant.waiting_since is not None and tenant.hold is not None and tenant.hold.phase is HoldPhase.PREEMPTED:
            self._preempted[tenant.id] = tenant

    def has_drained(self, tenant: TokenTenant) -> None:
        """Let a tenant pay its debts as any other: it is preempted no more."""
        tenant.rescues = 0
        tenant.starving = False
        self._preempted.pop(tenant.id, None)

    def classify(self, now: int, tenant: TokenTenant) -> None:
        """Make a waiting tenant runnable or throttled, by what its ceiling leaves (S6). Its account is settled."""
        account, parameters = tenant.account, self._parameters
        assert tenant.waiting_since is not None, "the tenant waits"
        resume = max(parameters.quantum_min_ns, min(parameters.resume_ns, parameters.quantum_max_ns // 2))
        if tenant.starving or account.ceiling_fits(resume if tenant.throttled else parameters.quantum_min_ns):
            if tenant.throttled:
                self._policy.raise_to_min(tenant)
                self._wait_anew(now, tenant)
            tenant.throttled, tenant.throttled_until = False, None
            self._throttled.pop(tenant.id, None)
            if not self._co_running.joins(now, tenant):
                self._holds.shorten(now, tenant.gpus, tenant)
        else:
            tenant.throttled = True
            tenant.throttled_until = account.ceiling_fits_at(resume)
            self._throttled[tenant.id] = tenant
        self._changed_gpus.update(tenant.gpus)

    def tick(self, now: int) -> None:
        """Let tenants starve that have waited long enough, and those run whose ceiling has room again."""
        for tenant in list(self._preempted.values()):
            if tenant.hold is None or tenant.hold.phase is not HoldPhase.PREEMPTED:
                del self._preempted[tenant.id]  # suspended since then: it owes nothing for what it has not drained
            elif not tenant.starving and now >= tenant.starves_at(self._parameters):
                tenant.starving = True
                self._occupancy.settle_around(now, tenant)
                self.classify(now, tenant)
        for tenant in list(self._throttled.values()):
            if tenant.throttled_until is not None and now >= tenant.throttled_until:
                self._occupancy.settle_around(now, tenant)
                self.classify(now, tenant)

    def _wait_anew(self, now: int, tenant: TokenTenant) -> None:
        """Let a tenant wait for the others only since its ceiling has had room: else several that were throttled for
        long would go one after the other, before all that have waited. One that may starve waits all the time."""
        if tenant.id in self._preempted:
            return
        room_since = now if tenant.throttled_until is None else min(now, tenant.throttled_until)
        assert tenant.waiting_since is not None, "the tenant waits"
        tenant.waiting_since = max(tenant.waiting_since, room_since)

    def due(self) -> list[int]:
        """Return the moments at which `tick` has something to do at the latest."""
        moments = [t.throttled_until for t in self._throttled.values() if t.throttled_until is not None]
        return moments + [t.starves_at(self._parameters) for t in self._preempted.values() if not t.starving]
