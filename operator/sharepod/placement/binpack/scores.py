"""Scores of all nodes for one kind of request, made in C (native/) over the columns.

Guarantees: whatever passes `node_filters` and `gpu_filters` passes here, but for GPUs that are kept for the one who
asks. The reverse holds but for extended resources, so that what passes is asked of the filters themselves before it is
taken. Every array that C sees is kept alive here. The same columns, weights and request give the same scores.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from sharepod.api.units import WHOLE_GPU

from ._scores import ffi as _ffi
from ._scores import lib as _lib
from .arrays import pointer
from .columns import Columns
from .queries import Ask, NodeMasks
from .usable_capacity import UsableCapacity, memory_share

Array = npt.NDArray[Any]

NO_PLACE = int(np.iinfo(np.int64).min)

HOLE_WEIGHT = 2.0
"""How much a GPU's worth as a hole counts beside usable capacity."""
ROUND_TO = 40
"""Thousandths: node scores nearer than this are equal, and the first node by name is taken."""

_WORK = 30_000
"""Cells times kinds of requests that a decision scores anew where much has changed, and as many again where the weights
have: what bounds its time."""

_CELLS = ("free", "bytes", "by_memory", "time", "memory", "size", "model", "label", "tenants", "like")
_ROWS = ("room", "stamp", "state", "node_model")
_TABLES = ("per_time", "parts", "cpu", "by_copies", "weights")
_ANY_LABEL = 0
_LANES = 8
_IN_PROPORTION = -1


class Scored:
    """Scores of all nodes for one kind of request; `NO_PLACE` where it does not fit. `cell`: what the chosen cell is
    like. `weights`: the number of the weights that each was made with; 0: it is a guess. `seen`: the stamp up to which
    changes are in."""

    __slots__ = ("_ask", "_blocked", "_kept", "ask", "cell", "compiled", "in_c", "score", "seen", "weights")

    def __init__(self, ask: Ask, rows: int) -> None:
        self.ask = ask
        self.seen = 0
        self.score = np.full(rows, NO_PLACE, dtype=np.int64)
        self.cell = np.zeros(rows, dtype=np.int64)
        self.weights = np.zeros(rows, dtype=np.int64)
        self.in_c = _ffi.new("shp_scores *")
        self.compiled = self._ask = _ffi.new("shp_ask *")
        self._kept: dict[str, tuple[Array, Any]] = {}  # what C has pointers to
        for name in ("score", "cell", "weights"):
            array = getattr(self, name)
            self._kept[name] = array, pointer(array)
            setattr(self.in_c, name, self._kept[name][1])
        self._blocked: tuple[tuple[int, int], ...] = ()
        resources = ask.needs.resources
        self._ask.count, self._ask.milli, self._ask.whole = ask.count, ask.milli, ask.whole
        self._ask.memory = _IN_PROPORTION if ask.memory is None else ask.memory
        self._ask.room_cpu, self._ask.room_memory = resources.cpu_milli, resources.memory
        self._ask.cpu = resources.cpu_milli

    def copy(self) -> Scored:
        """As it stands, for one decision."""
        copy = Scored(self.ask, len(self.score))
        copy.compiled, copy._kept["of"] = self.compiled, (self.score, self)
        copy.score[:], copy.cell[:], copy.weights[:], copy.seen = self.score, self.cell, self.weights, self.seen
        return copy

    def against(self, columns: Columns, masks: NodeMasks) -> Any:
        """`compiled`, the request as C reads it, up to date with these columns."""
        ask, compiled, kept = self.ask, self._ask, self._kept
        if "takes" not in kept or len(kept["takes"][0]) != max(len(columns.sizes), 1):
            self._point("takes", np.array([self._takes(size) for size in columns.sizes or [0]], dtype=np.int64))
        if ask.models and ("models" not in kept or len(kept["models"][0]) != max(len(columns.models), 1)):
            known = [model in ask.models for model in columns.models]
            self._point("models", np.array(known or [False], dtype=np.uint8))
        mask = masks.mask(ask.needs)
        if mask is None:
            compiled.nodes = _ffi.NULL
        elif "nodes" not in kept or kept["nodes"][0] is not mask or not compiled.nodes:
            self._point("nodes", mask)
        compiled.exclusion = _ANY_LABEL if ask.exclusion is None else columns.label_number(ask.exclusion)
        if ask.anti_affinity is not None and not ask.whole:
            self._block(columns, tuple(columns.anti_affinity.get(ask.anti_affinity, ())))
        return compiled

    def _point(self, name: str, array: Array) -> None:
        self._kept[name] = array, pointer(array)
        setattr(self._ask, name, self._kept[name][1])

    def _takes(self, size: int) -> int:
        """Thousandths of the memory of a GPU of this size."""
        if self.ask.whole:
            return WHOLE_GPU
        memory = -1 if self.ask.memory is None else self.ask.memory
        return memory_share(memory, self.ask.milli, size)

    def _block(self, columns: Columns, cells: tuple[tuple[int, int], ...]) -> None:
        if "blocked" not in self._kept:
            self._point("blocked", np.zeros(columns.free.shape, dtype=np.uint8))
        if cells != self._blocked:
            blocked = self._kept["blocked"][0]
            for cell in self._blocked:
                blocked[cell] = 0
            for cell in cells:
                blocked[cell] = 1
            self._blocked = cells


