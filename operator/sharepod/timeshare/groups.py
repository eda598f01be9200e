"""Groups: tenants that are granted together, such as the ranks of one training, each a tenant of its own.

Guarantees:
- Members of a group that want the token contend for one common turn, which begins on all their GPUs at once (S4).
- The common turn does not wait for a member that wants nothing, runs already, starves, or has not drained `ENDS_NS`
  after its turn.
- A member without credit may run on the credit of its group, until its own debt is `_RIDES_NS`. So a group delays
  another tenant of a GPU by at most `_RIDES_NS`, once.
- A group gets no more than the sum of its members' shares.
- Each member keeps its own charges, buckets and limit. Best-effort members contend for turns of their own, because they
  have no guarantee.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from .hold import Hold, HoldPhase
from .tenant import MinVirtualTimes, OrderKey, TokenTenant, ahead_ns, order_key

_MS = 1_000_000
_RIDES_NS = 100 * _MS
"""Debt, as time at its request, up to which a member may use the credit of its group: 100 ms, a longest quantum. The
turns of members end at slightly different moments, which adds up to this much only after many turns."""
_APART_NS = 200 * _MS
"""Difference between the lags of two members from which they contend separately: 200 ms, two longest quanta. So each
member gets its request, however small another member's request is."""
ENDS_NS = 10 * _MS
"""Time after the end of a member's turn for which the other members wait for that member to drain: 10 ms, a few
kernels. A member that takes longer may itself be waiting for another member, in a collective operation."""
_OWED_NS = 20 * _MS
"""Time that a contender with several GPUs must have waited, and must be owed, to precede tenants that wake with credit:
20 ms. Otherwise tenants would wake on its free GPUs while it waits for the last one, and its GPUs would seldom be free
at once."""
_SAME_NS = 3 * _MS
"""Largest difference between the deadlines of members whose turns count as one: 3 ms, the time before its deadline at
which a turn is renewed."""


@dataclass(frozen=True)
class Contender:
    """Contender for one turn: a tenant, or several members of a group."""

    members: tuple[TokenTenant, ...]
    gpus: tuple[str, ...]
    """GPUs that the turn needs: the GPUs of `members`, and of other members of the group that still drain."""
    until: int | None = None
    """End of the turn of other members that run already. None if no other member runs, or if that turn has no end."""
    joins: bool = False
    """True if other members run, or have not drained in time and may wait for `members` in a collective operation.
    `members` then precede other tenants, until the turn of the other members ends, or for a shortest quantum."""

    @property
    def rides(self) -> bool:
        """Return True if the turn uses the credit of the group: the credits and debts of `members` add up to credit, or
        they join other members.
        """
        if self.joins:
            return True
        return len(self.members) > 1 and sum(tenant.account.assured for tenant in self.members) > 0

    @property
    def overrun_ns(self) -> int:
        """Return the usual overrun of the turn, in nanoseconds: that of the member with the longest one."""
        return max([tenant.habits.overrun_ns for tenant in self.members])

    @property
    def lag_ns(self) -> int:
        """Return the nanoseconds that the members are owed: the mean of their lags, weighted by their requests."""
        requests = sum(tenant.account.request_milli for tenant in self.members)
        return sum(tenant.account.assured for tenant in self.members) // requests if requests else 0

    def key(self, least: MinVirtualTimes, *, now: int, patience_ns: int, latency_ns: int) -> OrderKey:
        """Return its sort key in the order of service (S7). The smallest key goes first."""
        first = self.members[0]
        if len(self.gpus) > 1:
            patience_ns = min(patience_ns, _OWED_NS)
        since = min([now if tenant.waiting_since is None else tenant.waiting_since for tenant in self.members])
        ahead = max([ahead_ns(tenant, least) for tenant in self.members])
        if self.joins:
            hurries = any(tenant.hurries for tenant in self.members)
            return (-1, since, 0, first.id) if hurries else (0, 0, 0, first.id)
        if len(self.members) == 1:
            return order_key(first, ahead, since, now=now, patience_ns=patience_ns, latency_ns=latency_ns)
        if not self.rides:
            return (2 if any(tenant.account.request_milli for tenant in self.members) else 3, ahead, since, first.id)
        lag = self.lag_ns
        owed_for = 0 if any(t.outlasts(latency_ns) for t in self.members) else min(now - since, lag)
        if owed_for >= latency_ns or any(tenant.hurries for tenant in self.members):
            return (-1, since, 0, first.id)
        if owed_for >= patience_ns or any(tenant.woke_with_credit for tenant in self.members):
            return (0, since, 0, first.id)
        return (1, -lag, since, first.id)


