"""Turn policy: decides which tenants are next, and for how long.

Guarantees:
- S6: A turn keeps its tenant within the limit. A starving tenant gets a shortest quantum regardless of its limit.
- S7: Order of service:
  1. starving tenants, tenants that wake with credit, and tenants that have been owed time for long: longest wait first;
  2. tenants with credit: greatest lag first;
  3. tenants with a request: least virtual time first;
  4. best effort: least virtual time first.

  A tenant whose turns outlast the target latency is ordered by its lag only, however long it has been owed time.
- A decision changes only accounts: it charges them up to now, and cancels credit that all competing tenants have in
  common.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from .account import Charge
from .anticipation import anticipate
from .groups import Contender, contenders, turns_together
from .hold import HoldPhase
from .occupancy import Occupancy
from .parameters import Parameters
from .plan import Anticipation, Turn, competing_weight, plan_turns, waiting_with
from .tenant import (
    MinVirtualTimes,
    OrderKey,
    TokenTenant,
    cancel_common_credit,
    goes_before,
    order_key,
    update_min_virtual_ns,
)

_DRAIN_GUESS_NS = 1_000_000
"""Time in which a holder beyond its usual overrun is assumed to drain: 1 ms, a short kernel. Used only for planning the
turns of gangs."""


class TurnPolicy:
    """Decides on the next turns of the tenants in `occupancy`."""

    def __init__(self, parameters: Parameters, occupancy: Occupancy) -> None:
        self._parameters = parameters
        self._occupancy = occupancy
        self._least: MinVirtualTimes = {}

    def forget(self, gpu: str) -> None:
        """Drop the state of a GPU that has no tenants any more."""
        self._least.pop((gpu, False), None)
        self._least.pop((gpu, True), None)

    def raise_to_min(self, tenant: TokenTenant) -> None:
        """Raise the tenant's virtual times to the minimum of the competing tenants. So a tenant has no claim on time
        that was lent while it slept.

        Exception: a tenant that may co-run keeps a claim of at most `excess_horizon_ns`. So lent time goes first to
        tenants that used least of their requests in that time.
        """
        for gpu in tenant.gpus:
            saved = 0
            if tenant.account.grants and self._occupancy.may_co_run(tenant):
                saved = self._parameters.excess_horizon_ns
            tenant.virtual_ns[gpu] = max(tenant.virtual_ns[gpu], self._min_virtual_ns(gpu, tenant.best_effort) - saved)

    def set_to_min(self, tenant: TokenTenant) -> None:
        """Set the virtual times of a tenant to the minimum of its new kind, after a change of its request from or to 0.
        Virtual times of guaranteed and best-effort tenants are not comparable."""
        for gpu in tenant.gpus:
            others = [other for other in self._occupancy.tenants_on[gpu] if other is not tenant]
            update_min_virtual_ns(others, gpu, self._least)
            tenant.virtual_ns[gpu] = self._least[gpu, tenant.best_effort]

    def cap_debt(self, tenant: TokenTenant, held_ns: int) -> None:
        """At the end of a hold that was charged `held_ns`: limit the tenant's debt to the debt cap, and its virtual
        time to the minimum plus the cap. The hold's own time is never cancelled."""
        tenant.account.cap_debt(held_ns)
        allowed = max(self._parameters.debt_ns, held_ns * 1000 // tenant.weight)
        for gpu in tenant.gpus:
            # The stored minimum is that of the last grant, so it is too low after a long hold. It only grows, so a
            # tenant that is within the bound now needs no update of it.
            known = self._least.get((gpu, tenant.best_effort), 0)
            if held_ns > self._parameters.quantum_max_ns or tenant.virtual_ns[gpu] > known + allowed:
                tenant.virtual_ns[gpu] = min(
                    tenant.virtual_ns[gpu], self._min_virtual_ns(gpu, tenant.best_effort) + allowed
                )

    def next_turns(
        self, now: int, waiting: list[TokenTenant], again: Sequence[TokenTenant] = ()
    ) -> Sequence[Turn | Anticipation]:
        """Return the turns that begin now on free GPUs, and the decisions to keep free GPUs idle from now on.

        Args:
            now: The present moment.
            waiting: Runnable tenants of the affected GPUs.
            again: Holders of one common turn that may be renewed. They are treated as if they had drained and
                waited.
        """
        occupancy, competing = self._occupancy, [*waiting, *again]
        simple, free = True, dict[str, None]()
        for tenant in competing:
            simple = simple and len(tenant.gpus) == 1 and not occupancy.is_linked(tenant.gpus[0])
            free[tenant.gpus[0]] = None
        if simple:
            turns: list[Turn | Anticipation] = []
            for gpu in free:
                holder = occupancy.holder.get(gpu)
                if holder is None or holder in again:
                    turn = self.next_turn(now, gpu, again[0] if again else None)
                    if turn is not None:
                        turns.append(turn)
            return turns
        # 1. Charge all accounts that the order depends on up to now.
        for tenant in competing:
            occupancy.settle(now, tenant)
        contending = contenders(now, competing, occupancy.groups, again)
        wanted = {gpu for contender in contending for gpu in contender.gpus}
        held = {
            gpu: occupancy.holder[gpu]
            for gpu in wanted
            if gpu in occupancy.holder and occupancy.holder[gpu] not in again
        }
        for tenant in dict.fromkeys(held.values()):
            occupancy.settle(now, tenant)
        cancel_common_credit(now, {gpu: occupancy.tenants_on[gpu] for gpu in wanted}, self._parameters)
        for gpu in wanted:
            update_min_virtual_ns(occupancy.tenants_on[gpu], gpu, self._least)
        # 2. Sort the tenants (S7).
        wakes = any(tenant.woke_with_credit for tenant in competing)
        patience_ns = self._parameters.patience_ns
        latency_ns = self._parameters.target_latency_ns

        def key(contender: Contender) -> OrderKey:
            return contender.key(self._least, now=now, patience_ns=patience_ns, latency_ns=latency_ns)

        def quantum(contender: Contender) -> int:
            hastened = wakes and key(contender)[0] <= 0
            length = min([self.length(tenant, weights, hastened=hastened) for tenant in contender.members])
            if contender.until is not None:
                return max(self._parameters.turn_min_ns, min(length, contender.until - now))
            return min(length, self._parameters.quantum_min_ns) if contender.joins else length

        contending = sorted(contending, key=key)
        # 3. Assign the free GPUs (S4, S5), except GPUs that are kept idle (S8).
        weights = competing_weight(wanted, occupancy.tenants_on)
        free_at = {gpu: self._expected_end(now, tenant) for gpu, tenant in held.items()}
        idle: dict[str, Anticipation] = {}
        while True:
            planned = plan_turns(
                contending, free_at, now=now, quantum=quantum, shortest_ns=self._parameters.turn_min_ns
            )
            kept = self._kept_idle_instead(now, planned, idle)
            if not kept:
                return [*planned, *dict.fromkeys(idle.values())]
            idle.update(kept)
            free_at.update((gpu, awaited.until) for gpu, awaited in kept.items())

    def _kept_idle_instead(
        self, now: int, planned: Iterable[Turn], idle: Mapping[str, Anticipation]
    ) -> dict[str, Anticipation]:
        """Return the GPUs that must be kept idle instead of one of the `planned` turns, in addition to the GPUs in
        `idle`. Either all GPUs of a gang are kept idle, or none."""
        occupancy, kept, given = self._occupancy, dict[str, Anticipation](), set[str]()
        for turn in planned:
            given.update(turn.tenant.gpus)
            if turn.tenant.account.assured > 0 and occupancy.has_several_gpus(turn.tenant):
                continue
            for gpu in turn.tenant.gpus:
                awaited = anticipate(now, turn.tenant, occupancy.tenants_on[gpu], self._parameters)
                if awaited is not None:
                    kept[gpu] = awaited
        gangs = {awaited.tenant: awaited for awaited in kept.values() if len(awaited.tenant.gpus) > 1}
        for gang in gangs:
            own = [gpu for gpu in gang.gpus if gpu in kept and kept[gpu].tenant is gang]
            taken = given | idle.keys() | kept.keys() | occupancy.holder.keys()
            whole = taken.isdisjoint(gpu for gpu in gang.gpus if gpu not in own)
            until = min([kept.pop(gpu).until for gpu in own])
            if whole:
                kept.update(dict.fromkeys(gang.gpus, Anticipation(gang, until)))
        return kept

    def settle(self, now: int, gpu: str) -> None:
        """Charge the accounts up to `now` as `next_turn` does, for a turn that was decided in advance. `gpu`: a GPU
        without a holder."""
        tenants = self._occupancy.tenants_on[gpu]
        for tenant in tenants:
            if tenant.waiting_since is not None and not tenant.throttled:
                self._occupancy.settle(now, tenant)
        cancel_common_credit(now, {gpu: tenants}, self._parameters)
        update_min_virtual_ns(tenants, gpu, self._least)

    def next_turn(self, now: int, gpu: str, again: TokenTenant | None = None) -> Turn | Anticipation | None:
        """Return what begins now on one GPU without a holder: a turn, or the decision to keep the GPU idle. None if no
        tenant waits. As `next_turns`, for a GPU that no gang or group links with others.

        The loops over a GPU's tenants, here and below, are plain, because a hand-off spends most of its time in them.
        """
        tenants, competing = self._occupancy.tenants_on[gpu], list[TokenTenant]()
        weight, best_effort_weight, wakes = 0, 0, False
        for tenant in tenants:
            waits = tenant.waiting_since is not None and not tenant.throttled
            if waits or tenant is again:
                competing.append(tenant)
                wakes = wakes or tenant.woke_with_credit
                if tenant.hold is None:
                    tenant.account.advance(now, 0, Charge.BORROWED, waiting=waits)
                else:
                    self._occupancy.settle(now, tenant)
            if waits or tenant.holding:
                if tenant.account.request_milli:
                    weight += tenant.account.request_milli
                else:
                    best_effort_weight += tenant.weight
        cancel_common_credit(now, {gpu: tenants}, self._parameters)
        update_min_virtual_ns(tenants, gpu, self._least)
        least, best_effort_least = self._least[gpu, False], self._least[gpu, True]
        first: TokenTenant | None = None
        place: OrderKey = (0, 0, 0, "")
        patience_ns = self._parameters.patience_ns
        latency_ns = self._parameters.target_latency_ns
        for tenant in competing:
            since = now if tenant.waiting_since is None else tenant.waiting_since
            ahead = tenant.virtual_ns[gpu] - (least if tenant.account.request_milli else best_effort_least)
            key = order_key(tenant, ahead, since, now=now, patience_ns=patience_ns, latency_ns=latency_ns)
            if first is None or goes_before(key, place):
                first, place = tenant, key
        if first is None:
            return None
        awaited = anticipate(now, first, self._occupancy.tenants_on[gpu], self._parameters)
        if awaited is not None:
            return awaited
        weights = {(gpu, False): weight, (gpu, True): best_effort_weight}
        return Turn(first, self.length(first, weights, hastened=wakes and place[0] <= 0), backfill=False)

    def renewal(self, now: int, holder: TokenTenant) -> list[Turn]:
        """Return the turns with which a hold can be renewed: the turns that would begin if the holder, and the members
        of its group that share its turn, had drained now and waited. Empty if another tenant is next on the holder's
        GPUs."""
        again = turns_together(holder, self._occupancy.groups)
        gpus = dict.fromkeys(gpu for tenant in again for gpu in tenant.gpus)
        waiting = waiting_with(gpus, self._occupancy.tenants_on, self._occupancy.groups, self._occupancy.awaited)
        # A member that co-runs with the holder needs no turn of its own: it gets as much done in this turn.
        waiting = [tenant for tenant in waiting if not self._occupancy.accompanies(tenant, holder)]
        for tenant in again:
            self._occupancy.settle(now, tenant)
        again = [tenant for tenant in again if tenant.account.ceiling_fits(self._parameters.quantum_min_ns)]
        if holder not in again:
            return []
        planned = self.next_turns(now, [other for other in waiting if other not in again], again)
        turns = [turn for turn in planned if isinstance(turn, Turn)]
        return turns if any(turn.tenant is holder for turn in turns) else []

    def may_be_renewed(self, tenant: TokenTenant, quantum_ns: int) -> bool:
        """Return False if a turn of `quantum_ns` that begins now cannot be renewed, because another tenant will be owed
        more at its end.

        The present lags are compared, this tenant's less `quantum_ns`. Until the turn ends, all lags grow by the same
        time.
        """
        account = tenant.account
        if account.assured <= 0 or tenant.group is not None:
            return True
        left = account.lag_ns() - quantum_ns * 1000 // account.request_milli
        for gpu in tenant.gpus:
            for other in self._occupancy.tenants_on[gpu]:
                waits = other.waiting_since is not None and not other.throttled
                if waits and other is not tenant and other.account.request_milli and other.account.lag_ns() > left:
                    return False
        return True

    def contended(self, now: int, tenant: TokenTenant) -> bool:
        """Return True if another tenant of the same GPUs is active: it waits or holds, or did within the last
        `quiet_ns`.
        """
        return any(
            self._active(now, other)
            for gpu in tenant.gpus
            for other in self._occupancy.tenants_on[gpu]
            if other is not tenant
        )

    def unlimited(self, now: int, tenant: TokenTenant) -> bool:
        """Return True if the tenant's turns need no end, because its limit is the whole GPU and no other tenant is
        active."""
        return tenant.account.limit_milli == 1000 and not self.contended(now, tenant)

    def quantum(self, tenant: TokenTenant) -> int:
        """Return the length of a turn of the tenant among the tenants that compete with it now, in nanoseconds."""
        return self.length(tenant, competing_weight(tenant.gpus, self._occupancy.tenants_on))

    def length(self, tenant: TokenTenant, weights: Mapping[tuple[str, bool], int], *, hastened: bool = False) -> int:
        """Return the length of the tenant's turn, in nanoseconds, shortened so that the tenant stays within its limit
        (S6).

        `weights`: by (GPU, True for best effort), sum of the weights of competing tenants, including this tenant.
        `hastened`: True if the tenant precedes tenants with more credit because it woke or has waited longer.
        """
        whole = max([weights.get((gpu, tenant.best_effort), 0) for gpu in tenant.gpus])
        weight = tenant.weight
        if tenant.group is not None:
            weight += self._occupancy.weight_of_companions(tenant)
        quantum = self._parameters.quantum(weight, whole, tenant.habits.mean_overrun_ns)
        if hastened and not tenant.woke_with_credit and not tenant.starving:
            # The turns of all tenants that have been owed time for long must fit into the rest of the target latency.
            latency_ns = self._parameters.target_latency_ns
            quantum = quantum * (latency_ns - self._parameters.patience_ns) // latency_ns
            quantum = max(self._parameters.turn_min_ns, quantum)
        room = tenant.account.ceiling_room_ns()
        return quantum if room is None else min(quantum, max(self._parameters.quantum_min_ns, room))

    def _active(self, now: int, tenant: TokenTenant) -> bool:
        hold = tenant.hold
        if tenant.waiting_since is not None or (hold is not None and hold.phase is not HoldPhase.SUSPENDED):
            return True
        return tenant.active_until is not None and now - tenant.active_until < self._parameters.quiet_ns

    def _min_virtual_ns(self, gpu: str, best_effort: bool) -> int:
        """Update the minimum virtual times of a GPU. Return that of best-effort or of guaranteed tenants."""
        update_min_virtual_ns(self._occupancy.tenants_on[gpu], gpu, self._least)
        return self._least[gpu, best_effort]

    def _expected_end(self, now: int, holder: TokenTenant) -> int:
        hold = holder.hold
        assert hold is not None, "a GPU's holder has a hold"
        if hold.deadline is None:
            return now + self._parameters.quantum_max_ns
        usual = max(hold.deadline + holder.habits.overrun_ns, now + _DRAIN_GUESS_NS)
        # Use the announced end, but no later than the usual overrun. Otherwise a tenant that announces a late end would
        # cause backfill turns until then, and the GPUs of a gang would never be free at once.
        return usual if hold.ends_at is None else min(usual, max(hold.ends_at, now))
