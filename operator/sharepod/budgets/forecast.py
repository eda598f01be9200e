"""Forecast of a budget: its rate of spending, and the time at which it is spent. Also finds unused reservations.

Guarantees:
- A forecast assumes the current rate. It gives no time if the budget is refilled before.
- A reservation counts as idle only after it was observed as unused for all of `IDLE_AFTER_S`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from sharepod.api.gpubudget import Refill

from .budget_account import BudgetAccount, Terms, refill_rate
from .periods import span_of

RATE_HALF_LIFE_S = 3600.0
"""Half-life of the spending from which the rate is computed, in seconds. With an hour, a job's start shows in minutes
and a pause of minutes does not."""
IDLE_AFTER_S = 3600.0
"""Seconds without use after which a reservation is idle."""


def gone_at_ms(account: BudgetAccount, terms: Terms, rate: float) -> int | None:
    """Return the time at which the budget is spent at this rate (account units a second), in milliseconds since 1970.

    None if the budget is refilled before, or if the rate does not exceed the refill.
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
    """Current reservation. `milli`: its time in thousandths, summed over its GPUs; the other fields show whether it is
    in use."""

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
    """Return the time since which each reservation has been unused, and the reservations that are idle.

    `before`: the first result of the last call. Best effort reserves nothing and is never idle.
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
