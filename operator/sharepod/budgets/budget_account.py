"""Account of one budget: the charge in its period, and the remaining amount.

Amounts are millionths of a GPU-second (milliseconds of a GPU times its model's weight in thousandths). They are whole
numbers, so that repeated additions lose nothing. Times are milliseconds since 1970.

Guarantees:
- BA1 exact: the charge of a period is the consumption in it, however the time is cut into steps.
- BA2 idempotent: the same consumption up to the same time, added again, changes nothing.
- BA3 bounded: the remaining amount is from 0 to the amount (refill at the period's start) or to the cap (continuous).
- Consumption over the end of a period is divided by time. The part that may lie in the old period is not charged to the
  new one.
- A clock that goes back changes no period and refills nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from sharepod.api.gpubudget import BudgetPeriod, ChargeBy, Refill

from .periods import span_of

MICRO = 1_000_000
"""Account units in a GPU-second of weight 1."""
RESUMED_AT = 10
"""Divisor of the cap: a spent budget with continuous refill counts again once a tenth of the cap is refilled. With
less, a team's priority would alternate at each check."""
_MOST_PERIODS = 120
"""Most periods that are checked for the time at which a spent budget counts again: ten years of months."""


@dataclass(frozen=True, slots=True)
class Consumed:
    """Consumption of GPU time, weighted, in account units."""

    held: int = 0
    reserved: int = 0

    def __add__(self, other: Consumed) -> Consumed:
        return Consumed(self.held + other.held, self.reserved + other.reserved)

    def part(self, numerator: int, denominator: int) -> Consumed:
        """Return a fraction of it, rounded down."""
        return Consumed(self.held * numerator // denominator, self.reserved * numerator // denominator)

    def by(self, charge: ChargeBy) -> int:
        """Return the part of the consumption that this kind of charge counts."""
        return self.held if charge is ChargeBy.HELD else self.reserved


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """Terms of a budget. `amount`: account units for each period. `cap`: the most that a continuous budget saves."""

    amount: int
    period: BudgetPeriod = BudgetPeriod.MONTH
    refill: Refill = Refill.PERIOD_START
    cap: int
    charge_by: ChargeBy = ChargeBy.RESERVED

    @property
    def full(self) -> int:
        """Amount of an unspent budget, in account units."""
        return self.cap if self.refill is Refill.CONTINUOUS else self.amount


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetAccount:
    """Account of a budget at `at_ms`.

    - `consumed`: consumption in the period that began at `period_start_ms`.
    - `credit`: remaining amount of a budget with continuous refill. For a budget that is refilled at the period's
      start, it is the remaining amount at `at_ms`. The account continues from it if the terms change to continuous
      refill; until then the remaining amount is the amount less the charge.
    - `spent`: True from when nothing was left until `1 / RESUMED_AT` of the cap is refilled.
    """

    period_start_ms: int
    at_ms: int
    consumed: Consumed = Consumed()
    credit: int = 0
    spent: bool = False

    def left(self, terms: Terms) -> int:
        """Return the remaining amount, in account units."""
        if terms.refill is Refill.CONTINUOUS:
            return min(self.credit, terms.cap)
        return max(0, terms.amount - self.consumed.by(terms.charge_by))

    def used_milli(self, terms: Terms) -> int:
        """Return the used part of the budget, in thousandths. With refill at the period's start it exceeds 1000 if the
        charge exceeds the amount."""
        if terms.refill is Refill.CONTINUOUS:
            return 1000 - self.left(terms) * 1000 // terms.cap
        return self.consumed.by(terms.charge_by) * 1000 // terms.amount

    def over_milli(self, terms: Terms) -> int:
        """Return by how much the charge of the period exceeds the amount, in thousandths of the amount."""
        return max(0, self.consumed.by(terms.charge_by) - terms.amount) * 1000 // terms.amount


def opened(terms: Terms, at_ms: int) -> BudgetAccount:
    """Return a new account, unspent."""
    return BudgetAccount(period_start_ms=span_of(terms.period, at_ms).start_ms, at_ms=at_ms, credit=terms.full)


def advanced(account: BudgetAccount, terms: Terms, consumed: Consumed, at_ms: int) -> BudgetAccount:
    """Return the account at a later time, charged with the consumption since `account.at_ms`."""
    if at_ms <= account.at_ms:
        if consumed == Consumed():
            return _judged(account, terms)
        at_ms = account.at_ms
    # 1. The consumption of the current period: all, or in proportion to the time since its start.
    span = span_of(terms.period, at_ms)
    here, before = consumed, account.consumed if account.period_start_ms >= span.start_ms else Consumed()
    if span.start_ms > account.at_ms:
        here = consumed.part(at_ms - span.start_ms, at_ms - account.at_ms)
    # 2. The credit of a continuous budget: refilled and charged at the same time, between 0 and the cap.
    charged = before + here
    if terms.refill is Refill.CONTINUOUS:
        net = _refilled(terms, account.at_ms, at_ms) - consumed.by(terms.charge_by)
        credit = min(max(0, account.credit + net), terms.cap)
    else:
        credit = max(0, terms.amount - charged.by(terms.charge_by))
    changed = replace(account, period_start_ms=span.start_ms, at_ms=at_ms, consumed=charged, credit=credit)
    return _judged(changed, terms)


def refill_rate(terms: Terms, at_ms: int) -> float:
    """Return the refill of a continuous budget in the period that contains a time, in account units a second. Return 0
    for a budget that refills at once."""
    if terms.refill is not Refill.CONTINUOUS:
        return 0.0
    return terms.amount * 1000 / span_of(terms.period, at_ms).length_ms


def refill_due_ms(account: BudgetAccount, terms: Terms) -> int:
    """Return when a spent budget counts again, if nothing is charged until then."""
    if terms.refill is Refill.PERIOD_START:
        return span_of(terms.period, account.at_ms).end_ms
    missing, at_ms = max(0, max(1, terms.cap // RESUMED_AT) - account.credit), account.at_ms
    # Each period refills at a rate of its own, because months differ in length.
    for _ in range(_MOST_PERIODS):
        span = span_of(terms.period, at_ms)
        until_end = _refilled(terms, at_ms, span.end_ms)
        if missing <= until_end:
            break
        missing, at_ms = missing - until_end, span.end_ms
    return at_ms + round(missing / refill_rate(terms, at_ms) * 1000)


def _judged(account: BudgetAccount, terms: Terms) -> BudgetAccount:
    """Return the account with `spent` set."""
    left = account.left(terms)
    waits = account.spent and terms.refill is Refill.CONTINUOUS and left < terms.cap // RESUMED_AT
    return replace(account, spent=left <= 0 or waits)


def _refilled(terms: Terms, since_ms: int, until_ms: int) -> int:
    """Return the refill of a continuous budget between two times. Sums over adjacent spans are exact."""
    if terms.refill is not Refill.CONTINUOUS:
        return 0
    got, at_ms = 0, since_ms
    while at_ms < until_ms:
        span = span_of(terms.period, at_ms)
        end_ms = min(span.end_ms, until_ms)
        got += terms.amount * (end_ms - span.start_ms) // span.length_ms
        got -= terms.amount * (at_ms - span.start_ms) // span.length_ms
        at_ms = end_ms
    return got
