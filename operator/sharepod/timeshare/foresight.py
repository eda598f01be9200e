"""Foresight: the next turn on a GPU, decided before its holder drains.

Guarantees:
- At any moment of a foreseen turn's window, `TurnPolicy` would decide on this same turn, as long as the same tenants
  wait and are connected.
- Only simple cases are foreseen: one tenant holds the GPU, its quantum has an end, its queue is bounded, and no tenant
  of the GPU has another GPU.
- A forecast charges accounts up to now and changes nothing else.

The lags of waiting tenants grow at the same speed. So their order stays until one of them gets credit or has waited
longer than `patience_ns`. The holder's lag falls, so the holder can only lose places to waiting tenants.
"""

from __future__ import annotations

from dataclasses import dataclass

from .account import Account, Charge
from .hold import Hold, HoldPhase
from .occupancy import Occupancy
from .parameters import Parameters
from .tenant import CREDIT_KEPT_NS, OrderKey, TokenTenant, common_credit_ns, goes_before, order_key
from .turns import TurnPolicy

_MOST_NS = 10_000_000_000
"""Longest time between `since` and `until` of a foreseen turn: 10 s, longer than any turn with a deadline."""
_MARGIN_NS = 1_000
"""Margin in nanoseconds, added to the moment from which the holder ranks after another tenant: each charge rounds
virtual times down."""


@dataclass(frozen=True)
class ForeseenTurn:
    """Turn that follows on one GPU if the holder drains between two moments, in nanoseconds of the clock."""

    holder: TokenTenant
    wanting: bool
    """Condition. True: the holder wants the token again when it has drained. False: the holder does not."""
    tenant: TokenTenant
    quantum_ns: int
    since: int
    until: int


