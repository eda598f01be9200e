"""What the scheduler keeps of each tenant, and in what order tenants are served."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from .account import Account

_KEPT_NS = 1_000_000
"""Written off is never so much that a positive assured bucket is none."""


@dataclass
class Hold:
    """A grant that has not been drained. `deadline` None: until someone waits."""

    grant_id: int
    granted_at: int
    deadline: int | None
    metered: bool
    """All that was launched under it was launched into a bounded queue."""
    assured: bool
    """It was given as guaranteed time, not as borrowed."""
    bounded: bool = False
    """The holder was told to keep its queue bounded."""
    shortened: bool = False
    """The holder was told a longer quantum than it has."""
    considered: bool = False
    """It was looked at whether it goes on after the quantum."""
    revoked: bool = False
    ending: bool = False
    """Its gate is closed, its last work is ending: nobody joins it, and it does not go on."""
    gives_way_at: int | None = None
    """From then on the next may be granted."""
    yielded: bool = False
    """The next may have been granted."""
    overdue: bool = False
    charged_ns: int = 0


@dataclass(eq=False)
class TokenTenant:
    """One tenant. It waits (`waiting_since`), holds (`hold`), or sleeps (`asleep_since`). An overdue one may wait for
    its next turn while it holds."""

    id: str
    gpus: tuple[str, ...]
    account: Account
    asleep_since: int | None = None
    waiting_since: int | None = None
    woke: bool = False
    """It woke with credit and goes next."""
    insists: bool = False
    """It is overdue and has waited in vain for long: it goes next, whatever it owes."""
    throttled: bool = False
    """It waits for its ceiling bucket only."""
    throttled_until: int | None = None
    hold: Hold | None = None
    present: bool = False
    """It has processes that may want the token at any moment."""
    active_until: int | None = None
    virtual: dict[str, int] = field(default_factory=dict)
    """Per GPU: time held over request, the clock of weighted fair queueing among those who share what is idle."""

    def __post_init__(self) -> None:
        self.virtual = dict.fromkeys(self.gpus, 0)

    @property
    def runnable(self) -> bool:
        """It waits for a GPU and nothing else."""
        return self.waiting_since is not None and not self.throttled

    @property
    def holding(self) -> bool:
        """It holds and was not overtaken."""
        return self.hold is not None and not self.hold.overdue

    @property
    def best_effort(self) -> bool:
        """Nothing is guaranteed to it."""
        return self.account.request_milli == 0

    @property
    def weight(self) -> int:
        """Its part in what is idle, among its kind."""
        return self.account.request_milli or 1000


def floors_of(sharing: Iterable[TokenTenant], gpu: str, floors: dict[tuple[str, bool], int]) -> None:
    """Brings `floors` up to date: the least virtual time of those who compete for the idle time of a GPU, by whether
    they are best effort, and never less than it was before."""
    least: list[int | None] = [None, None]
    for tenant in sharing:
        hold = tenant.hold
        if (tenant.waiting_since is not None and not tenant.throttled) or (hold is not None and not hold.overdue):
            virtual, kind = tenant.virtual[gpu], tenant.account.request_milli == 0
            lowest = least[kind]
            if lowest is None or virtual < lowest:
                least[kind] = virtual
    for kind in (False, True):
        before, lowest = floors.get((gpu, kind), 0), least[kind]
        floors[gpu, kind] = before if lowest is None or lowest < before else lowest


def write_off(sharing: Mapping[str, Iterable[TokenTenant]], burst_ns: int) -> None:
    """Forgets a part of what is owed to everybody on a GPU alike, before anyone's assured bucket is full.

    It is time that hand-offs cost, which nobody can be paid back; buckets that are full of it would spill unevenly.
    `sharing`: tenants by GPU, those that wait or hold with their accounts settled; `burst_ns`: what a bucket holds.
    """
    common: dict[str, int] = {}
    competing: list[TokenTenant] = []
    for gpu, tenants in sharing.items():
        full = burst_ns * 3 // 4
        if not any(t.account.assured > full * t.account.request_milli for t in tenants):
            continue
        active = [t for t in tenants if t.account.request_milli and (t.runnable or t.holding)]
        owed = [tenant.account.assured // tenant.account.request_milli for tenant in active]
        if len(active) > 1 and max(owed) > full:
            common[gpu] = min(min(owed) - _KEPT_NS, burst_ns // 4)
            competing.extend(active)
    for tenant in dict.fromkeys(competing):
        cut = min(common.get(gpu, 0) for gpu in tenant.gpus)
        if cut > 0:
            tenant.account.assured -= cut * tenant.account.request_milli


def order_key(
    tenant: TokenTenant, floors: Mapping[tuple[str, bool], int], since: int, *, patient_since: int
) -> tuple[int, int, int, str]:
    """The smallest goes first. Of equals the one that has waited longest, `since` when. Who has credit and has waited
    since `patient_since` or longer goes before all that wake: these may be so many that a gang never finds its GPUs
    free at once."""
    account = tenant.account
    if tenant.insists:
        return (0, since, 0, tenant.id)
    if account.assured > 0:
        return (
            (0, since, 0, tenant.id)
            if tenant.woke or since <= patient_since
            else (1, -account.owed_ns(), since, tenant.id)
        )
    best_effort = tenant.best_effort
    ahead = max([tenant.virtual[gpu] - floors[gpu, best_effort] for gpu in tenant.gpus])
    return (3 if best_effort else 2, ahead, since, tenant.id)
