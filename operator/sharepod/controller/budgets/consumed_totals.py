"""Totals of GPU time by namespace and model: what is written in GPUStatements, or, where that is more, the sum of what
agents report now, which a statement has a round later.

Guarantees:
- A total is never more than what was consumed, and in the end is that; it falls with neither nodes nor restarts below
  what is written.
- No node raises what another counts.
- Nothing is kept of what nodes no longer report.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from sharepod.budgets.budget import ConsumedTotal, TotalKey
from sharepod.controller.state.facts.node_facts import GpuNodeFacts


def consumed_totals(
    gpunodes: Iterable[GpuNodeFacts], written: Mapping[TotalKey, ConsumedTotal]
) -> dict[TotalKey, ConsumedTotal]:
    """Return the totals as they are now. `written`: those of the statements."""
    found: dict[TotalKey, ConsumedTotal] = {}
    for gpunode in gpunodes:
        for entry in gpunode.status.consumption:
            key = (entry.namespace, entry.model)
            total = found.get(key, ConsumedTotal())
            found[key] = ConsumedTotal(
                total.held_ms + entry.held_milliseconds, total.reserved_ms + entry.reserved_milliseconds
            )
    for key, total in written.items():
        seen = found.get(key, ConsumedTotal())
        found[key] = ConsumedTotal(max(seen.held_ms, total.held_ms), max(seen.reserved_ms, total.reserved_ms))
    return found
