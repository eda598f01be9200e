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
- A holder whose turn it is again when its quantum ends goes on without draining.
- For one that wakes with credit a holder keeps the token for the least quantum only, as long as that does not happen so
  often that hand-offs would eat what is shared.

Every method takes the present time in nanoseconds of any clock that never goes back. After any of them call `tick`
and carry out what it returns; call it again at `next_deadline` at the latest.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from .account import Account, AccountState, Usage
from .actions import Action, Grant, Overdue, Revoke
from .config import Config
from .occupancy import Occupancy
from .placing import Turn, affected
from .state import Hold, Tenant
from .turns import Turns

_NOTICE_NS = 1_000_000
"""A holder whose quantum becomes shorter is told so if more than this is left of it."""


class Scheduler:
    """The one scheduler of a node. Not thread-safe."""

    def __init__(self, config: Config | None = None) -> None:
        self._config = config or Config()
        self._tenants: dict[str, Tenant] = {}
        self._gpus = Occupancy()
        self._turns = Turns(self._config, self._gpus)
        self._grants = 0
        self._holding: dict[str, Tenant] = {}
        self._stuck: dict[str, Tenant] = {}
        """Those that are overdue and wait: what they have not drained may wait for what they would launch next, while
        what they owe grows without end."""
        self._cuts: dict[str, int] = {}
        """Per GPU, until when the holds that were cut for those who woke are paid for."""
        self._throttled: dict[str, Tenant] = {}
        self._now = 0
        self._stale: set[str] = set()
        """GPUs for which it may be someone's turn."""
        self._due: list[Grant] = []
        """New terms of what is held, to be told by the next tick."""

    # ---- what the outside tells

    def set_tenant(
        self,
        now: int,
        tenant_id: str,
        gpus: Sequence[str],
        *,
        request_milli: int,
        limit_milli: int,
        resumed: AccountState | None = None,
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
            account = Account(now, self._config, request_milli=request_milli, limit_milli=limit_milli)
            if resumed is not None:
                account.resume(resumed)
            tenant = Tenant(tenant_id, tuple(gpus), account, asleep_since=now)
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
            self._shorten_holds(now, tenant.gpus)
        self._stale.update(tenant.gpus)

    def remove(self, now: int, tenant_id: str) -> None:
        """Forgets a tenant; what it holds is free at once. Unknown tenants are ignored."""
        now = self._advance_clock(now)
        tenant = self._tenants.get(tenant_id)
        if tenant is None:
            return
        self._gpus.settle_around(now, tenant)
        self._gpus.remove(tenant)
        self._holding.pop(tenant_id, None)
        tenant.hold = None
        self._stop_waiting(tenant)
        for gpu in tenant.gpus:
            if gpu not in self._gpus.sharing:
                self._turns.forget(gpu)
                self._cuts.pop(gpu, None)
        del self._tenants[tenant_id]
        self._due = [action for action in self._due if action.tenant != tenant_id]
        self._stale.update(tenant.gpus)

    def want(self, now: int, tenant_id: str) -> None:
        """The tenant has work and waits for the token. While it holds one this says nothing new, unless it is overdue:
        then it waits for its next turn."""
        now = self._advance_clock(now)
        tenant = self._tenants[tenant_id]
        if tenant.waiting_since is not None or tenant.holding:
            return
        self._gpus.settle_around(now, tenant)
        woke = tenant.asleep_since is not None and now - tenant.asleep_since >= self._config.wake_ns
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

    def attend(self, now: int, tenant_id: str, *, present: bool) -> None:
        """Whether the tenant has processes that may want the token at any moment: what others launch meanwhile is
        metered."""
        now = self._advance_clock(now)
        tenant = self._tenants[tenant_id]
        tenant.present = present
        for gpu in tenant.gpus if present else ():
            holder = self._gpus.holder.get(gpu)
            if holder is None or holder is tenant or holder.hold is None or holder.hold.bounded:
                continue
            hold = holder.hold
            hold.bounded = True
            left = 0 if hold.deadline is None else hold.deadline - now
            if left > 0 or hold.deadline is None:
                self._due.append(Grant(holder.id, hold.grant_id, left, True))

    def draining(self, now: int, tenant_id: str, *, expected_ns: int) -> None:
        """The tenant's gate is closed, and what is left of its grant's work is expected to take so long: the next is
        granted as much sooner as a hand-off takes. It pays until it has drained."""
        now = self._advance_clock(now)
        hold = self._tenants[tenant_id].hold
        if hold is not None and not hold.overdue and not hold.yielded:
            hold.ending, hold.gives_way_at = True, now + max(0, expected_ns - self._config.hand_off_ns)

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
        self._holding.pop(tenant_id, None)
        tenant.hold = None
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
        actions: list[Action] = [renewal for renewal in self._due if self.holding(renewal.tenant) == renewal.grant_id]
        self._due = []
        for tenant in list(self._holding.values()):
            hold = tenant.hold
            assert hold is not None, "a holder holds"
            if hold.gives_way_at is not None and now >= hold.gives_way_at:
                self._give_way(now, tenant, hold)
            if hold.deadline is None or now < self._look_at(hold):
                continue
            if not hold.considered and not hold.revoked and not hold.ending:
                hold.considered = True
                if now < hold.deadline:
                    actions.extend(self._renew(now, tenant, hold))
            if now < hold.deadline:
                continue
            if hold.shortened and not hold.revoked and not hold.ending:
                hold.revoked = True
                actions.append(Revoke(tenant.id, hold.grant_id))
            if now >= hold.deadline + self._config.grace_ns:
                self._overtake(now, tenant, hold)
                actions.append(Overdue(tenant.id, hold.grant_id))
        for tenant in list(self._stuck.values()):
            if not tenant.insists and now >= self._insists_at(tenant):
                tenant.insists = True
                self._gpus.settle_around(now, tenant)
                self._classify(now, tenant)
        for tenant in list(self._throttled.values()):
            if tenant.throttled_until is not None and now >= tenant.throttled_until:
                self._gpus.settle_around(now, tenant)
                self._classify(now, tenant)
        if self._stale:
            actions.extend(self._place(now))
        return actions

    def next_deadline(self) -> int | None:
        """When `tick` has something to do at the latest, if nothing else happens before."""
        times = [t.throttled_until for t in self._throttled.values() if t.throttled_until is not None]
        times += [self._insists_at(tenant) for tenant in self._stuck.values() if not tenant.insists]
        for tenant in self._holding.values():
            hold = tenant.hold
            assert hold is not None, "a holder holds"
            if hold.gives_way_at is not None and self._gpus.may_give_way(tenant):
                times.append(hold.gives_way_at)
            if hold.deadline is None:
                continue
            if hold.ending or hold.revoked or (hold.considered and not hold.shortened):
                times.append(hold.deadline + self._config.grace_ns)
            else:
                times.append(hold.deadline if hold.considered else self._look_at(hold))
        return min(times, default=None)

    def usage(self, now: int, tenant_id: str) -> Usage:
        """What the tenant used up to `now`."""
        now = self._advance_clock(now)
        tenant = self._tenants[tenant_id]
        self._gpus.settle(now, tenant)
        return tenant.account.usage()

    def state(self, now: int, tenant_id: str) -> AccountState:
        """The tenant's account as of `now`, to go on with in another process."""
        now = self._advance_clock(now)
        tenant = self._tenants[tenant_id]
        self._gpus.settle(now, tenant)
        return tenant.account.state()

    def holding(self, tenant_id: str) -> int | None:
        """The id of the grant that the tenant has not drained, if there is one."""
        hold = self._tenants[tenant_id].hold
        return None if hold is None else hold.grant_id

    def overdue(self, tenant_id: str) -> bool:
        """Whether the tenant was overtaken and has not drained."""
        hold = self._tenants[tenant_id].hold
        return hold is not None and hold.overdue

    def remaining(self, now: int, tenant_id: str) -> Grant | None:
        """The grant that the tenant may still launch under, with the quantum that is left; None if there is none."""
        hold = self._tenants[tenant_id].hold
        if hold is None or hold.overdue or hold.revoked or hold.ending:
            return None
        if hold.deadline is None:
            return Grant(tenant_id, hold.grant_id, 0, hold.bounded)
        left = hold.deadline - now
        return Grant(tenant_id, hold.grant_id, left, hold.bounded) if left > 0 else None

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

    def _lively(self, now: int, tenant: Tenant) -> bool:
        if tenant.waiting_since is not None or tenant.hold is not None:
            return True
        return tenant.active_until is not None and now - tenant.active_until < self._config.quiet_ns

    def _enqueue(self, now: int, tenant: Tenant, *, woke: bool) -> None:
        tenant.waiting_since = now
        tenant.asleep_since = None
        tenant.woke = woke and tenant.account.assured > 0
        if tenant.hold is not None:
            self._stuck[tenant.id] = tenant
        if woke or tenant.account.grants == 0:
            self._turns.join(tenant)
        self._classify(now, tenant)

    def _insists_at(self, tenant: Tenant) -> int:
        assert tenant.waiting_since is not None, "it waits"
        return tenant.waiting_since + self._config.debt_ns

    def _stop_waiting(self, tenant: Tenant) -> None:
        """It was granted, or wants no more."""
        tenant.waiting_since, tenant.woke, tenant.insists = None, False, False
        self._stuck.pop(tenant.id, None)
        tenant.throttled, tenant.throttled_until = False, None
        self._throttled.pop(tenant.id, None)

    def _classify(self, now: int, tenant: Tenant) -> None:
        """Whether a waiting tenant can run or is held back by its ceiling. Its account is settled."""
        account, config = tenant.account, self._config
        assert tenant.waiting_since is not None, "it waits"
        resume = max(config.quantum_min_ns, min(config.resume_ns, config.quantum_max_ns // 2))
        if tenant.insists or account.fits(resume if tenant.throttled else config.quantum_min_ns):
            if tenant.throttled:
                self._turns.join(tenant)
            tenant.throttled, tenant.throttled_until = False, None
            self._throttled.pop(tenant.id, None)
            self._shorten_holds(now, tenant.gpus, tenant)
        else:
            tenant.throttled = True
            tenant.throttled_until = account.ready_at(resume)
            self._throttled[tenant.id] = tenant
        self._stale.update(tenant.gpus)

    # ---- holds

    def _look_at(self, hold: Hold) -> int:
        """When it is to be seen whether the holder goes on; its deadline once it was."""
        assert hold.deadline is not None, "it has a quantum"
        if hold.considered:
            return hold.deadline
        return hold.deadline - min(self._config.renew_ahead_ns, (hold.deadline - hold.granted_at) // 4)

    def _give_way(self, now: int, tenant: Tenant, hold: Hold) -> None:
        """Lets the next in while the tenant's last work ends, unless its own turn is the next. One at a time on a
        GPU."""
        if not self._gpus.may_give_way(tenant):
            return
        hold.gives_way_at = None
        if self._turns.next_of(now, tenant) is None:
            self._gpus.settle_around(now, tenant)
            hold.yielded = True
            self._gpus.give_way(tenant)
            self._stale.update(tenant.gpus)

    def _overtake(self, now: int, tenant: Tenant, hold: Hold) -> None:
        self._gpus.settle_around(now, tenant)
        hold.overdue = True
        tenant.account.overdue += 1
        del self._holding[tenant.id]
        self._gpus.overtake(tenant)
        self._stale.update(tenant.gpus)

    def _shorten_holds(self, now: int, gpus: Iterable[str], waiter: Tenant | None = None) -> None:
        """A holder that someone waits for keeps the token no longer than the quantum for that many.

        Once someone comes who has credit it keeps the token for the least quantum only, if it holds on borrowed time or
        is owed less by more than a quantum; for one that wakes with credit always, as long as that is not too often.
        """
        owed = waiter.account.owed_ns() if waiter is not None and waiter.account.assured > 0 else None
        for gpu in gpus:
            holder = self._gpus.holder.get(gpu)
            if holder is None or holder.hold is None or self._unlimited(now, holder):
                continue
            hold, quantum, cut = holder.hold, self._turns.quantum(holder), False
            if owed is not None and (not hold.assured or owed - holder.account.owed_ns() > quantum):
                quantum = self._config.quantum_min_ns
            elif waiter is not None and waiter.woke and self._cuts.get(gpu, now) <= now + self._config.cut_burst_ns:
                quantum, cut = self._config.quantum_min_ns, True
            deadline = max(now, hold.granted_at + quantum)
            if hold.deadline is None or hold.deadline - deadline >= self._config.quantum_min_ns:
                if cut:
                    self._cuts[gpu] = max(now, self._cuts.get(gpu, now)) + self._config.cut_every_ns
                self._gpus.settle(now, holder)
                self._shorten(now, holder, hold, deadline)

    def _shorten(self, now: int, tenant: Tenant, hold: Hold, deadline: int) -> None:
        """The holder is told at once, so that its queue is short by then; where that is too late, it is revoked when it
        is due."""
        hold.deadline, hold.considered = deadline, False
        hold.shortened = deadline - now < _NOTICE_NS
        if not hold.shortened and not hold.revoked and not hold.ending:
            hold.bounded = True
            self._due.append(Grant(tenant.id, hold.grant_id, deadline - now, True))

    def _accompanied(self, tenant: Tenant) -> bool:
        return any(other.present for gpu in tenant.gpus for other in self._gpus.sharing[gpu] if other is not tenant)

    def _unlimited(self, now: int, tenant: Tenant) -> bool:
        return tenant.account.limit_milli == 1000 and not self.contended(now, tenant.id)

    # ---- placing

    def _place(self, now: int) -> list[Action]:
        """Gives free GPUs to those whose turn it is."""
        waiting = affected(self._stale, self._gpus.sharing)
        self._stale = set()
        holder = self._gpus.holder
        if all(len(tenant.gpus) == 1 and tenant.gpus[0] in holder for tenant in waiting):
            return []
        return [self._grant(now, turn) for turn in self._turns.begin(now, waiting)]

    def _renew(self, now: int, tenant: Tenant, hold: Hold) -> list[Action]:
        """Lets a holder go on whose turn it is again."""
        turn = self._turns.next_of(now, tenant)
        if turn is None:
            return []
        assert hold.deadline is not None, "it has a quantum"
        self._gpus.settle_around(now, tenant)
        self._turns.forgive(tenant, hold.charged_ns)
        hold.granted_at, hold.deadline = hold.deadline, hold.deadline + turn.quantum_ns
        hold.assured = tenant.account.assured > 0
        hold.shortened = hold.considered = False
        hold.charged_ns = 0
        return [Grant(tenant.id, hold.grant_id, hold.deadline - now, hold.bounded)]

    def _grant(self, now: int, turn: Turn) -> Grant:
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
        tenant.hold = Hold(self._grants, now, deadline, metered=metered, assured=assured, bounded=metered)
        tenant.account.grants += 1
        self._stop_waiting(tenant)
        self._holding[tenant.id] = tenant
        self._gpus.occupy(tenant)
        return Grant(tenant.id, self._grants, 0 if deadline is None else deadline - now, metered)
