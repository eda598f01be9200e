"""Who holds the token of which GPU, and for how long.

Guarantees:
- A GPU has one holder, except that a holder which has not drained a grace period after its quantum is overtaken.
- Each nanosecond of a GPU counts as used once: by its holder, or where it has none by the overdue one, oldest first.
  An overdue tenant owes all the time until it drains besides; nobody else's share or ceiling changes by that.
- A tenant with several GPUs gets all of them in one grant or none. The GPUs that it waits for are kept for it once it
  is its turn, and are meanwhile given only to those who are due to be done when it can start.
- A tenant starts only with a positive ceiling bucket. Order: tenants that wake with credit; those with a positive
  assured bucket, most owed first; borrowers in proportion to their request; best effort.

Every method takes the present time in nanoseconds of any clock that never goes back. After any of them call `tick`
and carry out what it returns; call it again at `next_deadline` at the latest.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from .account import Account, Charge, Usage
from .actions import Action, Grant, Overdue, Revoke
from .config import Config
from .placing import Turn, affected, plan
from .state import Hold, Tenant, floor_of, order_key, write_off

_DRAIN_GUESS_NS = 1_000_000
"""How soon a holder past its deadline is taken to drain: only used to plan around it."""


class Scheduler:
    """The one scheduler of a node. Not thread-safe."""

    def __init__(self, config: Config | None = None) -> None:
        self._config = config or Config()
        self._tenants: dict[str, Tenant] = {}
        self._sharing: dict[str, list[Tenant]] = {}
        self._holder: dict[str, Tenant] = {}
        self._overdue: dict[str, list[Tenant]] = {}
        self._floors: dict[tuple[str, bool], int] = {}
        self._grants = 0
        self._holding: dict[str, Tenant] = {}
        self._throttled: dict[str, Tenant] = {}
        self._now = 0
        self._stale: set[str] = set()
        """GPUs for which it may be someone's turn."""

    # ---- what the outside tells

    def set_tenant(
        self, now: int, tenant_id: str, gpus: Sequence[str], *, request_milli: int, limit_milli: int
    ) -> None:
        """Adds a tenant, or changes the rates of one. Raises `ValueError` for impossible rates or other GPUs than
        before."""
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
            tenant = Tenant(tenant_id, tuple(gpus), account, asleep_since=now)
            self._tenants[tenant_id] = tenant
            for gpu in tenant.gpus:
                self._sharing.setdefault(gpu, []).append(tenant)
        else:
            if tenant.gpus != tuple(gpus):
                raise ValueError(
                    f"tenant {tenant_id} is on {list(tenant.gpus)}; a tenant never moves, remove it and add it anew"
                )
            self._settle_around(now, tenant)
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
        self._settle_around(now, tenant)
        self._free(tenant)
        self._stop_waiting(tenant)
        for gpu in tenant.gpus:
            self._sharing[gpu].remove(tenant)
            if not self._sharing[gpu]:
                del self._sharing[gpu]
                self._floors.pop((gpu, False), None)
                self._floors.pop((gpu, True), None)
        del self._tenants[tenant_id]
        self._stale.update(tenant.gpus)

    def want(self, now: int, tenant_id: str) -> None:
        """The tenant has work and waits for the token. While it holds one this says nothing new."""
        now = self._advance_clock(now)
        tenant = self._tenants[tenant_id]
        if tenant.waiting_since is not None or tenant.hold is not None:
            return
        self._settle_around(now, tenant)
        woke = tenant.asleep_since is not None and now - tenant.asleep_since >= self._config.wake_ns
        self._enqueue(now, tenant, woke=woke)

    def unwant(self, now: int, tenant_id: str) -> None:
        """The tenant waits no more (its processes are gone)."""
        now = self._advance_clock(now)
        tenant = self._tenants[tenant_id]
        if tenant.waiting_since is None:
            return
        self._settle_around(now, tenant)
        self._stop_waiting(tenant)
        tenant.asleep_since = now
        tenant.active_until = now
        self._stale.update(tenant.gpus)

    def attend(self, now: int, tenant_id: str, *, present: bool) -> None:
        """Whether the tenant has processes that may want the token at any moment: what others launch meanwhile is
        metered."""
        self._advance_clock(now)
        self._tenants[tenant_id].present = present

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
        self._settle_around(now, tenant)
        tenant.account.settle_debt(hold.charged_ns)
        for gpu in tenant.gpus:
            allowed = max(self._config.debt_ns, hold.charged_ns * 1000 // tenant.weight)
            tenant.virtual[gpu] = min(tenant.virtual[gpu], self._floor(gpu, tenant.best_effort) + allowed)
        self._free(tenant)
        tenant.active_until = now
        if wanting:
            self._enqueue(now, tenant, woke=False)
        else:
            tenant.asleep_since = now
        self._stale.update(tenant.gpus)

    # ---- what the outside does

    def tick(self, now: int) -> list[Action]:
        """Everything that is due at `now`. Cheap when nothing is."""
        now = self._advance_clock(now)
        actions: list[Action] = []
        for tenant in list(self._holding.values()):
            hold = tenant.hold
            assert hold is not None, "a holder holds"
            if hold.deadline is None or now < hold.deadline:
                continue
            if hold.shortened and not hold.revoked:
                hold.revoked = True
                actions.append(Revoke(tenant.id, hold.grant_id))
            if now >= hold.deadline + self._config.grace_ns:
                self._overtake(now, tenant, hold)
                actions.append(Overdue(tenant.id, hold.grant_id))
        for tenant in list(self._throttled.values()):
            if tenant.throttled_until is not None and now >= tenant.throttled_until:
                self._settle_around(now, tenant)
                self._classify(now, tenant)
        if self._stale:
            actions.extend(self._place(now))
        return actions

    def next_deadline(self) -> int | None:
        """When `tick` has something to do at the latest, if nothing else happens before."""
        times = [t.throttled_until for t in self._throttled.values() if t.throttled_until is not None]
        for tenant in self._holding.values():
            hold = tenant.hold
            if hold is not None and hold.deadline is not None:
                pending = hold.shortened and not hold.revoked
                times.append(hold.deadline if pending else hold.deadline + self._config.grace_ns)
        return min(times, default=None)

    def usage(self, now: int, tenant_id: str) -> Usage:
        """What the tenant used up to `now`."""
        now = self._advance_clock(now)
        tenant = self._tenants[tenant_id]
        self._settle(now, tenant)
        return tenant.account.usage()

    def holding(self, tenant_id: str) -> int | None:
        """The id of the grant that the tenant has not drained, if there is one."""
        hold = self._tenants[tenant_id].hold
        return None if hold is None else hold.grant_id

    def remaining(self, now: int, tenant_id: str) -> Grant | None:
        """The grant that the tenant may still launch under, with the quantum that is left; None if there is none."""
        hold = self._tenants[tenant_id].hold
        if hold is None or hold.overdue or hold.revoked:
            return None
        if hold.deadline is None:
            return Grant(tenant_id, hold.grant_id, 0, hold.metered)
        left = hold.deadline - now
        return Grant(tenant_id, hold.grant_id, left, hold.metered) if left > 0 else None

    def contended(self, now: int, tenant_id: str) -> bool:
        """Whether another tenant wants one of its GPUs, or did until a short while ago."""
        tenant = self._tenants[tenant_id]
        return any(
            self._lively(now, other) for gpu in tenant.gpus for other in self._sharing[gpu] if other is not tenant
        )

    def sharing_with(self, tenant_id: str) -> frozenset[str]:
        """The other tenants of its GPUs."""
        tenant = self._tenants[tenant_id]
        return frozenset(other.id for gpu in tenant.gpus for other in self._sharing[gpu] if other is not tenant)

    # ---- accounts

    def _advance_clock(self, now: int) -> int:
        self._now = max(self._now, now)
        return self._now

    def _charged_to(self, gpu: str) -> Tenant | None:
        holder = self._holder.get(gpu)
        if holder is not None:
            return holder
        overdue = self._overdue.get(gpu)
        return overdue[0] if overdue else None

    def _settle(self, now: int, tenant: Tenant) -> None:
        """Brings one account up to `now`. To be called before anything changes that its charge depends on."""
        account, hold = tenant.account, tenant.hold
        if hold is None:
            account.advance(now, 0, Charge.BORROWED)
            return
        paying = sum(1 for gpu in tenant.gpus if self._charged_to(gpu) is tenant)
        contended = self._contended(tenant)
        for until in (min(now, hold.deadline), now) if hold.deadline is not None else (now,):
            if until <= account.at:
                continue
            held = (until - account.at) * paying // len(tenant.gpus)
            owed = until - account.at if hold.overdue else held
            late = hold.deadline is not None and account.at >= hold.deadline
            # What was launched while it was alone, and so in any number, may drain for the grace period at no cost.
            own = contended and (hold.overdue or (hold.metered and (hold.assured or late)))
            hold.charged_ns += owed
            account.late_ns += held if late else 0
            for gpu in tenant.gpus:
                tenant.virtual[gpu] += owed * 1000 // tenant.weight
            account.advance(until, held, Charge.OWN if own else Charge.BORROWED, owed_ns=owed)

    def _settle_around(self, now: int, tenant: Tenant) -> None:
        """Settles the tenant and everyone whose charge a change of it can alter."""
        self._settle(now, tenant)
        for gpu in tenant.gpus:
            for other in self._paying(gpu):
                self._settle(now, other)

    def _paying(self, gpu: str) -> Iterable[Tenant]:
        yield from self._overdue.get(gpu, ())
        if gpu in self._holder:
            yield self._holder[gpu]

    def _contended(self, tenant: Tenant) -> bool:
        """Whether what it holds is kept from, or was taken by, another."""
        return any(
            t.runnable or t.hold is not None for gpu in tenant.gpus for t in self._sharing[gpu] if t is not tenant
        )

    def _floor(self, gpu: str, best_effort: bool) -> int:
        """The virtual time that a tenant which joins the borrowers of this GPU starts at."""
        key = (gpu, best_effort)
        floor = floor_of(self._sharing[gpu], gpu, best_effort, self._floors.get(key, 0))
        self._floors[key] = floor
        return floor

    # ---- holds

    def _lively(self, now: int, tenant: Tenant) -> bool:
        if tenant.waiting_since is not None or tenant.hold is not None:
            return True
        return tenant.active_until is not None and now - tenant.active_until < self._config.quiet_ns

    def _free(self, tenant: Tenant) -> None:
        for gpu in tenant.gpus:
            if self._holder.get(gpu) is tenant:
                del self._holder[gpu]
            overdue = self._overdue.get(gpu, [])
            if tenant in overdue:
                overdue.remove(tenant)
        self._holding.pop(tenant.id, None)
        tenant.hold = None

    def _overtake(self, now: int, tenant: Tenant, hold: Hold) -> None:
        self._settle_around(now, tenant)
        hold.overdue = True
        tenant.account.overdue += 1
        del self._holding[tenant.id]
        for gpu in tenant.gpus:
            self._overdue.setdefault(gpu, []).append(tenant)
            del self._holder[gpu]
        self._stale.update(tenant.gpus)

    def _enqueue(self, now: int, tenant: Tenant, *, woke: bool) -> None:
        tenant.waiting_since = now
        tenant.asleep_since = None
        tenant.woke = woke and tenant.account.assured > 0
        if woke or tenant.account.grants == 0:
            self._join(tenant)
        self._classify(now, tenant)

    def _stop_waiting(self, tenant: Tenant) -> None:
        """It was granted, or wants no more."""
        tenant.waiting_since, tenant.woke = None, False
        tenant.throttled, tenant.throttled_until = False, None
        self._throttled.pop(tenant.id, None)

    def _join(self, tenant: Tenant) -> None:
        """Who did not compete meanwhile has saved up no claim on what is idle."""
        for gpu in tenant.gpus:
            tenant.virtual[gpu] = max(tenant.virtual[gpu], self._floor(gpu, tenant.best_effort))

    def _classify(self, now: int, tenant: Tenant) -> None:
        """Whether a waiting tenant can run or is held back by its ceiling. Its account is settled."""
        if tenant.account.ceiling <= 0:
            tenant.throttled, tenant.throttled_until = True, tenant.account.ready_at()
            self._throttled[tenant.id] = tenant
        else:
            if tenant.throttled:
                self._join(tenant)
            tenant.throttled, tenant.throttled_until = False, None
            self._throttled.pop(tenant.id, None)
            self._shorten_holds(now, tenant.gpus, tenant)
        self._stale.update(tenant.gpus)

    def _shorten_holds(self, now: int, gpus: Iterable[str], waiter: Tenant | None = None) -> None:
        """A holder that someone waits for keeps the token no longer than the quantum for that many.

        Once someone comes who has credit it keeps the token for the least quantum only, if it holds on borrowed time or
        is owed less by more than a quantum.
        """
        owed = waiter.account.owed_ns() if waiter is not None and waiter.account.assured > 0 else None
        for gpu in gpus:
            holder = self._holder.get(gpu)
            if holder is None or holder.hold is None or self._unlimited(now, holder):
                continue
            hold, quantum = holder.hold, self._quantum(holder)
            if owed is not None and (not hold.assured or owed - holder.account.owed_ns() > quantum):
                quantum = self._config.quantum_min_ns
            deadline = max(now, hold.granted_at + quantum)
            if hold.deadline is None or hold.deadline - deadline >= self._config.quantum_min_ns:
                self._settle(now, holder)
                hold.deadline, hold.shortened = deadline, True

    def _quantum(self, tenant: Tenant) -> int:
        return self._config.quantum(
            max(sum(1 for t in self._sharing[gpu] if t.runnable or t.holding or t is tenant) for gpu in tenant.gpus)
        )

    def _accompanied(self, tenant: Tenant) -> bool:
        return any(other.present for gpu in tenant.gpus for other in self._sharing[gpu] if other is not tenant)

    def _unlimited(self, now: int, tenant: Tenant) -> bool:
        return tenant.account.limit_milli == 1000 and not self.contended(now, tenant.id)

    # ---- placing

    def _place(self, now: int) -> list[Action]:
        """Gives free GPUs to those whose turn it is."""
        waiting = affected(self._stale, self._sharing)
        self._stale = set()
        if not waiting or all(
            any(gpu in self._holder for gpu in tenant.gpus) and len(tenant.gpus) == 1 for tenant in waiting
        ):
            return []
        wanted = {gpu for tenant in waiting for gpu in tenant.gpus}
        for tenant in waiting:
            self._settle(now, tenant)
        for gpu in wanted & self._holder.keys():
            self._settle(now, self._holder[gpu])
        write_off({gpu: self._sharing[gpu] for gpu in wanted}, self._config.assured_burst_ns)
        floors = {(gpu, kind): self._floor(gpu, kind) for kind in (False, True) for gpu in wanted}
        waiting.sort(key=lambda tenant: order_key(tenant, floors))
        free_at = {gpu: self._expected_end(now, self._holder[gpu]) for gpu in wanted & self._holder.keys()}
        turns = plan(waiting, free_at, now=now, quantum=self._quantum, shortest_ns=self._config.quantum_min_ns)
        return [self._grant(now, turn) for turn in turns]

    def _expected_end(self, now: int, holder: Tenant) -> int:
        hold = holder.hold
        assert hold is not None, "a GPU's holder holds"
        if hold.deadline is None:
            return now + self._config.quantum_max_ns
        return max(hold.deadline, now + _DRAIN_GUESS_NS)

    def _grant(self, now: int, turn: Turn) -> Grant:
        tenant = turn.tenant
        for gpu in tenant.gpus:
            for other in self._paying(gpu):
                self._settle(now, other)
        unlimited = self._unlimited(now, tenant) and not turn.lent
        deadline = None if unlimited else now + turn.quantum_ns
        metered = not unlimited or self._accompanied(tenant)
        self._grants += 1
        tenant.hold = Hold(self._grants, now, deadline, metered=metered, assured=tenant.account.assured > 0)
        tenant.account.grants += 1
        self._stop_waiting(tenant)
        self._holding[tenant.id] = tenant
        for gpu in tenant.gpus:
            self._holder[gpu] = tenant
        return Grant(tenant.id, self._grants, 0 if deadline is None else deadline - now, metered)
