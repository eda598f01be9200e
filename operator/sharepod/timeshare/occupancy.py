"""Who is on which GPU, and who pays for it.

Guarantees: each nanosecond of a GPU is charged as held once. First pays who yields it (its last work is ending, and the
next was granted meanwhile), then its holder, and where it has none the overdue one, oldest first. An overdue tenant
owes all the time until it drains besides.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from .account import Charge
from .tenant import TokenTenant


class Occupancy:
    """`sharing`: all tenants by GPU. `holder`: who may launch on a GPU."""

    def __init__(self) -> None:
        self.sharing: dict[str, list[TokenTenant]] = {}
        self.holder: dict[str, TokenTenant] = {}
        self._yielding: dict[str, TokenTenant] = {}
        self._overdue: dict[str, list[TokenTenant]] = {}

    def add(self, tenant: TokenTenant) -> None:
        """A tenant is on its GPUs from now on."""
        for gpu in tenant.gpus:
            self.sharing.setdefault(gpu, []).append(tenant)

    def remove(self, tenant: TokenTenant) -> None:
        """It is on them no more. Its account is settled."""
        self.free(tenant)
        for gpu in tenant.gpus:
            self.sharing[gpu].remove(tenant)
            if not self.sharing[gpu]:
                del self.sharing[gpu]

    def occupy(self, tenant: TokenTenant) -> None:
        """It becomes the holder of its GPUs."""
        for gpu in tenant.gpus:
            assert gpu not in self.holder, "a GPU has one holder"
            self.holder[gpu] = tenant

    def give_way(self, tenant: TokenTenant) -> None:
        """The next may hold its GPUs while its last work ends."""
        for gpu in tenant.gpus:
            del self.holder[gpu]
            self._yielding[gpu] = tenant

    def overtake(self, tenant: TokenTenant) -> None:
        """It does not drain: others go on, and it pays where nobody else does."""
        self._leave(tenant)
        for gpu in tenant.gpus:
            self._overdue.setdefault(gpu, []).append(tenant)

    def free(self, tenant: TokenTenant) -> None:
        """It has drained."""
        self._leave(tenant)
        for gpu in tenant.gpus:
            overdue = self._overdue.get(gpu, [])
            if tenant in overdue:
                overdue.remove(tenant)

    def may_give_way(self, tenant: TokenTenant) -> bool:
        """Whether it holds its GPUs and nobody yields one of them already."""
        return all(self.holder.get(gpu) is tenant and gpu not in self._yielding for gpu in tenant.gpus)

    def contended(self, tenant: TokenTenant) -> bool:
        """Whether what it holds is kept from, or was taken by, another."""
        return any(
            t.runnable or t.hold is not None for gpu in tenant.gpus for t in self.sharing[gpu] if t is not tenant
        )

    def settle(self, now: int, tenant: TokenTenant) -> None:
        """Brings one account up to `now`. To be called before anything changes that its charge depends on."""
        account, hold = tenant.account, tenant.hold
        if hold is None:
            account.advance(now, 0, Charge.BORROWED)
            return
        paying = sum(1 for gpu in tenant.gpus if self._charged_to(gpu) is tenant)
        contended = self.contended(tenant)
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

    def settle_around(self, now: int, tenant: TokenTenant) -> None:
        """Settles the tenant and everyone whose charge a change of it can alter."""
        self.settle(now, tenant)
        self.settle_on(now, tenant.gpus)

    def settle_on(self, now: int, gpus: Iterable[str]) -> None:
        """Settles everyone who pays, or would if another did not, for one of these GPUs."""
        for gpu in gpus:
            for other in self._present(gpu):
                self.settle(now, other)

    def _leave(self, tenant: TokenTenant) -> None:
        for gpu in tenant.gpus:
            for places in (self.holder, self._yielding):
                if places.get(gpu) is tenant:
                    del places[gpu]

    def _present(self, gpu: str) -> Iterator[TokenTenant]:
        yield from self._overdue.get(gpu, ())
        for places in (self.holder, self._yielding):
            if gpu in places:
                yield places[gpu]

    def _charged_to(self, gpu: str) -> TokenTenant | None:
        payer = self._yielding.get(gpu) or self.holder.get(gpu)
        if payer is None:
            overdue = self._overdue.get(gpu)
            return overdue[0] if overdue else None
        return payer
