"""Whose turn is next, and for how long.

Guarantees: tenants that wake with credit come first; then those with a positive assured bucket, most owed first;
borrowers in proportion to their request; best effort. A tenant gets all its GPUs or none, and is given no longer than
its ceiling leaves room for.
"""

from __future__ import annotations

from .account import Charge
from .occupancy import Occupancy
from .parameters import Parameters
from .plan import Turn, affected, crowds, plan
from .tenant import TokenTenant, floors_of, order_key, write_off

_DRAIN_GUESS_NS = 1_000_000
"""How soon a holder past its deadline is taken to drain: only used to plan around it."""


class Turns:
    """Decides and changes nothing but accounts, which it settles, and the virtual time at which borrowers join."""

    def __init__(self, parameters: Parameters, gpus: Occupancy) -> None:
        self._parameters = parameters
        self._gpus = gpus
        self._floors: dict[tuple[str, bool], int] = {}

    def forget(self, gpu: str) -> None:
        """Nobody is on this GPU any more."""
        self._floors.pop((gpu, False), None)
        self._floors.pop((gpu, True), None)

    def join(self, tenant: TokenTenant) -> None:
        """Who did not compete meanwhile has saved up no claim on what is idle."""
        for gpu in tenant.gpus:
            tenant.virtual[gpu] = max(tenant.virtual[gpu], self._floor(gpu, tenant.best_effort))

    def forgive(self, tenant: TokenTenant, held_ns: int) -> None:
        """At the end of a hold that was charged `held_ns`: what goes beyond the most that can be owed is forgiven."""
        tenant.account.settle_debt(held_ns)
        allowed = max(self._parameters.debt_ns, held_ns * 1000 // tenant.weight)
        for gpu in tenant.gpus:
            if tenant.virtual[gpu] > self._floors.get((gpu, tenant.best_effort), 0) + allowed:  # floors only rise
                tenant.virtual[gpu] = min(tenant.virtual[gpu], self._floor(gpu, tenant.best_effort) + allowed)

    def begin(self, now: int, waiting: list[TokenTenant], again: TokenTenant | None = None) -> list[Turn]:
        """The turns that begin now. `again`: a holder that is looked at as if it had drained and waited."""
        gpus, competing = self._gpus, waiting if again is None else [*waiting, again]
        if not any(len(tenant.gpus) > 1 for tenant in competing):
            free = dict.fromkeys(tenant.gpus[0] for tenant in competing)
            turns = (self._first(now, gpu, again) for gpu in free if gpus.holder.get(gpu) in (None, again))
            return [turn for turn in turns if turn is not None]
        wanted = {gpu for tenant in competing for gpu in tenant.gpus}
        held = {gpu: gpus.holder[gpu] for gpu in wanted if gpu in gpus.holder and gpus.holder[gpu] is not again}
        for tenant in competing:
            gpus.settle(now, tenant)
        for tenant in dict.fromkeys(held.values()):
            gpus.settle(now, tenant)
        write_off({gpu: gpus.sharing[gpu] for gpu in wanted}, self._parameters.assured_burst_ns)
        for gpu in wanted:
            floors_of(gpus.sharing[gpu], gpu, self._floors)
        crowd = crowds(wanted, gpus.sharing)
        patient_since = self._patient_since(now, competing)

        def key(tenant: TokenTenant) -> tuple[int, int, int, str]:
            since = now if tenant.waiting_since is None else tenant.waiting_since
            return order_key(tenant, self._floors, since, patient_since=patient_since)

        competing = sorted(competing, key=key)
        return plan(
            competing,
            {gpu: self._expected_end(now, tenant) for gpu, tenant in held.items()},
            now=now,
            quantum=lambda tenant: self._length(tenant, crowd),
            shortest_ns=self._parameters.quantum_min_ns,
        )

    def _first(self, now: int, gpu: str, again: TokenTenant | None) -> Turn | None:
        """As `begin`, for a GPU that nobody holds and no gang waits for."""
        sharing, competing, crowd = self._gpus.sharing[gpu], [], 0
        for tenant in sharing:
            waits = tenant.waiting_since is not None and not tenant.throttled
            if waits or tenant is again:
                competing.append(tenant)
                if tenant.hold is None:
                    tenant.account.advance(now, 0, Charge.BORROWED)
                else:
                    self._gpus.settle(now, tenant)
            crowd += waits or tenant.holding
        write_off({gpu: sharing}, self._parameters.assured_burst_ns)
        floors_of(sharing, gpu, self._floors)
        first, least, patient_since = None, None, self._patient_since(now, competing)
        for tenant in competing:
            since = now if tenant.waiting_since is None else tenant.waiting_since
            key = order_key(tenant, self._floors, since, patient_since=patient_since)
            if least is None or key < least:
                first, least = tenant, key
        return None if first is None else Turn(first, self._length(first, {gpu: crowd}), lent=False)

    def next_of(self, now: int, tenant: TokenTenant) -> Turn | None:
        """The turn that a holder would get if it had drained now and wanted more."""
        waiting = [other for other in affected(tenant.gpus, self._gpus.sharing) if other is not tenant]
        self._gpus.settle(now, tenant)
        if not tenant.account.fits(self._parameters.quantum_min_ns):
            return None
        return next((turn for turn in self.begin(now, waiting, tenant) if turn.tenant is tenant), None)

    def may_go_on(self, tenant: TokenTenant, quantum_ns: int) -> bool:
        """Whether it can be the turn of a holder that begins now again after its quantum, by what others are owed now:
        that grows by as much as what it is owed itself."""
        account = tenant.account
        if account.assured <= 0:
            return True
        left = account.owed_ns() - quantum_ns * 1000 // account.request_milli
        others = (other for gpu in tenant.gpus for other in self._gpus.sharing[gpu] if other is not tenant)
        return not any(
            other.runnable and other.account.request_milli and other.account.owed_ns() > left for other in others
        )

    def quantum(self, tenant: TokenTenant) -> int:
        """How long the tenant may hold among those who compete with it now."""
        return self._length(tenant, crowds(tenant.gpus, self._gpus.sharing))

    def _length(self, tenant: TokenTenant, crowd: dict[str, int]) -> int:
        """For as many as compete with it, and no longer than its ceiling allows. `crowd`: how many those are, by GPU,
        itself among them."""
        quantum, room = self._parameters.quantum(max(crowd[gpu] for gpu in tenant.gpus)), tenant.account.room_ns()
        return quantum if room is None else max(self._parameters.quantum_min_ns, min(quantum, room))

    def _patient_since(self, now: int, competing: list[TokenTenant]) -> int:
        """Where nobody wakes, nobody goes before those who are owed more."""
        return now - self._parameters.patience_ns if any(tenant.woke for tenant in competing) else -1

    def _floor(self, gpu: str, best_effort: bool) -> int:
        """The virtual time that a tenant which joins the borrowers of this GPU starts at."""
        floors_of(self._gpus.sharing[gpu], gpu, self._floors)
        return self._floors[gpu, best_effort]

    def _expected_end(self, now: int, holder: TokenTenant) -> int:
        hold = holder.hold
        assert hold is not None, "a GPU's holder holds"
        if hold.deadline is None:
            return now + self._parameters.quantum_max_ns
        return max(hold.deadline, now + _DRAIN_GUESS_NS)
