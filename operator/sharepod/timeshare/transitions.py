"""Transitions of holds: renewal, cut, revocation, yield, preemption, suspension.

Guarantees:
- If the holder would also get the next turn, its hold is renewed before its deadline, so that it need not drain. If no
  other tenant of its GPUs is active, it is renewed without a deadline.
- A holder that announces the end of its last work yields `hand_off_ns` before that end: the next tenant is granted
  already. A GPU has one yielding holder at a time.
- A holder that has not drained one grace period after its deadline is preempted. While n tenants hold at once, work
  takes up to n times as long, so the grace period is n times as long.
- A co-runner holds until it is revoked, and then drains while others hold. After it has drained it waits for its turn
  again.
- A tenant without processor time cannot report that it has drained. It yields to the next tenant, and its hold is
  suspended when its last work is expected to end.
- When a tenant wakes with credit, the holder keeps only a shortest quantum. Each GPU has at most one such cut per
  `cut_every_ns` on average, after a burst.
- A gang or a group that is owed its turn keeps it: the turn is not cut for a tenant that wakes with credit.
- When an interactive tenant has an early turn (`hurries`), the holder keeps only a shortest turn.
- A tenant pays for the hand-offs of a turn that is shorter than a shortest turn. One such turn per `early_every_ns` on
  each GPU is free, after a burst. So a tenant that requests turns without using them delays others only by these free
  turns.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator

from .account import Charge
from .actions import Action, Preemption, Suspension, TokenGrant, TokenRevocation
from .groups import Contender, holds_up_until
from .hold import Hold, HoldPhase, Metering
from .leaky_bucket import LeakyBucket
from .occupancy import Occupancy
from .parameters import Parameters
from .plan import Turn
from .tenant import TokenTenant
from .turns import TurnPolicy

_NOTICE_NS = 1_000_000
"""Least time between the message of an earlier deadline and that deadline: 1 ms, in which a holder can bound its queue.
With less time left, a revocation is sent at the deadline instead."""

_HAND_OFFS_NS = 400_000
"""Charge, in nanoseconds, for each turn that is shorter than `turn_min_ns`, beyond the free ones. It is the time of the
hand-offs before and after the turn (benchmarks/handoff.py)."""

_LATE_NS = 20_000_000
"""Time beyond a tenant's usual overrun after which the scheduler must run once: 20 ms. If the agent does not run at
that moment, it has stalled, and the tenant does not pay for the delay."""

_RUNNING = HoldPhase.RUNNING


class HoldTransitions:
    """Changes the phases of holds as time passes. Contains all holds that are neither drained, preempted nor suspended,
    and preempted holds of tenants without processor time until these are suspended."""

    def __init__(
        self, parameters: Parameters, occupancy: Occupancy, policy: TurnPolicy, changed_gpus: set[str]
    ) -> None:
        self._parameters = parameters
        self._occupancy = occupancy
        self._policy = policy
        self._changed_gpus = changed_gpus
        """GPUs on which a turn may begin. Transitions add GPUs to this set."""
        self._tenants: dict[str, TokenTenant] = {}
        self._cuts = defaultdict[str, LeakyBucket](LeakyBucket)
        """For each GPU: limiter of cuts for tenants that wake with credit."""
        self._short_turns = defaultdict[str, LeakyBucket](LeakyBucket)
        """For each GPU: limiter of short turns for whose hand-offs the tenant pays nothing."""
        self._new_terms: list[tuple[TokenTenant, TokenGrant]] = []
        """Grants with changed terms of present holds, which the next tick returns."""

    def tenants(self) -> Iterable[TokenTenant]:
        """Return the tenants whose holds may still change."""
        return self._tenants.values()

    def begin(self, tenant: TokenTenant, hold: Hold) -> None:
        """Begin a hold on the tenant's GPUs."""
        tenant.hold = hold
        self._tenants[tenant.id] = tenant
        self._occupancy.occupy(tenant)

    def end(self, tenant: TokenTenant) -> None:
        """End the tenant's hold: it has drained, or is removed."""
        tenant.hold = None
        self._tenants.pop(tenant.id, None)

    def forget(self, gpu: str) -> None:
        """Drop the state of a GPU that has no tenants any more."""
        self._cuts.pop(gpu, None)
        self._short_turns.pop(gpu, None)

    def charge_hand_offs(self, now: int, tenant: TokenTenant, hold: Hold) -> None:
        """Charge a drained tenant for the hand-offs of its turn, if the turn was shorter than `turn_min_ns`, other
        tenants compete, and the free short turns of the GPU are used up.

        The caller must have charged its account up to `now`. The charge does not count as time held.
        """
        if now - hold.begun_at >= self._parameters.turn_min_ns or not self._occupancy.contended(tenant):
            return
        for gpu in tenant.gpus:
            if self._short_turns[gpu].has_room(now, self._parameters.cut_burst_ns):
                self._short_turns[gpu].add(now, self._parameters.early_every_ns)
            else:
                tenant.account.charge(_HAND_OFFS_NS // len(tenant.gpus))
                tenant.virtual_ns[gpu] += _HAND_OFFS_NS * 1000 // tenant.weight

    def meter(self, now: int, gpus: Iterable[str], newcomer: TokenTenant) -> None:
        """Meter the holders of these GPUs from now on: they must bound their queues, because `newcomer` is connected
        and may want a GPU. If `newcomer` is interactive, they must keep their queues short."""
        for gpu in gpus:
            holder = self._occupancy.holder.get(gpu)
            if holder is None or holder is newcomer or holder.hold is None:
                continue
            if holder.hold.metered and not newcomer.interactive:
                continue
            if not holder.hold.metered:
                holder.hold.metering = Metering.METERED_LATER
            left = 0 if holder.hold.deadline is None else holder.hold.deadline - now
            if holder.hold.phase is _RUNNING and (left > 0 or holder.hold.deadline is None):
                self._tell_terms(holder, holder.hold, left)

    def shorten(self, now: int, gpus: Iterable[str], waiter: TokenTenant | None = None) -> None:
        """Bring the deadlines of the holders of these GPUs forward, to the quantum that the present competitors leave
        them.

        A holder keeps only a shortest quantum:
        - for a waiter with credit, if the waiter's lag exceeds the holder's by more than a quantum;
        - for a waiter that woke with credit, as often as `cut_every_ns` allows.

        A holder keeps only a shortest turn:
        - for a waiter with credit, if the holder has borrowed time;
        - for a waiter that hurries.

        Args:
            now: The present moment.
            gpus: UUIDs of the GPUs.
            waiter: The tenant that has begun to wait. None if rates have changed.
        """
        lag = waiter.account.lag_ns() if waiter is not None and waiter.account.assured > 0 else None
        for gpu in gpus:
            holder = self._occupancy.holder.get(gpu)
            if holder is None or holder.hold is None or self._policy.unlimited(now, holder):
                continue
            hold, quantum, cut = holder.hold, self._policy.quantum(holder), False
            begin = hold.granted_at
            if waiter is not None and waiter.hurries:
                quantum, begin = self._parameters.turn_min_ns, hold.begun_at
            elif lag is not None and hold.given_as is Charge.BORROWED:
                quantum = self._parameters.turn_min_ns
            elif lag is not None and lag - holder.account.lag_ns() > quantum:
                quantum = min(quantum, self._parameters.quantum_min_ns)
            elif hold.given_as is Charge.GUARANTEED and self._occupancy.has_several_gpus(holder):
                pass
            elif waiter is not None and waiter.woke_with_credit and self._may_cut(now, gpu):
                quantum, cut = min(quantum, self._parameters.quantum_min_ns), True
            deadline = max(now, begin + quantum)
            if hold.deadline is None or hold.deadline - deadline >= min(quantum, self._parameters.quantum_min_ns):
                if cut:
                    self._cuts[gpu].add(now, self._parameters.cut_every_ns)
                self._occupancy.settle(now, holder)
                self._set_deadline(now, holder, hold, deadline)

    def begin_co_run(self, now: int, tenant: TokenTenant, hold: Hold) -> TokenGrant:
        """Begin a co-runner's hold. Return its grant."""
        tenant.hold = hold
        self._tenants[tenant.id] = tenant
        self._occupancy.add_co_runner(now, tenant)
        return self.terms(tenant, hold, 0)

    def end_co_run(self, now: int, tenant: TokenTenant) -> TokenRevocation:
        """End co-running: charge the co-runner's account up to `now`, and return the order to drain."""
        hold = _hold_of(tenant)
        self._occupancy.settle(now, tenant)
        hold.phase, hold.deadline, hold.renewal_considered = HoldPhase.REVOKED, now, True
        return TokenRevocation(tenant.id, hold.grant_id)

    def cut_now(self, now: int, tenant: TokenTenant) -> None:
        """End the turn of a lead now, because a co-runner leads next."""
        hold = _hold_of(tenant)
        self._occupancy.settle(now, tenant)
        if hold.metering is Metering.UNMETERED:
            hold.metering = Metering.METERED_LATER
        hold.deadline, hold.renewal_considered, hold.seen_late, hold.told_longer = now, True, False, True

    def cut_for(self, now: int, gang: Contender) -> None:
        """If a GPU of a waiting gang is idle, cut the holders of its other GPUs to a shortest quantum. If `gang` is the
        rest of a group whose other members already run, cut the holders to a shortest turn."""
        if gang.joins:
            self._cut_to_join(now, gang)
            return
        if gang.lag_ns <= 0 or all(gpu in self._occupancy.holder for gpu in gang.gpus):
            return
        for gpu in gang.gpus:
            holder = self._occupancy.holder.get(gpu)
            if holder is None or holder.hold is None or holder.hold.deadline is None:
                continue
            self._occupancy.settle(now, holder)
            deadline = max(now, holder.hold.granted_at + self._parameters.quantum_min_ns)
            if (
                holder.hold.phase is _RUNNING
                and holder.account.lag_ns() < gang.lag_ns
                and holder.hold.deadline - deadline >= self._parameters.turn_min_ns
            ):
                self._set_deadline(now, holder, holder.hold, deadline)

    def _cut_to_join(self, now: int, group: Contender) -> None:
        for gpu in group.gpus:
            holder = self._occupancy.holder.get(gpu)
            if holder is None or holder.hold is None or holder.hold.deadline is None:
                continue
            deadline = max(now, holder.hold.granted_at + self._parameters.turn_min_ns)
            late = holder.hold.deadline - deadline >= self._parameters.turn_min_ns
            if holder.hold.phase is _RUNNING and late and self._may_cut(now, gpu):
                self._cuts[gpu].add(now, self._parameters.cut_every_ns)
                self._occupancy.settle(now, holder)
                self._set_deadline(now, holder, holder.hold, deadline)

    def new_terms(self) -> list[Action]:
        """Return the changed terms of holds as actions, and clear them."""
        new, self._new_terms = self._new_terms, []
        return [terms for tenant, terms in new if tenant.hold is not None and tenant.hold.grant_id == terms.grant_id]

    def tick(self, now: int) -> list[Action]:
        """Apply all transitions that are due at `now`. Return the grants, revocations and reports that result."""
        actions = self.new_terms()
        for tenant in list(self._tenants.values()):
            hold = _hold_of(tenant)
            if tenant.group is not None and hold.holds_up_group:
                until = holds_up_until(hold)
                if until is not None and now >= until:
                    hold.holds_up_group = False
                    self._changed_gpus.update(tenant.gpus)
            # 1. Yield, if the tenant's last work is about to end.
            if hold.yields_at is not None and now >= hold.yields_at:
                self._yield(now, tenant, hold)
            # 2. Suspend, if the tenant has no processor time and its last work has ended.
            if hold.silent and hold.ends_at is not None and now >= hold.ends_at:
                self._suspend(now, tenant, hold)
                actions.append(Suspension(tenant.id, hold.grant_id))
                continue
            if hold.deadline is None or hold.phase is HoldPhase.PREEMPTED or now < self._look_at(hold):
                continue
            hold.seen_late = hold.seen_late or now >= self._late_at(tenant, hold)
            # 3. Renew, if the tenant would also get the next turn.
            if not hold.renewal_considered and hold.phase is _RUNNING:
                hold.renewal_considered = True
                if now < hold.deadline:
                    actions.extend(self._renew(now, tenant))
                    continue
            if now < hold.deadline:
                continue
            # 4. Revoke, if the tenant was sent a later deadline.
            if hold.told_longer and hold.phase is _RUNNING:
                hold.phase = HoldPhase.REVOKED
                actions.append(TokenRevocation(tenant.id, hold.grant_id))
            # 5. Preempt, if the grace period has expired.
            if now >= hold.deadline + self._grace_ns(tenant):
                self._preempt(now, tenant, hold)
                actions.append(Preemption(tenant.id, hold.grant_id))
        return actions

    def stalled(self, since: int, now: int) -> None:
        """Charge no tenant for the time from the expected end of its turn until `now`, because the agent did not run
        and could not begin another turn. `since`: last moment at which the agent certainly ran."""
        late = [(idle.until, idle.tenant) for idle in self._occupancy.awaited.values()]
        for tenant in self._tenants.values():
            hold = _hold_of(tenant)
            if not hold.displaced and hold.deadline is not None:
                usual = hold.deadline + tenant.habits.overrun_ns
                late.append((usual if hold.ends_at is None else hold.ends_at, tenant))
        ended: list[TokenTenant] = []
        for ends, tenant in sorted(late, key=lambda each: each[0]):
            begin = max(since, ends)
            if begin >= now:
                break
            gpus, held = tenant.gpus, tenant.hold
            if held is not None and held.phase is HoldPhase.YIELDING:
                gpus = self._occupancy.pass_on(begin, tenant)
                ended.append(tenant)
            self._occupancy.stall(begin, now, gpus)
            if held is not None and held.deadline is not None:
                held.deadline += now - begin
        for tenant in ended:
            self._occupancy.yield_on(now, tenant)

    def due(self) -> Iterator[int]:
        """Yield the moments by which `tick` must be called again."""
        for tenant in self._tenants.values():
            hold = _hold_of(tenant)
            if hold.yields_at is not None and self._occupancy.may_yield(tenant):
                yield hold.yields_at
            if tenant.group is not None and hold.holds_up_group:
                until = holds_up_until(hold)
                if until is not None:
                    yield until
            if hold.silent and hold.ends_at is not None:
                yield hold.ends_at
            if hold.deadline is None or hold.phase is HoldPhase.PREEMPTED:
                continue
            if hold.phase is not _RUNNING or (hold.renewal_considered and not hold.told_longer):
                late_at = self._late_at(tenant, hold)
                preempted_at = hold.deadline + self._grace_ns(tenant)
                yield preempted_at if hold.seen_late else min(late_at, preempted_at)
            else:
                yield hold.deadline if hold.renewal_considered else self._look_at(hold)

    def _grace_ns(self, tenant: TokenTenant) -> int:
        together = [len(self._occupancy.occupants(gpu)) for gpu in tenant.gpus if gpu in self._occupancy.co_runners]
        return self._parameters.grace_ns * max(together, default=1)

    def _may_cut(self, now: int, gpu: str) -> bool:
        return self._cuts[gpu].has_room(now, self._parameters.cut_burst_ns)

    def _late_at(self, tenant: TokenTenant, hold: Hold) -> int:
        """Return the moment from which the tenant counts as late: its deadline, its usual overrun and `_LATE_NS`."""
        assert hold.deadline is not None, "the hold has a deadline"
        return hold.deadline + tenant.habits.overrun_ns + _LATE_NS

    def _look_at(self, hold: Hold) -> int:
        """Return the moment at which to consider the hold's renewal; once that has been considered, its deadline."""
        assert hold.deadline is not None, "the hold has a deadline"
        if hold.renewal_considered:
            return hold.deadline
        return hold.deadline - min(self._parameters.renew_ahead_ns, (hold.deadline - hold.granted_at) // 4)

    def _tell_terms(self, tenant: TokenTenant, hold: Hold, left_ns: int) -> None:
        self._new_terms.append((tenant, self.terms(tenant, hold, left_ns)))

    def terms(self, tenant: TokenTenant, hold: Hold, left_ns: int) -> TokenGrant:
        """Return the grant with the present terms of a hold. `left_ns`: nanoseconds until its quantum ends; 0: no
        end.
        """
        short = hold.metered and self._occupancy.beside_interactive(tenant)
        concurrent = hold.metered and self._occupancy.may_co_run(tenant)
        return TokenGrant(
            tenant.id, hold.grant_id, left_ns, hold.metered, short=short, prompt=tenant.prompt, concurrent=concurrent
        )

    def _set_deadline(self, now: int, tenant: TokenTenant, hold: Hold, deadline: int) -> None:
        """Set an earlier deadline. The holder gets new terms at once, so that its queue is short when the deadline
        comes. If less than `_NOTICE_NS` is left, it gets a revocation at the deadline instead."""
        hold.deadline, hold.renewal_considered, hold.seen_late = deadline, False, False
        hold.told_longer = deadline - now < _NOTICE_NS
        if not hold.told_longer and hold.phase is _RUNNING:
            if hold.metering is Metering.UNMETERED:
                hold.metering = Metering.METERED_LATER
            self._tell_terms(tenant, hold, deadline - now)

    def _renew(self, now: int, tenant: TokenTenant) -> list[Action]:
        """If the tenant would also get the next turn, renew its hold, and the holds of its group that end at the same
        time. If other members must begin their turns with the renewed one, mark their GPUs as changed, so that the next
        tick grants these turns."""
        terms: list[Action] = []
        for turn in self._policy.renewal(now, tenant):
            hold = turn.tenant.hold
            if hold is None or hold.co_runs or hold.displaced:
                self._changed_gpus.update(turn.tenant.gpus)
            elif hold.phase is _RUNNING and hold.deadline is not None and now < hold.deadline:
                terms.extend(self._renew_one(now, turn, hold, hold.deadline))
        return terms

    def _renew_one(self, now: int, turn: Turn, hold: Hold, deadline: int) -> list[Action]:
        tenant = turn.tenant
        room, quantum, left = tenant.account.ceiling_room_ns(), turn.quantum_ns, deadline - now
        if room is not None:  # the rest of this quantum also counts against the limit
            quantum = min(quantum, room - left)
        # the turn must end when the reservation begins; otherwise backfill turns would delay the reserved turn
        if turn.backfill:
            quantum = min(quantum, turn.quantum_ns - left)
        if (room is not None or turn.backfill) and quantum < min(turn.quantum_ns, self._parameters.quantum_min_ns):
            return []
        unlimited = self._policy.unlimited(now, tenant) and not turn.backfill
        self._occupancy.settle_around(now, tenant)
        self._policy.cap_debt(tenant, hold.charged_ns)
        hold.granted_at, hold.deadline = deadline, None if unlimited else deadline + quantum
        hold.given_as = Charge.GUARANTEED if tenant.account.assured > 0 or turn.rides else Charge.BORROWED
        hold.told_longer = hold.renewal_considered = hold.seen_late = False
        hold.holds_up_group = True
        hold.charged_ns = 0
        return [self.terms(tenant, hold, 0 if hold.deadline is None else hold.deadline - now)]

    def _yield(self, now: int, tenant: TokenTenant, hold: Hold) -> None:
        """Let the next tenant hold while this tenant's last work ends. Do nothing if this tenant is next again and gets
        processor time.
        """
        if not self._occupancy.may_yield(tenant):
            return
        hold.yields_at = None
        if hold.silent or not self._policy.renewal(now, tenant):
            self._occupancy.settle_around(now, tenant)
            hold.phase = HoldPhase.YIELDING
            self._occupancy.start_yielding(tenant)
            self._changed_gpus.update(tenant.gpus)

    def _preempt(self, now: int, tenant: TokenTenant, hold: Hold) -> None:
        self._occupancy.settle_around(now, tenant)
        assert hold.deadline is not None, "a hold without deadline is not preempted"
        tenant.habits.overran(now - hold.deadline)
        hold.phase = HoldPhase.PREEMPTED
        tenant.account.preemptions += 1
        if not hold.silent:
            del self._tenants[tenant.id]
        self._occupancy.preempt(tenant)
        self._changed_gpus.update(tenant.gpus)

    def _suspend(self, now: int, tenant: TokenTenant, hold: Hold) -> None:
        self._occupancy.settle_around(now, tenant)
        hold.phase, hold.yields_at = HoldPhase.SUSPENDED, None
        tenant.active_until = now
        del self._tenants[tenant.id]
        self._occupancy.suspend(tenant)
        self._changed_gpus.update(tenant.gpus)


def _hold_of(tenant: TokenTenant) -> Hold:
    assert tenant.hold is not None, "the tenant has a hold"
    return tenant.hold
