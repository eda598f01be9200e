"""Tenants of the scheduler, and the order in which they are served."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from .account import Account
from .habits import Habits
from .hold import Hold
from .leaky_bucket import LeakyBucket
from .parameters import Parameters
from .progress import Progress

CREDIT_KEPT_NS = 1_000_000
"""Lag that the cancellation of common credit leaves to each tenant: 1 ms, so that a tenant with credit keeps some."""
_RESCUES_MOST = 10
"""Number of rescues after which the wait for the next one stops doubling: 10, a wait of some three hours."""


@dataclass(eq=False)
class TokenTenant:
    """One tenant of the scheduler.

    A tenant waits (`waiting_since`), holds (`hold`) or sleeps (`asleep_since`). A preempted or suspended tenant may
    wait for its next turn before its hold has drained.
    """

    id: str
    gpus: tuple[str, ...]
    account: Account
    group: str | None = None
    """Group of tenants that are granted together; None: no group."""
    interactive: bool = False
    """True if the tenant requests short waits. It then hurries when it wakes with credit, at most once per
    `early_every_ns` on average (after a burst)."""
    asleep_since: int | None = None
    woke_at: int | None = None
    """Moment at which it last woke after a sleep; None: not yet."""
    waiting_since: int | None = None
    woke_with_credit: bool = False
    """True if the tenant waits after a sleep, with a positive assured bucket: it goes next."""
    hurries: bool = False
    """True if the tenant waits for an early turn: it precedes all others, and holders keep only a shortest turn."""
    prompt: bool = False
    """True if the tenant releases the token as soon as its work has ended: it may hurry at its next wake too."""
    early_turns: LeakyBucket = field(default_factory=LeakyBucket)
    """Limiter of early turns."""
    starving: bool = False
    """True if the tenant is preempted and has waited as long as the debt cap: it goes next, whatever it owes."""
    rescues: int = 0
    """Turns granted because the tenant was starving, since it last drained. Each doubles the wait for the next.
    Otherwise tenants that never drain would take a grace period every ten seconds, whatever their requests."""
    throttled: bool = False
    """True if the tenant waits for its ceiling bucket."""
    throttled_until: int | None = None
    """Moment at which the ceiling bucket has room again; None: never at the present rates."""
    hold: Hold | None = None
    connected: bool = False
    """True if the tenant has connected processes, which may want the token at any moment."""
    active_until: int | None = None
    """Moment at which the tenant last stopped waiting or holding."""
    concurrent: bool = False
    """True if the tenant may hold a GPU while others do: its hooks count samples, and it does not opt out."""
    surcharged: bool = False
    """True for a time after a surcharge: the tenant then holds only while no other tenant does."""
    habits: Habits = field(default_factory=Habits)
    progress: Progress = field(default_factory=Progress)
    virtual_ns: dict[str, int] = field(default_factory=dict)
    """Virtual time by GPU: time held over weight, by which weighted fair queueing lends idle time."""

    def __post_init__(self) -> None:
        self.virtual_ns = dict.fromkeys(self.gpus, 0)

    @property
    def runnable(self) -> bool:
        """Return whether the tenant waits for a GPU and not for its ceiling."""
        return self.waiting_since is not None and not self.throttled

    @property
    def holding(self) -> bool:
        """Return whether the tenant has a hold that was neither preempted nor suspended."""
        return self.hold is not None and not self.hold.displaced

    def starves_at(self, parameters: Parameters) -> int:
        """Return the moment from which the tenant starves, if it is preempted and waits until then."""
        assert self.waiting_since is not None, "the tenant waits"
        return self.waiting_since + (parameters.debt_ns << min(self.rescues, _RESCUES_MOST))

    def wakes(self, now: int, parameters: Parameters) -> bool:
        """Return whether the tenant wakes after a sleep long enough to go next, and decide whether it hurries. Its
        account is settled."""
        if self.asleep_since is None:
            return False
        in_time = self.early_turns.has_room(now, parameters.cut_burst_ns)
        self.hurries = self.interactive and in_time and self.account.assured > 0
        self.prompt = self.interactive and in_time
        if self.hurries:
            self.early_turns.add(now, parameters.early_every_ns)
        return self.hurries or now - self.asleep_since >= parameters.wake_ns

    def has_woken(self, since: int) -> bool:
        """Return whether a tenant with a request has woken since that moment."""
        return self.woke_at is not None and self.woke_at > since and self.account.request_milli > 0

    def outlasts(self, latency_ns: int) -> bool:
        """Return whether the tenant's turns overrun by more than the target latency, so that no neighbour is served
        within that."""
        return self.habits.overrun_ns > latency_ns

    @property
    def best_effort(self) -> bool:
        """Return whether the tenant has no request."""
        return self.account.request_milli == 0

    @property
    def weight(self) -> int:
        """Return the tenant's weight in the sharing of idle time, among tenants of its kind."""
        return self.account.request_milli or 1000


