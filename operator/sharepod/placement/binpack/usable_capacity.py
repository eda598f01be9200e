"""What the free capacity of a node is worth to the requests that come: its usable capacity, in thousandths of a GPU.

For each class of requests a node counts with the free time of the GPUs that could take one, and with as many copies as
fit beside its CPU and the GPUs' memory; classes weigh by their share of the arrivals and by how scarce the room for
them is. Placing where this value falls least keeps slivers of time, stranded CPU or memory, and scarce models from
adding up.

FGD (Weng et al., "Beware of Fragmentation", USENIX ATC 2023) counts the first of the two terms, with weights that are
the shares alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from sharepod.api.units import WHOLE_GPU

from .demand import DemandClass

Floats = npt.NDArray[np.floating[Any]]
Ints = npt.NDArray[np.integer[Any]]

MIX = 0.8
"""How much the time of GPUs that could take one counts beside the number of copies that fit."""

SCARCE_AT_MOST = 0.05
"""Room for a class below this part of all idle time does not make it scarcer still."""


class UsableCapacity:
    """The value of states under one estimate of the demand.

    Shapes: `time`, `memory` (thousandths free) and `size` (a number for each capacity of GPU memory) are of cells, that
    is of single GPUs; `cpu` and `model` (a number for each GPU model) of nodes. What a cell holds for each kind of
    request is a vector of `width` numbers, the last of them what it is worth as a hole: the lesser of
    `hole_worth` (by free time) and `hole_memory` (by size and free memory). Those of a node's cells add up, and `value`
    is of the sum.
    """

    def __init__(
        self,
        shares: Mapping[DemandClass, float],
        *,
        models: Sequence[str],
        sizes: Sequence[int],
        hole_worth: Floats | None = None,
        hole_memory: Floats | None = None,
        mix: float = MIX,
    ) -> None:
        self.classes = list(shares)
        self.shares = np.array([shares[known] for known in self.classes], dtype=np.float64)
        self.models, self.sizes = len(models), len(sizes)
        kinds = list(dict.fromkeys(_kind(known) for known in self.classes))
        self.kinds = len(kinds)
        self.width = 2 * self.kinds + 1
        number = {kind: index for index, kind in enumerate(kinds)}
        self._kind = np.array([number[_kind(known)] for known in self.classes], dtype=np.intp)
        self.cpu = np.array([max(kind.cpu, 1) for kind in kinds], dtype=np.float32)
        taken = np.array([kind.count * kind.milli for kind in kinds], dtype=np.float32)
        self.by_copies = ((1.0 - mix) * taken).astype(np.float32)
        self._taken = taken[self._kind]
        self.mix = np.float32(mix)
        # Thirds have to add up to no less than one.
        self.parts = np.array([(1.0 + 1e-6) / kind.count for kind in kinds], dtype=np.float32)
        everything = np.arange(WHOLE_GPU + 1)
        self.hole_worth = (np.zeros(WHOLE_GPU + 1) if hole_worth is None else hole_worth).astype(np.float32)
        unbound = np.full((max(self.sizes, 1), WHOLE_GPU + 1), np.inf)
        self.hole_memory = (unbound if hole_memory is None else hole_memory).astype(np.float32)

        self.time_fits = _fits(everything, [kind.milli for kind in kinds])
        needs = [[max(memory_share(kind.memory, kind.milli, size), 1) for kind in kinds] for size in sizes or (1,)]
        self.in_proportion = self._cells(self.time_fits, everything, self.hole_worth)
        self.per_time = np.array([1.0 / kind.milli for kind in kinds], dtype=np.float32)
        self.per_memory: Floats | None = None
        self.memory_fits: Floats | None = None
        if any(kind.memory >= 0 for kind in kinds):
            self.per_memory = (1.0 / np.array(needs)).astype(np.float32)
            self.memory_fits = np.stack([_fits(everything, of_size) for of_size in needs])

        fits = [[not known.models or model in known.models for known in self.classes] for model in models]
        fits.append([not known.models for known in self.classes])
        self._fits = np.array(fits, dtype=np.float64).reshape(len(models) + 1, len(self.classes))
        self.weights = self._by_kind(self.shares)

    def weigh_by_scarcity(self, copies: Floats, idle: float) -> None:
        """`copies` that fit into the whole cluster, for each class; `idle`: all free thousandths."""
        room = copies * self._taken
        weights = self.shares * idle / (np.maximum(room, SCARCE_AT_MOST * idle) + self._taken)
        total = weights.sum()
        if total > 0:
            self.weights = self._by_kind(weights * (self.shares.sum() / total))

    def _by_kind(self, weights: Floats) -> Floats:
        """Weights of classes as (models + 1, kinds); the last is for models that were not known."""
        result = np.zeros((self.kinds, len(self._fits)))
        np.add.at(result, self._kind, (self._fits * weights).T)
        return np.ascontiguousarray(result.T, dtype=np.float32)

    def _cells(self, fits: Floats, time: Ints, holes: Floats) -> Floats:
        suited = (fits >= 1) * (self.mix * time[..., None].astype(np.float32))
        result: Floats = np.concatenate((fits * self.parts, suited, holes[..., None]), axis=-1)
        return result

    @property
    def proportional(self) -> bool:
        """Every request asks for memory in proportion to its time, so that the smaller of the two says it all."""
        return self.memory_fits is None

    def levels(self, level: Ints) -> Floats:
        """As `cells`, where all is `proportional`."""
        result: Floats = self.in_proportion[level]
        return result

    def cells(self, time: Ints, memory: Ints, size: Ints) -> Floats:
        """What cells hold: how many of each kind fit, as parts of the GPUs that one takes; their time where one fits;
        their worth as holes. Shape of `time` + (width,)."""
        if self.memory_fits is None:
            return self.levels(np.minimum(time, memory))
        fits = np.minimum(self.time_fits[time], self.memory_fits[size, memory])
        return self._cells(fits, time, np.minimum(self.hole_worth[time], self.hole_memory[size, memory]))

    def copies(self, held: Floats, cpu: Floats) -> Floats:
        """How many of each kind (nodes, kinds) fit beside the CPU."""
        copies = cpu[:, None] / self.cpu
        np.minimum(copies, held[:, : self.kinds], out=copies)
        result: Floats = np.floor(np.maximum(copies, 0.0, out=copies), out=copies)
        return result

    def value(self, held: Floats, cpu: Floats, model: Ints) -> Floats:
        """Usable capacity of nodes, from the sums of what their cells hold."""
        copies = self.copies(held, cpu)
        worth = (copies >= 1) * held[:, self.kinds : -1]
        worth += copies * self.by_copies
        worth *= self.weights[model]
        result: Floats = worth.sum(axis=1)
        return result

    def room(self, copies: Floats, model: Ints) -> Floats:
        """`copies` of nodes added up over those whose model each class takes."""
        of_model = np.zeros((len(self._fits), self.kinds))
        np.add.at(of_model, model, copies)
        result: Floats = (of_model[:, self._kind] * self._fits).sum(axis=0)
        return result


def _kind(known: DemandClass) -> DemandClass:
    """Classes that differ in nothing but the models they take are of one kind."""
    return replace(known, models=())


def _fits(free: Ints, needs: Sequence[int]) -> Floats:
    return (free[:, None] // np.array(needs, dtype=np.int64)[None, :]).astype(np.float32)


def memory_share(memory: int, milli: int, size: int) -> int:
    """Thousandths of a GPU's memory, rounded up, that a class takes of one of this size; more than 1000: does not
    fit."""
    if memory == -2:
        return WHOLE_GPU
    if memory == -1 or not size:
        return milli
    return min(-(-memory * WHOLE_GPU // size), WHOLE_GPU + 1)
