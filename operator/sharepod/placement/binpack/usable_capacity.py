"""Usable capacity: the free capacity of a node, in thousandths of a GPU, weighted by the requests that could use it.

For each class of requests, the usable capacity of a node has two terms: the free time of the GPUs that could take one
request, and the number of copies of the request that fit its GPUs and CPU together. Classes weigh by their share of the
arrivals and by the scarcity of room for them. Placing where usable capacity falls least avoids slivers of time,
stranded CPU or memory, and occupied scarce models.

FGD (Weng et al., "Beware of Fragmentation", USENIX ATC 2023) counts only the first term, weighted only by the shares.

This module computes the tables; native/scores.c sums over the GPUs of each node. tests/reference/usable_capacity.py has
the definition in NumPy, which a property test compares with the C.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from sharepod.api.units import WHOLE_GPU

from .demand import DemandClass, MemoryShare
from .sliced_work import Slices

Floats = npt.NDArray[np.floating[Any]]
Ints = npt.NDArray[np.integer[Any]]

MIX = 0.8
"""Weight, from 0 to 1, of the first term: the free time of GPUs that could take one request. The second term, the
copies that fit, has the rest."""

SEVERAL_BY_COPIES, SEVERAL_WEIGHT = 200.0, 0.05
"""For requests of several GPUs: factor by which a copy counts more, and weight of a class all of whose room is
reserved. With `MIX` and HOLE_WEIGHT, the last room for eight GPUs counts half as much as the value of its holes. Twice
as much allocates 0.1 points less of the traces default and multigpu20."""
OF_MODELS_WEIGHT = 8.0
"""Weight of a class that requires certain GPU models, once all room of these models is reserved. With 2 instead, 2.5
points more of the trace gpuspec33 are refused at a load of 0.9."""

INTENSITIES = 16
"""Number of parts of equal GPU time into which the demand is divided, ordered by its ratio of CPU to GPU time."""
CPU_NEEDED, CPU_NEEDED_IF_TENANTS_LEAVE = 0.45, 0.15
"""Part of the CPU requested with a node's holes that is kept free for them: before any tenant leaves, and afterwards.
Less than all suffices, because requests with little CPU will come, too. Until a tenant leaves, lost room stays lost, so
more CPU is kept: 0.45 allocates 0.3 points more of the six traces than 0.15. With departures, 0.3 refuses 0.6 points
more of the trace gpushare100 at a load of 0.95 than 0.15."""

NO_CPU = 2.0**-10
"""CPU that counts as free on a node without free CPU, in thousandths of a core. It is too little for any request with
CPU, and enough for all requests without. Equal to the value in scores.c."""
_ASKED_WITHOUT_CPU = NO_CPU / 2**20
"""CPU that counts for a request without CPU, in thousandths of a core: small, but a valid divisor."""

_MOST_MEMORY = 1 << 53
"""Bytes at which a requested memory is cut: more than any GPU has, while a thousand times as many still fit into 64
bits."""
_WEIGHED_AT_ONCE = 200_000
"""Comparisons of one slice, some 2 ms: pairs of classes, or models x pairs of classes."""

SCARCE_AT_MOST = 0.05
"""Least room of a class, as a part of all idle time: less room counts as this part, so that no class becomes
arbitrarily scarce."""


class UsableCapacity:
    """Tables that define usable capacity under one estimate of the demand.

    Args:
        shares: Part of all arrivals, by class.
        models: Names of the GPU models; a model's number is its index.
        sizes: Sizes of GPU memory in bytes; a size's number is its index.
        hole_by_time: value of a GPU as a hole by its free thousandths of time, of shape (1001,).
        hole_by_memory: value of a GPU as a hole by its free thousandths of memory, of shape (sizes, 1001). The lesser
        of both values counts.
        mix: see `MIX`.
        tenants_leave: keep less CPU for holes. Also prefer nodes with few idle GPUs among equal ones: more GPUs of the
        other nodes may then become idle, for requests of several.

    A shape is a class without its models. The tables have one column for each of `shapes`.
    - `parts`: one GPU's part of a request.
    - `of_one`: most copies that count on one GPU; 1 for a request of several GPUs, since a GPU with room for two is
      still one GPU.
    - `by_copies`: value of one copy.
    - `takes`: thousandths of a GPU's memory that a request takes, of shape (sizes, shapes).
    - `per_time`, `per_memory`: copies that fit into one thousandth, the lesser of which counts; `per_memory` is None if
      all memory is in proportion to time.
    - `weights`: weight of a shape on GPUs of a model, of shape (models + 1, shapes); the last row is for models first
      seen later.
    """

    def __init__(
        self,
        shares: Mapping[DemandClass, float],
        *,
        models: Sequence[str],
        sizes: Sequence[int],
        hole_by_time: Floats | None = None,
        hole_by_memory: Floats | None = None,
        mix: float = MIX,
        tenants_leave: bool = False,
    ) -> None:
        self.tenants_leave = tenants_leave
        self.classes = list(shares)
        self.shares = np.array([shares[known] for known in self.classes], dtype=np.float64)
        self.models, self.sizes = len(models), len(sizes)
        shape_of = [_shape(known) for known in self.classes]
        self.shapes = list(dict.fromkeys(shape_of))
        number = {shape: index for index, shape in enumerate(self.shapes)}
        self._shape_of = np.array([number[shape] for shape in shape_of], dtype=np.intp)
        self.cpu = np.array([shape.cpu or _ASKED_WITHOUT_CPU for shape in self.shapes], dtype=np.float32)
        taken = np.array([shape.count * shape.milli for shape in self.shapes], dtype=np.float32)
        several = np.array([_takes_several(shape) for shape in self.shapes], dtype=bool)
        self.by_copies = ((1.0 - mix) * taken * np.where(several, SEVERAL_BY_COPIES, 1.0)).astype(np.float32)
        self._taken = taken[self._shape_of]
        self._several = several[self._shape_of]
        self.time_by_cpu = _time_by_cpu(shares, CPU_NEEDED_IF_TENANTS_LEAVE if tenants_leave else CPU_NEEDED)
        self.mix = np.float32(mix)
        # GPUs' parts of a request must sum to at least one, although a third rounds down
        self.parts = np.array([(1.0 + 1e-6) / shape.count for shape in self.shapes], dtype=np.float32)
        self.of_one = np.array([1.0 if shape.count > 1 else np.inf for shape in self.shapes], dtype=np.float32)
        self.hole_by_time = (np.zeros(WHOLE_GPU + 1) if hole_by_time is None else hole_by_time).astype(np.float32)
        if hole_by_memory is None:
            hole_by_memory = np.full((max(self.sizes, 1), WHOLE_GPU + 1), np.inf)
        self.hole_by_memory = hole_by_memory.astype(np.float32)
        self.per_time = np.array([1.0 / shape.milli for shape in self.shapes], dtype=np.float32)
        self.takes = _takes(self.shapes, sizes or (1,))
        self.per_memory: Floats | None = None
        if any(shape.memory >= 0 for shape in self.shapes):
            self.per_memory = (1.0 / self.takes).astype(np.float32)

        self._fits = np.ones((len(models) + 1, len(self.classes)))
        number_of = {model: index for index, model in enumerate(models)}
        of_models = [index for index, known in enumerate(self.classes) if known.models]
        self._fits[:, of_models] = 0.0
        taken_by = [(index, model) for index in of_models for model in self.classes[index].models if model in number_of]
        self._fits[[number_of[model] for _, model in taken_by], [index for index, _ in taken_by]] = 1.0
        self.weights = self._by_shape(self.shares)

    def weigh_by_scarcity(self, copies: Floats, idle: float) -> Slices[None]:
        """Replace the weights, in slices, so that classes with little room weigh more.

        Args:
            copies: Number of copies of a request that fit into the whole cluster, by class.
            idle: Free thousandths of all GPUs of the cluster.
        """
        room = copies * self._taken
        weights = self.shares * idle / (np.maximum(room, SCARCE_AT_MOST * idle) + self._taken)
        total = weights.sum()
        if total > 0:
            weights *= self.shares.sum() / total
            self.weights = self._by_shape((yield from self._with_spoken_for(weights, room, idle)))

    def _with_spoken_for(self, weights: Floats, room: Floats, idle: float) -> Slices[Floats]:
        """Return a copy of `weights` with new weights for classes of several GPUs, and for classes that require certain
        models.

        The new weight of a class grows with the square of the reserved part of its room. The reserved part is the
        expected demand for this room, divided by the room, at most 1. The demand includes that of rivals: classes that
        can use only room of this class. Classes of several GPUs always get the new weight, classes of one GPU only if
        it is higher.
        """
        count = np.array([known.count for known in self.classes])
        cpu = np.array([known.cpu for known in self.classes])
        time = self.shares * self._taken
        coming = time * (idle / time.sum())
        result: Floats = weights.copy()

        def weigh(some: Ints, rivals: npt.NDArray[np.bool_], most: float) -> Floats:
            wanted: Floats = rivals @ coming
            spoken_for = np.minimum(wanted / (room[some] + self._taken[some]), 1.0)
            found: Floats = most * spoken_for**2 * coming[some] / wanted
            return found

        for some in _in_parts(np.flatnonzero(self._several), len(count)):
            rivals = self._several & (count >= count[some, None]) & (cpu >= cpu[some, None])
            result[some] = weigh(some, rivals, SEVERAL_WEIGHT)
            yield
        of_models = self._fits[:-1].any(axis=0) & ~self._fits[-1].astype(bool)
        for some in _in_parts(np.flatnonzero(of_models & (count == 1)), self._fits.size):
            # others[i, j]: number of models that class j fits and class some[i] does not. 0: all models of class j also
            # fit class some[i].
            others = (1.0 - self._fits[:, some]).T @ self._fits
            by_room = weigh(some, (others == 0) & of_models, OF_MODELS_WEIGHT)
            result[some] = np.maximum(weights[some], by_room)
            yield
        return result

    def _by_shape(self, weights: Floats) -> Floats:
        """Return weights by class as a table of shape (models + 1, shapes): each class adds its weight to its shape,
        for the models that it fits."""
        result = np.zeros((len(self.shapes), len(self._fits)))
        np.add.at(result, self._shape_of, (self._fits * weights).T)
        return np.ascontiguousarray(result.T, dtype=np.float32)

    def copies(self, sums: Floats, cpu: Floats) -> Floats:
        """Return the number of copies of each shape that fit on nodes, of shape (nodes, shapes).

        Args:
            sums: Sums over the GPUs of each node (`Weighing.sums`). The first columns are the copies of each shape that
            fit there.
            cpu: Free thousandths of a core, of shape (nodes,).
        """
        copies = np.maximum(cpu, np.float32(NO_CPU))[:, None] / self.cpu
        np.minimum(copies, sums[:, : len(self.shapes)], out=copies)
        result: Floats = np.floor(copies, out=copies)
        return result

    def no_room(self) -> Floats:
        """Return a table of zeros for `add_room`, of shape (models + 1, shapes)."""
        return np.zeros((len(self._fits), len(self.shapes)))

    def add_room(self, room: Floats, copies: Floats, model: Ints) -> None:
        """Add the copies of each shape that fit on nodes to `room`, in the row of the node's model."""
        for number in np.flatnonzero(np.bincount(model)):  # not np.unique, whose first call imports a module for 6 ms
            room[number] += copies[model == number].sum(axis=0, dtype=np.float64)

    def room_of_classes(self, room: Floats) -> Floats:
        """Return, for each class, the copies in the table `room` summed over the models that the class fits, of shape
        (classes,)."""
        result: Floats = (room[:, self._shape_of] * self._fits).sum(axis=0)
        return result


