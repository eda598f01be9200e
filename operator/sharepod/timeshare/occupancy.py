"""Occupancy of the GPUs: which tenant holds each, and which tenant pays for it.

Guarantees:
- S1: A GPU has at most one holder.
- S2: Each nanosecond of a GPU is charged as held at most once. The first of these pays: the tenant that yields the GPU;
  its holder; the tenant preempted longest ago.
- S3: A preempted tenant owes all the time until it has drained, also time that another tenant pays for. A suspended
  tenant owes nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from .account import Charge
from .gpu_time import GpuBooks, GpuTime, GpuUse
from .hold import HoldPhase, Metering
from .plan import Anticipation
from .tenant import TokenTenant

_PREEMPTED, _SUSPENDED = HoldPhase.PREEMPTED, HoldPhase.SUSPENDED


class Occupancy:
    """Tenants, holders, yielding and preempted tenants of every GPU."""

    def __init__(self) -> None:
        self.tenants_on: dict[str, list[TokenTenant]] = {}
        """All tenants by GPU. GPUs without tenants are left out."""
        self.holder: dict[str, TokenTenant] = {}
        """The tenant that may launch on a GPU. Free GPUs are left out."""
        self.awaited: dict[str, Anticipation] = {}
        """GPUs that are kept idle, with the sleeping tenant that pays for it."""
        self._books: dict[str, GpuBooks] = {}
        self._yielding: dict[str, TokenTenant] = {}
        self._preempted: dict[str, list[TokenTenant]] = {}
        self._gangs_on: dict[str, int] = {}
        """Number of tenants of several GPUs, by GPU. GPUs without any are left out."""

    def add(self, now: int, tenant: TokenTenant) -> None:
        """Add a tenant to its GPUs."""
        for gpu in tenant.gpus:
            if gpu not in self._books:
                self._books[gpu] = GpuBooks(now)
            self.tenants_on.setdefault(gpu, []).append(tenant)
            if len(tenant.gpus) > 1:
                self._gangs_on[gpu] = self._gangs_on.get(gpu, 0) + 1

    def remove(self, tenant: TokenTenant) -> None:
        """Remove a tenant from its GPUs, which are free of it at once. Its account has to be settled."""
        self.free(tenant)
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

    def has_gangs(self, gpu: str) -> bool:
        """Return whether a tenant of the GPU has other GPUs, too."""
        return gpu in self._gangs_on

    def sole_tenant(self, gpu: str) -> TokenTenant | None:
        """Return the holder of a GPU on which nobody else has work, and which no gang shares; None if there is none."""
        if gpu in self._gangs_on or gpu in self._yielding or self._preempted.get(gpu):
            return None
        return self.holder.get(gpu)

    def occupy(self, tenant: TokenTenant) -> None:
        """Make the tenant the holder of its GPUs, which have to be free."""
        for gpu in tenant.gpus:
            assert gpu not in self.holder, "S1: a GPU has at most one holder"
            assert gpu not in self.awaited, "S8: what is idle for a tenant is not held"
            self.holder[gpu] = tenant

    def keep_idle(self, now: int, anticipation: Anticipation) -> None:
        """Keep a free GPU idle for a tenant that sleeps. The tenant pays from now on, where nobody else does."""
        self._enter(now, anticipation.tenant.gpus[0])
        self.settle(now, anticipation.tenant)
        self.awaited[anticipation.tenant.gpus[0]] = anticipation

    def cease_waiting(self, now: int, gpu: str) -> None:
        """Keep the GPU idle no longer."""
        if gpu in self.awaited:
            self._enter(now, gpu)
            self.settle(now, self.awaited[gpu].tenant)
            del self.awaited[gpu]

    def start_yielding(self, tenant: TokenTenant) -> None:
        """Let others hold the tenant's GPUs while its last work ends. The tenant pays on."""
        for gpu in tenant.gpus:
            del self.holder[gpu]
            self._yielding[gpu] = tenant

    def pass_on(self, now: int, tenant: TokenTenant) -> tuple[str, ...]:
        """Let the holders of the GPUs that a tenant yields pay from now on: its last work has ended, although it could
        not say so. Return the GPUs that it yields and nobody holds, for which it goes on paying."""
        self.settle_around(now, tenant)
        for gpu in tenant.gpus:
            if gpu in self.holder:
                del self._yielding[gpu]
        return tuple(gpu for gpu in tenant.gpus if gpu in self._yielding)

    def yield_on(self, now: int, tenant: TokenTenant) -> None:
        """Let a tenant that yields pay again, for all its GPUs, until it has drained."""
        self.settle_around(now, tenant)
        for gpu in tenant.gpus:
            self._yielding[gpu] = tenant

    def preempt(self, tenant: TokenTenant) -> None:
        """Let others hold the GPUs of a tenant that does not drain. The tenant pays where nobody else does."""
        self._leave(tenant)
        for gpu in tenant.gpus:
            self._preempted.setdefault(gpu, []).append(tenant)

    def suspend(self, tenant: TokenTenant) -> None:
        """Let others hold the GPUs of a tenant that cannot drain, and has no work on them. The tenant pays nothing."""
        self._leave(tenant)
        for gpu in tenant.gpus:
            if tenant in self._preempted.get(gpu, ()):
                self._preempted[gpu].remove(tenant)

    def free(self, tenant: TokenTenant) -> None:
        """Take the tenant off its GPUs: it has drained."""
        self._leave(tenant)
        for gpu in tenant.gpus:
            preempted = self._preempted.get(gpu, [])
            if tenant in preempted:
                preempted.remove(tenant)

    def may_yield(self, tenant: TokenTenant) -> bool:
        """Return whether the tenant holds its GPUs and no other tenant is yielding one of them."""
        return all(self.holder.get(gpu) is tenant and gpu not in self._yielding for gpu in tenant.gpus)

    def contended(self, tenant: TokenTenant) -> bool:
        """Return whether another tenant waits for one of the tenant's GPUs, or has a hold on one that is not
        suspended."""
        return any(
            t.runnable or (t.hold is not None and t.hold.phase is not _SUSPENDED)
            for gpu in tenant.gpus
            for t in self.tenants_on[gpu]
            if t is not tenant
        )

    def beside_interactive(self, tenant: TokenTenant) -> bool:
        """Return whether an interactive tenant of the tenant's GPUs, other than itself, is connected."""
        for gpu in tenant.gpus:
            for other in self.tenants_on[gpu]:
                if other.interactive and other.connected and other is not tenant:
                    return True
        return False

    def settle(self, now: int, tenant: TokenTenant) -> None:
        """Bring the tenant's account forward to `now`. To be called before anything changes that its charge depends
        on."""
        account, hold = tenant.account, tenant.hold
        if hold is None:
            self._settle_without_hold(now, tenant)
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
            # What was launched without metering, and so in any number, may drain for the grace period at no cost.
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
        """Settle the tenant, and all whose charge a change of it can alter."""
        self.settle(now, tenant)
        self.settle_on(now, tenant.gpus)

    def settle_on(self, now: int, gpus: Iterable[str]) -> None:
        """Settle all tenants that pay for one of these GPUs, or would if another did not."""
        for gpu in gpus:
            self._enter(now, gpu)
            for other in self._possible_payers(gpu):
                self.settle(now, other)

    def stall(self, begin: int, end: int, gpus: Iterable[str]) -> None:
        """Take the time from `begin` to `end` out of all accounts of these GPUs: it is nobody's."""
        for gpu in gpus:
            self._enter(begin, gpu)
            self._books[gpu].advance(end, GpuUse.STALLED)
            for tenant in self.tenants_on[gpu]:
                self.settle(begin, tenant)
                if tenant.hold is not None and tenant.hold.phase is not _SUSPENDED:
                    tenant.account.turns.add(begin, end, overdue=tenant.hold.phase is _PREEMPTED)
                tenant.account.skip(end)

    def gpu_time(self, now: int, gpu: str) -> GpuTime | None:
        """Return what the time of a GPU went to up to `now`; None if it has no tenants."""
        if gpu not in self._books:
            return None
        self._enter(now, gpu)
        return self._books[gpu].time()

    def _enter(self, now: int, gpu: str) -> None:
        """Enter the time until now into the GPU's books."""
        if gpu not in self._books:
            return
        if self._payer(gpu) is not None:
            use = GpuUse.HELD
        elif gpu in self.awaited:
            use = GpuUse.ANTICIPATED
        elif any(tenant.runnable for tenant in self.tenants_on[gpu]):
            use = GpuUse.HANDED_OVER
        else:
            use = GpuUse.IDLE
        self._books[gpu].advance(now, use)

    def _settle_without_hold(self, now: int, tenant: TokenTenant) -> None:
        account, gpu = tenant.account, tenant.gpus[0]
        idle = now - account.at
        if (
            idle <= 0
            or gpu not in self.awaited
            or self.awaited[gpu].tenant is not tenant
            or self._payer(gpu) is not None
        ):
            account.advance(now, 0, Charge.BORROWED, waiting=tenant.runnable)
            return
        account.anticipated_ns += idle
        tenant.virtual_ns[gpu] += idle * 1000 // tenant.weight
        account.advance(now, 0, Charge.GUARANTEED, owed_ns=idle)

    def _leave(self, tenant: TokenTenant) -> None:
        for gpu in tenant.gpus:
            for places in (self.holder, self._yielding):
                if places.get(gpu) is tenant:
                    del places[gpu]

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
            preempted = self._preempted.get(gpu)
            return preempted[0] if preempted else None
        return payer