class Scores:
    """One for each `Packing`. After `columns` were started over, `bind`; with new weights, `weigh`."""

    def __init__(self, columns: Columns) -> None:
        self._columns = columns
        self._masks = NodeMasks(columns)
        self._view: Any = None
        self._capacity: Any = None
        self._usable: UsableCapacity | None = None
        self._number = 0
        self._kept: list[Any] = []
        self._tables: list[Any] = []
        self.weigh(UsableCapacity({}, models=(), sizes=()))
        self.bind()

    def bind(self) -> None:
        """The arrays of the columns are others."""
        columns, view = self._columns, _ffi.new("shp_columns *")
        self._masks.forget()
        view.rows, view.width = len(columns.names), columns.width
        self._kept = []
        for name in (*_CELLS, *_ROWS):
            self._keep(self._kept, view, name, getattr(columns, name))
        self._keep(self._kept, view, "cpu", columns.cpu)
        self._cells = np.zeros(columns.width, dtype=np.int64)
        self._for_cells = pointer(self._cells)
        self._view = view
        self._hold_all()

    def weigh(self, usable: UsableCapacity) -> None:
        """Takes these weights from now on. What it is told of the nodes stays; no score made before holds any more."""
        self._usable = usable
        self._number += 1
        capacity = _ffi.new("shp_capacity *")
        capacity.number = self._number
        self._kinds = -(-usable.kinds // _LANES) * _LANES
        capacity.kinds, capacity.models, capacity.sizes = self._kinds, usable.models, usable.sizes
        capacity.mix, capacity.hole_weight, capacity.round_to = usable.mix, HOLE_WEIGHT, ROUND_TO
        self._tables = []
        for name in _TABLES:
            self._keep(self._tables, capacity, name, self._filled_up(getattr(usable, name), usable.kinds))
        if usable.per_memory is not None:
            self._keep(self._tables, capacity, "per_memory", self._filled_up(usable.per_memory, usable.kinds))
            self._keep(self._tables, capacity, "hole_memory", usable.hole_memory)
        self._keep(self._tables, capacity, "hole_worth", usable.hole_worth)
        self._scratch = np.zeros(max(3 * self._kinds, 1), dtype=np.float32)
        self._for_scratch = pointer(self._scratch)
        self._capacity = capacity
        if self._view is not None:
            self._hold_all()

    def _filled_up(self, table: Array, kinds: int) -> Array:
        """With kinds of which none fits, up to a multiple of eight."""
        filled = np.zeros((*table.shape[:-1], self._kinds), dtype=np.float32)
        filled[..., :kinds] = table
        return filled

    def _hold_all(self) -> None:
        rows = len(self._columns.names)
        self.held = np.zeros((rows, 2 * self._kinds + 1), dtype=np.float32)
        self.value = np.zeros(rows, dtype=np.float32)
        self._state: list[Any] = []
        self._keep(self._state, self._capacity, "held", self.held)
        self._keep(self._state, self._capacity, "value", self.value)
        self.hold(np.arange(rows, dtype=np.int64))

    def hold(self, rows: Array) -> None:
        """These rows of the columns have changed."""
        if rows.size:
            _lib.shp_hold(self._view, self._capacity, pointer(rows), rows.size, self._for_scratch)

    def update(self, scored: Scored) -> None:
        """Takes in what has changed on the nodes."""
        if scored.seen < self._columns.version:
            self._score(scored, scored.seen, _WORK)

    def renew(self, scored: Scored, work: int) -> int:
        """Scores all nodes with the weights that hold; what is left of `work`. Not for a decision's path."""
        return self._score(scored, -1, work)

    def _score(self, scored: Scored, seen: int, work: int) -> int:
        view, capacity, ask = self._view, self._capacity, scored.against(self._columns, self._masks)
        left = _lib.shp_update(view, capacity, ask, seen, work, scored.in_c, self._for_scratch, self._for_cells)
        scored.seen = self._columns.version
        return int(left)

    def best(self, scored: Scored) -> int:
        """The first of the nodes with the highest score; -1: there is no place. It is up to date."""
        view, capacity, ask = self._view, self._capacity, scored.compiled
        return int(_lib.shp_best(view, capacity, ask, _WORK, scored.in_c, self._for_scratch, self._for_cells))

    def most_free(self, ask: Ask) -> Scored:
        """By how free the fullest of the GPUs is that would be taken."""
        scored = Scored(ask, len(self._columns.names))
        compiled = scored.against(self._columns, self._masks)
        _lib.shp_most_free(self._view, compiled, scored.in_c.score, self._for_cells)
        scored.weights[:] = self._number
        return scored

    def least_promised(self, ask: Ask) -> Scored:
        """By how little of the GPUs in use is promised; then by how few are idle."""
        scored = Scored(ask, len(self._columns.names))
        compiled = scored.against(self._columns, self._masks)
        _lib.shp_least_promised(self._view, compiled, scored.in_c.score, self._for_cells)
        scored.weights[:] = self._number
        return scored

    def passing(self, scored: Scored, row: int) -> list[int]:
        """The cells of one node that pass; none where they are fewer than asked."""
        found = _lib.shp_passing(self._view, scored.compiled, row, self._for_cells)
        return list(self._for_cells[0:found])

    @staticmethod
    def _keep(kept: list[Any], owner: Any, name: str, array: Array) -> None:
        kept.append((array, pointer(array)))
        setattr(owner, name, kept[-1][1])
