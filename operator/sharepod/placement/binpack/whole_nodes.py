"""Requests for a whole node of the largest kind, which are expected before the first has come.

Where the nodes are of several sizes, a job that fills one of the largest has nowhere else to go, and those are few. It
may be the rarest of all requests: an engine that goes by arrivals alone fills those nodes with what fits anywhere, and
learns what they were worth when it has to turn the first such job away.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from sharepod.api.units import WHOLE_GPU
from sharepod.placement.state.types import NodeState

from .demand import DemandClass, MemoryShare, in_order

EXPECTED = 0.0005
"""Part of all arrivals that requests for whole nodes of the largest kinds count as, at the least. With four times as
much the six traces are packed the same."""
OF_CPU = 0.9
"""Part of the node's CPU that such a request is expected to ask for: some of it is the node's own."""
_MOST_KINDS = 4
"""Kinds of largest nodes: each costs a decision one demand shape."""


def largest_kinds(nodes: Iterable[NodeState | None]) -> list[tuple[int, int]]:
    """Return GPUs and thousandths of a core of the kinds of nodes of which no other has as much of both, those with the
    most GPUs first; none where all are such."""
    kinds = {(len(node.gpus), node.allocatable.cpu_milli) for node in nodes if node is not None and node.gpus}
    most: dict[int, int] = {}  # sorted instead of all kinds, of which there may be as many as nodes
    for gpus, cpu in kinds:
        most[gpus] = max(cpu, most.get(gpus, cpu))
    largest: list[tuple[int, int]] = []
    for gpus, cpu in sorted(most.items(), reverse=True):
        if not largest or cpu > largest[-1][1]:
            largest.append((gpus, cpu))
    return largest[:_MOST_KINDS] if len(largest) < len(kinds) else []


def with_whole_nodes(shares: Mapping[DemandClass, float], kinds: Iterable[tuple[int, int]]) -> dict[DemandClass, float]:
    """Return the shares of all arrivals with what is expected at the least of whole nodes of these kinds."""
    whole = [
        DemandClass(gpus, WHOLE_GPU, MemoryShare.IN_PROPORTION, int(cpu * OF_CPU)) for gpus, cpu in kinds if gpus > 1
    ]
    expected = {known: max(shares.get(known, 0.0), EXPECTED / len(whole)) for known in whole}
    return in_order({**shares, **expected})
