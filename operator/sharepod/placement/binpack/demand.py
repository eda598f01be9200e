"""Which requests come, and how often: what packing keeps room for.

Guarantees: nothing has to be configured or trained; a request counts less the more have come after it, so that a
changed workload is followed within a few thousand arrivals; the memory this takes is bounded.
"""

from __future__ import annotations

from dataclasses import dataclass

from sharepod.api.gpunode import Mode
from sharepod.api.units import WHOLE_GPU
from sharepod.placement.state.types import PlacementRequest

HALF_LIFE = 10_000
"""Arrivals after which one counts half."""

_GROWTH = 2.0 ** (1.0 / HALF_LIFE)
_RESCALE_AT = 1e12
_MAX_CLASSES = 1024
_FIRST_RENEWAL = 64
"""Fewer arrivals say nothing of a demand: until then Binpack goes by what is left over."""
_RENEWAL_EVERY = range(32, 256)
"""Arrivals from one renewal to the next, more once an eighth more says little that is new."""


@dataclass(frozen=True, slots=True, order=True)
class DemandClass:
    """Requests that are alike to packing: `milli` thousandths of time on each of `count` GPUs of one of `models` (none:
    of any), with `cpu` thousandths of a core beside them. `memory`: bytes on each GPU; -1: in proportion to the time,
    -2: all of it."""

    count: int
    milli: int
    memory: int
    cpu: int
    models: tuple[str, ...] = ()


def class_of(request: PlacementRequest) -> DemandClass | None:
    """None for best effort, which lives on what others leave."""
    gpu = request.gpu
    whole = gpu.mode is Mode.EXCLUSIVE
    if not gpu.request and not whole:
        return None
    memory = -2 if whole else -1 if gpu.memory is None else int(gpu.memory)
    milli = WHOLE_GPU if whole else int(gpu.request)
    return DemandClass(gpu.count, milli, memory, request.pod.resources.cpu_milli, tuple(sorted(set(gpu.models))))


class Demand:
    """Counts arrivals. `arrivals`: how many, ever."""

    def __init__(self) -> None:
        self._weights: dict[DemandClass, float] = {}
        self._total = 0.0
        self._unit = 1.0
        self._next_renewal = _FIRST_RENEWAL
        self.arrivals = 0

    @property
    def due(self) -> bool:
        """Enough has come since `shares` was last asked for to ask again."""
        return self.arrivals >= self._next_renewal

    def count(self, what: DemandClass | None) -> None:
        """One arrival; None: of something that takes no GPU time."""
        self.arrivals += 1
        self._unit *= _GROWTH
        self._total += self._unit
        if what is not None:
            self._weights[what] = self._weights.get(what, 0.0) + self._unit
        if self._unit > _RESCALE_AT:
            self._total /= self._unit
            self._weights = {known: weight / self._unit for known, weight in self._weights.items()}
            self._unit = 1.0

    def shares(self) -> dict[DemandClass, float]:
        """The share of each class among all arrivals, in a fixed order. Classes beyond a bound are forgotten, the
        rarest first."""
        pause = min(max(self.arrivals // 8, _RENEWAL_EVERY.start), _RENEWAL_EVERY.stop)
        self._next_renewal = max(self.arrivals + pause, _FIRST_RENEWAL)
        if len(self._weights) > _MAX_CLASSES:
            kept = sorted(self._weights, key=lambda known: (-self._weights[known], known))[:_MAX_CLASSES]
            self._weights = {known: self._weights[known] for known in kept}
        return {known: self._weights[known] / self._total for known in sorted(self._weights)}
