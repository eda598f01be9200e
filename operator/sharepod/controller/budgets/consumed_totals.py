"""Totals of GPU time by namespace and model: what is written in GPUStatements, or, where that is more, the sum of what
agents report now, which a statement has a round later.

Guarantee: a total is never more than what was consumed, and in the end is that; it falls with neither nodes nor
restarts below what is written.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from sharepod.budgets.budget import ConsumedTotal, TotalKey
from sharepod.controller.state.facts.node_facts import GpuNodeFacts


class ConsumedTotals:
    """Sums over the largest counters of every series that was seen."""

    def __init__(self) -> None:
        self._series: dict[tuple[str, str], ConsumedTotal] = {}
        """Counters by node and series: no node raises another's."""
        self._totals: dict[TotalKey, ConsumedTotal] = {}

    def of(
        self, gpunodes: Iterable[GpuNodeFacts], written: Mapping[TotalKey, ConsumedTotal]
    ) -> dict[TotalKey, ConsumedTotal]:
        """Take in what is reported now; return the totals. `written`: those of the statements."""
        for gpunode in gpunodes:
            for entry in gpunode.status.consumption:
                series = (gpunode.name, entry.series)
                was = self._series.get(series, ConsumedTotal())
                held = max(was.held_ms, entry.held_milliseconds)
                reserved = max(was.reserved_ms, entry.reserved_milliseconds)
                key = (entry.namespace, entry.model)
                total = self._totals.get(key, ConsumedTotal())
                self._series[series] = ConsumedTotal(held, reserved)
                self._totals[key] = ConsumedTotal(
                    total.held_ms + held - was.held_ms, total.reserved_ms + reserved - was.reserved_ms
                )
        found = dict(self._totals)
        for key, total in written.items():
            seen = found.get(key, ConsumedTotal())
            found[key] = ConsumedTotal(max(seen.held_ms, total.held_ms), max(seen.reserved_ms, total.reserved_ms))
        return found
