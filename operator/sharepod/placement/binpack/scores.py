"""Scores of all nodes for request classes, computed by C (native/) from the columns.

Guarantees:
- Every place that passes the filters gets a score here, except GPUs that are reserved for the head of the queue.
- A place with a score passes the filters, except possibly filters for extended resources. So the caller must apply the
  filters too.
- Every array to which C has a pointer is kept alive here.
- The same columns, weights and request class give the same scores.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from ._scores import ffi as _ffi
from ._scores import lib as _lib
from .arrays import pointer
from .columns import Columns
from .demand import memory_milli
from .request_classes import NodeMasks, RequestClass
from .sliced_work import Slices
from .usable_capacity import UsableCapacity

Array = npt.NDArray[Any]

NO_PLACE = int(np.iinfo(np.int64).min)
"""Score of a node that does not take the request."""

HOLE_WEIGHT = 4.0
"""Weight of the value of holes (hole_prices.py) in a score, relative to usable capacity."""
ROUND_TO = 40
"""Rounding of scores, in thousandths of a GPU. Among equal nodes the first by name is chosen. If tenants leave, the
nodes with the fewest idle GPUs come first among these."""

_WORK = 3_000
"""Work of one decision, in GPUs x demand shapes scored: for changed nodes, and again as much for nodes scored with old
weights. It bounds the time of a decision. Three times as much packs six traces (five seeds each) equally well, to 0.01
points."""

_SUMMED_AT_ONCE, _SCORED_AT_ONCE = 500_000, 500_000
"""Work of one slice, in GPUs x demand shapes that it sums, or scores: one to two milliseconds."""
_NO_PAUSE = -(1 << 63)

_GPU_COLUMNS = (
    "share",
    "share_in_proportion",
    "bytes",
    "time",
    "memory",
    "size",
    "model",
    "exclusion",
    "tenants",
    "labels",
    "interactive_room",
    "worth",
    "signature",
)
_NODE_COLUMNS = ("room", "changed_at", "node_signature", "node_model")
_TABLES = ("per_time", "parts", "of_one", "cpu", "by_copies", "weights")
_ANY_EXCLUSION = 0
_LANES = 8
"""Number of shapes that C sums at once. The tables are padded to a multiple of it."""


class ClassScores:
    """Scores of all nodes for one request class, in arrays of shape (nodes,).

    - `score`: `NO_PLACE` where a node does not take the class.
    - `gpu`: signature of the best GPU of the node.
    - `weights`: number of the weights by which the score was computed; 0: an estimate.
    - `seen`: version of the columns up to which changes are included.
    - `c_scores`, `c_request`: these arrays, and the class, as C reads them.
    """

    __slots__ = (
        "_kept",
        "_owner",
        "c_request",
        "c_scores",
        "gpu",
        "request_class",
        "score",
        "seen",
        "weights",
    )

    def __init__(self, request_class: RequestClass, nodes: int) -> None:
        self.request_class = request_class
        self.seen = 0
        self.score = np.full(nodes, NO_PLACE, dtype=np.int64)
        self.gpu = np.zeros(nodes, dtype=np.int64)
        self.weights = np.zeros(nodes, dtype=np.int64)
        self.c_scores = _ffi.new("shp_scores *")
        self.c_request = _ffi.new("shp_request *")
        self._owner: ClassScores | None = None
        self._kept: dict[str, tuple[Array, Any]] = {}  # arrays to which C has pointers
        for name in ("score", "gpu", "weights"):
            array = getattr(self, name)
            self._kept[name] = array, pointer(array)
            setattr(self.c_scores, name, self._kept[name][1])
        resources, c_request = request_class.needs.resources, self.c_request
        c_request.count, c_request.milli, c_request.whole = (
            request_class.count,
            request_class.milli,
            request_class.whole,
        )
        c_request.memory = int(request_class.memory)
        c_request.interactive = request_class.interactive and not request_class.whole
        c_request.room_cpu, c_request.room_memory = resources.cpu_milli, resources.memory
        c_request.cpu = resources.cpu_milli

    def copy(self) -> ClassScores:
        """Return a copy of the scores, which a caller may change for one decision."""
        copy = ClassScores(self.request_class, len(self.score))
        copy.c_request = self.c_request
        copy._owner = self  # keeps the arrays alive to which c_request points
        copy.score[:], copy.gpu[:], copy.weights[:], copy.seen = self.score, self.gpu, self.weights, self.seen
        return copy

    def update_request(self, columns: Columns, masks: NodeMasks) -> Any:
        """Update `c_request`, the request as the C code reads it, from the columns of all GPUs, and return it. `masks`:
        nodes that suit the pod."""
        wanted, c_request, kept = self.request_class, self.c_request, self._kept
        if "takes" not in kept or len(kept["takes"][0]) != max(len(columns.sizes), 1):
            takes = [memory_milli(wanted.memory, wanted.milli, size) for size in columns.sizes or [0]]
            self._point("takes", np.array(takes, dtype=np.int64))
        if wanted.models and ("model_mask" not in kept or len(kept["model_mask"][0]) != max(len(columns.models), 1)):
            known = [model in wanted.models for model in columns.models]
            self._point("model_mask", np.array(known or [False], dtype=np.uint8))
        mask = masks.mask(wanted.needs)
        if mask is None:
            c_request.node_mask = _ffi.NULL
        elif "node_mask" not in kept or kept["node_mask"][0] is not mask or not c_request.node_mask:
            self._point("node_mask", mask)
        number = _ANY_EXCLUSION if wanted.exclusion is None else columns.exclusion_number(wanted.exclusion)
        c_request.exclusion = number
        shares = columns.combinations.shares
        c_request.first_worth = shares.open_to(wanted.exclusion)
        kept_off = () if wanted.anti_affinity is None else (wanted.anti_affinity,)
        c_request.leaves = shares.not_kept_off(kept_off, interactive=False)
        c_request.leaves_if_last = shares.not_kept_off(kept_off, interactive=wanted.interactive)
        if wanted.anti_affinity is not None and not wanted.whole:
            keeps_off = columns.combinations.keeping_off(wanted.anti_affinity)
            if "keeps_off" not in kept or kept["keeps_off"][0] is not keeps_off:
                self._point("keeps_off", keeps_off)
        return c_request

    def _point(self, name: str, array: Array) -> None:
        self._kept[name] = array, pointer(array)
        setattr(self.c_request, name, self._kept[name][1])


class Weighing:
    """Columns weighted by one estimate of the demand: its tables, and the sums over the GPUs of each node.

    Args:
        number: Number of the weights, from 1 on.
        usable: Tables of usable capacity.
        c_columns: The columns as C reads them, of `nodes` nodes.
        arrays: Arrays to which `c_columns` points. Kept alive here.
        nodes: Number of nodes.
        worth: Worth of each GPU (column `worth`), from which the sums are made.

    `sums`: copies that fit, time of suited GPUs, and value of holes, of shape (nodes, 2 shapes + 1).
    """

    def __init__(
        self, number: int, usable: UsableCapacity, c_columns: Any, arrays: list[Any], nodes: int, worth: Array
    ) -> None:
        self.usable = usable
        self.c_columns = c_columns
        self._kept = [*arrays]
        _keep(self._kept, c_columns, "worth", worth)
        self.c_capacity = capacity = _ffi.new("shp_capacity *")
        capacity.number = number
        self._shapes = -(-len(usable.shapes) // _LANES) * _LANES
        capacity.shapes, capacity.models, capacity.sizes = self._shapes, usable.models, usable.sizes
        capacity.mix, capacity.hole_weight, capacity.round_to = usable.mix, HOLE_WEIGHT, ROUND_TO
        capacity.fewest_idle = usable.tenants_leave
        for name in _TABLES:
            _keep(self._kept, capacity, name, self._filled_up(getattr(usable, name)))
        if usable.per_memory is not None:
            _keep(self._kept, capacity, "per_memory", self._filled_up(usable.per_memory))
            _keep(self._kept, capacity, "hole_by_memory", usable.hole_by_memory)
        _keep(self._kept, capacity, "hole_by_time", usable.hole_by_time)
        capacity.intensities = usable.time_by_cpu.size
        _keep(self._kept, capacity, "time_by_cpu", usable.time_by_cpu)
        self.sums = np.zeros((nodes, 2 * self._shapes + 1), dtype=np.float32)
        _keep(self._kept, capacity, "sums", self.sums)
        _keep(self._kept, capacity, "value", np.zeros(nodes, dtype=np.float32))
        self._scratch = np.zeros(max(3 * self._shapes, 1), dtype=np.float32)
        self.for_scratch = pointer(self._scratch)

    def _filled_up(self, table: Array) -> Array:
        """Pad a table to a multiple of `_LANES` columns, with zeros: shapes that never fit."""
        filled = np.zeros((*table.shape[:-1], self._shapes), dtype=np.float32)
        filled[..., : table.shape[-1]] = table
        return filled

    def reweigh(self) -> None:
        """Copy the changed weights of `usable` to C. Earlier results of `sum_gpus` are then outdated."""
        _keep(self._kept, self.c_capacity, "weights", self._filled_up(self.usable.weights))

    def sum_gpus(self, nodes: Array) -> None:
        """Compute the sums over the GPUs of these nodes."""
        if nodes.size:
            _lib.shp_sum_gpus(self.c_columns, self.c_capacity, pointer(nodes), nodes.size, self.for_scratch)

    def slices(self, nodes: Array) -> Iterator[Array]:
        """Compute the sums over the GPUs of these nodes in slices. Yields the nodes of each slice."""
        gpus = max(int(self.c_columns.width) * max(self._shapes, 1), 1)
        at_once = max(_SUMMED_AT_ONCE // gpus, 1)
        for first in range(0, nodes.size, at_once):
            some = nodes[first : first + at_once]
            self.sum_gpus(some)
            yield some


def _keep(kept: list[Any], owner: Any, name: str, array: Array) -> None:
    kept.append((array, pointer(array)))
    setattr(owner, name, kept[-1][1])


class Scorer:
    """Computes the scores of request classes from the columns. Call `bind` after the columns were rebuilt, and `take`
    to apply new weights."""

    def __init__(self, columns: Columns) -> None:
        self._columns = columns
        self._masks = NodeMasks(columns)
        self._number = 0
        self._kept: list[Any] = []
        self.bind(UsableCapacity({}, models=(), sizes=()))

    def bind(self, usable: UsableCapacity) -> None:
        """Point C to the columns' new arrays, and apply the weights of `usable`."""
        columns, c_columns = self._columns, _ffi.new("shp_columns *")
        self._masks.forget()
        c_columns.nodes, c_columns.width = len(columns.names), columns.width
        self._kept = []
        for name in (*_GPU_COLUMNS, *_NODE_COLUMNS):
            _keep(self._kept, c_columns, name, getattr(columns, name))
        _keep(self._kept, c_columns, "cpu", columns.cpu)
        self._changed = _ffi.new("shp_pass *")
        self._gpus = np.zeros(columns.width, dtype=np.int64)
        self._for_gpus = pointer(self._gpus)
        self._c_columns = c_columns
        weighing = self.weighing(usable, columns.worth)
        weighing.sum_gpus(np.arange(len(columns.names), dtype=np.int64))
        self.take(weighing)

    def weighing(self, usable: UsableCapacity, worth: Array) -> Weighing:
        """Return new weights, with sums to be computed. Scores use the present weights until
        `take`. `worth`: for each GPU, the part of all arrivals whose labels allow them to join its tenants."""
        self._number += 1
        columns = _ffi.new("shp_columns *", self._c_columns[0])
        return Weighing(self._number, usable, columns, self._kept, len(self._columns.names), worth)

    def take(self, weighing: Weighing) -> None:
        """Apply new weights whose sums are computed. All scores are then outdated."""
        self._weighing = weighing
        self._c_capacity, self._for_scratch = weighing.c_capacity, weighing.for_scratch
        weighing.c_columns = self._c_columns

    def sum_gpus(self, nodes: Array) -> None:
        """Compute the sums over the GPUs of these nodes again, because their columns have changed."""
        self._weighing.sum_gpus(nodes)

    def update(self, scores: ClassScores) -> None:
        """Score the nodes that have changed; beyond `_WORK`, estimate."""
        if scores.seen < self._columns.version:
            changed = self._changed
            changed.seen, changed.node, changed.work, changed.cleared = scores.seen, 0, _WORK, 0
            self._score(scores, changed, _NO_PAUSE)
            scores.seen = self._columns.version

    def renew(self, scores: ClassScores, work: int) -> Slices[int]:
        """Score all nodes by the present weights, in slices, until `work` is used up. Return the unused rest of it."""
        self.update(scores)  # the next decision then finds few changed nodes
        columns, every = self._c_columns, _ffi.new("shp_pass *", {"seen": -1, "work": work})
        while True:
            self._score(scores, every, every.work - _SCORED_AT_ONCE)
            if every.node >= columns.nodes:
                return int(every.work)
            yield
            if columns is not self._c_columns:
                return int(every.work)

    def _score(self, scores: ClassScores, some: Any, pause: int) -> None:
        """Score the nodes of a pass (`shp_pass` in scores.h) until its remaining work is below `pause`."""
        columns, capacity = self._c_columns, self._c_capacity
        request = scores.update_request(self._columns, self._masks)
        _lib.shp_score(columns, capacity, request, some, pause, scores.c_scores, self._for_scratch, self._for_gpus)

    def best(self, scores: ClassScores) -> int:
        """Return the index of the first node with the highest score; -1: no node takes the request."""
        columns, capacity, request = self._c_columns, self._c_capacity, scores.c_request
        best = _lib.shp_best(columns, capacity, request, _WORK, scores.c_scores, self._for_scratch, self._for_gpus)
        return int(best)

    def most_free(self, request_class: RequestClass) -> ClassScores:
        """Score nodes by the free part of the fullest of the GPUs that the request would get."""
        scores = ClassScores(request_class, len(self._columns.names))
        request = scores.update_request(self._columns, self._masks)
        _lib.shp_most_free(self._c_columns, request, scores.c_scores.score, self._for_gpus)
        scores.weights[:] = self._c_capacity.number
        return scores

    def least_promised(self, request_class: RequestClass) -> ClassScores:
        """Score nodes: least guaranteed time first, idle GPUs last; then fewest idle GPUs."""
        scores = ClassScores(request_class, len(self._columns.names))
        request = scores.update_request(self._columns, self._masks)
        _lib.shp_least_promised(self._c_columns, request, scores.c_scores.score, self._for_gpus)
        scores.weights[:] = self._c_capacity.number
        return scores

    def passing(self, scores: ClassScores, node: int) -> list[int]:
        """Return the positions of a node's passing GPUs; empty if fewer than requested."""
        found = _lib.shp_passing(self._c_columns, scores.c_request, node, self._for_gpus)
        return list(self._for_gpus[0:found])
