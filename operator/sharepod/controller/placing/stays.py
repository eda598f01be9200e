"""Stays: how long each tenant has run so far, and an estimate of how long it will still run.

Guarantees:
- A run counts from the decision that placed the tenant. If an earlier leader made that decision, it counts from the
  start of the Pod.
- Estimates use only runs that this process has seen from beginning to end.
"""

from __future__ import annotations

from collections.abc import Callable

from sharepod.api.units import TenantId
from sharepod.placement.run_times import RunTimes, kind_of
from sharepod.placement.state.accounts import Row


class Stays:
    """Stays of the tenants of a cluster.

    Args:
        clock: Monotonic seconds.
        ran_for: Returns the seconds since the start of a tenant's Pod; 0 if the start is not known.
    """

    def __init__(self, clock: Callable[[], float], ran_for: Callable[[TenantId], float]) -> None:
        self._clock = clock
        self._ran_for = ran_for
        self._run_times = RunTimes()
        self._began: dict[TenantId, float] = {}
        """For each tenant that this process has placed: time of the placement."""

    def began(self, tenant: TenantId) -> None:
        """Record that a tenant was placed."""
        self._began[tenant] = self._clock()

    def ended(self, tenant: TenantId, row: Row) -> None:
        """Use the length of an ended run for later estimates. Called when the share of a tenant was released."""
        began = self._began.pop(tenant, None)
        if began is not None:
            self._run_times.ended(kind_of(row.wanted), self._clock() - began)

    def left(self, tenant: TenantId, row: Row) -> float:
        """Return the seconds until a tenant is expected to end; 0 while its share is being released."""
        if row.wanted.releasing:
            return 0.0
        began = self._began.get(tenant)
        age = self._ran_for(tenant) if began is None else self._clock() - began
        return self._run_times.left(kind_of(row.wanted), age)
