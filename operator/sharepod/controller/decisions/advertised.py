"""Amounts of the line's resources that a node advertises, so that kube-scheduler can bind a Pod where its share is.
Pure.

kube-scheduler adds up the lines of a node's Pods and does not know the ledger. It must not refuse a Pod that has a row
in the ledger. After a restart the kubelet must admit every Pod that runs on the node again.

Guarantees:
- The advertised amount is never less than the sum of the lines of the Pods bound to the node.
- Without lowered shares the amount equals the capacity of the node's GPUs: it is written once, not with each Pod.
- If a share was lowered, or a Pod has lost its row, the ledger has room that the Pod's line still occupies. This amount
  is advertised in addition.
- A raised share changes nothing: its Pod's line is smaller than its row, and the ledger itself refuses requests beyond
  its room.

A Pod's gate opens only once its node advertises enough. Otherwise kube-scheduler would preempt Pods of lower priority
for the Pod's line.
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
    """Line of a Pod that is bound to a node or has a row there. `row`: the Pod's row; None if it has lost its row."""

    carried: Carried
    row: Tenant | None

    @property
    def beyond(self) -> Carried:
        """Amounts by which the line exceeds the row."""
        row = _reserved(self.row)
        return Carried(max(0, self.carried.milli - row.milli), max(0, self.carried.mib - row.mib))

    @property
    def at_least(self) -> Carried:
        """Amounts of the line or of the row, whichever is larger, per resource."""
        row = _reserved(self.row)
        return Carried(max(self.carried.milli, row.milli), max(self.carried.mib, row.mib))


def advertised(gpus: Iterable[Gpu], lines: Iterable[LineOnNode], *, in_force: bool) -> Mapping[str, int]:
    """Return the amount of each resource that a node advertises.

    `in_force`: True if the cluster turns each Pod's line into a claim or refuses the Pod. If False, only the lines of
    bound Pods are advertised: otherwise kube-scheduler could bind a Pod with a line that gets no GPU.
    """
    some = list(lines)
    least = _sum(line.carried for line in some)
    if in_force:
        known = list(gpus)
        whole = Carried(WHOLE_GPU * len(known), sum(gpu.memory // MIB for gpu in known))
        enough = _sum((whole, *(line.beyond for line in some)))
        # the report may lack a GPU, and the lines of bound Pods must fit
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
