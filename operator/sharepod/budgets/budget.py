"""Budget of one GPUBudget: its rules, its charges, and the resulting standing of the namespaces that it covers.

Guarantees:
- BU1 once: a total that is read again, or late, charges nothing more. The charge, and the totals that it contains, are
  stored in one write.
- BU2 from-here-on: a namespace is charged from the time at which the budget first covers it. Earlier consumption is not
  charged.
- BU3 told-once: 80 %, 100 % and the refill are each announced once in a period. With continuous refill, 80 % and 100 %
  are announced again after each refill.
- An account is never larger than can be stored. Namespaces whose totals have no room in it are charged nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import groupby

from sharepod.api.gpubudget import MAX_AMOUNT, MAX_TAKEN, BudgetBooks, ChargedTotal, GPUBudgetSpec, WhenSpent

from .budget_account import MICRO, BudgetAccount, Consumed, Terms, advanced, opened
from .forecast import RATE_HALF_LIFE_S
from .periods import span_of
from .standing import DecayedUsage, Standing, share_milli

NEARLY_SPENT = 80
"""Percentage of a budget from which it is nearly spent."""
_WEIGHT_ONE = 1000
_NO_MODEL = ""

TotalKey = tuple[str, str]
"""(namespace, GPU model)."""


@dataclass(frozen=True, slots=True)
class ConsumedTotal:
    """GPU time that a namespace has consumed on one GPU model, in milliseconds. A total never falls."""

    held_ms: int = 0
    reserved_ms: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetRules:
    """Rules of a budget. `weights`: thousandths of a second charged for one second of GPU time, by model; 1000 without
    an entry."""

    terms: Terms
    when_spent: WhenSpent = WhenSpent.BORROW
    borrow_priority: int = -1000
    weights: Mapping[str, int] = field(default_factory=dict, hash=False)

    @classmethod
    def of(cls, spec: GPUBudgetSpec) -> BudgetRules:
        """Return the rules of a GPUBudget."""
        return cls(
            terms=Terms(
                amount=spec.amount_seconds * MICRO,
                period=spec.period,
                refill=spec.refill,
                cap=(spec.cap or spec.amount_seconds) * MICRO,
                charge_by=spec.charge_by,
            ),
            when_spent=spec.when_spent,
            borrow_priority=spec.borrow_priority,
            weights={entry.model: entry.weight_milli for entry in spec.models},
        )

    def weighted(self, model: str, had: ConsumedTotal) -> Consumed:
        """Return GPU time on a model in account units, that is, multiplied by the model's weight."""
        weight = self.weights.get(model, _WEIGHT_ONE)
        return Consumed(had.held_ms * weight, had.reserved_ms * weight)


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetState:
    """State of a budget at the time `account.at_ms`.

    - `announced`: percentage that was announced last: 0, 80 or 100.
    - `usage`: charged time, in which past time decays with the half-life of the queue's order.
    - `spending`: charged time, in which past time decays with a half-life of an hour.
    - `charged`: total that is charged already, by namespace and model.
    """

    account: BudgetAccount
    announced: int = 0
    usage: DecayedUsage
    spending: DecayedUsage
    charged: Mapping[TotalKey, ConsumedTotal] = field(default_factory=dict, hash=False)

    @classmethod
    def begun(cls, rules: BudgetRules, at_ms: int) -> BudgetState:
        """Return the state of a new budget."""
        none = DecayedUsage(0.0, at_ms, at_ms)
        return cls(account=opened(rules.terms, at_ms), usage=none, spending=none)

    @classmethod
    def restored(cls, books: BudgetBooks) -> BudgetState:
        """Return the state from its stored form."""
        return cls(
            account=BudgetAccount(
                period_start_ms=books.period_start,
                at_ms=books.at,
                consumed=Consumed(books.held, books.reserved),
                credit=books.credit,
                spent=books.spent,
            ),
            announced=books.announced,
            usage=DecayedUsage(float(books.usage), books.at, books.since),
            spending=DecayedUsage(float(books.spending), books.at, books.since),
            charged={
                (entry.namespace, entry.model): ConsumedTotal(entry.held_milliseconds, entry.reserved_milliseconds)
                for entry in books.taken
            },
        )

    def books(self) -> BudgetBooks:
        """Return the state in its stored form."""
        return BudgetBooks(
            period_start=max(0, self.account.period_start_ms),
            at=self.account.at_ms,
            held=min(MAX_AMOUNT, self.account.consumed.held),
            reserved=min(MAX_AMOUNT, self.account.consumed.reserved),
            credit=self.account.credit,
            spent=self.account.spent,
            announced=self.announced,
            usage=min(MAX_AMOUNT, round(self.usage.amount)),
            spending=min(MAX_AMOUNT, round(self.spending.amount)),
            since=self.usage.since_ms,
            taken=tuple(
                ChargedTotal(
                    namespace=namespace,
                    model=model,
                    held_milliseconds=had.held_ms,
                    reserved_milliseconds=had.reserved_ms,
                )
                for (namespace, model), had in _with_room(self.charged)
            ),
        )