class Foresight:
    """Forecasts the next turns of the GPUs in `occupancy`, as `policy` would decide on them."""

    def __init__(self, parameters: Parameters, occupancy: Occupancy, policy: TurnPolicy) -> None:
        self._parameters = parameters
        self._occupancy = occupancy
        self._policy = policy

    def turns(self, now: int, gpu: str) -> list[ForeseenTurn]:
        """Return the turns that may follow on a GPU: one in case the holder wants the token again after draining, and
        one in case it does not. A turn that cannot be foreseen is left out."""
        holder = self._occupancy.sole_tenant(gpu)
        hold = None if holder is None else holder.hold
        if holder is None or hold is None or hold.deadline is None or not _drains_simply(hold):
            return []
        # 1. Charge the waiting tenants up to now, and find the first of them in the order of service.
        waiting, until = list[TokenTenant](), now + _MOST_NS
        if hold.yields_at is not None:
            until = min(until, hold.yields_at - 1)
        for tenant in self._occupancy.tenants_on[gpu]:
            if tenant is holder:
                continue
            if tenant.hold is not None or tenant.account.in_arrears:
                return []
            if tenant.throttled_until is not None:
                until = min(until, tenant.throttled_until - 1)
            if tenant.waiting_since is not None and not tenant.throttled:
                tenant.account.advance(now, 0, Charge.BORROWED, waiting=True)
                waiting.append(tenant)
        first, place = self._first(now, gpu, waiting)
        if first is None:
            return []
        # 2. Find out how long `first` stays first.
        for tenant in waiting:
            until = min(until, self._first_until(now, first, place[0], tenant))
        since = self._not_anticipated_since(now, gpu, first, holder)
        # 3. Forecast each case: the holder wants more, or does not.
        self._occupancy.settle(now, holder)
        turns: list[ForeseenTurn] = []
        woke = False
        for tenant in waiting:
            woke = woke or tenant.woke_with_credit
        for wanting in (True, False):
            begin, end = since, until
            if wanting:
                behind = self._behind_since(now, gpu, holder, first, place[0])
                fits = self._fits_until(now, holder.account)
                if behind is None or fits is None or holder.account.in_arrears:
                    continue
                begin, end = max(begin, behind), min(end, fits)
            elif not self._kept_waiting_by_none(now, first) and self._window(first, holder) > 0:
                continue
            end = min(end, self._credit_stays_until(now, waiting, holder if wanting else None))
            quantum = self._quantum(gpu, first, [*waiting, holder] if wanting else waiting, woke and place[0] <= 0)
            if quantum is not None and end >= max(now, begin):
                turns.append(ForeseenTurn(holder, wanting, first, quantum, begin, end))
        return turns

    def _first(self, now: int, gpu: str, waiting: list[TokenTenant]) -> tuple[TokenTenant | None, OrderKey]:
        first: TokenTenant | None = None
        place: OrderKey = (0, 0, 0, "")
        patience_ns = self._parameters.patience_ns
        for tenant in waiting:
            key = order_key(
                tenant,
                tenant.virtual_ns[gpu],
                _since(tenant),
                now=now,
                patience_ns=patience_ns,
                latency_ns=self._parameters.target_latency_ns,
            )
            if first is None or goes_before(key, place):
                first, place = tenant, key
        return first, place

    def _first_until(self, now: int, first: TokenTenant, rank: int, other: TokenTenant) -> int:
        """Return the moment until which `first` precedes `other` in the order of service. `rank`: first number of the
        sort key of `first`. If both are the same tenant, return the moment until which it keeps its rank."""
        account = other.account
        never, request = now + _MOST_NS, account.request_milli
        if not request:
            return never
        level = account.assured
        owed_from = now + -level // request + 1 if level <= 0 else now
        patient_from = self._owed_for_since(now, other, self._parameters.patience_ns)
        until = never
        if other is first:
            if rank == 1:
                until = patient_from - 1
            return owed_from - 1 if rank == 2 else until
        if level <= 0 and other.hurries:
            return owed_from - 1
        latency_from = self._owed_for_since(now, other, self._parameters.target_latency_ns)
        if latency_from > now:
            until = latency_from - 1
        if rank == 0 and (_since(other), other.id) < (_since(first), first.id):
            return min(until, patient_from - 1, owed_from - 1 if level <= 0 and other.woke_with_credit else never)
        if rank == 1:
            until = min(until, patient_from - 1)
            if level <= 0 and (other.woke_with_credit or first.account.lag_ns() <= 0):
                until = min(until, owed_from - 1)
        elif rank > 1:
            until = min(until, owed_from - 1)
        return until

    def _not_anticipated_since(self, now: int, gpu: str, first: TokenTenant, holder: TokenTenant) -> int:
        """Return the moment from which the GPU is no longer kept idle for a tenant that sleeps now, so that `first`
        gets it.
        """
        since = now
        if self._kept_waiting_by_none(now, first):
            return since
        for tenant in self._occupancy.tenants_on[gpu]:
            if tenant is not holder and tenant.asleep_since is not None:
                since = max(since, tenant.asleep_since + self._window(first, tenant))
        return since

    def _kept_waiting_by_none(self, now: int, first: TokenTenant) -> bool:
        """Return True if the GPU is never kept idle for a pausing tenant instead of being granted to `first`: `first`
        has credit, and woke from a sleep or has waited for `idle_patience_ns`."""
        waited_long = now - _since(first) >= self._parameters.idle_patience_ns
        return first.account.assured > 0 and (first.woke_with_credit or waited_long)

    def _window(self, first: TokenTenant, sleeper: TokenTenant) -> int:
        """Return the nanoseconds after the end of the sleeper's hold for which the GPU may be kept idle for the
        sleeper, instead of its grant to `first`. 0: not at all.
        """
        request, overrun = sleeper.account.request_milli, first.habits.overrun_ns
        if not request or overrun <= sleeper.habits.tolerated_ns(request):
            return 0
        return sleeper.habits.window(overrun, self._parameters.turn_min_ns, self._parameters.quantum_max_ns)

    def _behind_since(self, now: int, gpu: str, holder: TokenTenant, first: TokenTenant, rank: int) -> int | None:
        """Return the moment from which the holder, if it drained and waited again, would rank after `first` in the
        order of service. `rank`: first number of the sort key of `first`. None if unknown."""
        account, request = holder.account, holder.account.request_milli
        now = max(now, _since(first) + 1)  # at equal lag the tenant that has waited longer precedes
        if rank <= 0:
            return now
        if rank == 1:
            ahead = account.assured - first.account.lag_ns() * request
            if not request or account.assured <= 0 or ahead <= 0:
                return now
            return now + ahead // 1000 + 1 + _MARGIN_NS
        if rank == 2 and not request:
            return now
        if rank == 3 and request:
            return None
        since = now
        if account.assured > 0 and request:
            if request == 1000:
                return None
            since += account.assured // (1000 - request) + 1 + _MARGIN_NS
        ahead = first.virtual_ns[gpu] - holder.virtual_ns[gpu]
        return since if ahead < 0 else max(since, now + ahead * holder.weight // 1000 + 1 + _MARGIN_NS)

    def _fits_until(self, now: int, account: Account) -> int | None:
        """Return the moment until which the holder's limit allows another shortest quantum. None if its limit already
        forbids one."""
        if not account.ceiling_fits(self._parameters.quantum_min_ns):
            return None
        spent = 1000 - account.limit_milli
        return now + (account.ceiling - self._parameters.quantum_min_ns * spent) // spent if spent else now + _MOST_NS

    def _credit_stays_until(self, now: int, waiting: list[TokenTenant], holder: TokenTenant | None) -> int:
        """Return the moment until which credits grow as forecast: before that moment no common credit is cancelled and
        no assured bucket is full.
        """
        full = common_credit_ns(self._parameters.assured_burst_ns)
        until = now + _MOST_NS
        competing = [tenant for tenant in waiting if tenant.account.request_milli]
        if holder is not None and holder.account.request_milli:
            if holder.account.lag_ns() <= CREDIT_KEPT_NS:
                full = self._parameters.assured_burst_ns  # without credit of the holder, nothing is cancelled
            elif holder.account.lag_ns() > full:
                return now - 1
        elif len(competing) == 1:
            full = self._parameters.assured_burst_ns
        for tenant in competing:
            account = tenant.account
            until = min(until, now + (full * account.request_milli - account.assured) // account.request_milli)
        return until

    def _owed_for_since(self, now: int, tenant: TokenTenant, length_ns: int) -> int:
        """Return the moment from which the tenant has waited for `length_ns` and has a lag of `length_ns`. `now` if it
        already has. For a tenant whose turns outlast the target latency, which is ordered by its lag only, return a
        moment far in the future."""
        if tenant.outlasts(self._parameters.target_latency_ns):
            return now + _MOST_NS
        account = tenant.account
        missing = length_ns - account.assured // account.request_milli
        return max(_since(tenant) + length_ns, now + max(0, missing))

    def _quantum(self, gpu: str, first: TokenTenant, competing: list[TokenTenant], hastened: bool) -> int | None:
        """Return the length of the next turn, in nanoseconds. Return None if the limit of `first` would shorten the
        turn: the ceiling bucket fills until the turn begins, so its length is not known yet.
        """
        kind = first.best_effort
        weight = sum([tenant.weight for tenant in competing if tenant.best_effort == kind])
        quantum = self._policy.length(first, {(gpu, kind): weight}, hastened=hastened)
        room = first.account.ceiling_room_ns()
        return quantum if room is None or room > quantum else None


def _drains_simply(hold: Hold) -> bool:
    return not hold.silent and hold.phase in (HoldPhase.RUNNING, HoldPhase.REVOKED, HoldPhase.DRAINING)


def _since(tenant: TokenTenant) -> int:
    assert tenant.waiting_since is not None, "the tenant waits"
    return tenant.waiting_since
