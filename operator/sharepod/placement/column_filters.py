"""The filters once more, over columns: which nodes and GPUs can take a request, for thousands of nodes at once.

Guarantees: whatever passes `node_filters` and `gpu_filters` passes here, but for GPUs that are kept for the one who
asks. The reverse holds but for extended resources
and for nodes to avoid, so that what passes is asked of the filters themselves before it is taken.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from sharepod.api.gpunode import Mode

from .columns import EMPTY, PLAIN, Columns
from .model import LabelKey, NodeSelectorTerm, PodNeeds, Request, Toleration, label_key
from .node_filters import BY_STATE

Array = npt.NDArray[Any]

_MAX_MASKS = 1024


@dataclass(frozen=True, slots=True)
class Ask:
    """The request as the columns see it. `memory` None: in proportion to `milli`. `room`, `cpu`: what its pod takes."""

    needs: PodNeeds
    count: int
    milli: int
    memory: int | None
    exclusion: LabelKey | None
    models: tuple[str, ...]
    apart: LabelKey | None
    whole: bool
    room: Array = field(init=False)
    cpu: np.float32 = field(init=False)

    def __post_init__(self) -> None:
        resources = self.needs.resources
        object.__setattr__(self, "room", np.array([resources.cpu_milli, resources.memory], dtype=np.int64))
        object.__setattr__(self, "cpu", np.float32(resources.cpu_milli))

    @classmethod
    def of(cls, request: Request) -> Ask:
        gpu = request.gpu
        return cls(
            request.pod,
            gpu.count,
            int(gpu.request),
            None if gpu.memory is None else int(gpu.memory),
            label_key(request.namespace, gpu.labels.exclusion),
            gpu.models,
            label_key(request.namespace, gpu.labels.anti_affinity),
            gpu.mode is Mode.EXCLUSIVE,
        )


_PlacementKey = tuple[frozenset[tuple[str, str]], tuple[NodeSelectorTerm, ...], tuple[Toleration, ...]]


_ANYWHERE: _PlacementKey = (frozenset(), (), ())


def _placement_key(needs: PodNeeds) -> _PlacementKey:
    if not (needs.node_selector or needs.node_affinity_terms or needs.tolerations):
        return _ANYWHERE
    return frozenset(needs.node_selector.items()), needs.node_affinity_terms, needs.tolerations


def needs_key(needs: PodNeeds) -> tuple[Hashable, ...]:
    resources = needs.resources
    extended: Mapping[str, int] = resources.extended
    return (
        resources.cpu_milli,
        resources.memory,
        tuple(sorted(extended.items())) if extended else None,
        _placement_key(needs),
    )


@dataclass(slots=True)
class _Mask:
    """Which nodes can take a pod with these needs, as far as it does not depend on tenants."""

    passes: npt.NDArray[np.bool_]
    seen: int
    all_pass: bool = False


class ColumnFilters:
    """Keeps which nodes suit a pod whatever their tenants; that changes with the nodes alone."""

    def __init__(self, columns: Columns) -> None:
        self._columns = columns
        self._masks: dict[Hashable, _Mask] = {}

    def forget(self) -> None:
        """The rows of the columns are others."""
        self._masks.clear()

    def _mask(self, needs: PodNeeds) -> _Mask:
        columns = self._columns
        key = _placement_key(needs)
        mask = self._masks.get(key)
        if mask is None:
            if len(self._masks) >= _MAX_MASKS:
                self._masks.clear()
            mask = self._masks[key] = _Mask(np.zeros(len(columns.names), dtype=bool), -1)
        if mask.seen < columns.last_fixed:
            for slot in np.flatnonzero(columns.fixed > mask.seen).tolist():
                state = columns.states[slot]
                mask.passes[slot] = state is not None and all(passes(state, needs) for passes in BY_STATE)
            mask.seen = columns.now
            mask.all_pass = bool(mask.passes.all())
        return mask

    def passing(self, part: Array, ask: Ask) -> tuple[Array, Array]:
        """Which of these nodes pass, and of those which cells do."""
        good = (self._columns.room[part] >= ask.room).all(axis=1)
        mask = self._mask(ask.needs)
        if not mask.all_pass:
            good &= mask.passes[part]
        cells = self._passing_cells(part, ask)
        if ask.count == 1:
            good &= cells.any(axis=1)
        elif ask.count:
            good &= cells.sum(axis=1) >= ask.count
        return part[good], cells[good]

    def _passing_cells(self, part: Array, ask: Ask) -> Array:
        columns = self._columns
        cells: Array
        if ask.whole:
            cells = (columns.held[part] == EMPTY) & (columns.free[part] >= 0)
        elif ask.memory is None and ask.exclusion is None:
            cells = columns.plain[part] >= ask.milli
        else:
            if ask.memory is None:
                cells = columns.by_memory[part] >= ask.milli
            else:
                cells = (columns.free[part] >= ask.milli) & (columns.bytes[part] >= ask.memory)
            held = columns.held[part]
            if ask.exclusion is None:
                cells &= held <= PLAIN
            else:
                cells &= (held == EMPTY) | (held == columns.label(ask.exclusion))
        if ask.apart is not None and not ask.whole:
            for slot, cell in columns.apart.get(ask.apart, ()):
                cells[part == slot, cell] = False
        if ask.models:
            known = np.array([model in ask.models for model in columns.models] or [False])
            cells &= known[columns.model[part]]
        return cells
