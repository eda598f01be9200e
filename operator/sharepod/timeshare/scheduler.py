"""Token scheduler of a node: decides which tenant holds which GPU, and for how long.

Guarantees:
- S1: A GPU has at most one lead, its holder. A tenant that may not co-run leads alone. Only these other tenants may
  have work on the GPU:
  - co-runners;
  - a tenant that yields the GPU `hand_off_ns` before the announced end of its last work;
  - tenants that were suspended, or preempted a grace period after their deadline.
- S2: Each nanosecond of a GPU is charged as held at most once: to one tenant, or in parts to several tenants.
- S3: A tenant pays until it has drained, whatever end it announced.
  - A preempted tenant owes all the time until it has drained. Shares and limits of other tenants stay unchanged.
  - A tenant without processor time pays until the expected end of its last work. When it runs again, it pays until it
    has drained.
- S4: A tenant with several GPUs gets all of them in one grant, or none. Members of a group that want the token get it
  at the same time (groups.py).
- S5: When a tenant or group with several GPUs is next but must wait, its GPUs are reserved. Until its expected start
  they are granted only for turns that end before.
- S6: A tenant starts only if it can hold for a shortest quantum without exceeding its limit. A turn ends at the latest
  when the limit is reached. A starving tenant gets a shortest quantum regardless of its limit.
- S7: The order of service is that of turns.py.
- S8: A GPU is kept idle only for a pausing tenant with credit that is expected back soon, and that tenant pays for the
  time.
- S9, S10, S12: Tenants co-run only while the sum of progress gains by it. A lead that is owed time and loses work has
  no co-runners. A co-runner's limit holds as in turns (co_running.py).
- S11: A tenant's counters change no other tenant's measured progress (progress.py).

Every method takes the present time in nanoseconds of any clock. If it is earlier than in a previous call, the previous
time counts. The caller must call `tick` after any change, and no later than `next_deadline`, and must carry out the
returned actions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from .account import Account, AccountSnapshot, Charge, TimeUsage
from .actions import Action, PreparedHandOff, TokenGrant
from .co_running import QUIET_NS, CoRunning
from .foresight import Foresight
from .gpu_time import GpuTime
from .groups import contenders
from .hold import CoRunEnd, Hold, HoldPhase, HoldPlace, Metering
from .occupancy import Occupancy
from .parameters import Parameters, Sharing
from .plan import Anticipation, Turn, waiting_with
from .progress import Progress, Samples
from .tenant import TokenTenant
from .transitions import HoldTransitions
from .turn_history import TurnSpans
from .turns import TurnPolicy
from .waiting_tenants import WaitingTenants

_SURCHARGED_NS = 60_000_000_000
"""Time after a surcharge for which a tenant has exclusive turns, in nanoseconds: 60 s. Its hooks have reported less use
than NVML, so their progress counters are not trusted."""


@dataclass(frozen=True)
class CoRuns:
    """Co-running on one GPU."""

    co_runners: int
    """Number of tenants that hold the GPU while another leads, or still drain after that."""
    ends: Mapping[CoRunEnd, int]
    """For each reason: number of times that a tenant stopped co-running."""


class Scheduler:
    """Token scheduler of one node. Not thread-safe."""

    def __init__(self, parameters: Parameters | None = None) -> None:
        self._parameters = parameters or Parameters()
        self._tenants: dict[str, TokenTenant] = {}
        self._occupancy = Occupancy()
        self._policy = TurnPolicy(self._parameters, self._occupancy)
        self._foresight = Foresight(self._parameters, self._occupancy, self._policy)
        self._co_running = CoRunning(self._parameters, self._occupancy)
        self._sharing: dict[str, Sharing] = {}
        """For each GPU: its sharing, if `set_sharing` was called."""
        self._surcharged: dict[str, int] = {}
        """For each tenant with a recent surcharge: the moment from which it may co-run again, in nanoseconds."""
        self._grants = 0
        self._changed_gpus: set[str] = set()
        """GPUs on which a turn may begin."""
        self._holds = HoldTransitions(self._parameters, self._occupancy, self._policy, self._changed_gpus)
        self._waiting = WaitingTenants(
            self._parameters, self._occupancy, self._policy, self._holds, self._co_running, self._changed_gpus
        )
        self._now = 0

    # ---- input

    def set_tenant(
        self,
        now: int,
        tenant_id: str,
        gpus: Sequence[str],
        *,
        request_milli: int,
        limit_milli: int,
        interactive: bool = False,
        group: str | None = None,
        read: Callable[[], Samples] | None = None,
        resumed: AccountSnapshot | None = None,
    ) -> None:
        """Add a tenant, or change a tenant's rates.

        Args:
            now: The present moment.
            tenant_id: Id of the tenant in the ledger.
            gpus: UUIDs of its GPUs, in the tenant's order.
            request_milli: Guaranteed share of each GPU, in thousandths.
            limit_milli: Limit of its share of each GPU, in thousandths.
            interactive: True if the tenant requests short waits.
            group: Group of tenants that are granted together; for a new tenant only.
            read: Returns the counters of its hooks as of now; for a new tenant only. Called to charge tenants that
                co-run. Without it the tenant's progress is unknown.
            resumed: The tenant's account in an earlier agent, if known; for a new tenant only.

        Raises:
            ValueError: Not 0 <= request <= limit <= 1000; no GPU, or a GPU twice; other GPUs than before.
        """
        if not 0 <= request_milli <= limit_milli <= 1000:
            raise ValueError(
                f"tenant {tenant_id}: not 0 <= request <= limit <= 1000: request {request_milli}, limit {limit_milli}"
            )
        if not gpus or len(set(gpus)) != len(gpus):
            raise ValueError(f"tenant {tenant_id}: gpus {list(gpus)} are empty or name a GPU twice")
        now = self._advance_clock(now)
        tenant = self._tenants.get(tenant_id)
        if tenant is None:
            account = Account(now, self._parameters, request_milli=request_milli, limit_milli=limit_milli)
            if resumed is not None:
                account.resume(resumed)
            tenant = TokenTenant(
                tenant_id, tuple(gpus), account, group, interactive, asleep_since=now, progress=Progress(read)
            )
            self._tenants[tenant_id] = tenant
            self._occupancy.add(now, tenant)
            for gpu in gpus:
                self._share(gpu)
        else:
            if tenant.gpus != tuple(gpus):
                raise ValueError(
                    f"tenant {tenant_id} is on {list(tenant.gpus)}; a tenant never moves, remove it and add it again"
                )
            self._occupancy.settle_around(now, tenant)
            was_best_effort = tenant.best_effort
            tenant.account.set_rates(request_milli=request_milli, limit_milli=limit_milli)
            if tenant.best_effort != was_best_effort:
                self._policy.set_to_min(tenant)
            tenant.interactive = interactive
            tenant.hurries, tenant.prompt = tenant.hurries and interactive, tenant.prompt and interactive
            if tenant.waiting_since is not None:
                self._waiting.classify(now, tenant)
            self._holds.shorten(now, tenant.gpus)
        self._changed_gpus.update(tenant.gpus)

    def remove(self, now: int, tenant_id: str) -> None:
        """Remove a tenant. The GPUs that it holds are free at once. No effect for an unknown tenant."""
        now = self._advance_clock(now)
        tenant = self._tenants.get(tenant_id)
        if tenant is None:
            return
        self._cease_waiting(now, tenant)
        self._occupancy.settle_around(now, tenant)
        self._occupancy.remove(tenant)
        self._holds.end(tenant)
        self._waiting.remove(tenant)
        for gpu in tenant.gpus:
            if gpu not in self._occupancy.tenants_on:
                self._policy.forget(gpu)
                self._holds.forget(gpu)
                self._co_running.forget(gpu)
        del self._tenants[tenant_id]
        self._surcharged.pop(tenant_id, None)
        self._changed_gpus.update(tenant.gpus)

    def want(self, now: int, tenant_id: str) -> None:
        """Make a tenant that has work wait for its turn. No effect if it waits or holds already. A preempted or
        suspended tenant also begins to wait, although its hold has not drained."""
        now = self._advance_clock(now)
        tenant = self._tenants[tenant_id]
        if tenant.waiting_since is not None or tenant.holding:
            return
        self._occupancy.settle_around(now, tenant)
        self._cease_waiting(now, tenant)
        self._return_suspended(tenant)
        woke = tenant.wakes(now, self._parameters)
        if tenant.asleep_since is not None:
            tenant.habits.paused(now - tenant.asleep_since, tenant.account.held_ns)
        self._waiting.add(now, tenant, woke=woke)

    def unwant(self, now: int, tenant_id: str) -> None:
        """End a tenant's wait: the processes that wanted the token have exited."""
        now = self._advance_clock(now)
        tenant = self._tenants[tenant_id]
        if tenant.waiting_since is None:
            return
        self._occupancy.settle_around(now, tenant)
        self._waiting.remove(tenant)
        if tenant.hold is None:
            tenant.asleep_since = now
            tenant.active_until = now
        self._changed_gpus.update(tenant.gpus)

    def set_connected(self, now: int, tenant_id: str, *, connected: bool) -> None:
        """Set whether the tenant has connected processes, which may want the token at any moment. While it has, other
        holders of its GPUs are metered."""
        now = self._advance_clock(now)
        tenant = self._tenants[tenant_id]
        tenant.connected = connected
        if not connected:
            tenant.habits.forget_pauses()
            self._changed_gpus.update(tenant.gpus)
        if connected:
            self._holds.meter(now, tenant.gpus, tenant)

    def sharing(self, gpu: str) -> Sharing:
        """Return how tenants share a GPU."""
        return self._sharing.get(gpu, self._parameters.sharing)

    def set_sharing(self, now: int, gpu: str, sharing: Sharing) -> None:
        """Set how tenants share a GPU, in place of the parameters' default."""
        now = self._advance_clock(now)
        if gpu in self._occupancy.tenants_on:
            self._occupancy.settle_on(now, [gpu])
        self._sharing[gpu] = sharing
        self._share(gpu)
        self._changed_gpus.add(gpu)

    def set_concurrent(self, now: int, tenant_id: str, *, concurrent: bool) -> None:
        """Set whether the tenant may hold a GPU while others do. This requires that all its hooks count samples, and
        that it does not opt out. False at first."""
        now = self._advance_clock(now)
        tenant = self._tenants[tenant_id]
        tenant.concurrent = concurrent
        self._changed_gpus.update(tenant.gpus)

    def draining(self, now: int, tenant_id: str, *, expected_ns: int) -> None:
        """Record that all gates of the tenant are closed and that its last work ends in `expected_ns` nanoseconds.

        The next tenant is granted `hand_off_ns` before that end. If other tenants co-run, which delays the end, it is
        granted only once this tenant has drained. The draining tenant pays until it has drained (S3). If the tenant was
        suspended, it counts as running again.
        """
        now = self._advance_clock(now)
        tenant = self._tenants[tenant_id]
        hold = tenant.hold
        if hold is None:
            return
        hold.silent = False
        if hold.phase is HoldPhase.SUSPENDED:
            self._occupancy.settle_around(now, tenant)
            self._return_suspended(tenant)
            hold.phase = HoldPhase.PREEMPTED
            self._occupancy.preempt(tenant)
            self._waiting.watch_preempted(tenant)
        elif hold.phase is not HoldPhase.YIELDING and hold.phase is not HoldPhase.PREEMPTED:
            if hold.co_runs:
                self._stop_waiting(tenant, hold)
            hold.phase = HoldPhase.DRAINING
            hold.ends_at = now + expected_ns
            if tenant.group is not None:
                self._changed_gpus.update(tenant.gpus)  # members of the tenant's group may join it if it is late
            if not any(gpu in self._occupancy.co_runners for gpu in tenant.gpus):
                hold.yields_at = now + max(0, expected_ns - self._parameters.hand_off_ns)

    def silent(self, now: int, tenant_id: str, *, expected_ns: int) -> None:
        """Record that the tenant gets no processor time, so that its hooks cannot report that it has drained.

        The caller must have barred its gates before, so that it launches nothing more. Its last work ends in
        `expected_ns` nanoseconds; a negative value means that the work has ended.

        At the end of that work the hold is suspended: the tenant pays nothing until it runs again. The next tenant is
        granted `hand_off_ns` before that end.
        """
        now = self._advance_clock(now)
        tenant = self._tenants[tenant_id]
        hold = tenant.hold
        if hold is None or hold.silent or hold.displaced:
            return
        if hold.co_runs:
            self._stop_waiting(tenant, hold)
        if hold.deadline is not None and hold.metering is Metering.METERED_FROM_START and not hold.starved:
            tenant.habits.overran_by_work(now + expected_ns - hold.deadline)
        hold.ends_at = now + max(0, expected_ns)
        hold.silent = hold.starved = True
        tenant.account.suspensions += 1
        if hold.phase is not HoldPhase.YIELDING:
            hold.phase = HoldPhase.DRAINING
            hold.yields_at = now + max(0, expected_ns - self._parameters.hand_off_ns)

    def drained(self, now: int, tenant_id: str, *, wanting: bool) -> None:
        """End the tenant's hold: all its GPU work has ended. `wanting`: True if it has more work and so waits again.
        For a tenant without a hold, the call is `want` if `wanting`, else it has no effect."""
        now = self._advance_clock(now)
        tenant = self._tenants[tenant_id]
        hold = tenant.hold
        if hold is None:
            if wanting:
                self.want(now, tenant_id)
            return
        self._occupancy.settle_around(now, tenant)
        if wanting:  # otherwise the tenant pauses: its last span is not typical of its work, and is not measured
            tenant.account.refund(tenant.progress.joined(now))
        self._return_suspended(tenant)
        co_ran = hold.co_runs and not hold.displaced
        if not co_ran:
            self._holds.charge_hand_offs(now, tenant, hold)
        self._policy.cap_debt(tenant, hold.charged_ns)
        learns = hold.metering is Metering.METERED_FROM_START and not hold.starved and not co_ran
        if hold.deadline is not None and learns:
            tenant.habits.overran(max(0, now - hold.deadline))
        self._occupancy.free(tenant)
        self._holds.end(tenant)
        tenant.active_until = now
        self._waiting.has_drained(tenant)
        if co_ran and not wanting:
            self._waiting.remove(tenant)
        if tenant.waiting_since is not None:
            self._waiting.classify(now, tenant)
        elif wanting:
            self._waiting.add(now, tenant, woke=False, since=hold.waited_since)
        else:
            tenant.asleep_since = now
        self._changed_gpus.update(tenant.gpus)

    def surcharge(self, now: int, tenant_id: str, ns: int) -> None:
        """Charge a tenant for time in which its kernels ran without the token. Its buckets pay, so its next turns come
        later. The recorded time held stays unchanged."""
        now = self._advance_clock(now)
        tenant = self._tenants[tenant_id]
        self._occupancy.settle_around(now, tenant)
        tenant.account.surcharge(ns)
        for gpu in tenant.gpus:
            tenant.virtual_ns[gpu] += ns * 1000 // tenant.weight
        if tenant.waiting_since is not None:
            self._waiting.classify(now, tenant)
        tenant.surcharged = True
        self._surcharged[tenant_id] = now + _SURCHARGED_NS
        self._changed_gpus.update(tenant.gpus)

    def stalled(self, now: int) -> None:
        """Record a stall: the caller (the agent) did not run for some time since its last call of any method. It must
        call this first when it runs again.

        No tenant is charged for time after the end of its turn plus its usual overrun, because the agent could not take
        the token. Grace periods start again. For a GPU that a tenant yields, the next tenant pays from the announced
        end on.
        """
        since, now = self._now, self._advance_clock(now)
        self._holds.stalled(since, now)

    # ---- output

    def tick(self, now: int) -> list[Action]:
        """Apply all changes that are due at `now`: renew, revoke and preempt holds, and grant free GPUs. Return the
        actions, which the caller must carry out. Cheap if nothing is due.
        """
        now = self._advance_clock(now)
        # 1. Find tenants that starve from now on, that are below their limit again, or that may co-run again.
        self._waiting.tick(now)
        for tenant_id in [tenant_id for tenant_id, until in self._surcharged.items() if until <= now]:
            del self._surcharged[tenant_id]
            self._tenants[tenant_id].surcharged = False
            self._changed_gpus.update(self._tenants[tenant_id].gpus)
        # 2. Find GPUs that need not be kept idle any longer.
        self._changed_gpus.update(gpu for gpu, idle in self._occupancy.awaited.items() if now >= idle.until)
        # 3. Apply the due transitions of holds.
        actions = self._holds.tick(now)
        # 4. Grant free GPUs.
        changed = set[str]()
        if self._changed_gpus:
            if self._occupancy.concurrent or self._occupancy.co_runners:
                changed = self._changed_gpus & (self._occupancy.concurrent | self._occupancy.co_runners.keys())
            actions.extend(self._grant_free_gpus(now))
        # 5. Begin and end co-running.
        if self._occupancy.concurrent or self._occupancy.co_runners:
            for gpu in sorted(changed.union(self._co_running.is_due(now))):
                actions.extend(self._change_co_runners(now, gpu))
        return actions

    def prepare(self, now: int, gpu: str) -> list[PreparedHandOff]:
        """Decide the hand-offs of a GPU in advance: one in case its holder drains and wants the token again, and one in
        case it wants no more.

        If the holder drains between `since` and `until` of a hand-off, calling `drained` and `tick` would have the same
        result. Any later call that changes tenants of the GPU makes the hand-offs invalid.
        """
        turns = self._foresight.turns(self._advance_clock(now), gpu)
        if turns:
            self._grants += 1
        prepared: list[PreparedHandOff] = []
        for turn in turns:
            tenant, hold = turn.tenant, turn.holder.hold
            assert hold is not None, "the holder has a hold"
            short = self._occupancy.beside_interactive(tenant)
            concurrent = self._occupancy.may_co_run(tenant)
            grant = TokenGrant(
                tenant.id, self._grants, turn.quantum_ns, True, short, tenant.prompt, concurrent=concurrent
            )
            prepared.append(
                PreparedHandOff(gpu, turn.holder.id, hold.grant_id, turn.wanting, grant, turn.since, turn.until)
            )
        return prepared

    def hand_off(self, now: int, prepared: PreparedHandOff) -> None:
        """Record that the caller has carried out a prepared hand-off: the holder drained at `now`, and the next tenant
        holds from then on."""
        now = self._advance_clock(now)
        self.drained(now, prepared.holder, wanting=prepared.wanting)
        grant = prepared.grant
        self._policy.settle(now, prepared.gpu)
        self._changed_gpus.discard(prepared.gpu)
        self._grant(now, Turn(self._tenants[grant.tenant], grant.quantum_ns, backfill=False), grant.grant_id)

    def next_deadline(self) -> int | None:
        """Return the moment by which the caller must call `tick` again, if no other event comes first. None if nothing
        is due.
        """
        times = [idle.until for idle in self._occupancy.awaited.values()]
        times.extend(self._surcharged.values())
        return min([*times, *self._waiting.due(), *self._holds.due(), *self._co_running.due()], default=None)

    def usage(self, now: int, tenant_id: str) -> TimeUsage:
        """Return the tenant's usage up to `now`."""
        now = self._advance_clock(now)
        tenant = self._tenants[tenant_id]
        self._occupancy.settle(now, tenant)
        return tenant.account.usage()

    def turns(self, now: int, tenant_id: str) -> TurnSpans:
        """Return the spans in which the tenant could have work on its GPUs, in the last seconds before `now`."""
        now = self._advance_clock(now)
        tenant = self._tenants[tenant_id]
        self._occupancy.settle(now, tenant)
        return tenant.account.turns.spans(now)

    def gpu_time(self, now: int, gpu: str) -> GpuTime | None:
        """Return the use of a GPU's time up to `now`; None if it has no tenants."""
        return self._occupancy.gpu_time(self._advance_clock(now), gpu)

    def co_runs(self, gpu: str) -> CoRuns:
        """Return the number of co-runners on a GPU, and why earlier ones stopped."""
        return CoRuns(len(self._occupancy.co_runners.get(gpu, ())), dict(self._occupancy.co_run_ends(gpu)))

    def alone_in_flight(self, now: int, tenant_id: str) -> float | None:
        """Return the part of the time, 0 to 1, for which the tenant has work in flight while it holds alone. None if it
        was not measured within the last 30 s."""
        return self._tenants[tenant_id].progress.known(self._advance_clock(now))

    def snapshot(self, now: int, tenant_id: str) -> AccountSnapshot:
        """Return the tenant's account as of `now`, for another process to resume."""
        now = self._advance_clock(now)
        tenant = self._tenants[tenant_id]
        self._occupancy.settle(now, tenant)
        return tenant.account.snapshot()

    def displaced(self, tenant_id: str) -> bool:
        """Return True if the tenant was preempted or suspended and has not drained since."""
        hold = self._tenants[tenant_id].hold
        return hold is not None and hold.displaced

    def waited_for(self) -> list[str]:
        """Return the ids of the tenants that delay another tenant: they yield a GPU, or hold a GPU that another tenant
        waits for. Only tenants with a bounded queue from the start of their hold are included."""
        return [tenant.id for tenant in self._holds.tenants() if self._is_waited_for(tenant)]

    def is_waited_for(self, tenant_id: str) -> bool:
        """Return True if `waited_for` contains the tenant."""
        return self._is_waited_for(self._tenants[tenant_id])

    def _is_waited_for(self, tenant: TokenTenant) -> bool:
        hold = tenant.hold
        if hold is None or hold.displaced or hold.metering is not Metering.METERED_FROM_START:
            return False
        if hold.co_runs and hold.phase is HoldPhase.RUNNING:
            return False
        if hold.phase is HoldPhase.YIELDING:
            return True
        for gpu in tenant.gpus:
            for other in self._occupancy.tenants_on[gpu]:
                if other.runnable:
                    return True
        return False

    def holders_beside(self, tenant_id: str) -> list[str]:
        """Return the ids of the tenants that lead on the GPUs of a tenant."""
        holder = self._occupancy.holder
        return [holder[gpu].id for gpu in self._tenants[tenant_id].gpus if gpu in holder]

    def remaining_grant(self, now: int, tenant_id: str) -> TokenGrant | None:
        """Return the grant under which the tenant may still launch, with the rest of its quantum. None if it may not
        launch."""
        hold = self._tenants[tenant_id].hold
        if hold is None or hold.phase is not HoldPhase.RUNNING:
            return None
        left = 0 if hold.deadline is None else hold.deadline - now
        if hold.deadline is not None and left <= 0:
            return None
        return self._holds.terms(self._tenants[tenant_id], hold, left)

    def holds_together(self) -> list[tuple[str, bool]]:
        """Return the holders of each GPU whose holders changed since the last call, as (id, True if another tenant
        holds or yields the same GPU now). Tenants with several GPUs are left out."""
        changed = self._occupancy.take_changed()
        if not changed:
            return []
        holders = [self._occupancy.occupants(gpu) for gpu in changed]
        return [(tenant.id, len(tenants) > 1) for tenants in holders for tenant in tenants if len(tenant.gpus) == 1]

    def contended(self, now: int, tenant_id: str) -> bool:
        """Return True if another tenant of the same GPUs is active: it waits or holds, or did within the last
        `quiet_ns`.
        """
        return self._policy.contended(now, self._tenants[tenant_id])

    def sharing_with(self, tenant_id: str) -> frozenset[str]:
        """Return the ids of all other tenants of a tenant's GPUs."""
        tenant = self._tenants[tenant_id]
        return frozenset(
            other.id for gpu in tenant.gpus for other in self._occupancy.tenants_on[gpu] if other is not tenant
        )

    def _advance_clock(self, now: int) -> int:
        self._now = max(self._now, now)
        return self._now

    def _return_suspended(self, tenant: TokenTenant) -> None:
        """If the tenant was suspended and runs again, raise its virtual time to the minimum. So it has no claim on time
        that was lent while it was suspended. A tenant that waited in that time keeps its virtual time, because it
        competed."""
        if tenant.hold is not None and tenant.hold.phase is HoldPhase.SUSPENDED and tenant.waiting_since is None:
            self._policy.raise_to_min(tenant)

    def _share(self, gpu: str) -> None:
        if self.sharing(gpu) is Sharing.CONCURRENT:
            self._occupancy.concurrent.add(gpu)
        else:
            self._occupancy.concurrent.discard(gpu)
            self._co_running.forget(gpu)

    def _stop_waiting(self, tenant: TokenTenant, hold: Hold) -> None:
        """Interrupt the wait of a draining co-runner. If it wants more when it has drained, its wait continues from its
        former start."""
        if tenant.waiting_since is not None:
            hold.waited_since = tenant.waiting_since
            self._waiting.remove(tenant)
            self._changed_gpus.update(self._occupancy.gpus_of_group(tenant))

    # ---- granting

    def _change_co_runners(self, now: int, gpu: str) -> list[Action]:
        """Begin and end co-running on a GPU, as `CoRunning.changes` decides. Return the grants and revocations."""
        changes = self._co_running.changes(now, gpu)
        actions: list[Action] = [self._end_co_run(now, tenant, end) for tenant, end in changes.ends]
        for tenant, charge in changes.begins:
            self._grants += 1
            hold = Hold(
                self._grants,
                now,
                now,
                None,
                metering=Metering.METERED_FROM_START,
                given_as=charge,
                renewal_considered=True,
                place=HoldPlace.CO_RUNNER,
                accompanies=tenant in changes.members,
            )
            tenant.account.grants += 1
            tenant.habits.begin(tenant.account.held_ns)
            actions.append(self._holds.begin_co_run(now, tenant, hold))
        if changes.cut is not None:
            self._holds.cut_now(now, changes.cut)
            actions.extend(self._holds.tick(now))
        return actions

    def _end_co_run(self, now: int, tenant: TokenTenant, end: CoRunEnd) -> Action:
        assert tenant.hold is not None, "a co-runner has a hold"
        tenant.hold.co_run_end = end
        self._stop_waiting(tenant, tenant.hold)
        return self._holds.end_co_run(now, tenant)

    def _keeps_out(self, now: int, tenant: TokenTenant) -> list[Action] | None:
        """Return the revocations of the co-runners that must drain before `tenant` can lead alone. None if `tenant` may
        lead at once. An empty list if all of them drain already."""
        if not self._occupancy.co_runners:
            return None
        runners = [other for gpu in tenant.gpus for other in self._occupancy.co_runners.get(gpu, {}).values()]
        if tenant.hold is not None and tenant.hold.co_runs and tenant.hold.phase is not HoldPhase.RUNNING:
            return []
        if not runners or self._occupancy.may_co_run(tenant):
            return None
        running = [other for other in runners if other.hold is not None and other.hold.phase is HoldPhase.RUNNING]
        return [self._end_co_run(now, other, CoRunEnd.EXCLUSIVE) for other in running]

    def _accompanied(self, tenant: TokenTenant) -> bool:
        return any(
            other.connected for gpu in tenant.gpus for other in self._occupancy.tenants_on[gpu] if other is not tenant
        )

    def _grant_free_gpus(self, now: int) -> list[Action]:
        if len(self._changed_gpus) == 1:
            for gpu in self._changed_gpus:
                if not self._occupancy.is_linked(gpu):
                    self._changed_gpus.clear()
                    return self._grant_free_gpu(now, gpu)
                break
        waiting = waiting_with(
            self._changed_gpus, self._occupancy.tenants_on, self._occupancy.groups, self._occupancy.awaited
        )
        for gpu in self._changed_gpus:
            self._occupancy.cease_waiting(now, gpu)
        self._changed_gpus.clear()
        holder = self._occupancy.holder
        if all(len(tenant.gpus) == 1 and tenant.group is None and tenant.gpus[0] in holder for tenant in waiting):
            return []
        actions: list[Action] = []
        for turn in self._policy.next_turns(now, waiting):
            if isinstance(turn, Anticipation):
                for gpu in turn.tenant.gpus:  # another sleeper may have kept the GPU idle
                    self._occupancy.cease_waiting(now, gpu)
                self._occupancy.keep_idle(now, turn)
                continue
            ends = self._keeps_out(now, turn.tenant)
            actions.extend([self._grant(now, turn)] if ends is None else ends)
        rest = contenders(now, [tenant for tenant in waiting if tenant.runnable], self._occupancy.groups)
        gangs = [contender for contender in rest if len(contender.gpus) > 1 or contender.joins]
        for contender in gangs:
            self._holds.cut_for(now, contender)
        # some of the turns cut here may be over already
        return actions + (self._holds.tick(now) if gangs else self._holds.new_terms())

    def _grant_free_gpu(self, now: int, gpu: str) -> list[Action]:
        """Grant one GPU if it is free and a tenant waits for it. No gang or group may link it with other GPUs."""
        self._occupancy.cease_waiting(now, gpu)
        if gpu in self._occupancy.holder:
            return []
        for tenant in self._occupancy.tenants_on.get(gpu, ()):
            if tenant.waiting_since is not None and not tenant.throttled:
                break
        else:
            return []
        turn = self._policy.next_turn(now, gpu)
        actions: list[Action] = []
        if isinstance(turn, Anticipation):
            self._occupancy.keep_idle(now, turn)
        elif turn is not None:
            ends = self._keeps_out(now, turn.tenant)
            actions.extend([self._grant(now, turn)] if ends is None else ends)
        return actions + self._holds.new_terms()

    def _cease_waiting(self, now: int, tenant: TokenTenant) -> None:
        for gpu in tenant.gpus:
            if gpu in self._occupancy.awaited:
                self._changed_gpus.update(self._occupancy.awaited[gpu].tenant.gpus)
                self._occupancy.cease_waiting(now, gpu)

    def _grant(self, now: int, turn: Turn, grant_id: int | None = None) -> TokenGrant:
        """Begin a turn and return its grant. `grant_id`: id of a prepared grant; None: the next id."""
        tenant, charged_ns = turn.tenant, 0
        for gpu in tenant.gpus:
            self._occupancy.cease_waiting(now, gpu)
        if tenant.hold is not None and tenant.hold.co_runs and not tenant.hold.displaced:
            return self._promote(now, turn, tenant.hold)
        # The tenant was preempted or suspended. Its work that still runs is charged to the new turn from now on.
        if tenant.hold is not None:
            self._occupancy.settle_around(now, tenant)
            if tenant.hold.phase is HoldPhase.PREEMPTED:  # else `cap_debt` would cancel the debt of that work
                charged_ns = tenant.hold.charged_ns
            self._policy.cap_debt(tenant, tenant.hold.charged_ns)
            self._occupancy.free(tenant)
        self._occupancy.settle_on(now, tenant.gpus)
        unlimited = self._policy.unlimited(now, tenant) and not turn.backfill
        deadline = None if unlimited else now + turn.quantum_ns
        metered = not unlimited or self._accompanied(tenant)
        if grant_id is None:
            self._grants += 1
            grant_id = self._grants
        hold = Hold(
            grant_id,
            now,
            now,
            deadline,
            metering=Metering.METERED_FROM_START if metered else Metering.UNMETERED,
            given_as=Charge.GUARANTEED if tenant.account.assured > 0 or turn.rides else Charge.BORROWED,
            # Deciding on a renewal wakes the agent. If the renewal is impossible, it counts as decided.
            renewal_considered=not self._policy.may_be_renewed(tenant, turn.quantum_ns * 3 // 4),
            charged_ns=charged_ns,
        )
        tenant.account.grants += 1
        tenant.rescues += 1 if tenant.starving else 0
        tenant.habits.begin(tenant.account.held_ns)
        if tenant.woke_with_credit and tenant.habits.rests:
            hold.quiet_until = now + QUIET_NS
        self._waiting.remove(tenant)
        self._holds.begin(tenant, hold)
        return self._holds.terms(tenant, hold, 0 if deadline is None else deadline - now)

    def _promote(self, now: int, turn: Turn, hold: Hold) -> TokenGrant:
        """Make a co-runner the lead: its hold continues, now with a quantum. Return the grant with the new terms."""
        tenant = turn.tenant
        self._occupancy.promote(now, tenant)
        self._policy.cap_debt(tenant, hold.charged_ns)
        unlimited = self._policy.unlimited(now, tenant) and not turn.backfill
        hold.accompanies = False
        hold.place, hold.deadline = HoldPlace.LEAD, None if unlimited else now + turn.quantum_ns
        hold.granted_at = hold.begun_at = now
        hold.given_as = Charge.GUARANTEED if tenant.account.assured > 0 or turn.rides else Charge.BORROWED
        hold.renewal_considered = not self._policy.may_be_renewed(tenant, turn.quantum_ns * 3 // 4)
        hold.charged_ns = 0
        if tenant.woke_with_credit and tenant.habits.rests:
            hold.quiet_until = now + QUIET_NS
        self._waiting.remove(tenant)
        return self._holds.terms(tenant, hold, 0 if hold.deadline is None else turn.quantum_ns)
