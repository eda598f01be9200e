"""Status and messages of a GPUBudget. Pure: the time is passed in.

Guarantees:
- Every condition has a reason. The message of a condition that reports a problem contains a remedy.
- The transition time of a condition changes only with its status.
"""

from __future__ import annotations

from typing import Literal

from sharepod.api.bounds import clipped
from sharepod.api.gpubudget import (
    CONDITION_GONE_EARLY,
    CONDITION_IN_FORCE,
    CONDITION_WITHIN_BUDGET,
    BudgetShown,
    GPUBudgetStatus,
    Refill,
    WhenSpent,
)
from sharepod.api.objects import Condition
from sharepod.budgets.amounts import hours_text
from sharepod.budgets.budget import NEARLY_SPENT, BudgetEvent, BudgetRules, BudgetState
from sharepod.budgets.budget_account import MICRO, refill_due_ms
from sharepod.budgets.coverage import Coverage
from sharepod.budgets.forecast import RATE_HALF_LIFE_S, gone_at_ms
from sharepod.budgets.periods import span_of
from sharepod.controller.state.facts.budget_facts import BudgetFacts
from sharepod.controller.state.reading.timestamps import text_of

_ROUNDED_S = 600
"""Forecast times are rounded up to this many seconds, so that a forecast that moves by seconds causes no write."""
_MOST_PERCENT = 1_000_000

_FOLLOWS = {
    WhenSpent.BORROW: "its SharePods continue at low priority, and others may preempt them",
    WhenSpent.QUEUE: "new SharePods wait",
    WhenSpent.NOTIFY: "nothing follows",
}
"""Consequence of a spent budget, as the end of a message."""


def time_text(at_ms: int) -> str:
    """Return a time as RFC 3339 text, as Kubernetes writes times."""
    return text_of(at_ms / 1000)


def refill_text(state: BudgetState, rules: BudgetRules) -> str:
    """Return the time at which a spent budget has GPU time again, as RFC 3339 text. With continuous refill it is
    rounded up to ten minutes.
    """
    due_ms = refill_due_ms(state.account, rules.terms)
    return time_text(due_ms if rules.terms.refill is Refill.PERIOD_START else _rounded(due_ms))


def unreadable_status(item: BudgetFacts, *, now_ms: int) -> GPUBudgetStatus:
    """Return the status of a GPUBudget with an unreadable spec. It keeps the account, so a corrected spec continues
    it."""
    why = _condition(
        item, CONDITION_IN_FORCE, "False", "Unreadable", clipped(f"{item.error}. Correct the GPUBudget"), now_ms
    )
    return item.status.model_copy(
        update={"observed_generation": item.generation, "namespaces": (), "conditions": (why,)}
    )


