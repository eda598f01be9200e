"""Which GPUs of a node are near each other: what several GPUs for one tenant are chosen by.

Guarantees: of all sets of the size asked for, the one whose worst pair is nearest, then whose pairs are nearest in sum,
then the one that comes first in the order given; exact up to `_EXACT` sets, beyond that grown from each GPU in turn. A
node of which no connection is known, or where all are alike, has no `Topology`: there every set is as good.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from math import comb

from sharepod.api.units import GpuUuid

from .types import GpuState

_RANKS = {"NVLINK": 0, "PIX": 1, "PXB": 2, "PHB": 3, "NODE": 4, "SYS": 5}
"""How far apart two GPUs are, in the words and the order of `nvidia-smi topo -m`."""

_SAME_NUMA, _ELSEWHERE = _RANKS["NODE"], _RANKS["SYS"]
_EXACT = 512
"""Sets that are compared one by one. Eight GPUs have at most 70 of one size."""

Distance = tuple[int, int]
"""Of the worst pair, and of all pairs in sum."""


class Topology:
    """The distances between the GPUs of one node."""

    __slots__ = ("_apart",)

    def __init__(self, apart: dict[tuple[GpuUuid, GpuUuid], int]) -> None:
        self._apart = apart

    @classmethod
    def of(cls, gpus: Sequence[GpuState]) -> Topology | None:
        apart = {(one.uuid, other.uuid): _distance(one, other) for one in gpus for other in gpus if one is not other}
        return cls(apart) if len(set(apart.values())) > 1 else None

    def distance(self, gpus: Sequence[GpuUuid]) -> Distance:
        pairs = [self._apart[pair] for pair in combinations(gpus, 2)]
        return max(pairs, default=0), sum(pairs)

    def nearest(self, gpus: Sequence[GpuUuid], count: int, *, having: Sequence[GpuUuid] = ()) -> tuple[GpuUuid, ...]:
        """`count` of these, which are at least as many, each once; those of `having`, fewer, are among them."""
        if count < 2 or len(gpus) <= count:
            return tuple(gpus[:count])
        others = [uuid for uuid in gpus if uuid not in having]
        missing = count - len(having)
        if comb(len(others), missing) <= _EXACT:
            sets = [(*having, *chosen) for chosen in combinations(others, missing)]
        else:
            sets = [self._grown(others, (*having, first), count) for first in others]
        return min(sets, key=self.distance)

    def _grown(self, others: Sequence[GpuUuid], begun: Sequence[GpuUuid], count: int) -> tuple[GpuUuid, ...]:
        chosen = list(begun)
        left = [uuid for uuid in others if uuid not in chosen]
        while len(chosen) < count:
            best = min(left, key=lambda uuid: _to_all(self._apart, uuid, chosen))
            chosen.append(best)
            left.remove(best)
        return tuple(chosen)


def _to_all(apart: dict[tuple[GpuUuid, GpuUuid], int], uuid: GpuUuid, chosen: Sequence[GpuUuid]) -> Distance:
    to = [apart[uuid, other] for other in chosen]
    return max(to), sum(to)


def _distance(one: GpuState, other: GpuState) -> int:
    """By the link that either side names, else by NUMA node; GPUs of unknown NUMA node count as apart."""
    kinds = [kind for uuid, kind in one.links if uuid == other.uuid]
    kinds += [kind for uuid, kind in other.links if uuid == one.uuid]
    known = [_RANKS[kind] for kind in kinds if kind in _RANKS]
    if known:
        return min(known)
    same = one.numa_node is not None and one.numa_node == other.numa_node
    return _SAME_NUMA if same else _ELSEWHERE
