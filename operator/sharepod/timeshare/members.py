"""Decides when members of a group hold one GPU together. Example: two ranks of a training, each a tenant of its own.

Guarantees:
- Members take turns until one of them is late to drain while another one waits. The late member may be blocked in a
  collective operation that needs the waiting one. For the next `_TOGETHER_NS` they therefore hold the GPU together, as
  the processes of one tenant do.
- In that time a member co-runs while another member leads, and until the other member has drained.
- If a member is late to drain and a tenant outside the group already has its turn, the waiting members co-run too, so
  that the collective operation can end.
"""

from __future__ import annotations

from .account import Charge
from .groups import ENDS_NS
from .hold import CoRunEnd, HoldPhase
from .occupancy import Occupancy
from .tenant import TokenTenant

_MS = 1_000_000
_TOGETHER_NS = 60_000 * _MS
"""Time for which members hold a GPU together after one was late to drain: 60 s. Then they take turns again. Members
that wait for each other lose one turn by that; others lose nothing."""
_UNANNOUNCED_NS = 50 * _MS
"""Time after its turn within which a member is expected to drain if it announces no end of its work: 50 ms, two kernels
of 20 ms and a hand-off. A longer usual overrun replaces it."""


class Members:
    """Decides which members of a group co-run with the lead of the GPUs in `occupancy`."""

    def __init__(self, occupancy: Occupancy, quantum_min_ns: int) -> None:
        self._occupancy = occupancy
        self._quantum_min_ns = quantum_min_ns
        self._until: dict[tuple[str, str], int] = {}
        """Moment until which the members of a group hold a GPU together, by GPU and group."""

    def forget(self, gpu: str) -> None:
        """Drop the state of a GPU that has no tenants."""
        for key in [key for key in self._until if key[0] == gpu]:
            del self._until[key]

    def look(self, now: int, gpu: str) -> None:
        """For each member that is late to drain while another member waits or holds: let the group hold the GPU
        together from now on, for `_TOGETHER_NS`."""
        for tenant in self._occupancy.occupants(gpu):
            if tenant.group is None or not self._is_late(now, tenant):
                continue
            for other in self._occupancy.tenants_on[gpu]:
                if other is not tenant and other.group == tenant.group and (other.runnable or other.holding):
                    self._until[gpu, tenant.group] = now + _TOGETHER_NS

    def accompany(self, now: int, tenant: TokenTenant, lead: TokenTenant) -> bool:
        """Return True if a waiting tenant must co-run now, because another member of its group leads or is late to
        drain."""
        account = tenant.account
        if tenant.group is None or account.in_arrears or not account.ceiling_fits(self._quantum_min_ns):
            return False
        return self._together(now, tenant) and (tenant.group == lead.group or self._is_awaited(now, tenant))

    def end(self, now: int, tenant: TokenTenant, lead: TokenTenant) -> CoRunEnd | None:
        """Return the reason for which a co-running member of a group must stop. None if it may continue."""
        if not self._occupancy.may_co_run(tenant):
            return CoRunEnd.EXCLUSIVE
        if not tenant.account.ceiling_fits(self._quantum_min_ns):
            return CoRunEnd.LIMIT
        if tenant.group == lead.group:
            return None if self._together(now, tenant) else CoRunEnd.GROUP
        return None if self._is_awaited(now, tenant) else CoRunEnd.GROUP

    def due(self, gpu: str, lead: TokenTenant) -> list[int]:
        """Return moments at which a decision about the members on a GPU may change."""
        moments = [at for at in map(self._late_at, self._occupancy.occupants(gpu)) if at is not None]
        if lead.group is not None and (gpu, lead.group) in self._until:
            moments.append(self._until[gpu, lead.group])
        return moments

    def _together(self, now: int, tenant: TokenTenant) -> bool:
        return now < self._until.get((tenant.gpus[0], tenant.group or ""), 0)

    def _is_awaited(self, now: int, tenant: TokenTenant) -> bool:
        """Return True if another member of the tenant's group is late to drain on its GPU."""
        for other in self._occupancy.occupants(tenant.gpus[0]):
            if other is not tenant and other.group == tenant.group and self._is_late(now, other):
                return True
        return False

    def _is_late(self, now: int, tenant: TokenTenant) -> bool:
        late_at = self._late_at(tenant)
        return late_at is not None and late_at <= now

    def _late_at(self, tenant: TokenTenant) -> int | None:
        """Return the moment from which a member is late to drain; None: it need not drain. The expected time is
        multiplied by the number of holders, because they share the GPU."""
        hold = tenant.hold
        if tenant.group is None or hold is None or hold.phase is HoldPhase.RUNNING:
            return None
        if hold.deadline is None:
            return None
        holders = len(self._occupancy.occupants(tenant.gpus[0]))
        if hold.ends_at is None:
            expected = max(tenant.habits.overrun_ns, _UNANNOUNCED_NS)
        else:
            expected = max(0, hold.ends_at - hold.deadline)
        return hold.deadline + holders * expected + ENDS_NS


def kind_of_time(tenant: TokenTenant, lead: TokenTenant) -> Charge:
    """Return how a co-running member is charged: as its lead, if that is of the same group; else as guaranteed. A
    member without a request borrows."""
    if not tenant.account.request_milli:
        return Charge.BORROWED
    return lead.hold.given_as if tenant.group == lead.group and lead.hold is not None else Charge.GUARANTEED
