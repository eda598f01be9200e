"""Tenants that wait for the token: runnable, throttled (waiting for their ceiling), or starving.

Guarantees:
- S6: A tenant is runnable only if it can hold for a shortest quantum without exceeding its limit. A throttled tenant
  becomes runnable again once it can hold for `resume_ns`. Its wait for other tenants counts from that moment.
- A preempted tenant that has waited as long as the debt cap starves: it is served next, whatever it owes.
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
    """State of waiting tenants that changes with time: throttled tenants become runnable, and preempted tenants
    starve."""

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
        """GPUs on which a turn may begin, so that the next tick must decide. When a tenant begins to wait, or its place
        in the order changes, its GPUs are added."""
        self._preempted: dict[str, TokenTenant] = {}
        """Preempted tenants that wait, by id. The work that keeps such a tenant from draining may need its next
        launches to finish, and its debt grows until then. So it must be served at some time, whatever it owes."""
        self._throttled: dict[str, TokenTenant] = {}

    def add(self, now: int, tenant: TokenTenant, *, woke: bool, since: int | None = None) -> None:
        """Begin a tenant's wait. The caller must have charged its account up to `now`.

        Args:
            now: The present moment.
            tenant: The tenant.
            woke: True if the tenant wakes, as `TokenTenant.wakes` returns.
            since: Start of its wait. None: `now`.
        """
        if woke or tenant.account.grants == 0:
            self._policy.raise_to_min(tenant)  # before it counts among the competing tenants
        tenant.waiting_since = now if since is None else since
        tenant.asleep_since = None
        tenant.woke_at = now if woke else tenant.woke_at
        tenant.woke_with_credit = woke and tenant.account.assured > 0
        self.watch_preempted(tenant)
        self.classify(now, tenant)

    def remove(self, tenant: TokenTenant) -> None:
        """End a tenant's wait: it was granted, or no longer wants the token."""
        tenant.waiting_since, tenant.woke_with_credit, tenant.starving, tenant.hurries = None, False, False, False
        self._preempted.pop(tenant.id, None)
        tenant.throttled, tenant.throttled_until = False, None
        self._throttled.pop(tenant.id, None)

    def watch_preempted(self, tenant: TokenTenant) -> None:
        """Watch a preempted tenant that waits, so that it starves once it has waited as long as the debt cap."""
        if tenant.waiting_since is not None and tenant.hold is not None and tenant.hold.phase is HoldPhase.PREEMPTED:
            self._preempted[tenant.id] = tenant

    def has_drained(self, tenant: TokenTenant) -> None:
        """End the tenant's starvation and the count of its rescues: it has drained, so its debt no longer grows."""
        tenant.rescues = 0
        tenant.starving = False
        self._preempted.pop(tenant.id, None)

    def classify(self, now: int, tenant: TokenTenant) -> None:
        """Make a waiting tenant runnable, or throttled if it is at its limit (S6). The caller must have charged its
        account up to `now`.
        """
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
        """Mark preempted tenants that starve from now on, and make throttled tenants runnable whose ceiling bucket has
        filled again."""
        for tenant in list(self._preempted.values()):
            if tenant.hold is None or tenant.hold.phase is not HoldPhase.PREEMPTED:
                # the tenant is suspended now, so its undrained work costs it nothing
                del self._preempted[tenant.id]
            elif not tenant.starving and now >= tenant.starves_at(self._parameters):
                tenant.starving = True
                self._occupancy.settle_around(now, tenant)
                self.classify(now, tenant)
        for tenant in list(self._throttled.values()):
            if tenant.throttled_until is not None and now >= tenant.throttled_until:
                self._occupancy.settle_around(now, tenant)
                self.classify(now, tenant)

    def _wait_anew(self, now: int, tenant: TokenTenant) -> None:
        """Count a throttled tenant's wait from the moment at which its limit allowed it to run again. Otherwise tenants
        that were throttled for long would all run before tenants that were ready. A tenant that may starve keeps its
        wait.
        """
        if tenant.id in self._preempted:
            return
        room_since = now if tenant.throttled_until is None else min(now, tenant.throttled_until)
        assert tenant.waiting_since is not None, "the tenant waits"
        tenant.waiting_since = max(tenant.waiting_since, room_since)

    def due(self) -> list[int]:
        """Return the moments by which `tick` must be called again."""
        moments = [t.throttled_until for t in self._throttled.values() if t.throttled_until is not None]
        return moments + [t.starves_at(self._parameters) for t in self._preempted.values() if not t.starving]
