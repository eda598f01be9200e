"""The resources of the line that a node advertises, so that kube-scheduler lets a Pod go where its share is. Pure.

kube-scheduler adds up what the lines of a node's Pods say and knows nothing of the ledger. It must refuse no Pod that
the ledger has room for, and the kubelet must find room for each Pod that runs there when it starts again.

Guarantees:
- What is advertised is never less than the lines of the Pods bound to the node say together.
- Without shares that were lowered it is what the node's GPUs have: it is written once, and not with each Pod.
- A share that was lowered, or has lost its row, leaves its room to others: it is advertised on top.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from sharepod.api.claims import ClaimRequest
from sharepod.api.gpunode import Gpu, Tenant
from sharepod.api.plain_pods import MEMORY, MIB, MILLI
from sharepod.api.units import WHOLE_GPU


@dataclass(frozen=True, slots=True)
class LineOnNode:
    """Line of a Pod that is bound to a node or has a row there. `row`: None if it has lost it."""

    request: ClaimRequest
    row: Tenant | None


def advertised(gpus: Iterable[Gpu], lines: Iterable[LineOnNode], *, in_force: bool) -> Mapping[str, int]:
    """Return the amount of each resource. `in_force`: Pods with a line are given claims, or refused.

    Where they are not, a Pod with a line would be bound without a GPU: only what bound Pods carry is advertised.
    """
    carried = [(_carried(line.request), _reserved(line.row)) for line in lines]
    if not in_force:
        sums = [sum(said[index] for said, _ in carried) for index in range(2)]
    else:
        some = list(gpus)
        whole = (WHOLE_GPU * len(some), sum(gpu.memory // MIB for gpu in some))
        more = [sum(max(0, said[index] - row[index]) for said, row in carried) for index in range(2)]
        sums = [whole[index] + more[index] for index in range(2)]
    return dict(zip((MILLI, MEMORY), sums, strict=True))


def _carried(request: ClaimRequest) -> tuple[int, int]:
    """Return the thousandths and MiB that a line says, as kube-scheduler counts them."""
    memory = request.gpu.memory
    return request.most_milli * request.gpu.count, 0 if memory is None else memory // MIB * request.gpu.count


def _reserved(row: Tenant | None) -> tuple[int, int]:
    """Return the thousandths and MiB that a row reserves on all its GPUs."""
    if row is None:
        return 0, 0
    return row.request_milli * len(row.gpus), row.memory // MIB * len(row.gpus)