def _with_room(charged: Mapping[TotalKey, ConsumedTotal]) -> list[tuple[TotalKey, ConsumedTotal]]:
    """Return the totals to store, by namespace, as many as there is room for. A namespace is stored completely or not
    at all. If only some of its totals were stored, the others would be charged again."""
    found: list[tuple[TotalKey, ConsumedTotal]] = []
    for _, group in groupby(sorted(charged.items()), key=lambda item: item[0][0]):
        own = list(group)
        if len(own) > 1 and own[0] == (own[0][0], ConsumedTotal()) and own[0][0][1] == _NO_MODEL:
            del own[0]  # it only marks the namespace as covered, and so do the namespace's other entries
        if len(found) + len(own) > MAX_TAKEN:
            break
        found += own
    return found


def charged(
    state: BudgetState,
    rules: BudgetRules,
    namespaces: Collection[str],
    totals: Mapping[TotalKey, ConsumedTotal],
    *,
    at_ms: int,
    half_life_s: float,
) -> BudgetState:
    """Return the state at `at_ms`, with the growth of the totals of these namespaces charged."""
    covered = set(namespaces)
    known = {namespace for namespace, _ in state.charged}
    far = {key: had for key, had in state.charged.items() if key[0] in covered}
    consumed = Consumed()
    for namespace in sorted(covered - known):
        far[namespace, _NO_MODEL] = ConsumedTotal()
    for key, total in totals.items():
        namespace, model = key
        if namespace not in covered:
            continue
        before = far.get(key, ConsumedTotal() if namespace in known else total)
        now = ConsumedTotal(max(total.held_ms, before.held_ms), max(total.reserved_ms, before.reserved_ms))
        far[key] = now
        consumed += rules.weighted(
            model, ConsumedTotal(now.held_ms - before.held_ms, now.reserved_ms - before.reserved_ms)
        )
    account = advanced(state.account, rules.terms, consumed, at_ms)
    due = consumed.by(rules.terms.charge_by)
    return replace(
        state,
        account=account,
        usage=state.usage.at(account.at_ms, half_life_s, due),
        spending=state.spending.at(account.at_ms, RATE_HALF_LIFE_S, due),
        charged=far,
    )


class BudgetEvent(StrEnum):
    """Event about a GPUBudget. The value is the Event's reason."""

    NEARLY_SPENT = "BudgetNearlySpent"
    SPENT = "BudgetSpent"
    REFILLED = "BudgetRefilled"


def announced(before: BudgetState, now: BudgetState, rules: BudgetRules) -> tuple[BudgetState, list[BudgetEvent]]:
    """Return (state with the new announcements recorded, announcements to make once that state is stored).

    `before`: the state as last stored.
    """
    events = []
    announced_percent = now.announced
    new_period = now.account.period_start_ms > before.account.period_start_ms
    refilled = before.account.spent and not now.account.spent
    if announced_percent and (new_period or refilled):
        events.append(BudgetEvent.REFILLED)
        announced_percent = 0
    elif new_period:
        announced_percent = 0
    percent = 100 if now.account.spent else min(99, now.account.used_milli(rules.terms) // 10)
    if percent >= 100 > announced_percent:
        events.append(BudgetEvent.SPENT)
        announced_percent = 100
    elif percent >= NEARLY_SPENT > announced_percent:
        events.append(BudgetEvent.NEARLY_SPENT)
        announced_percent = NEARLY_SPENT
    return replace(now, announced=announced_percent), events


def standing_of(state: BudgetState, rules: BudgetRules, *, half_life_s: float, refill_at: str) -> Standing:
    """Return the standing that a budget gives its namespaces: their use relative to their entitlement and, once the
    budget is spent, the effect of `whenSpent`. `refill_at`: time at which a spent budget counts again, RFC 3339."""
    account, terms = state.account, rules.terms
    entitled_per_s = terms.amount * 1000 / span_of(terms.period, account.at_ms).length_ms
    share = share_milli(state.usage, entitled_per_s, half_life_s)
    if not account.spent or rules.when_spent is WhenSpent.NOTIFY:
        return Standing(share_milli=share)
    over = max(1, account.over_milli(terms))
    if rules.when_spent is WhenSpent.QUEUE:
        return Standing(waits_until=refill_at, over_budget_milli=over, share_milli=share)
    lowered_to = rules.borrow_priority
    return Standing(lowered_to=lowered_to, over_budget_milli=over, share_milli=share, refill_at=refill_at or None)
