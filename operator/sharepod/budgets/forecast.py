"""Forecast of the time at which a budget is spent. Also finds reservations that are idle.

Guarantees:
- A forecast assumes that the present rate continues. It gives no time if the budget is refilled before.
- A reservation counts as idle only after it was unused for all of `IDLE_AFTER_S`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from sharepod.api.gpubudget import Refill

from .budget_account import BudgetAccount, Terms, refill_rate
from .periods import span_of

RATE_HALF_LIFE_S = 3600.0
"""Half-life of the spending from which the rate is computed, in seconds. With an hour, the rate shows a job's start
after some minutes, and hardly reacts to a pause of minutes."""
IDLE_AFTER_S = 3600.0
"""Seconds without use after which a reservation is idle."""


def gone_at_ms(account: BudgetAccount, terms: Terms, rate: float) -> int | None:
    """Return the time at which the budget is spent at `rate` (account units per second), in milliseconds since 1970.

    None if the budget is refilled before, or if the rate does not exceed a continuous refill.
    """
    left = account.left(terms)
    if left <= 0:
        return account.at_ms
    net = rate - refill_rate(terms, account.at_ms)
    if net <= 0:
        return None
    seconds = left / net
    end_ms = span_of(terms.period, account.at_ms).end_ms
    gone_ms = account.at_ms + int(min(seconds * 1000, 1e15))
    return None if gone_ms >= end_ms and terms.refill is Refill.PERIOD_START else gone_ms


@dataclass(frozen=True, slots=True)
class Holding:
    """Share that is reserved now. `milli`: its request in thousandths, summed over its GPUs. `used`: True if it is in
    use."""

    tenant: str
    namespace: str
    milli: int
    used: bool


@dataclass(frozen=True, slots=True)
class IdleReservation:
    """Reservation that was not used for `IDLE_AFTER_S`."""

    tenant: str
    namespace: str
    milli: int


def unused_since(
    before: Mapping[str, float], holdings: Iterable[Holding], now_s: float
) -> tuple[dict[str, float], list[IdleReservation]]:
    """Return (time since which each unused reservation has been unused, by tenant; the reservations that are idle).

    `before`: the first value of the last call. A tenant with request 0 reserves nothing and is never idle.
    """
    since: dict[str, float] = {}
    idle = []
    for one in holdings:
        if one.used or one.milli == 0:
            continue
        since[one.tenant] = before.get(one.tenant, now_s)
        if now_s - since[one.tenant] >= IDLE_AFTER_S:
            idle.append(IdleReservation(one.tenant, one.namespace, one.milli))
    return since, idle
