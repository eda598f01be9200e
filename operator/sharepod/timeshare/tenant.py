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
"""Least credit that the cancellation of common credit leaves to each tenant: 1 ms. So a tenant with credit still counts
as owed time."""
_RESCUES_MOST = 10
"""Number of rescues (turns of a starving tenant) after which the wait for the next rescue stops doubling: 10. The wait
is then about three hours."""


@dataclass(eq=False)
class TokenTenant:
    """One tenant of the scheduler.

    A tenant waits (`waiting_since` is set), holds (`hold`) or sleeps (`asleep_since`). A preempted or suspended tenant
    may wait for its next turn before its hold has drained.
    """

    id: str
    gpus: tuple[str, ...]
    account: Account
    group: str | None = None
    """Group of tenants that are granted together; None: no group."""
    interactive: bool = False
    """True if the tenant requests short waits. When it wakes with credit, it precedes almost all others (`hurries`), at
    most once per `early_every_ns` on average, after a burst."""
    asleep_since: int | None = None
    woke_at: int | None = None
    """Moment at which the tenant last woke after a sleep. None if it never has."""
    waiting_since: int | None = None
    woke_with_credit: bool = False
    """True if the tenant waits after a sleep and its assured bucket is positive. It then precedes tenants that only
    have credit."""
    hurries: bool = False
    """True if an interactive tenant waits for an early turn. It then precedes almost all others, and the holder's turn
    is cut to a shortest turn."""
    prompt: bool = False
    """True if the tenant must release the token as soon as its work has ended. It can afford that, because its next
    turn is an early one too."""
    early_turns: LeakyBucket = field(default_factory=LeakyBucket)
    """Limiter of early turns."""
    starving: bool = False
    """True if the tenant is preempted and has waited as long as the debt cap. It then goes next, whatever it owes."""
    rescues: int = 0
    """Number of rescues, turns that the tenant got because it was starving, since it last drained. Each rescue doubles
    the wait for the next. Otherwise a tenant that never drains would take a grace period of GPU time every ten seconds,
    whatever its request."""
    throttled: bool = False
    """True if the tenant waits although it has work, because it is at its limit."""
    throttled_until: int | None = None
    """Moment at which the ceiling bucket allows the throttled tenant to run again. None if never, at the present
    rates."""
    hold: Hold | None = None
    connected: bool = False
    """True if the tenant has connected processes, which may want the token at any moment."""
    active_until: int | None = None
    """Moment at which the tenant last stopped waiting or holding."""
    concurrent: bool = False
    """True if the tenant may hold a GPU while others do: its hooks count samples, and it does not opt out."""
    surcharged: bool = False
    """True for a time after a charge for kernels that ran without the token. The tenant then never co-runs."""
    habits: Habits = field(default_factory=Habits)
    progress: Progress = field(default_factory=Progress)
    virtual_ns: dict[str, int] = field(default_factory=dict)
    """For each GPU: virtual time, which is time held divided by weight. Tenants get lent time in the order of virtual
    time (weighted fair queueing)."""

    def __post_init__(self) -> None:
        self.virtual_ns = dict.fromkeys(self.gpus, 0)

    @property
    def runnable(self) -> bool:
        """Return True if the tenant waits for a GPU and is not at its limit."""
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
        """Return True if the tenant, which begins to wait, wakes: it has slept for at least `wake_ns`, or hurries. Also
        set `hurries` and `prompt`. The caller must have charged its account up to `now`."""
        if self.asleep_since is None:
            return False
        in_time = self.early_turns.has_room(now, parameters.cut_burst_ns)
        self.hurries = self.interactive and in_time and self.account.assured > 0
        self.prompt = self.interactive and in_time
        if self.hurries:
            self.early_turns.add(now, parameters.early_every_ns)
        return self.hurries or now - self.asleep_since >= parameters.wake_ns

    def has_woken(self, since: int) -> bool:
        """Return True if the tenant has a request and has woken since that moment."""
        return self.woke_at is not None and self.woke_at > since and self.account.request_milli > 0

    def outlasts(self, latency_ns: int) -> bool:
        """Return True if the tenant's turns usually overrun by more than the target latency. Its neighbours then cannot
        be served within the target latency."""
        return self.habits.overrun_ns > latency_ns

    @property
    def best_effort(self) -> bool:
        """Return True if the tenant has request 0."""
        return self.account.request_milli == 0

    @property
    def weight(self) -> int:
        """Return the tenant's weight in the sharing of idle time, among tenants of the same kind (best effort or
        not).
        """
        return self.account.request_milli or 1000


MinVirtualTimes = dict[tuple[str, bool], int]
"""For each (GPU, True for best effort): minimum virtual time, like `min_vruntime` of Linux's CFS. It never falls."""


def update_min_virtual_ns(tenants: Iterable[TokenTenant], gpu: str, least: MinVirtualTimes) -> None:
    """Raise the two minimum virtual times of `gpu`, of guaranteed and of best-effort tenants, to the least among the
    tenants that hold it or wait for it."""
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
    """Return the lag in nanoseconds beyond which common credit is cancelled: three quarters of the capacity of an
    assured bucket.
    """
    return burst_ns * 3 // 4


def cancel_common_credit(now: int, tenants_on: Mapping[str, Iterable[TokenTenant]], parameters: Parameters) -> None:
    """Take the same lag from all competing tenants of a GPU that all have credit, before one of their assured buckets
    is full.

    Credit that all of them have is time that was lost to hand-offs, which no tenant can get back. Without cancellation
    the buckets would fill up and overflow unevenly. If a tenant has woken within `assured_burst_ns`, nothing is
    cancelled: its bucket may have filled during its sleep, and the other tenants would lose time that they are owed.

    Args:
        now: The present moment.
        tenants_on: Tenants by GPU. The accounts of waiting and holding tenants must be charged up to `now`.
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
"""Sort key of a tenant in the order of service. The smallest goes first."""


def ahead_ns(tenant: TokenTenant, least: MinVirtualTimes) -> int:
    """Return the nanoseconds by which the tenant's virtual time exceeds the minimum of its kind. Of several GPUs the
    largest value counts.
    """
    kind = tenant.account.request_milli == 0
    return max([tenant.virtual_ns[gpu] - least[gpu, kind] for gpu in tenant.gpus])


def goes_before(one: OrderKey, other: OrderKey) -> bool:
    """Return True if key `one` precedes key `other`. Compares number by number, without creating tuples."""
    if one[0] != other[0]:
        return one[0] < other[0]
    if one[1] != other[1]:
        return one[1] < other[1]
    if one[2] != other[2]:
        return one[2] < other[2]
    return one[3] < other[3]


def order_key(tenant: TokenTenant, ahead: int, since: int, *, now: int, patience_ns: int, latency_ns: int) -> OrderKey:
    """Return the sort key (S7) of a tenant that has waited since `since` and whose virtual time exceeds the minimum by
    `ahead`.

    - A tenant that has waited for `patience_ns` and is owed `patience_ns` precedes all waking tenants. Otherwise many
      waking tenants could delay it by all the credit that they can save, and a gang would never find its GPUs free at
      once.
    - A tenant that hurries precedes all others, except tenants that have waited for `latency_ns` and are owed
      `latency_ns`.
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