def budget_status(
    item: BudgetFacts, rules: BudgetRules, state: BudgetState, coverage: Coverage, *, now_ms: int
) -> GPUBudgetStatus:
    """Return the status of a GPUBudget."""
    account, terms = state.account, rules.terms
    span = span_of(terms.period, account.at_ms)
    rate = state.spending.rate(RATE_HALF_LIFE_S)
    gone_ms = gone_at_ms(account, terms, rate) if not account.spent else None
    percent = min(_MOST_PERCENT, account.used_milli(terms) // 10)
    conditions = (
        _in_force(item, coverage, now_ms),
        _within(item, rules, state, percent, now_ms),
        _gone_early(item, rules, rate, gone_ms, now_ms),
    )
    return GPUBudgetStatus(
        observed_generation=item.generation,
        namespaces=coverage.namespaces,
        period_start=time_text(span.start_ms),
        period_end=time_text(span.end_ms),
        shown=BudgetShown(
            amount_hours=hours_text(terms.amount * 1000 // MICRO),
            left_hours=hours_text(account.left(terms) * 1000 // MICRO),
        ),
        held=account.consumed.held // MICRO,
        reserved=account.consumed.reserved // MICRO,
        left=account.left(terms) // MICRO,
        percent=percent,
        rate=gpus_text(rate),
        gone_at=time_text(_rounded(gone_ms)) if gone_ms is not None else None,
        refill_at=refill_text(state, rules) if account.spent else None,
        conditions=conditions,
        books=state.books(),
    )


def gpus_text(rate: float) -> str:
    """Return a rate as text in GPUs. The rate is in account units per second, that is, millionths of a GPU."""
    return f"{rate / MICRO:.3g}"


def event_note(event: BudgetEvent, rules: BudgetRules, state: BudgetState, status: GPUBudgetStatus) -> str:
    """Return the text of an Event."""
    amount = rules.terms.full // MICRO
    if event is BudgetEvent.REFILLED:
        return f"the budget is refilled: {status.left} of {amount} GPU-seconds are left until {status.period_end}"
    if event is BudgetEvent.SPENT:
        return (
            f"the budget of {amount} GPU-seconds is spent: {_FOLLOWS[rules.when_spent]}. It counts again at "
            f"{refill_text(state, rules)}"
        )
    at_this_rate = (
        f"; at the present rate of {status.rate} GPUs it is spent at {status.gone_at}" if status.gone_at else ""
    )
    return f"{status.percent} % of the budget is used, {status.left} of {amount} GPU-seconds are left{at_this_rate}"


def same_but_time(one: GPUBudgetStatus, other: GPUBudgetStatus) -> bool:
    """Return whether two statuses are equal except for the time up to which they are computed."""
    return _timeless(one) == _timeless(other)


def _timeless(status: GPUBudgetStatus) -> GPUBudgetStatus:
    if status.books is None:
        return status
    books = status.books.model_copy(update={"at": 0, "usage": 0, "spending": 0})
    return status.model_copy(update={"books": books, "rate": "", "gone_at": None, "refill_at": None})


def _in_force(item: BudgetFacts, coverage: Coverage, now_ms: int) -> Condition:
    if coverage.reason is None:
        text = f"covers {', '.join(coverage.namespaces[:10])}"
        more = len(coverage.namespaces) - 10
        return _condition(
            item, CONDITION_IN_FORCE, "True", "InForce", f"{text} and {more} more" if more > 0 else text, now_ms
        )
    status: Literal["True", "False"] = "True" if coverage.namespaces else "False"
    return _condition(item, CONDITION_IN_FORCE, status, coverage.reason, coverage.message, now_ms)


def _within(item: BudgetFacts, rules: BudgetRules, state: BudgetState, percent: int, now_ms: int) -> Condition:
    if state.account.spent:
        message = f"nothing is left: {_FOLLOWS[rules.when_spent]}. It counts again at {refill_text(state, rules)}"
        return _condition(item, CONDITION_WITHIN_BUDGET, "False", "BudgetSpent", message, now_ms)
    reason = "NearlySpent" if percent >= NEARLY_SPENT else "WithinBudget"
    return _condition(item, CONDITION_WITHIN_BUDGET, "True", reason, "", now_ms)


def _gone_early(item: BudgetFacts, rules: BudgetRules, rate: float, gone_ms: int | None, now_ms: int) -> Condition:
    if gone_ms is None:
        return _condition(item, CONDITION_GONE_EARLY, "False", "LastsToRefill", "", now_ms)
    message = (
        f"at the present rate of {gpus_text(rate)} GPUs nothing is left at {time_text(_rounded(gone_ms))}: "
        f"{_FOLLOWS[rules.when_spent]} then. Use less, or ask for a larger budget"
    )
    return _condition(item, CONDITION_GONE_EARLY, "True", "SpendsTooFast", message, now_ms)


def _condition(
    item: BudgetFacts, kind: str, status: Literal["True", "False"], reason: str, message: str, now_ms: int
) -> Condition:
    known = next((one for one in item.status.conditions if one.type == kind), None)
    since = known.last_transition_time if known is not None and known.status == status else None
    return Condition(
        type=kind,
        status=status,
        reason=reason,
        message=message,
        last_transition_time=since or time_text(now_ms),
        observed_generation=item.generation,
    )


def _rounded(at_ms: int) -> int:
    return -(-at_ms // (_ROUNDED_S * 1000)) * _ROUNDED_S * 1000
