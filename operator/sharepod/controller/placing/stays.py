"""Stays: how long tenants have run so far, and how long they are expected to stay.

Guarantees:
- A run counts from the decision that placed the tenant; that of a tenant which an earlier leader placed, from the start
  of its Pod.
- Only runs that this process has seen from beginning to end are learned from.
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
        ran_for: Returns the seconds since the start of a tenant's Pod; 0 where none is known.
    """

    def __init__(self, clock: Callable[[], float], ran_for: Callable[[TenantId], float]) -> None:
        self._clock = clock
        self._ran_for = ran_for
        self._run_times = RunTimes()
        self._began: dict[TenantId, float] = {}
        """When each tenant was placed that this process has placed."""

    def began(self, tenant: TenantId) -> None:
        """Note that a tenant was placed."""
        self._began[tenant] = self._clock()

    def ended(self, tenant: TenantId, row: Row) -> None:
        """Learn from a tenant whose share was released."""
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
