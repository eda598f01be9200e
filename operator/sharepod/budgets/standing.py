"""Standing of a team (a namespace): its usage relative to its budget, and the resulting place in the queue.

The share of a team is its decayed usage divided by its entitlement: usage of one half-life ago counts half, as in
time-based fair share. A team that uses exactly its entitlement has a share of 1000 thousandths.

Guarantees:
- While a team uses nothing, its share falls.
- A team without a budget is never lowered, and its share is that of a team that uses exactly its entitlement.
- Order within a team does not change: all its SharePods have the same standing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

ON_ENTITLEMENT = 1000
"""Share, in thousandths, of a team that uses exactly its entitlement, and of a team without a budget."""
STEP_MILLI = 500
"""Step, in thousandths, to which the share is rounded to order the queue. With finer steps, small jobs of a team with a
slightly lower share take GPUs that became free together, and jobs of whole nodes wait (`make bench-fairness`)."""
MOST_MILLI = 1_000_000
"""Largest share in thousandths: a thousand times the entitlement."""


@dataclass(frozen=True, slots=True)
class DecayedUsage:
    """Decaying usage: `amount` at `at_ms`, in account units. `since_ms`: time at which counting began."""

    amount: float
    at_ms: int
    since_ms: int

    def at(self, at_ms: int, half_life_s: float, more: int = 0) -> DecayedUsage:
        """Return the usage at a later time, with the consumption `more` since then added. If `at_ms` is not later,
        nothing decays."""
        passed_s = max(0, at_ms - self.at_ms) / 1000
        factor = math.exp2(-passed_s / half_life_s)
        # the consumption is assumed to be spread evenly over the time that has passed, so a part of it has decayed
        evenly = 1.0 if passed_s == 0 else (1 - factor) / (passed_s / half_life_s * math.log(2))
        return DecayedUsage(self.amount * factor + more * evenly, max(at_ms, self.at_ms), self.since_ms)

    def rate(self, half_life_s: float) -> float:
        """Return the mean rate of the usage, in account units per second. Each second has the weight that decay leaves
        it."""
        counted_s = (self.at_ms - self.since_ms) / 1000
        weight_s = (1 - math.exp2(-counted_s / half_life_s)) * half_life_s / math.log(2)
        return self.amount / weight_s if weight_s > 0 else 0.0


def share_milli(usage: DecayedUsage, entitled_per_s: float, half_life_s: float) -> int:
    """Return the decayed usage over the decayed usage of a team that uses `entitled_per_s`, in thousandths."""
    due = entitled_per_s * half_life_s / math.log(2)
    return min(MOST_MILLI, int(usage.amount * 1000 / due))


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """Standing of a namespace, which decides its place in the queue and the choice of victims.

    - `lowered_to`: highest priority that the namespace's SharePods may have. None: not lowered.
    - `waits_until`: time until which new SharePods must wait, RFC 3339. None: they need not wait.
    - `over_budget_milli`: charge beyond the amount, in thousandths of the amount.
    - `refill_at`: time at which the budget of a lowered namespace counts again, RFC 3339.
    """

    lowered_to: int | None = None
    waits_until: str | None = None
    over_budget_milli: int = 0
    share_milli: int = ON_ENTITLEMENT
    refill_at: str | None = None

    def effective_priority(self, priority: int) -> int:
        """Return the priority by which the operator queues and evicts a SharePod of the namespace: the lower of
        `priority` and `lowered_to`."""
        return priority if self.lowered_to is None else min(priority, self.lowered_to)

    @property
    def step(self) -> int:
        """Share in steps, by which the queue is ordered; a lower step is earlier."""
        return self.share_milli // STEP_MILLI


WITHOUT_BUDGET = Standing()
"""Standing of a namespace without a budget."""
