"""Totals of GPU time by namespace and GPU model. A total is the GPUStatement's or, if larger, the sum of the agents'
present reports. A statement contains these reports one round later.

Guarantees:
- A total never exceeds the real consumption, and finally equals it. Deleted nodes and restarts never reduce a total
  below the statement's.
- The report of one node never changes the count of another node.
- Series (counts per tenant and GPU model) that nodes no longer report are not kept.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from sharepod.budgets.budget import ConsumedTotal, TotalKey
from sharepod.controller.state.facts.node_facts import GpuNodeFacts


def consumed_totals(
    gpunodes: Iterable[GpuNodeFacts], written: Mapping[TotalKey, ConsumedTotal]
) -> dict[TotalKey, ConsumedTotal]:
    """Return the present totals. `written`: totals of the statements."""
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
