"""Occupancy of the GPUs: which tenants hold each GPU, and which tenant pays for its time.

Guarantees:
- S1: A GPU has at most one lead, its holder. Only co-runners hold the GPU at the same time.
- S2: Each nanosecond of a GPU is charged as held at most once. While there are co-runners, all tenants that hold or
  have not drained pay a part, by the time that each has work in flight. Time without work in flight is a gap. Without
  co-runners only one tenant pays: the tenant that yields the GPU, else its holder, else the undrained tenant that was
  preempted first.
- S3: A preempted tenant owes all the time until it has drained, even time that another tenant pays for. A suspended
  tenant owes nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping

from .account import Charge
from .gpu_time import GpuBooks, GpuTime, GpuUse
from .groups import is_parted
from .hold import CoRunEnd, Hold, HoldPhase, HoldPlace, Metering
from .plan import Anticipation
from .progress import divide, foretell
from .tenant import TokenTenant

_PREEMPTED, _SUSPENDED = HoldPhase.PREEMPTED, HoldPhase.SUSPENDED


class Occupancy:
    """For each GPU: its tenants, and which of them hold it, co-run on it, yield it, or were preempted on it."""

    def __init__(self) -> None:
        self.tenants_on: dict[str, list[TokenTenant]] = {}
        """For each GPU: all its tenants. GPUs without tenants are left out."""
        self.holder: dict[str, TokenTenant] = {}
        """For each GPU: its lead, the tenant that may launch. Free GPUs are left out."""
        self.awaited: dict[str, Anticipation] = {}
        """For each GPU that is kept idle: the sleeping tenant that pays, and until when."""
        self.concurrent: set[str] = set()
        """GPUs that several tenants may hold at once (`Sharing.CONCURRENT`)."""
        self.co_runners: dict[str, dict[str, TokenTenant]] = {}
        """For each GPU: its co-runners, including co-runners that still drain. GPUs without any are left out."""
        self._co_run_ends: dict[str, Counter[CoRunEnd]] = {}
        """For each GPU, then for each reason: number of times that a tenant stopped co-running."""
        self._changed = set[str]()
        """GPUs whose occupants changed since the last call of `take_changed`."""
        self._books: dict[str, GpuBooks] = {}
        self._yielding: dict[str, TokenTenant] = {}
        self._preempted: dict[str, list[TokenTenant]] = {}
        self._gangs_on: dict[str, int] = {}
        """For each GPU: number of its gangs (tenants with several GPUs). GPUs without any are left out."""
        self.groups: dict[str, list[TokenTenant]] = {}
        """Members of each group."""

    def add(self, now: int, tenant: TokenTenant) -> None:
        """Add a tenant to its GPUs."""
        for gpu in tenant.gpus:
            if gpu not in self._books:
                self._books[gpu] = GpuBooks(now)
            self.tenants_on.setdefault(gpu, []).append(tenant)
            if len(tenant.gpus) > 1:
                self._gangs_on[gpu] = self._gangs_on.get(gpu, 0) + 1

        if tenant.group is not None:
            self.groups.setdefault(tenant.group, []).append(tenant)

    def remove(self, tenant: TokenTenant) -> None:
        """Remove a tenant from all its GPUs at once, even if it holds them. The caller must charge its account
        (`settle`) before.
        """
        self.free(tenant)
        if tenant.group is not None:
            self.groups[tenant.group].remove(tenant)
            if not self.groups[tenant.group]:
                del self.groups[tenant.group]
        for gpu in tenant.gpus:
            self.tenants_on[gpu].remove(tenant)
            if len(tenant.gpus) > 1:
                self._gangs_on[gpu] -= 1
                if not self._gangs_on[gpu]:
                    del self._gangs_on[gpu]
            if not self.tenants_on[gpu]:
                del self.tenants_on[gpu]
                del self._books[gpu]
                self._preempted.pop(gpu, None)

    def is_linked(self, gpu: str) -> bool:
        """Return True if a tenant of the GPU, or another member of that tenant's group, also has other GPUs."""
        if gpu in self._gangs_on:
            return True
        return bool(self.groups) and any(self.is_parted(tenant) for tenant in self.tenants_on.get(gpu, ()))

    def is_parted(self, tenant: TokenTenant) -> bool:
        """Return True if other members of the tenant's group have other GPUs."""
        return is_parted(tenant, self.groups)

    def has_several_gpus(self, tenant: TokenTenant) -> bool:
        """Return True if the tenant, or its group, has several GPUs."""
        return len(tenant.gpus) > 1 or self.is_parted(tenant)

    def gpus_of_group(self, tenant: TokenTenant) -> Iterable[str]:
        """Return the GPUs of all members of a tenant's group. Without a group: the tenant's own GPUs."""
        if tenant.group is None:
            return tenant.gpus
        return dict.fromkeys(gpu for mate in self.groups[tenant.group] for gpu in mate.gpus)

    def sole_tenant(self, gpu: str) -> TokenTenant | None:
        """Return the holder of a GPU. None if another tenant may have work on the GPU, or if the GPU is linked to
        other GPUs (`is_linked`).
        """
        if self.is_linked(gpu) or gpu in self._yielding or self._preempted.get(gpu) or gpu in self.co_runners:
            return None
        return self.holder.get(gpu)

    def occupy(self, tenant: TokenTenant) -> None:
        """Make the tenant the holder of its GPUs, which must be free."""
        for gpu in tenant.gpus:
            assert gpu not in self.holder, "S1: a GPU has at most one lead"
            assert gpu not in self.awaited, "S8: a GPU kept idle for a tenant is not held"
            self.holder[gpu] = tenant
            self._changed.add(gpu)

    def may_co_run(self, tenant: TokenTenant) -> bool:
        """Return True if the tenant may hold its GPU while others do. Gangs, tenants on a GPU of a gang, and surcharged
        tenants may not."""
        if tenant.surcharged or not tenant.concurrent:
            return False
        return tenant.gpus[0] in self.concurrent and tenant.gpus[0] not in self._gangs_on

    def accompanies(self, tenant: TokenTenant, other: TokenTenant) -> bool:
        """Return True if `tenant` co-runs because a member of its group holds, and `other` is in the same group."""
        return tenant.group == other.group and tenant.hold is not None and tenant.hold.accompanies

    def weight_of_companions(self, tenant: TokenTenant) -> int:
        """Return the summed weight of the tenants that would co-run in this tenant's turn as members of its group. The
        caller adds it to the tenant's weight, because the turn is also theirs."""
        if not self.may_co_run(tenant):
            return 0
        return sum(
            other.weight
            for other in self.tenants_on[tenant.gpus[0]]
            if other is not tenant
            and other.group == tenant.group
            and other.runnable
            and not other.best_effort
            and self.may_co_run(other)
        )

    def add_co_runner(self, now: int, tenant: TokenTenant) -> None:
        """Make the tenant a co-runner of its GPU. Charge the accounts of all holders before, because their charge
        changes."""
        gpu = tenant.gpus[0]
        self.settle(now, tenant)
        self.settle_on(now, tenant.gpus)
        self.co_runners.setdefault(gpu, {})[tenant.id] = tenant
        self._changed.add(gpu)

    def promote(self, now: int, tenant: TokenTenant) -> None:
        """Make a co-runner the lead of its GPU, which must have no lead."""
        gpu = tenant.gpus[0]
        self._enter(now, gpu)
        _hold_of(tenant).co_run_end = CoRunEnd.LEADS
        self._leave(tenant)
        self.occupy(tenant)

    def co_run_ends(self, gpu: str) -> Mapping[CoRunEnd, int]:
        """Return, by reason, the number of times that a tenant stopped co-running on a GPU."""
        return self._co_run_ends.get(gpu, {})

    def occupants(self, gpu: str) -> list[TokenTenant]:
        """Return the tenants that may have work on the GPU, ordered by id: its lead, its co-runners, and the tenant
        that yields it.
        """
        tenants = dict(self.co_runners.get(gpu, {}))
        for places in (self.holder, self._yielding):
            if gpu in places:
                tenants[places[gpu].id] = places[gpu]
        return [tenants[name] for name in sorted(tenants)]

    def take_changed(self) -> list[str]:
        """Return the GPUs whose occupants changed since the last call, sorted."""
        changed, self._changed = sorted(self._changed), set()
        return changed

    def keep_idle(self, now: int, anticipation: Anticipation) -> None:
        """Keep the free GPUs of a sleeping tenant idle. From now on the sleeper pays for each of them, unless a tenant
        that has not drained pays.
        """
        for gpu in anticipation.tenant.gpus:
            self._enter(now, gpu)
        self.settle(now, anticipation.tenant)
        self.awaited.update(dict.fromkeys(anticipation.tenant.gpus, anticipation))

    def cease_waiting(self, now: int, gpu: str) -> None:
        """Stop keeping this GPU idle, and all other GPUs of the same sleeper."""
        if gpu in self.awaited:
            tenant = self.awaited[gpu].tenant
            for own in tenant.gpus:
                self._enter(now, own)
            self.settle(now, tenant)
            for own in tenant.gpus:
                del self.awaited[own]

    def start_yielding(self, tenant: TokenTenant) -> None:
        """Let other tenants hold the tenant's GPUs while its last work ends. Until it has drained, this tenant pays and
        not the next holder."""
        for gpu in tenant.gpus:
            del self.holder[gpu]
            self._yielding[gpu] = tenant

    def pass_on(self, now: int, tenant: TokenTenant) -> tuple[str, ...]:
        """Charge the present holders, and no longer `tenant`, for the GPUs that `tenant` yields. Called when its last
        work ended during a stall of the agent, so that it could not report the end.

        Return the yielded GPUs that have no holder yet. The tenant still pays for these.
        """
        self.settle_around(now, tenant)
        for gpu in tenant.gpus:
            if gpu in self.holder:
                del self._yielding[gpu]
                self._changed.add(gpu)
        return tuple(gpu for gpu in tenant.gpus if gpu in self._yielding)

    def yield_on(self, now: int, tenant: TokenTenant) -> None:
        """Undo `pass_on`: charge a yielding tenant again for all its GPUs, until it has drained."""
        self.settle_around(now, tenant)
        for gpu in tenant.gpus:
            self._yielding[gpu] = tenant
            self._changed.add(gpu)

    def preempt(self, tenant: TokenTenant) -> None:
        """Let other tenants hold the GPUs of a tenant that does not drain. It pays for each GPU while no other tenant
        pays.
        """
        self._leave(tenant)
        for gpu in tenant.gpus:
            self._preempted.setdefault(gpu, []).append(tenant)

    def suspend(self, tenant: TokenTenant) -> None:
        """Let other tenants hold the GPUs of a tenant that has no processor time to drain, and whose work has ended. It
        pays nothing."""
        self._leave(tenant)
        for gpu in tenant.gpus:
            if tenant in self._preempted.get(gpu, ()):
                self._preempted[gpu].remove(tenant)

    def free(self, tenant: TokenTenant) -> None:
        """Remove the tenant's hold from its GPUs: it has drained."""
        self._leave(tenant)
        for gpu in tenant.gpus:
            preempted = self._preempted.get(gpu, [])
            if tenant in preempted:
                preempted.remove(tenant)

    def may_yield(self, tenant: TokenTenant) -> bool:
        """Return True if the tenant may yield: it holds its GPUs, no other tenant yields one of them, and no tenant
        co-runs there.

        With a co-runner a yield would be early, because the last work takes longer than announced. It is also not
        needed: the co-runner keeps the GPU busy during the hand-off.
        """
        return all(
            self.holder.get(gpu) is tenant and gpu not in self._yielding and gpu not in self.co_runners
            for gpu in tenant.gpus
        )

    def contended(self, tenant: TokenTenant) -> bool:
        """Return True if another tenant waits for one of the tenant's GPUs, or has a hold there that is not
        suspended.
        """
        return any(
            t.runnable or (t.hold is not None and t.hold.phase is not _SUSPENDED)
            for gpu in tenant.gpus
            for t in self.tenants_on[gpu]
            if t is not tenant
        )

    def beside_interactive(self, tenant: TokenTenant) -> bool:
        """Return True if another tenant of the same GPUs is interactive and connected."""
        for gpu in tenant.gpus:
            for other in self.tenants_on[gpu]:
                if other.interactive and other.connected and other is not tenant:
                    return True
        return False

    def settle(self, now: int, tenant: TokenTenant) -> None:
        """Settle: charge the tenant's account for the time until `now`. The caller must do this before any change that
        affects the tenant's charge.
        """
        account, hold = tenant.account, tenant.hold
        if hold is None:
            self._settle_without_hold(now, tenant)
            return
        if self.co_runners and tenant.gpus[0] in self.co_runners and not hold.displaced:
            self._enter(now, tenant.gpus[0])
            return
        preempted = hold.phase is _PREEMPTED
        paying = sum(1 for gpu in tenant.gpus if self._payer(gpu) is tenant)
        contended = self.contended(tenant)
        for until in (min(now, hold.deadline), now) if hold.deadline is not None else (now,):
            if until <= account.at:
                continue
            held = (until - account.at) * paying // len(tenant.gpus)
            owed = until - account.at if preempted else held
            if owed or hold.phase is not _SUSPENDED:
                account.turns.add(account.at, until, overdue=preempted and not held)
            late = hold.deadline is not None and account.at >= hold.deadline
            # Work that was launched before the queue was bounded may take any time. So the tenant is not charged as
            # guaranteed while it drains.
            guaranteed = contended and (
                preempted
                or (hold.metering is Metering.METERED_FROM_START and (late or hold.given_as is Charge.GUARANTEED))
            )
            hold.charged_ns += owed
            account.overdue_ns += owed - held
            account.late_ns += held if late else 0
            for gpu in tenant.gpus:
                tenant.virtual_ns[gpu] += owed * 1000 // tenant.weight
            account.advance(until, held, Charge.GUARANTEED if guaranteed else Charge.BORROWED, owed_ns=owed)

    def settle_around(self, now: int, tenant: TokenTenant) -> None:
        """Settle the tenant, and all other tenants of its GPUs that pay or may pay."""
        self.settle(now, tenant)
        self.settle_on(now, tenant.gpus)

    def settle_on(self, now: int, gpus: Iterable[str]) -> None:
        """Settle all tenants that pay for one of these GPUs now, or that pay once the present payer stops."""
        for gpu in gpus:
            self._enter(now, gpu)
            for other in self._possible_payers(gpu):
                self.settle(now, other)

    def stall(self, begin: int, end: int, gpus: Iterable[str]) -> None:
        """Charge no tenant of these GPUs for the time from `begin` to `end`, in which the agent did not run."""
        for gpu in gpus:
            self._enter(begin, gpu)
            self._books[gpu].advance(end, GpuUse.STALLED)
            for tenant in self.tenants_on[gpu]:
                self.settle(begin, tenant)
                if tenant.hold is not None and tenant.hold.phase is not _SUSPENDED:
                    tenant.account.turns.add(begin, end, overdue=tenant.hold.phase is _PREEMPTED)
                tenant.account.skip(end)

    def gpu_time(self, now: int, gpu: str) -> GpuTime | None:
        """Return the use of a GPU's time up to `now`. None if the GPU has no tenants."""
        if gpu not in self._books:
            return None
        self._enter(now, gpu)
        return self._books[gpu].time()

    def _enter(self, now: int, gpu: str) -> None:
        """Add the time until now to the GPU's time record, by its present use."""
        if gpu not in self._books:
            return
        if (gpu in self.concurrent and gpu not in self._gangs_on) or gpu in self.co_runners:
            self._measure(now, gpu)
        if self._payer(gpu) is not None:
            use = GpuUse.HELD
        elif gpu in self.awaited:
            use = GpuUse.ANTICIPATED
        elif any(tenant.runnable for tenant in self.tenants_on[gpu]):
            use = GpuUse.HANDED_OVER
        else:
            use = GpuUse.IDLE
        self._books[gpu].advance(now, use)

    def _measure(self, now: int, gpu: str) -> None:
        """Add the time until now to the progress measures of the tenants that held the GPU. If they co-ran, also charge
        their accounts.
        """
        begin = self._books[gpu].at
        if now <= begin:
            return
        tenants = self.occupants(gpu)
        together = gpu in self.co_runners
        if len(tenants) == 1 and not together:
            tenants[0].account.refund(tenants[0].progress.alone(now, now - begin))
            return
        launches = [tenant.progress.span() for tenant in tenants]
        if not together:
            return  # one tenant yields to the other, so the span shows the progress of neither
        for tenant in tenants:
            tenant.account.refund(tenant.progress.joined(begin))
        self._settle_together(now, gpu, tenants)
        for tenant, launched in zip(tenants, launches, strict=True):
            tenant.progress.shared(now - begin, launched)

    def _settle_together(self, now: int, gpu: str, tenants: list[TokenTenant]) -> None:
        """Divide the time since the GPU's last record among the co-running tenants, by their work in flight, and charge
        each for its part."""
        books = self._books[gpu]
        moments = {now}
        for tenant in tenants:
            hold = _hold_of(tenant)
            if hold.deadline is not None and books.at < hold.deadline < now:
                moments.add(hold.deadline)
        in_flight = [tenant.progress.in_flight for tenant in tenants] if len(tenants) > 1 else [1.0]
        losses = self.losses(now, tenants)
        for until in sorted(moments):
            elapsed = until - books.at
            parts = divide(elapsed, in_flight)
            for tenant, part, loss in zip(tenants, parts, losses, strict=True):
                self._charge_together(tenant, until, part, elapsed - int(loss * elapsed))
            books.share(until, sum(parts))

    def losses(self, now: int, tenants: list[TokenTenant]) -> list[float]:
        """Return, for each tenant, the part of its work (0 to 1) that it loses while all these tenants hold at once. It
        is the loss measured in the last window, or a predicted loss if that measure is too old.

        Members of a group that hold together pay for all time that the other holders do not get. So a group, and not
        its neighbours, pays for switches between its members and for its collective operations.
        """
        members = self._members_together(tenants)
        others = [tenant for tenant in tenants if tenant not in members]
        demands = [tenant.progress.alone_in_flight for tenant in tenants]
        foretold = foretell([1.0 if demand is None else demand for demand in demands])
        known = [tenant.progress.loss(now) for tenant in tenants]
        losses = [1 - progress if loss is None else loss for loss, progress in zip(known, foretold, strict=True)]
        if not members:
            return losses
        if not others:
            processes = sum(tenant.progress.processes for tenant in members)
            return [tenant.progress.in_flight * (1 - tenant.progress.processes / processes) for tenant in tenants]
        left = max(0.0, 1 - sum([1 - loss for loss, one in zip(losses, tenants, strict=True) if one in others], 0.0))
        least = left / len(members)
        return [min(loss, 1 - least) if one in members else loss for loss, one in zip(losses, tenants, strict=True)]

    @staticmethod
    def _members_together(tenants: list[TokenTenant]) -> list[TokenTenant]:
        """Return the tenants that hold the GPU together with another member of their group, so that one of them co-runs
        for that reason."""
        groups = {tenant.group for tenant in tenants if tenant.hold is not None and tenant.hold.accompanies}
        return [tenant for tenant in tenants if tenant.group in groups] if groups else []

    def _charge_together(self, tenant: TokenTenant, until: int, held: int, progress: int) -> None:
        account, hold, gpu = tenant.account, _hold_of(tenant), tenant.gpus[0]
        begin = account.at
        late = hold.deadline is not None and begin >= hold.deadline
        account.turns.add(begin, until, overdue=False)
        guaranteed = hold.given_as is Charge.GUARANTEED
        if hold.place is HoldPlace.LEAD:
            guaranteed = hold.metering is Metering.METERED_FROM_START and (late or guaranteed)
        hold.charged_ns += progress
        account.late_ns += held if late else 0
        tenant.virtual_ns[gpu] += progress * 1000 // tenant.weight
        account.advance_together(until, held, progress, Charge.GUARANTEED if guaranteed else Charge.BORROWED)

    def _settle_without_hold(self, now: int, tenant: TokenTenant) -> None:
        account, paying = tenant.account, 0
        if self.awaited:
            for gpu in tenant.gpus:
                if gpu in self.awaited and self.awaited[gpu].tenant is tenant and self._payer(gpu) is None:
                    paying += 1
        idle = (now - account.at) * paying // len(tenant.gpus)
        if idle <= 0:
            account.advance(now, 0, Charge.BORROWED, waiting=tenant.runnable)
            return
        account.anticipated_ns += idle
        for gpu in tenant.gpus:
            tenant.virtual_ns[gpu] += idle * 1000 // tenant.weight
        account.advance(now, 0, Charge.GUARANTEED, owed_ns=idle)

    def _leave(self, tenant: TokenTenant) -> None:
        for gpu in tenant.gpus:
            self._changed.add(gpu)
            for places in (self.holder, self._yielding):
                if places.get(gpu) is tenant:
                    del places[gpu]
            runners = self.co_runners.get(gpu)
            if runners is not None and runners.pop(tenant.id, None) is not None:
                self._co_run_ends.setdefault(gpu, Counter())[_hold_of(tenant).co_run_end] += 1
                if not runners:
                    del self.co_runners[gpu]

    def _possible_payers(self, gpu: str) -> Iterator[TokenTenant]:
        yield from self._preempted.get(gpu, ())
        for places in (self.holder, self._yielding):
            if gpu in places:
                yield places[gpu]
        if gpu in self.awaited:
            yield self.awaited[gpu].tenant

    def _payer(self, gpu: str) -> TokenTenant | None:
        payer = self._yielding.get(gpu) or self.holder.get(gpu)
        if payer is None:
            if gpu in self.co_runners:
                return next(iter(self.co_runners[gpu].values()))
            preempted = self._preempted.get(gpu)
            return preempted[0] if preempted else None
        return payer


def _hold_of(tenant: TokenTenant) -> Hold:
    assert tenant.hold is not None, "the tenant has a hold"
    return tenant.hold
