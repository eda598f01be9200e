"""Demand: how often requests of each class arrive. Binpack keeps room for likely classes.

Guarantees:
- The demand needs no configuration and no training.
- An arrival's weight halves with every `HALF_LIFE` later arrivals, so a changed workload is followed within a few
  thousand arrivals.
- At most `_MAX_CLASSES` classes are kept from one renewal (the computation of new weights from the demand) to the next.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum

from sharepod.api.gpunode import Mode
from sharepod.api.units import WHOLE_GPU, Bytes
from sharepod.placement.state.types import PlacementRequest

from .label_demand import LabelDemand, LabelShares
from .sliced_work import Slices

HALF_LIFE = 10_000
"""Arrivals after which an arrival counts half. A changed workload outweighs the old one within two half-lives."""

_GROWTH = 2.0 ** (1.0 / HALF_LIFE)
_RESCALE_AT = 1e12
"""Weight of one arrival at which all weights are divided by it: far below the largest float, so that no sum
overflows."""
_MAX_CLASSES = 1024
"""Most demand classes that a renewal keeps; the rarest are dropped. The number bounds memory and the time of a
renewal."""
_FIRST_RENEWAL = 64
"""Arrivals before the first renewal. Fewer do not describe a demand; before the first renewal Binpack ranks by
`policies.PACK`."""
_RENEWAL_EVERY = range(32, 256)
"""Arrivals from one renewal to the next: an eighth of the arrivals so far, within this range."""


class MemoryShare(IntEnum):
    """Memory of a request without bytes, as a part of the GPU's. Negative, to sort before bytes."""

    ALL = -2
    """All of the GPU's memory: mode Exclusive."""
    IN_PROPORTION = -1
    """The same part of the GPU's memory as of its time: `spec.gpu.memory` is not set."""


@dataclass(frozen=True, slots=True, order=True)
class DemandClass:
    """Class of requests that Binpack treats as equal when it learns the demand. A class without `models` is called a
    demand *shape*."""

    count: int
    """Number of GPUs."""
    milli: int
    """Thousandths of the time of each GPU."""
    memory: Bytes | MemoryShare
    """Bytes of each GPU's memory, or a part of it."""
    cpu: int
    """Requested CPU, in thousandths of a core."""
    models: tuple[str, ...] = ()
    """GPU models, sorted; empty: any."""


def memory_of(request: PlacementRequest) -> Bytes | MemoryShare:
    """Return the memory that a request takes on each of its GPUs: bytes, or a part of the GPU's memory."""
    if request.gpu.mode is Mode.EXCLUSIVE:
        return MemoryShare.ALL
    return MemoryShare.IN_PROPORTION if request.gpu.memory is None else Bytes(int(request.gpu.memory))


def memory_milli(memory: int | MemoryShare, milli: int, size: int) -> int:
    """Return the thousandths of a GPU's memory that a request takes, rounded up. More than 1000: the request does not
    fit.

    Args:
        memory: Bytes, or a part of the GPU's memory.
        milli: Thousandths of the GPU's time.
        size: Bytes of the GPU's memory; 0: unknown.
    """
    if memory == MemoryShare.ALL:
        return WHOLE_GPU
    if memory == MemoryShare.IN_PROPORTION or not size:
        return milli
    return min(-(-memory * WHOLE_GPU // size), WHOLE_GPU + 1)


def class_of(request: PlacementRequest) -> DemandClass | None:
    """Return the demand class of a request. None for best effort, which uses only time that other tenants leave
    idle."""
    gpu = request.gpu
    whole = gpu.mode is Mode.EXCLUSIVE
    if not gpu.request_milli and not whole:
        return None
    milli = WHOLE_GPU if whole else int(gpu.request_milli)
    models = tuple(sorted(set(gpu.models)))
    return DemandClass(gpu.count, milli, memory_of(request), request.pod.resources.cpu_milli, models)


def in_order(shares: Mapping[DemandClass, float]) -> dict[DemandClass, float]:
    """Return the shares sorted by class, in the one order that all tables of this package use."""
    ordered = sorted(shares, key=lambda known: (known.count, known.milli, known.memory, known.cpu, known.models))
    return {known: shares[known] for known in ordered}


class Demand:
    """Weighted count of arrivals, by class and by label. Later arrivals weigh more (`HALF_LIFE`). `arrivals`: total
    number of arrivals. `labels`: weighted count by label."""

    def __init__(self) -> None:
        self._weights: dict[DemandClass, float] = {}
        self._total = 0.0
        self._unit = 1.0  # weight of the next arrival; it grows, so earlier weights need no update
        self._next_renewal = _FIRST_RENEWAL
        self.labels = LabelDemand()
        self.arrivals = 0

    @property
    def due(self) -> bool:
        """True once enough arrivals have come since the last `shares` for a renewal."""
        return self.arrivals >= self._next_renewal

    def count(self, request: PlacementRequest | None) -> None:
        """Count one arrival. None: a pod without GPUs, which counts only in the total."""
        what = None if request is None else class_of(request)
        self.arrivals += 1
        self._unit *= _GROWTH
        self._total += self._unit
        if request is not None:
            self.labels.count(request, self._unit)
        if what is not None:
            self._weights[what] = self._weights.get(what, 0.0) + self._unit
        if self._unit > _RESCALE_AT:
            self._total /= self._unit
            self._weights = {known: weight / self._unit for known, weight in self._weights.items()}
            self.labels.rescale(self._unit)
            self._unit = 1.0

    def shares(self) -> dict[DemandClass, float]:
        """Return, for each class, its part (0 to 1) of the weight of all arrivals, in the order of `in_order`. Schedule
        the next renewal."""
        pause = min(max(self.arrivals // 8, _RENEWAL_EVERY.start), _RENEWAL_EVERY.stop)
        self._next_renewal = max(self.arrivals + pause, _FIRST_RENEWAL)
        if len(self._weights) > _MAX_CLASSES:
            kept = sorted(self._weights, key=lambda known: (-self._weights[known], known))[:_MAX_CLASSES]
            self._weights = {known: self._weights[known] for known in kept}
        return in_order({known: weight / self._total for known, weight in self._weights.items()})

    def label_shares(self) -> Slices[LabelShares]:
        """Return the parts of all arrivals by label, computed in slices."""
        yield from self.labels.keep_commonest()
        return self.labels.shares(self._total)
