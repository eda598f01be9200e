"""Who holds the token of which GPU, and for how long.

Guarantees:
- A GPU has one holder, except that a holder which has not drained a grace period after its quantum is overtaken, and
  that one which says when its last work will have ended gives way to the next a hand-off's time before.
- Each nanosecond of a GPU counts as used once. A tenant pays until it has drained, whatever it said before; an overdue
  one owes all the time until then, and nobody else's share or ceiling changes by that.
- A tenant with several GPUs gets all of them in one grant or none. The GPUs that it waits for are kept for it once it
  is its turn, and are meanwhile given only to those who are due to be done when it can start.
- A tenant starts only if its ceiling leaves room for a least quantum, and is given no longer than it leaves room for.
  Order: tenants that wake with credit; those with a positive assured bucket, most owed first; borrowers in proportion
  to their request; best effort.

Every method takes the present time in nanoseconds of any clock that never goes back. After any of them call `tick`
and carry out what it returns; call it again at `next_deadline` at the latest.
"""

from __future__ import annotations

from collections.abc import Sequence

from .account import Account, AccountSnapshot, TimeUsage
from .actions import Action, TokenGrant
from .occupancy import Occupancy
from .parameters import Parameters
from .plan import Turn, affected
from .tenant import Hold, TokenTenant
from .transitions import Holds
from .turns import Turns