def is_parted(tenant: TokenTenant, groups: Mapping[str, Sequence[TokenTenant]]) -> bool:
    """Return True if the tenant's group is spread over different GPUs, so that its members need a common turn."""
    return tenant.group is not None and any(mate.gpus != tenant.gpus for mate in groups[tenant.group])


def members_of_one_group(tenants: Sequence[TokenTenant]) -> bool:
    """Return whether these tenants are members of the same group."""
    group = tenants[0].group
    return group is not None and all(tenant.group == group for tenant in tenants)


def contenders(
    now: int,
    competing: Iterable[TokenTenant],
    groups: Mapping[str, Sequence[TokenTenant]],
    again: Sequence[TokenTenant] = (),
) -> list[Contender]:
    """Return the contenders that these tenants form. Members of a group on different GPUs, with similar lags, form one
    contender. Every other tenant is one by itself.

    Args:
        now: The present moment.
        competing: Tenants that contend. Their accounts must be settled.
        groups: The tenants of each group.
        again: Holders among `competing` that may be renewed. They are treated as if they had drained and waited.
    """
    found: list[Contender] = []
    by_group: dict[str, list[TokenTenant]] = {}
    for tenant in competing:
        if tenant.starving or not tenant.account.request_milli or not is_parted(tenant, groups):
            found.append(Contender((tenant,), tenant.gpus))
        else:
            by_group.setdefault(tenant.group or "", []).append(tenant)
    contend_again = {tenant.id for tenant in again}
    for group, members in by_group.items():
        best = max([member.account.lag_ns() for member in members])
        least = max(min(0, best) - _RIDES_NS, best - _APART_NS)
        riders: list[TokenTenant] = []
        taken: set[str] = set()
        for member in sorted(members, key=lambda member: (-member.account.lag_ns(), member.id)):
            if member.account.lag_ns() >= least and taken.isdisjoint(member.gpus):
                riders.append(member)
                taken.update(member.gpus)
            else:
                found.append(Contender((member,), member.gpus))
        mates = [mate for mate in groups[group] if mate.account.request_milli and mate.id not in contend_again]
        ending, until = _others(now, mates, taken)
        late = any(_is_late(mate) for mate in mates)
        joins = (late or until is not None) and riders[-1].account.lag_ns() >= -_RIDES_NS
        found.append(Contender(tuple(riders), (*taken, *ending), until, joins))
    return found


def turns_together(holder: TokenTenant, groups: Mapping[str, Sequence[TokenTenant]]) -> list[TokenTenant]:
    """Return the tenants whose holds must be renewed together: `holder`, and members of its group whose turns end at
    the same time."""
    if holder.group is None or holder.hold is None or holder.hold.deadline is None:
        return [holder]
    ends = holder.hold.deadline
    return [
        mate
        for mate in groups[holder.group]
        if mate is holder
        or (
            _leads(mate)
            and mate.hold is not None
            and mate.hold.deadline is not None
            and abs(mate.hold.deadline - ends) <= _SAME_NS
        )
    ]


def holds_up_until(hold: Hold) -> int | None:
    """Return the moment until which the common turn of the group waits for this hold to drain. None if the hold has no
    end.
    """
    if hold.deadline is None:
        return None
    return ENDS_NS + (hold.deadline if hold.ends_at is None else min(hold.deadline, hold.ends_at))


def _leads(tenant: TokenTenant) -> bool:
    hold = tenant.hold
    return hold is not None and not hold.co_runs and not hold.displaced and hold.phase is not HoldPhase.YIELDING


def _is_late(tenant: TokenTenant) -> bool:
    hold = tenant.hold
    return hold is not None and not hold.co_runs and hold.phase is not HoldPhase.SUSPENDED and not hold.holds_up_group


def _others(now: int, group: Sequence[TokenTenant], taken: set[str]) -> tuple[list[str], int | None]:
    """Return (GPUs of other members that still drain, end of the turn of other members that run). The end is None if
    none runs."""
    ending: list[str] = []
    until: int | None = None
    for mate in group:
        hold = mate.hold
        if hold is None or not _leads(mate) or hold.deadline is None:
            continue
        if hold.phase is HoldPhase.RUNNING and hold.deadline - now > _SAME_NS:
            until = hold.deadline if until is None else max(until, hold.deadline)
        elif hold.holds_up_group:
            ending.extend(gpu for gpu in mate.gpus if gpu not in taken and gpu not in ending)
    return ending, until
