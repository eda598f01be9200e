"""The resources of the line that a node advertises, so that kube-scheduler can bind a Pod where its share is. Pure.

kube-scheduler adds up the lines of a node's Pods and does not know the ledger. It must refuse no Pod for which the
ledger has room, and the kubelet must readmit every Pod that runs there when the kubelet restarts.

Guarantees:
- The advertised amount is never less than the sum of the lines of the Pods bound to the node.
- Without lowered shares the amount equals the capacity of the node's GPUs: it is written once, not with each Pod.
- A lowered share, or a Pod without its row, frees room for others: the freed amount is advertised in addition.
- A raised share needs no change: its Pod's line is smaller than its row, and the ledger refuses other requests.

A Pod gets its share only once its node advertises that much: otherwise kube-scheduler would evict Pods of lower
priority for its line.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from sharepod.api.gpunode import Gpu, Tenant
from sharepod.api.resource_line import MEMORY, MILLI, NOTHING, Carried
from sharepod.api.units import MIB, WHOLE_GPU

SOON_S = 0.05
"""Seconds until the next step for a Pod whose node does not advertise enough yet: the time of one write."""


@dataclass(frozen=True, slots=True)
class LineOnNode:
    """Line of a Pod that is bound to a node or has a row there. `row`: None if it has lost it."""

    carried: Carried
    row: Tenant | None

    @property
    def beyond(self) -> Carried:
        """Amounts that it carries beyond its row."""
        row = _reserved(self.row)
        return Carried(max(0, self.carried.milli - row.milli), max(0, self.carried.mib - row.mib))

    @property
    def at_least(self) -> Carried:
        """Amounts that it carries or reserves, whichever is more."""
        row = _reserved(self.row)
        return Carried(max(self.carried.milli, row.milli), max(self.carried.mib, row.mib))


def advertised(gpus: Iterable[Gpu], lines: Iterable[LineOnNode], *, in_force: bool) -> Mapping[str, int]:
    """Return the amount of each resource. `in_force`: Pods with a line get claims, or are refused.

    Otherwise a Pod with a line would be bound without a GPU, so only the lines of bound Pods are advertised.
    """
    some = list(lines)
    least = _sum(line.carried for line in some)
    if in_force:
        known = list(gpus)
        whole = Carried(WHOLE_GPU * len(known), sum(gpu.memory // MIB for gpu in known))
        enough = _sum((whole, *(line.beyond for line in some)))
        # a GPU may be missing from the report
        least = Carried(max(least.milli, enough.milli), max(least.mib, enough.mib))
    return {MILLI: least.milli, MEMORY: least.mib}


def _sum(amounts: Iterable[Carried]) -> Carried:
    total = NOTHING
    for one in amounts:
        total = Carried(total.milli + one.milli, total.mib + one.mib)
    return total


def _reserved(row: Tenant | None) -> Carried:
    """Return the thousandths and MiB that a row reserves on all its GPUs."""
    if row is None:
        return NOTHING
    return Carried(row.request_milli * len(row.gpus), row.memory // MIB * len(row.gpus))