def _takes(shapes: Sequence[DemandClass], sizes: Sequence[int]) -> Ints:
    """Return `memory_milli` of each shape for each memory size, at least 1, of shape (sizes, shapes)."""
    milli = np.array([shape.milli for shape in shapes], dtype=np.int64)
    memory = np.array([min(int(shape.memory), _MOST_MEMORY) for shape in shapes], dtype=np.int64)
    takes = np.empty((len(sizes), len(shapes)), dtype=np.int64)
    for row, size in zip(takes, sizes, strict=True):
        row[:] = np.minimum(-(-memory * WHOLE_GPU // size), WHOLE_GPU + 1) if size else milli
        row[memory == MemoryShare.IN_PROPORTION] = milli[memory == MemoryShare.IN_PROPORTION]
        row[memory == MemoryShare.ALL] = WHOLE_GPU
    return np.maximum(takes, 1, out=takes)


def _in_parts(classes: Ints, work: int) -> Iterator[Ints]:
    """Yield the classes in slices whose comparisons take some milliseconds. `work`: comparisons per class."""
    at_once = max(_WEIGHED_AT_ONCE // max(work, 1), 1)
    for first in range(0, len(classes), at_once):
        yield classes[first : first + at_once]


def _time_by_cpu(shares: Mapping[DemandClass, float], needed: float) -> Floats:
    """Return, for each of `INTENSITIES` parts of the demand, the thousandths of a GPU that one thousandth of a core
    serves. The parts have equal GPU time."""
    if not shares:
        return np.zeros(0, dtype=np.float32)
    time = np.array([known.count * known.milli for known in shares], dtype=np.float64)
    cpu = np.array([known.cpu or _ASKED_WITHOUT_CPU for known in shares]) / time
    order = np.argsort(cpu, kind="stable")
    upto = np.cumsum((np.array(list(shares.values())) * time)[order])
    parts = np.searchsorted(upto, (np.arange(INTENSITIES) + 0.5) / INTENSITIES * upto[-1])
    result: Floats = (1.0 / (needed * cpu[order][parts])).astype(np.float32)
    return result


def _takes_several(shape: DemandClass) -> bool:
    """Return whether requests take several GPUs of one node with at least one GPU's time in total. Of smaller requests
    hundreds fit on a node, so rounding errors would decide."""
    return shape.count > 1 and shape.count * shape.milli >= WHOLE_GPU


def _shape(known: DemandClass) -> DemandClass:
    return DemandClass(known.count, known.milli, known.memory, known.cpu) if known.models else known
