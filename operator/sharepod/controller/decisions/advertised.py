"""Advertised amounts: capacity of the resource line's two resources that a node shows to kube-scheduler. Pure.

kube-scheduler adds up the resource lines of a node's Pods, and does not know the ledger. It must be able to bind each
Pod to the node where its row is. After a restart the kubelet must admit all Pods of the node again.

Guarantees:
- The advertised amount is never less than the sum of the lines of the Pods bound to the node.
- While no share was lowered, the amount is the capacity of the node's GPUs, so it is not written again for each Pod.
- After a share was lowered, or a Pod has lost its row, the ledger has free capacity that the Pod's line still occupies.
  This amount is advertised in addition.
- A raised share changes nothing. Its Pod's line is smaller than its row, and the ledger refuses requests beyond its
  capacity.

A Pod's scheduling gate opens only once its node advertises enough. Otherwise kube-scheduler would preempt Pods of lower
priority to fit the Pod's line.
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
    """Resource line of a Pod that is bound to a node or has a row there. `row`: the Pod's row; None if it has lost
    it."""

    carried: Carried
    row: Tenant | None

    @property
    def beyond(self) -> Carried:
        """Amounts by which the resource line exceeds the row."""
        row = _reserved(self.row)
        return Carried(max(0, self.carried.milli - row.milli), max(0, self.carried.mib - row.mib))

    @property
    def at_least(self) -> Carried:
        """For each resource: amount of the resource line or of the row, whichever is larger."""
        row = _reserved(self.row)
        return Carried(max(self.carried.milli, row.milli), max(self.carried.mib, row.mib))


def advertised(gpus: Iterable[Gpu], lines: Iterable[LineOnNode], *, in_force: bool) -> Mapping[str, int]:
    """Return the amount of each resource that a node advertises.

    `in_force`: True if the cluster turns the resource line of each Pod into a claim, or refuses the Pod. If False, the
    node advertises no more than the lines of its bound Pods need. So kube-scheduler binds no further Pod with a line,
    which would get no GPU.
    """
    some = list(lines)
    least = _sum(line.carried for line in some)
    if in_force:
        known = list(gpus)
        whole = Carried(WHOLE_GPU * len(known), sum(gpu.memory // MIB for gpu in known))
        enough = _sum((whole, *(line.beyond for line in some)))
        # The agent's report may lack a GPU, but the lines of bound Pods must fit in any case.
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
