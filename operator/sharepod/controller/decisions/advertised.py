"""The resources of the line that a node advertises, so that kube-scheduler lets a Pod go where its share is. Pure.

kube-scheduler adds up what the lines of a node's Pods say and knows nothing of the ledger. It must refuse no Pod that
the ledger has room for, and the kubelet must find room for each Pod that runs there when it starts again.

Guarantees:
- What is advertised is never less than the lines of the Pods bound to the node say together.
- Without shares that were lowered it is what the node's GPUs have: it is written once, and not with each Pod.
- A share that was lowered, or has lost its row, leaves its room to others: it is advertised on top.
- A share that was raised needs nothing: its Pod carries less than its row, and the ledger alone refuses others.

A Pod gets its share only once its node advertises that: kube-scheduler would evict Pods of lower priority for its line.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from sharepod.api.gpunode import Gpu, Tenant
from sharepod.api.resource_line import MEMORY, MILLI, NOTHING, Carried
from sharepod.api.units import MIB, WHOLE_GPU

SOON_S = 0.05
"""Seconds until a Pod is looked at again whose node does not advertise enough yet: that takes one write."""


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
    """Return the amount of each resource. `in_force`: Pods with a line are given claims, or refused.

    Where they are not, a Pod with a line would be bound without a GPU: only what bound Pods carry is advertised.
    """
    some = list(lines)
    least = _sum(line.carried for line in some)
    if in_force:
        known = list(gpus)
        whole = Carried(WHOLE_GPU * len(known), sum(gpu.memory // MIB for gpu in known))
        enough = _sum((whole, *(line.beyond for line in some)))
        least = Carried(max(least.milli, enough.milli), max(least.mib, enough.mib))  # a GPU may be out of sight
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
