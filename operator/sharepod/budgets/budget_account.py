"""Account of one budget: the charge in its period, and the remaining amount.

Amounts are in account units: millionths of a GPU-second (milliseconds of a GPU times its model's weight in
thousandths). They are integers, so that repeated additions lose nothing. Times are milliseconds since 1970.

Guarantees:
- BA1 exact: the charge of a period is the consumption in it, however often it is charged.
- BA2 idempotent: the same consumption up to the same time, added again, changes nothing.
- BA3 bounded: the remaining amount is from 0 to the amount (refill at the period's start) or to the cap (continuous).
- Consumption that spans the end of a period is divided in proportion to time. The old period's part is not charged to
  the new one.
- A clock that goes back changes no period and refills nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from sharepod.api.gpubudget import BudgetPeriod, ChargeBy, Refill

from .periods import span_of

MICRO = 1_000_000
"""Account units per GPU-second of weight 1."""
RESUMED_AT = 10
"""A spent budget with continuous refill counts again once the cap divided by this number is refilled. Without such a
threshold, a team's priority would change at each check."""
_MOST_PERIODS = 120
"""Largest number of periods that are searched for the time at which a spent budget counts again: ten years of
months."""


@dataclass(frozen=True, slots=True)
class Consumed:
    """Consumed GPU time, multiplied by its weight, in account units: `held`, and `reserved`."""

    held: int = 0
    reserved: int = 0

    def __add__(self, other: Consumed) -> Consumed:
        return Consumed(self.held + other.held, self.reserved + other.reserved)

    def part(self, numerator: int, denominator: int) -> Consumed:
        """Return the fraction `numerator / denominator` of it, rounded down."""
        return Consumed(self.held * numerator // denominator, self.reserved * numerator // denominator)

    def by(self, charge: ChargeBy) -> int:
        """Return the consumption that a budget with this `chargeBy` charges."""
        return self.held if charge is ChargeBy.HELD else self.reserved


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """Terms of a budget. `amount`: account units per period. `cap`: largest amount that continuous refill can save."""

    amount: int
    period: BudgetPeriod = BudgetPeriod.MONTH
    refill: Refill = Refill.PERIOD_START
    cap: int
    charge_by: ChargeBy = ChargeBy.RESERVED

    @property
    def full(self) -> int:
        """Remaining amount of an unspent budget, in account units."""
        return self.cap if self.refill is Refill.CONTINUOUS else self.amount


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetAccount:
    """Account of a budget at `at_ms`.

    - `consumed`: consumption in the period that began at `period_start_ms`.
    - `credit`: remaining amount with continuous refill. With refill at the period's start, the remaining amount is the
      amount less the charge; `credit` has the same value, so that the account can continue if the terms change to
      continuous refill.
    - `spent`: True once nothing is left. With continuous refill, it stays True until `1 / RESUMED_AT` of the cap is
      refilled.
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
        """Return the used part of the budget, in thousandths. With refill at the period's start it may exceed 1000."""
        if terms.refill is Refill.CONTINUOUS:
            return 1000 - self.left(terms) * 1000 // terms.cap
        return self.consumed.by(terms.charge_by) * 1000 // terms.amount

    def over_milli(self, terms: Terms) -> int:
        """Return by how much the charge of the period exceeds the amount, in thousandths of the amount."""
        return max(0, self.consumed.by(terms.charge_by) - terms.amount) * 1000 // terms.amount


def opened(terms: Terms, at_ms: int) -> BudgetAccount:
    """Return a new account, of which nothing is spent."""
    return BudgetAccount(period_start_ms=span_of(terms.period, at_ms).start_ms, at_ms=at_ms, credit=terms.full)


def advanced(account: BudgetAccount, terms: Terms, consumed: Consumed, at_ms: int) -> BudgetAccount:
    """Return the account at `at_ms`, charged with the consumption since `account.at_ms`."""
    if at_ms <= account.at_ms:
        if consumed == Consumed():
            return _judged(account, terms)
        at_ms = account.at_ms
    # 1. The consumption in the present period: all of it, or the part in proportion to the time since the period's
    # start.
    span = span_of(terms.period, at_ms)
    here, before = consumed, account.consumed if account.period_start_ms >= span.start_ms else Consumed()
    if span.start_ms > account.at_ms:
        here = consumed.part(at_ms - span.start_ms, at_ms - account.at_ms)
    # 2. The credit of continuous refill: refilled and charged for the same time, between 0 and the cap.
    charged = before + here
    if terms.refill is Refill.CONTINUOUS:
        net = _refilled(terms, account.at_ms, at_ms) - consumed.by(terms.charge_by)
        credit = min(max(0, account.credit + net), terms.cap)
    else:
        credit = max(0, terms.amount - charged.by(terms.charge_by))
    changed = replace(account, period_start_ms=span.start_ms, at_ms=at_ms, consumed=charged, credit=credit)
    return _judged(changed, terms)


def refill_rate(terms: Terms, at_ms: int) -> float:
    """Return the speed of a continuous refill in the period that contains `at_ms`, in account units per second. 0 for
    refill at the period's start."""
    if terms.refill is not Refill.CONTINUOUS:
        return 0.0
    return terms.amount * 1000 / span_of(terms.period, at_ms).length_ms


def refill_due_ms(account: BudgetAccount, terms: Terms) -> int:
    """Return the time at which a spent budget counts again if nothing is charged until then, in milliseconds since
    1970."""
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
    """Return the account with `spent` computed."""
    left = account.left(terms)
    waits = account.spent and terms.refill is Refill.CONTINUOUS and left < terms.cap // RESUMED_AT
    return replace(account, spent=left <= 0 or waits)


def _refilled(terms: Terms, since_ms: int, until_ms: int) -> int:
    """Return the continuous refill between two times, in account units. Adjacent intervals add up exactly."""
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
