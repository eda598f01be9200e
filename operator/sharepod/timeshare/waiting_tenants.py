"""Tenants that wait for the token: runnable, throttled (waiting for their ceiling), or starving.

Guarantees:
- S6: A tenant is runnable only if its ceiling has room for a shortest quantum. A throttled tenant runs again once there
  is room for more. Its wait for other tenants counts from then.
- A preempted tenant that has waited as long as the debt cap starves: it is served, whatever it owes.
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
    """All waiting tenants with a pending deadline."""

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
        """GPUs on which a turn may begin. Tenants that begin to wait, or whose order changes, add theirs."""
        self._preempted: dict[str, TokenTenant] = {}
        """Preempted tenants that wait. Their old work may need their next launches to finish, while their debt grows
        without limit. So they must be served at some time."""
        self._throttled: dict[str, TokenTenant] = {}

    def add(self, now: int, tenant: TokenTenant, *, woke: bool, since: int | None = None) -> None:
        """Begin a tenant's wait. Its account is settled.

        Args:
            now: The present moment.
            tenant: The tenant.
            woke: Whether the tenant has slept, as `TokenTenant.wakes` defines.
            since: Start of its wait, if before `now`.
        """
        if woke or tenant.account.grants == 0:
            self._policy.raise_to_min(tenant)  # before it competes: the minimum is that of the others
        tenant.waiting_since = now if since is None else since
        tenant.asleep_since = None
        tenant.woke_at = now if woke else tenant.woke_at
        tenant.woke_with_credit = woke and tenant.account.assured > 0
        self.watch_preempted(tenant)
        self.classify(now, tenant)

    def remove(self, tenant: TokenTenant) -> None:
        """End a tenant's wait: it was granted, or wants no more."""
        tenant.waiting_since, tenant.woke_with_credit, tenant.starving, tenant.hurries = None, False, False, False
        self._preempted.pop(tenant.id, None)
        tenant.throttled, tenant.throttled_until = False, None
        self._throttled.pop(tenant.id, None)

    def watch_preempted(self, tenant: TokenTenant) -> None:
        """Watch a preempted tenant that waits, so that it starves if it waits for too long."""
        if tenant.waiting_since is not None and tenant.hold is not None and tenant.hold.phase is HoldPhase.PREEMPTED:
            self._preempted[tenant.id] = tenant

    def has_drained(self, tenant: TokenTenant) -> None:
        """End the tenant's rescues and starvation: it is no longer preempted, and pays its debts like other tenants."""
        tenant.rescues = 0
        tenant.starving = False
        self._preempted.pop(tenant.id, None)

    def classify(self, now: int, tenant: TokenTenant) -> None:
        """Make a waiting tenant runnable or throttled, by the room under its ceiling (S6). Its account is settled."""
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
        """Mark preempted tenants that now starve, and make tenants runnable whose ceiling has room again."""
        for tenant in list(self._preempted.values()):
            if tenant.hold is None or tenant.hold.phase is not HoldPhase.PREEMPTED:
                del self._preempted[tenant.id]  # suspended since then: undrained work costs it nothing
            elif not tenant.starving and now >= tenant.starves_at(self._parameters):
                tenant.starving = True
                self._occupancy.settle_around(now, tenant)
                self.classify(now, tenant)
        for tenant in list(self._throttled.values()):
            if tenant.throttled_until is not None and now >= tenant.throttled_until:
                self._occupancy.settle_around(now, tenant)
                self.classify(now, tenant)

    def _wait_anew(self, now: int, tenant: TokenTenant) -> None:
        """Count a throttled tenant's wait from the moment its ceiling had room again. Otherwise tenants throttled for
        long would all run before tenants that were ready. A tenant that may starve keeps its wait."""
        if tenant.id in self._preempted:
            return
        room_since = now if tenant.throttled_until is None else min(now, tenant.throttled_until)
        assert tenant.waiting_since is not None, "the tenant waits"
        tenant.waiting_since = max(tenant.waiting_since, room_since)

    def due(self) -> list[int]:
        """Return the latest moments for the next `tick`."""
        moments = [t.throttled_until for t in self._throttled.values() if t.throttled_until is not None]
        return moments + [t.starves_at(self._parameters) for t in self._preempted.values() if not t.starving]
