"""Requests for a whole node of the largest kind, which count as demand before the first of them arrives.

In a cluster with nodes of several sizes, a job that fills a largest node fits only on these few nodes, and may be the
rarest request. An engine that learns only from arrivals would fill these nodes with small requests, and learn their
value only when it refuses the first large job.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from sharepod.api.units import WHOLE_GPU
from sharepod.placement.state.types import NodeState

from .demand import DemandClass, MemoryShare, in_order

EXPECTED = 0.0005
"""Least part of all arrivals that requests for whole nodes of the largest kinds count for, together. With four times as
much, the six traces are packed equally well."""
OF_CPU = 0.9
"""Part of the node's CPU that a request for the whole node is assumed to take. The node's own processes need the
rest."""
_MOST_KINDS = 4
"""Most kinds of largest nodes: each adds one demand shape to the work of a decision."""


def largest_kinds(nodes: Iterable[NodeState | None]) -> list[tuple[int, int]]:
    """Return (GPUs, thousandths of a core) of the largest kinds of nodes, most GPUs first. A kind is largest if no
    other has as much of both. Empty if all are largest."""
    kinds = {(len(node.gpus), node.allocatable.cpu_milli) for node in nodes if node is not None and node.gpus}
    most: dict[int, int] = {}  # most CPU by number of GPUs; sorting all kinds would cost more
    for gpus, cpu in kinds:
        most[gpus] = max(cpu, most.get(gpus, cpu))
    largest: list[tuple[int, int]] = []
    for gpus, cpu in sorted(most.items(), reverse=True):
        if not largest or cpu > largest[-1][1]:
            largest.append((gpus, cpu))
    return largest[:_MOST_KINDS] if len(largest) < len(kinds) else []


def with_whole_nodes(shares: Mapping[DemandClass, float], kinds: Iterable[tuple[int, int]]) -> dict[DemandClass, float]:
    """Return the parts of all arrivals by class, with requests for whole nodes raised to their least part. `kinds`:
    (GPUs, thousandths of a core) of the largest nodes."""
    whole = [
        DemandClass(gpus, WHOLE_GPU, MemoryShare.IN_PROPORTION, int(cpu * OF_CPU)) for gpus, cpu in kinds if gpus > 1
    ]
    expected = {known: max(shares.get(known, 0.0), EXPECTED / len(whole)) for known in whole}
    return in_order({**shares, **expected})