class Scheduler:
    """The one scheduler of a node. Not thread-safe."""

    def __init__(self, parameters: Parameters | None = None) -> None:
        self._parameters = parameters or Parameters()
        self._tenants: dict[str, TokenTenant] = {}
        self._gpus = Occupancy()
        self._turns = Turns(self._parameters, self._gpus)
        self._grants = 0
        self._stale: set[str] = set()
        """GPUs for which it may be someone's turn."""
        self._holds = Holds(self._parameters, self._gpus, self._turns, self._stale)
        self._stuck: dict[str, TokenTenant] = {}
        """Those that are overdue and wait: what they have not drained may wait for what they would launch next, while
        what they owe grows without end."""
        self._throttled: dict[str, TokenTenant] = {}
        self._now = 0

    # ---- what the outside tells

    def set_tenant(
        self,
        now: int,
        tenant_id: str,
        gpus: Sequence[str],
        *,
        request_milli: int,
        limit_milli: int,
        resumed: AccountSnapshot | None = None,
    ) -> None:
        """Adds a tenant, with the account that it had in an earlier process if that is known, or changes the rates of
        one. Raises `ValueError` for impossible rates or other GPUs than before."""
        if not 0 <= request_milli <= limit_milli <= 1000:
            raise ValueError(
                f"tenant {tenant_id}: not 0 <= request <= limit <= 1000: request {request_milli}, limit {limit_milli}"
            )
        if not gpus or len(set(gpus)) != len(gpus):
            raise ValueError(f"tenant {tenant_id}: gpus {list(gpus)} are none, or one twice")
        now = self._advance_clock(now)
        tenant = self._tenants.get(tenant_id)
        if tenant is None:
            account = Account(now, self._parameters, request_milli=request_milli, limit_milli=limit_milli)
            if resumed is not None:
                account.resume(resumed)
            tenant = TokenTenant(tenant_id, tuple(gpus), account, asleep_since=now)
            self._tenants[tenant_id] = tenant
            self._gpus.add(tenant)
        else:
            if tenant.gpus != tuple(gpus):
                raise ValueError(
                    f"tenant {tenant_id} is on {list(tenant.gpus)}; a tenant never moves, remove it and add it anew"
                )
            self._gpus.settle_around(now, tenant)
            tenant.account.set_rates(request_milli=request_milli, limit_milli=limit_milli)
            if tenant.waiting_since is not None:
                self._classify(now, tenant)
            self._holds.shorten(now, tenant.gpus, unlimited=self._unlimited)
        self._stale.update(tenant.gpus)

    def remove(self, now: int, tenant_id: str) -> None:
        """Forgets a tenant; what it holds is free at once. Unknown tenants are ignored."""
        now = self._advance_clock(now)
        tenant = self._tenants.get(tenant_id)
        if tenant is None:
            return
        self._gpus.settle_around(now, tenant)
        self._gpus.remove(tenant)
        self._holds.end(tenant)
        self._stop_waiting(tenant)
        for gpu in tenant.gpus:
            if gpu not in self._gpus.sharing:
                self._turns.forget(gpu)
                self._holds.forget(gpu)
        del self._tenants[tenant_id]
        self._stale.update(tenant.gpus)

    def want(self, now: int, tenant_id: str) -> None:
        """The tenant has work and waits for the token. While it holds one this says nothing new, unless it is overdue:
        then it waits for its next turn."""
        now = self._advance_clock(now)
        tenant = self._tenants[tenant_id]
        if tenant.waiting_since is not None or tenant.holding:
            return
        self._gpus.settle_around(now, tenant)
        woke = tenant.asleep_since is not None and now - tenant.asleep_since >= self._parameters.wake_ns
        self._enqueue(now, tenant, woke=woke)

    def unwant(self, now: int, tenant_id: str) -> None:
        """The tenant waits no more (its processes are gone)."""
        now = self._advance_clock(now)
        tenant = self._tenants[tenant_id]
        if tenant.waiting_since is None:
            return
        self._gpus.settle_around(now, tenant)
        self._stop_waiting(tenant)
        if tenant.hold is None:
            tenant.asleep_since = now
            tenant.active_until = now
        self._stale.update(tenant.gpus)

    def set_present(self, now: int, tenant_id: str, *, present: bool) -> None:
        """Whether the tenant has processes that may want the token at any moment: what others launch meanwhile is
        metered."""
        now = self._advance_clock(now)
        tenant = self._tenants[tenant_id]
        tenant.present = present
        if present:
            self._holds.bound(now, tenant.gpus, tenant)

    def draining(self, now: int, tenant_id: str, *, expected_ns: int) -> None:
        """The tenant's gate is closed, and what is left of its grant's work is expected to take so long: the next is
        granted as much sooner as a hand-off takes. It pays until it has drained."""
        now = self._advance_clock(now)
        hold = self._tenants[tenant_id].hold
        if hold is not None and not hold.overdue and not hold.yielded:
            hold.ending, hold.gives_way_at = True, now + max(0, expected_ns - self._parameters.hand_off_ns)

    def drained(self, now: int, tenant_id: str, *, wanting: bool) -> None:
        """All GPU work of the tenant's grant has ended; `wanting`: it has more. Without a grant this is `want` or
        nothing."""
        now = self._advance_clock(now)
        tenant = self._tenants[tenant_id]
        hold = tenant.hold
        if hold is None:
            if wanting:
                self.want(now, tenant_id)
            return
        self._gpus.settle_around(now, tenant)
        self._turns.forgive(tenant, hold.charged_ns)
        self._gpus.free(tenant)
        self._holds.end(tenant)
        tenant.active_until = now
        if tenant.waiting_since is not None:
            self._classify(now, tenant)
        elif wanting:
            self._enqueue(now, tenant, woke=False)
        else:
            tenant.asleep_since = now
        self._stale.update(tenant.gpus)

    # ---- what the outside does

    def tick(self, now: int) -> list[Action]:
        """Everything that is due at `now`. Cheap when nothing is."""
        now = self._advance_clock(now)
        for tenant in list(self._stuck.values()):
            if not tenant.insists and now >= self._insists_at(tenant):
                tenant.insists = True
                self._gpus.settle_around(now, tenant)
                self._classify(now, tenant)
        for tenant in list(self._throttled.values()):
            if tenant.throttled_until is not None and now >= tenant.throttled_until:
                self._gpus.settle_around(now, tenant)
                self._classify(now, tenant)
        actions = self._holds.tick(now)
        if self._stale:
            actions.extend(self._place(now))
        return actions

    def next_deadline(self) -> int | None:
        """When `tick` has something to do at the latest, if nothing else happens before."""
        times = [t.throttled_until for t in self._throttled.values() if t.throttled_until is not None]
        times += [self._insists_at(tenant) for tenant in self._stuck.values() if not tenant.insists]
        return min([*times, *self._holds.due()], default=None)

    def usage(self, now: int, tenant_id: str) -> TimeUsage:
        """What the tenant used up to `now`."""
        now = self._advance_clock(now)
        tenant = self._tenants[tenant_id]
        self._gpus.settle(now, tenant)
        return tenant.account.usage()

    def snapshot(self, now: int, tenant_id: str) -> AccountSnapshot:
        """The tenant's account as of `now`, to go on with in another process."""
        now = self._advance_clock(now)
        tenant = self._tenants[tenant_id]
        self._gpus.settle(now, tenant)
        return tenant.account.snapshot()

    def held_grant_id(self, tenant_id: str) -> int | None:
        """The id of the grant that the tenant has not drained, if there is one."""
        hold = self._tenants[tenant_id].hold
        return None if hold is None else hold.grant_id

    def preempted(self, tenant_id: str) -> bool:
        """Whether the tenant was overtaken and has not drained."""
        hold = self._tenants[tenant_id].hold
        return hold is not None and hold.overdue

    def remaining_grant(self, now: int, tenant_id: str) -> TokenGrant | None:
        """The grant that the tenant may still launch under, with the quantum that is left; None if there is none."""
        hold = self._tenants[tenant_id].hold
        if hold is None or hold.overdue or hold.revoked or hold.ending:
            return None
        if hold.deadline is None:
            return TokenGrant(tenant_id, hold.grant_id, 0, hold.bounded)
        left = hold.deadline - now
        return TokenGrant(tenant_id, hold.grant_id, left, hold.bounded) if left > 0 else None

    def contended(self, now: int, tenant_id: str) -> bool:
        """Whether another tenant wants one of its GPUs, or did until a short while ago."""
        tenant = self._tenants[tenant_id]
        return any(
            self._lively(now, other) for gpu in tenant.gpus for other in self._gpus.sharing[gpu] if other is not tenant
        )

    def sharing_with(self, tenant_id: str) -> frozenset[str]:
        """The other tenants of its GPUs."""
        tenant = self._tenants[tenant_id]
        return frozenset(other.id for gpu in tenant.gpus for other in self._gpus.sharing[gpu] if other is not tenant)

    # ---- waiting

    def _advance_clock(self, now: int) -> int:
        self._now = max(self._now, now)
        return self._now

    def _lively(self, now: int, tenant: TokenTenant) -> bool:
        if tenant.waiting_since is not None or tenant.hold is not None:
            return True
        return tenant.active_until is not None and now - tenant.active_until < self._parameters.quiet_ns

    def _enqueue(self, now: int, tenant: TokenTenant, *, woke: bool) -> None:
        tenant.waiting_since = now
        tenant.asleep_since = None
        tenant.woke = woke and tenant.account.assured > 0
        if tenant.hold is not None:
            self._stuck[tenant.id] = tenant
        if woke or tenant.account.grants == 0:
            self._turns.join(tenant)
        self._classify(now, tenant)

    def _insists_at(self, tenant: TokenTenant) -> int:
        assert tenant.waiting_since is not None, "it waits"
        return tenant.waiting_since + self._parameters.debt_ns

    def _stop_waiting(self, tenant: TokenTenant) -> None:
        """It was granted, or wants no more."""
        tenant.waiting_since, tenant.woke, tenant.insists = None, False, False
        self._stuck.pop(tenant.id, None)
        tenant.throttled, tenant.throttled_until = False, None
        self._throttled.pop(tenant.id, None)

    def _classify(self, now: int, tenant: TokenTenant) -> None:
        """Whether a waiting tenant can run or is held back by its ceiling. Its account is settled."""
        account, parameters = tenant.account, self._parameters
        assert tenant.waiting_since is not None, "it waits"
        resume = max(parameters.quantum_min_ns, min(parameters.resume_ns, parameters.quantum_max_ns // 2))
        if tenant.insists or account.fits(resume if tenant.throttled else parameters.quantum_min_ns):
            if tenant.throttled:
                self._turns.join(tenant)
            tenant.throttled, tenant.throttled_until = False, None
            self._throttled.pop(tenant.id, None)
            self._holds.shorten(now, tenant.gpus, tenant, unlimited=self._unlimited)
        else:
            tenant.throttled = True
            tenant.throttled_until = account.ready_at(resume)
            self._throttled[tenant.id] = tenant
        self._stale.update(tenant.gpus)

    # ---- holds

    def _accompanied(self, tenant: TokenTenant) -> bool:
        return any(other.present for gpu in tenant.gpus for other in self._gpus.sharing[gpu] if other is not tenant)

    def _unlimited(self, now: int, tenant: TokenTenant) -> bool:
        return tenant.account.limit_milli == 1000 and not self.contended(now, tenant.id)

    # ---- placing

    def _place(self, now: int) -> list[Action]:
        """Gives free GPUs to those whose turn it is."""
        waiting = affected(self._stale, self._gpus.sharing)
        self._stale.clear()
        holder = self._gpus.holder
        if all(len(tenant.gpus) == 1 and tenant.gpus[0] in holder for tenant in waiting):
            return []
        return [self._grant(now, turn) for turn in self._turns.begin(now, waiting)]

    def _grant(self, now: int, turn: Turn) -> TokenGrant:
        tenant = turn.tenant
        if tenant.hold is not None:  # overdue: what it has on its GPUs is part of this turn from now on
            self._gpus.settle_around(now, tenant)
            self._turns.forgive(tenant, tenant.hold.charged_ns)
            self._gpus.free(tenant)
        self._gpus.settle_on(now, tenant.gpus)
        unlimited = self._unlimited(now, tenant) and not turn.lent
        deadline = None if unlimited else now + turn.quantum_ns
        metered = not unlimited or self._accompanied(tenant)
        self._grants += 1
        assured = tenant.account.assured > 0
        hold = Hold(self._grants, now, deadline, metered=metered, assured=assured, bounded=metered)
        # To look whether it goes on costs the agent to wake up once more.
        hold.considered = not self._turns.may_go_on(tenant, turn.quantum_ns * 3 // 4)
        tenant.account.grants += 1
        self._stop_waiting(tenant)
        self._holds.begin(tenant, hold)
        return TokenGrant(tenant.id, self._grants, 0 if deadline is None else deadline - now, metered)
