"""Topology of one node: distances between its GPUs, by which close GPUs are chosen for a tenant with several.

Guarantees:
- `nearest` returns the set with the least distance between its farthest two GPUs, then the least sum over all pairs,
  then the first in the given order.
- The choice is exact if there are at most `_EXACT_SETS` sets. Otherwise one set is grown from each GPU, by adding the
  nearest GPU, and the best of these sets is chosen.
- A node without known connections, or with equal distances, has no `Topology`: all sets are equally good there.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from math import comb

from sharepod.api.units import GpuUuid

from .types import GpuState

_RANKS = {"NVLINK": 0, "PIX": 1, "PXB": 2, "PHB": 3, "NODE": 4, "SYS": 5}
"""Distance of two GPUs by their connection, in the terms and order of `nvidia-smi topo -m`; 0 is nearest."""

_SAME_NUMA, _ELSEWHERE = _RANKS["NODE"], _RANKS["SYS"]
_EXACT_SETS = 512
"""Most sets of GPUs that are compared one by one: a node of eight GPUs has at most 70 sets of one size, a node of
sixteen up to 12,870."""

Distance = tuple[int, int]
"""Distance of a set of GPUs: (distance of its farthest pair, sum over all its pairs). Sets are compared by it."""


class Topology:
    """Distances between the GPUs of one node, by pair of UUIDs."""

    __slots__ = ("_distances",)

    def __init__(self, distances: dict[tuple[GpuUuid, GpuUuid], int]) -> None:
        self._distances = distances

    @classmethod
    def of(cls, gpus: Sequence[GpuState]) -> Topology | None:
        """Return the topology of these GPUs. None if all distances are equal."""
        distances = {
            (one.uuid, other.uuid): _distance(one, other) for one in gpus for other in gpus if one is not other
        }
        return cls(distances) if len(set(distances.values())) > 1 else None

    def distance(self, gpus: Sequence[GpuUuid]) -> Distance:
        """Return the distance of a set of GPUs."""
        pairs = [self._distances[pair] for pair in combinations(gpus, 2)]
        return max(pairs, default=0), sum(pairs)

    def nearest(self, gpus: Sequence[GpuUuid], count: int, *, having: Sequence[GpuUuid] = ()) -> tuple[GpuUuid, ...]:
        """Choose `count` of these GPUs, which must be distinct and at least `count`. All GPUs of `having`, fewer than
        `count`, are among the chosen GPUs."""
        if count < 2 or len(gpus) <= count:
            return tuple(gpus[:count])
        others = [uuid for uuid in gpus if uuid not in having]
        missing = count - len(having)
        if comb(len(others), missing) <= _EXACT_SETS:
            sets = [(*having, *chosen) for chosen in combinations(others, missing)]
        else:
            sets = [self._grown(others, (*having, first), count) for first in others]
        return min(sets, key=self.distance)

    def _grown(self, others: Sequence[GpuUuid], begun: Sequence[GpuUuid], count: int) -> tuple[GpuUuid, ...]:
        chosen = list(begun)
        left = [uuid for uuid in others if uuid not in chosen]
        while len(chosen) < count:
            best = min(left, key=lambda uuid: _to_all(self._distances, uuid, chosen))
            chosen.append(best)
            left.remove(best)
        return tuple(chosen)


def _to_all(distances: dict[tuple[GpuUuid, GpuUuid], int], uuid: GpuUuid, chosen: Sequence[GpuUuid]) -> Distance:
    to = [distances[uuid, other] for other in chosen]
    return max(to), sum(to)


def _distance(one: GpuState, other: GpuState) -> int:
    """Return the distance of two GPUs: by the link that either of them reports, otherwise by their NUMA nodes. If a
    NUMA node is unknown, they count as on different nodes."""
    kinds = [kind for uuid, kind in one.links if uuid == other.uuid]
    kinds += [kind for uuid, kind in other.links if uuid == one.uuid]
    known = [_RANKS[kind] for kind in kinds if kind in _RANKS]
    if known:
        return min(known)
    same = one.numa_node is not None and one.numa_node == other.numa_node
    return _SAME_NUMA if same else _ELSEWHERE
