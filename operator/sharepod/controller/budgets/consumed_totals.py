"""Totals of GPU time by namespace and GPU model, more recent than the GPUStatements.

A total is the larger of two: the statement's total, and the sum of the agents' present reports. A statement contains a
report one round later. Between two reports, the reserved time is estimated from the reservations.

Guarantees:
- A total never exceeds the real consumption, and finally equals it. Exception: a share that was raised since the last
  report counts with its new size, for `_MOST_MS` at most.
- A total is never below the statement's, whatever nodes are deleted or restarted.
- The report of one node never changes the count of another node.
- Only the series in the agents' present reports are summed. A series has one node's counts of one namespace and model.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from sharepod.api.consumption import MAX_MODEL
from sharepod.budgets.budget import ConsumedTotal, TotalKey
from sharepod.controller.state.facts.node_facts import GpuNodeFacts

_MOST_MS = 90_000
"""Longest time in milliseconds for which reserved time is estimated without a report. Agents report each minute."""


class ReportAges:
    """Ages of the nodes' reports, measured by this process's clock because a node's clock may be wrong."""

    def __init__(self) -> None:
        self._seen: dict[str, tuple[str, int]] = {}

    def update(self, gpunodes: Iterable[GpuNodeFacts], now_ms: int) -> dict[str, int]:
        """Return the milliseconds since this process first saw each node's latest report, at most `_MOST_MS`."""
        before, self._seen = self._seen, {}
        for gpunode in gpunodes:
            at = gpunode.status.consumption_at
            if at is not None:
                known = before.get(gpunode.name)
                self._seen[gpunode.name] = known if known is not None and known[0] == at else (at, now_ms)
        return {name: min(_MOST_MS, max(0, now_ms - seen_ms)) for name, (_at, seen_ms) in self._seen.items()}


def reserving(gpunode: GpuNodeFacts) -> Counter[TotalKey]:
    """Return the thousandths of GPUs reserved on a node, by namespace and model. A share counts if its agent has
    counted it since before the last report, so the next report will contain its time from now on."""
    found: Counter[TotalKey] = Counter()
    at = gpunode.status.consumption_at
    for row in gpunode.rows.values():
        seen = gpunode.seen(row.id)
        if at is None or seen is None or seen.counted_since is None or seen.counted_since > at:
            continue
        for uuid in row.gpus:
            if (gpu := gpunode.gpus.get(uuid)) is not None:
                found[row.namespace, gpu.model[:MAX_MODEL]] += row.request_milli
    return found


def consumed_totals(
    gpunodes: Iterable[GpuNodeFacts], written: Mapping[TotalKey, ConsumedTotal], ages_ms: Mapping[str, int]
) -> dict[TotalKey, ConsumedTotal]:
    """Return the totals at present. `written`: totals of the statements; `ages_ms`: age of each node's report."""
    found: dict[TotalKey, ConsumedTotal] = {}
    for gpunode in gpunodes:
        for entry in gpunode.status.consumption:
            _add(found, (entry.namespace, entry.model), entry.held_milliseconds, entry.reserved_milliseconds)
        if age_ms := ages_ms.get(gpunode.name, 0):
            for key, milli in reserving(gpunode).items():
                _add(found, key, 0, milli * age_ms // 1000)
    for key, total in written.items():
        seen = found.get(key, ConsumedTotal())
        found[key] = ConsumedTotal(max(seen.held_ms, total.held_ms), max(seen.reserved_ms, total.reserved_ms))
    return found


def _add(found: dict[TotalKey, ConsumedTotal], key: TotalKey, held_ms: int, reserved_ms: int) -> None:
    total = found.get(key, ConsumedTotal())
    found[key] = ConsumedTotal(total.held_ms + held_ms, total.reserved_ms + reserved_ms)
