"""Usable capacity: the free capacity of a node, in thousandths of a GPU, weighted by the requests that could use it.

For each class of requests a node counts with the free time of the GPUs that could take one request, and with as many
copies of the request as fit beside the node's CPU and the GPUs' memory. Classes weigh by their share of the arrivals
and by how scarce the room for them is. Placing where usable capacity falls least keeps slivers of time, stranded CPU or
memory, and scarce models from adding up.

FGD (Weng et al., "Beware of Fragmentation", USENIX ATC 2023) counts the first of the two terms, with weights that are
the shares alone.

This module makes the tables; the sums over nodes are made in C (native/scores.c). tests/reference/usable_capacity.py
has the definition in NumPy, which a property test compares with the C.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from sharepod.api.units import WHOLE_GPU

from .demand import DemandClass, memory_milli

Floats = npt.NDArray[np.floating[Any]]
Ints = npt.NDArray[np.integer[Any]]

MIX = 0.8
"""Weight, of 1, of the time of GPUs that could take one request; the number of copies that fit has the rest."""

SCARCE_AT_MOST = 0.05
"""Part of all idle time. Room for a class below this part does not make the class scarcer still."""


class UsableCapacity:
    """Tables that define usable capacity under one estimate of the demand.

    Args:
        shares: of all arrivals, by class.
        models: GPU models; a model's number is its index.
        sizes: bytes of GPU memory; a size's number is its index.
        hole_by_time: value of a GPU as a hole by its free thousandths of time, of shape (1001,).
        hole_by_memory: the same by size and free thousandths of memory, of shape (sizes, 1001). The lesser counts.
        mix: see `MIX`.

    A shape is a class without its models. `shapes` lists them; tables have one column for each. `parts`: of the GPUs
    that a request takes, what one GPU is. `by_copies`: what one copy counts. `takes`: thousandths of memory, of (sizes,
    shapes). `per_time`, `per_memory`: copies that fit into one thousandth; `per_memory` is None where all memory is in
    proportion to time, so that the lesser of the two says it all. `weights`: of (models + 1, shapes), the last row for
    models first seen later.
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
    ) -> None:
        self.classes = list(shares)
        self.shares = np.array([shares[known] for known in self.classes], dtype=np.float64)
        self.models, self.sizes = len(models), len(sizes)
        shape_of = [_shape(known) for known in self.classes]
        self.shapes = list(dict.fromkeys(shape_of))
        number = {shape: index for index, shape in enumerate(self.shapes)}
        self._shape_of = np.array([number[shape] for shape in shape_of], dtype=np.intp)
        self.cpu = np.array([max(shape.cpu, 1) for shape in self.shapes], dtype=np.float32)
        taken = np.array([shape.count * shape.milli for shape in self.shapes], dtype=np.float32)
        self.by_copies = ((1.0 - mix) * taken).astype(np.float32)
        self._taken = taken[self._shape_of]
        self.mix = np.float32(mix)
        # Thirds have to add up to no less than one.
        self.parts = np.array([(1.0 + 1e-6) / shape.count for shape in self.shapes], dtype=np.float32)
        self.hole_by_time = (np.zeros(WHOLE_GPU + 1) if hole_by_time is None else hole_by_time).astype(np.float32)
        unbound = np.full((max(self.sizes, 1), WHOLE_GPU + 1), np.inf)
        self.hole_by_memory = (unbound if hole_by_memory is None else hole_by_memory).astype(np.float32)
        self.per_time = np.array([1.0 / shape.milli for shape in self.shapes], dtype=np.float32)
        takes = [
            [max(memory_milli(shape.memory, shape.milli, size), 1) for shape in self.shapes] for size in sizes or (1,)
        ]
        self.takes = np.array(takes, dtype=np.int64)
        self.per_memory: Floats | None = None
        if any(shape.memory >= 0 for shape in self.shapes):
            self.per_memory = (1.0 / self.takes).astype(np.float32)

        fits = [[not known.models or model in known.models for known in self.classes] for model in models]
        fits.append([not known.models for known in self.classes])
        self._fits = np.array(fits, dtype=np.float64).reshape(len(models) + 1, len(self.classes))
        self.weights = self._by_shape(self.shares)

    def weigh_by_scarcity(self, copies: Floats, idle: float) -> None:
        """Replace the weights: classes with little room weigh more.

        Args:
            copies: that fit into the whole cluster, by class.
            idle: all free thousandths of the cluster.
        """
        room = copies * self._taken
        weights = self.shares * idle / (np.maximum(room, SCARCE_AT_MOST * idle) + self._taken)
        total = weights.sum()
        if total > 0:
            self.weights = self._by_shape(weights * (self.shares.sum() / total))

    def _by_shape(self, weights: Floats) -> Floats:
        """Return weights of classes as a table of (models + 1, shapes)."""
        result = np.zeros((len(self.shapes), len(self._fits)))
        np.add.at(result, self._shape_of, (self._fits * weights).T)
        return np.ascontiguousarray(result.T, dtype=np.float32)

    def copies(self, sums: Floats, cpu: Floats) -> Floats:
        """Return how many copies of each shape fit on nodes, of (nodes, shapes).

        Args:
            sums: over the GPUs of each node; the first columns are the copies of each shape that fit there.
            cpu: free thousandths of a core, of (nodes,).
        """
        copies = cpu[:, None] / self.cpu
        np.minimum(copies, sums[:, : len(self.shapes)], out=copies)
        result: Floats = np.floor(np.maximum(copies, 0.0, out=copies), out=copies)
        return result

    def no_room(self) -> Floats:
        """Return copies that fit, by model and shape: none yet, of (models + 1, shapes)."""
        return np.zeros((len(self._fits), len(self.shapes)))

    def add_room(self, room: Floats, copies: Floats, model: Ints) -> None:
        """Add the `copies` of nodes, whose models these are, to `room`."""
        for number in np.flatnonzero(np.bincount(model)):  # np.unique imports a module of 6 ms at its first call
            room[number] += copies[model == number].sum(axis=0, dtype=np.float64)

    def room_of_classes(self, room: Floats) -> Floats:
        """Add up `room` over the models that each class takes. Of (classes,)."""
        result: Floats = (room[:, self._shape_of] * self._fits).sum(axis=0)
        return result


def _shape(known: DemandClass) -> DemandClass:
    return replace(known, models=()) if known.models else known
