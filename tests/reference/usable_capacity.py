"""Usable capacity by its definition, in NumPy. Tests compare the product's C with it, and FGD is computed with it.

Arrays of GPUs: `time` and `memory` (free thousandths), `size` (a number for each capacity of GPU memory), and `worth`
(part of all arrivals that may join a GPU's tenants). Arrays of nodes: `cpu`, and `model` (a number for each GPU model).

Each GPU has a vector: for each shape, how many copies fit; for each shape, the time that counts if one copy fits; last,
its value as a hole. The vectors of a node's GPUs are added, and `value` is computed from the sum.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from sharepod.api.units import WHOLE_GPU
from sharepod.placement.binpack.columns import OPEN_AT
from sharepod.placement.binpack.usable_capacity import NO_CPU, UsableCapacity

Floats = npt.NDArray[np.floating[Any]]
Ints = npt.NDArray[np.integer[Any]]


class Definition:
    """The definition of usable capacity for the tables of one `UsableCapacity`."""

    def __init__(self, usable: UsableCapacity) -> None:
        self.usable = usable
        self._shapes = len(usable.shapes)
        everything = np.arange(WHOLE_GPU + 1)
        self._time_fits = _fits(everything, [shape.milli for shape in usable.shapes])
        self._in_proportion = self._vectors(self._time_fits, everything, usable.hole_by_time)
        self._memory_fits: Floats | None = None
        if usable.per_memory is not None:
            self._memory_fits = np.stack([_fits(everything, takes.tolist()) for takes in usable.takes])

    def _vectors(self, fits: Floats, time: Ints, holes: Floats) -> Floats:
        suited = (fits >= 1) * (self.usable.mix * time[..., None].astype(np.float32))
        parts = np.minimum(fits, self.usable.of_one) * self.usable.parts
        result: Floats = np.concatenate((parts, suited, holes[..., None]), axis=-1)
        return result

    def gpus(self, time: Ints, memory: Ints, size: Ints, worth: Floats | None = None) -> Floats:
        """Return the vectors of GPUs, in the shape of `time` + (2 shapes + 1,). Without `worth` any tenant may join any
        GPU."""
        vectors = self._open_to_all(time, memory, size)
        if worth is None:
            return vectors
        part = np.broadcast_to(worth[..., None], vectors.shape).copy()
        part[..., : self._shapes] = part[..., : self._shapes] >= OPEN_AT
        result: Floats = vectors * part
        return result

    def _open_to_all(self, time: Ints, memory: Ints, size: Ints) -> Floats:
        if self._memory_fits is None:
            result: Floats = self._in_proportion[np.minimum(time, memory)]
            return result
        fits = np.minimum(self._time_fits[time], self._memory_fits[size, memory])
        holes = np.minimum(self.usable.hole_by_time[time], self.usable.hole_by_memory[size, memory])
        return self._vectors(fits, time, holes)

    def value(self, sums: Floats, cpu: Floats, model: Ints) -> Floats:
        """Return the usable capacity of nodes, from the sums of their GPUs' vectors."""
        copies = self.usable.copies(sums, cpu)
        worth = (copies >= 1) * sums[:, self._shapes : -1]
        worth += copies * self.usable.by_copies
        worth *= self.usable.weights[model]
        result: Floats = worth.sum(axis=1)
        return result

    def served(self, holes: Floats, cpu: Floats) -> Floats:
        """Return the part of the values of holes that the CPU of each node can serve, of (nodes,)."""
        by_cpu = np.maximum(cpu, np.float32(NO_CPU))[:, None] * self.usable.time_by_cpu
        result: Floats = np.minimum(holes[:, None], by_cpu).mean(axis=1)
        return result


def _fits(free: Ints, needs: Sequence[int]) -> Floats:
    return (free[:, None] // np.array(needs, dtype=np.int64)[None, :]).astype(np.float32)
