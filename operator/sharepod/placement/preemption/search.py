"""Search: finds the cheapest set of units (tenants that end together) whose preemption frees the amounts that a request
lacks. Pure.

Guarantees:
- The result is exact within `_VISITS` steps: no other sufficient set costs less. After that it is the cheapest set
  found, never worse than `_greedy`.
- No unit of the result is superfluous: without any one of them too little is freed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .shortage import Amounts, Dimension, Frees
from .victims import BOUNDED_ITEMS, PlanCost, Unit, cost_of

_VISITS = 4096
"""Most steps of a search for one set of GPUs. They suffice for every set of twelve units, and for more units if the
bounds exclude sets. They take some 10 ms at most."""


@dataclass(frozen=True, slots=True)
class Chosen:
    """Units whose preemption frees enough, with the cost."""

    cost: PlanCost
    evict: tuple[Unit, ...]
    lower: tuple[Unit, ...]


def cheapest_set(
    short: Amounts,
    units: Sequence[tuple[Unit, Frees]],
    forced: Sequence[Unit],
    *,
    below: PlanCost | None = None,
) -> Chosen | None:
    """Return the cheapest set of units whose preemption frees the amounts `short`. None if no set does.

    Args:
        units: Units that may be preempted, including `forced`, which are all evicted.
        below: Most that the set may cost; None: any cost.
    """
    search = _Search(short, units, forced, below)
    search.run()
    return search.best


class _Search:
    """Depth-first search: each unit in turn is evicted, lowered or spared. A branch that cannot beat the best set so
    far is cut."""

    def __init__(
        self, short: Amounts, units: Sequence[tuple[Unit, Frees]], forced: Sequence[Unit], below: PlanCost | None
    ) -> None:
        self.best: Chosen | None = None
        self._below = below
        self._forced = list(forced)
        names = {unit.name for unit in forced}
        self._short = dict(short)
        for unit, frees in units:
            if unit.name in names:
                self._short = _less(self._short, frees.by_end)
        useful = [
            item for item in units if item[0].name not in names and any(name in self._short for name in item[1].by_end)
        ]
        self._units = sorted(useful, key=self._usefulness)
        self._left = self._most_that_is_left()
        self._visits = 0

    def run(self) -> None:
        """Search for the best set, and store it in `best`."""
        if not _covers(self._left[0], self._short):
            return
        self._greedy()
        self._visit(0, self._short, self._forced, [])

    def _usefulness(self, item: tuple[Unit, Frees]) -> tuple[int | str, ...]:
        unit, frees = item
        part = sum(
            min(amount, self._short.get(name, 0)) * 1000 // self._short[name]
            for name, amount in frees.by_end.items()
            if name in self._short
        )
        return (
            unit.protected,
            unit.priority,
            -part,
            -unit.over_budget_milli,
            -unit.started,
            unit.lost_seconds,
            unit.name,
        )

    def _most_that_is_left(self) -> list[Amounts]:
        """Return, for each position in `_units`, the sum of the amounts that the units from there on can free."""
        sums: list[Amounts] = [{}]
        for _, frees in reversed(self._units):
            total = dict(sums[-1])
            for name, amount in frees.by_end.items():
                total[name] = total.get(name, 0) + amount
            sums.append(total)
        sums.reverse()
        return sums

    def _greedy(self) -> None:
        """Evict units in order until enough is free. Then spare superfluous units, the most expensive first."""
        # 1. If only time is short, lower all units that may be lowered. 2. Otherwise evict units in order.
        lowered = [item for item in self._units if item[1].by_lowering]
        short = self._short
        for _, frees in lowered:
            short = _less(short, frees.by_lowering)
        evicted: list[tuple[Unit, Frees]] = []
        for item in self._units:
            if not short:
                break
            evicted.append(item)
            lowered = [other for other in lowered if other is not item]
            short = self._still_short(evicted, lowered)
        if short:
            return
        # 3. Spare superfluous units.
        for item in sorted(evicted, key=lambda one: cost_of([one[0]], []), reverse=True):
            fewer = [other for other in evicted if other is not item]
            also = [*lowered, item] if item[1].by_lowering else lowered
            if not self._still_short(fewer, also):
                evicted, lowered = fewer, also
        for item in sorted(lowered, key=lambda one: cost_of([], [one[0]]), reverse=True):
            fewer = [other for other in lowered if other is not item]
            if not self._still_short(evicted, fewer):
                lowered = fewer
        self._offer([*self._forced, *(unit for unit, _ in evicted)], [unit for unit, _ in lowered])

    def _still_short(self, evicted: Sequence[tuple[Unit, Frees]], lowered: Sequence[tuple[Unit, Frees]]) -> Amounts:
        short = self._short
        for _, frees in evicted:
            short = _less(short, frees.by_end)
        for _, frees in lowered:
            short = _less(short, frees.by_lowering)
        return short

    def _visit(self, position: int, short: Amounts, evicted: list[Unit], lowered: list[Unit]) -> None:
        if not short:
            self._offer(evicted, lowered)
            return
        if position == len(self._units) or self._visits >= _VISITS or not _covers(self._left[position], short):
            return
        self._visits += 1
        unit, frees = self._units[position]
        if any(name in short for name in frees.by_lowering):
            self._visit(position + 1, _less(short, frees.by_lowering), evicted, [*lowered, unit])
        more = [*evicted, unit]
        if any(name in short for name in frees.by_end) and self._can_be_best(more):
            self._visit(position + 1, _less(short, frees.by_end), more, lowered)
        self._visit(position + 1, short, evicted, lowered)

    def _can_be_best(self, evicted: Sequence[Unit]) -> bool:
        begin = cost_of(evicted, ())[:BOUNDED_ITEMS]
        known = [cost for cost in (self._below, self.best.cost if self.best is not None else None) if cost is not None]
        return all(begin <= cost[:BOUNDED_ITEMS] for cost in known)

    def _offer(self, evicted: Sequence[Unit], lowered: Sequence[Unit]) -> None:
        cost = cost_of(evicted, lowered)
        if self._below is not None and cost > self._below:
            return
        if self.best is None or cost < self.best.cost:
            self.best = Chosen(cost, tuple(evicted), tuple(lowered))


def _less(short: Mapping[Dimension, int], freed: Mapping[Dimension, int]) -> Amounts:
    """Return the amounts that are still short after `freed`."""
    return {name: amount - freed.get(name, 0) for name, amount in short.items() if amount > freed.get(name, 0)}


def _covers(freed: Mapping[Dimension, int], short: Mapping[Dimension, int]) -> bool:
    return all(freed.get(name, 0) >= amount for name, amount in short.items())