MinVirtualTimes = dict[tuple[str, bool], int]
"""Minimum virtual time (`min_vruntime` of CFS) by GPU and kind; kind: whether best effort. Never falls."""


def update_min_virtual_ns(tenants: Iterable[TokenTenant], gpu: str, least: MinVirtualTimes) -> None:
    """Raise the minimum virtual times of `gpu` to the least among the tenants that compete for its idle time."""
    guaranteed: int | None = None
    best_effort: int | None = None
    for tenant in tenants:
        hold = tenant.hold
        if (tenant.waiting_since is not None and not tenant.throttled) or (hold is not None and not hold.displaced):
            virtual = tenant.virtual_ns[gpu]
            if tenant.account.request_milli:
                if guaranteed is None or virtual < guaranteed:
                    guaranteed = virtual
            elif best_effort is None or virtual < best_effort:
                best_effort = virtual
    for kind, lowest in ((False, guaranteed), (True, best_effort)):
        before = least.get((gpu, kind), 0)
        least[gpu, kind] = before if lowest is None or lowest < before else lowest


def common_credit_ns(burst_ns: int) -> int:
    """Return the lag beyond which common credit is cancelled: three quarters of an assured bucket."""
    return burst_ns * 3 // 4


def cancel_common_credit(now: int, tenants_on: Mapping[str, Iterable[TokenTenant]], parameters: Parameters) -> None:
    """Cancel a part of the credit that all competing tenants of a GPU have in common, before an assured bucket is full.

    Common credit is time lost to hand-offs, which cannot be repaid. Full buckets would overflow unevenly. If a tenant
    has woken within `assured_burst_ns`, nothing is cancelled. Its bucket may have filled during its sleep, and the
    others would lose time that they are owed.

    Args:
        now: The present moment.
        tenants_on: Tenants by GPU. The accounts of waiting and holding tenants are settled.
        parameters: Durations of the scheduler.
    """
    common: dict[str, int] = {}
    competing: list[TokenTenant] = []
    full = common_credit_ns(parameters.assured_burst_ns)
    for gpu, tenants in tenants_on.items():
        for tenant in tenants:
            if tenant.account.assured > full * tenant.account.request_milli:
                break
        else:
            continue
        active = [t for t in tenants if t.account.request_milli and (t.runnable or t.holding)]
        if len(active) > 1 and max([tenant.account.lag_ns() for tenant in active]) > full:
            if any(tenant.has_woken(now - parameters.assured_burst_ns) for tenant in tenants):
                continue
            least = min([tenant.account.lag_ns() for tenant in active]) - CREDIT_KEPT_NS
            common[gpu] = min(least, parameters.assured_burst_ns // 4)
            competing.extend(active)
    for tenant in dict.fromkeys(competing):
        cut = min(common.get(gpu, 0) for gpu in tenant.gpus)
        if cut > 0:
            tenant.account.assured -= cut * tenant.account.request_milli


OrderKey = tuple[int, int, int, str]
"""Place of a tenant in the order of service; the smallest goes first."""


def ahead_ns(tenant: TokenTenant, least: MinVirtualTimes) -> int:
    """Return how far the tenant's virtual time exceeds the minimum, on the GPU where it does most."""
    kind = tenant.account.request_milli == 0
    return max([tenant.virtual_ns[gpu] - least[gpu, kind] for gpu in tenant.gpus])


def goes_before(one: OrderKey, other: OrderKey) -> bool:
    """Return whether a place precedes another. Compares number by number, without creating tuples."""
    if one[0] != other[0]:
        return one[0] < other[0]
    if one[1] != other[1]:
        return one[1] < other[1]
    if one[2] != other[2]:
        return one[2] < other[2]
    return one[3] < other[3]


def order_key(tenant: TokenTenant, ahead: int, since: int, *, now: int, patience_ns: int, latency_ns: int) -> OrderKey:
    """Return the place of a tenant that has waited since `since` and is `ahead` in virtual time (S7).

    - A tenant that has waited, and is owed, `patience_ns` precedes all waking tenants. Otherwise many waking tenants
      could delay it by all the credit that they can save, and a gang would never find its GPUs free at once.
    - A tenant that hurries precedes all except tenants that have waited, and are owed, `latency_ns`.
    - A tenant whose own turns outlast the target latency is ordered by its lag only. Otherwise several such turns in
      sequence would overflow the buckets of the other tenants.
    """
    account = tenant.account
    if tenant.starving:
        return (0, since, 0, tenant.id)
    if account.assured > 0:
        lag = account.lag_ns()
        owed_for = 0 if tenant.outlasts(latency_ns) else min(now - since, lag)
        if tenant.hurries or owed_for >= latency_ns:
            return (-1, since, 0, tenant.id)
        first = tenant.woke_with_credit or owed_for >= patience_ns
        return (0, since, 0, tenant.id) if first else (1, -lag, since, tenant.id)
    return (2 if account.request_milli else 3, ahead, since, tenant.id)
