"""The books of all nodes once more, as columns: one row per node, one cell per GPU.

Guarantees: after `settle` they say what the accounts say. They are there for speed alone: the filters of
`node_filters` and `gpu_filters` decide, and what the columns pass is asked of those again before it is an answer.
Rows are in the order of the nodes' names, so that the first of equals is the same whatever came first.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from sharepod.api.objects import MAX_TENANTS
from sharepod.api.units import WHOLE_GPU
from sharepod.placement.state.accounts import NodeAccount
from sharepod.placement.state.types import LabelKey, NodeState

EMPTY, PLAIN = 0, 1
"""Labels of cells: no tenant at all; only tenants without an exclusion label. Others are numbered as they appear."""

_MAX_LABELS = 1 << 16
"""Combinations of exclusion labels after which they are numbered anew."""

_NO_SLOT: dict[tuple[int, int], None] = {}


class Columns:
    """Columns of (nodes,) and of (nodes, GPUs).

    `room`: CPU and memory for one more pod, -1 where the node takes none; `cpu`: what is free of it.
    `free`: thousandths that a share could have, -1 where the cell takes none; `by_memory`: no more than free memory in
    proportion allows; `bytes`: free memory; `label`: see EMPTY and PLAIN.
    `time`, `memory`: thousandths that are free, as indexes from 0 to 1000.
    `like`: equal for cells that are alike, -1 where a cell takes no shares, 0 where there is none; `state`: equal for
    nodes with the same CPU and cells.
    `stamp`: when the row last changed; `fixed`: when what does not depend on tenants did,
    `last_fixed`: for the last time.
    """

    def __init__(self, accounts: Mapping[str, NodeAccount]) -> None:
        self._accounts = accounts
        self._dirty: dict[str, None] = {}
        self._labels: dict[frozenset[LabelKey | None], int] = {}
        self._models: dict[str, int] = {}
        self._sizes: dict[int, int] = {}
        self.version = 0
        self._rebuild = True
        self._allocate([], 1)

    @property
    def models(self) -> list[str]:
        return list(self._models)

    @property
    def sizes(self) -> list[int]:
        return list(self._sizes)

    def label_number(self, key: LabelKey) -> int:
        """The number of cells all of whose tenants have this exclusion label; -1: there are none."""
        return self._labels.get(frozenset((key,)), -1)

    def touch(self, name: str) -> None:
        """Something about this node has changed."""
        self._dirty[name] = None

    def settle(self) -> npt.NDArray[np.intp] | None:
        """Takes over what has changed. Returns the rows that did; None: all of them are new."""
        if not self._dirty and not self._rebuild:
            return _NOTHING
        changed: list[int] = []
        for name in self._dirty:
            node = self._accounts.get(name)
            slot = self.slots.get(name)
            if node is None and slot is None:
                continue
            if slot is None or (node is not None and len(node.gpus) > self.width):
                self._rebuild = True
                break
            changed.append(slot)
        if self._rebuild or len(self._labels) > _MAX_LABELS:
            self._start_over()
            return None
        self._dirty.clear()
        self.version += 1
        for slot in changed:
            self._read(slot)
        return np.array(sorted(changed), dtype=np.intp)

    def _start_over(self) -> None:
        self._dirty.clear()
        self._rebuild = False
        self._labels.clear()
        names = sorted(self._accounts)
        nodes = [self._accounts[name] for name in names]
        self._allocate(names, max((len(node.gpus) for node in nodes), default=1))
        self.version += 1
        for slot in range(len(names)):
            self._read(slot)

    def _allocate(self, names: list[str], width: int) -> None:
        count, width = len(names), max(width, 1)
        self.width = width
        self.names = names
        self.slots = {name: slot for slot, name in enumerate(names)}
        self.states: list[NodeState | None] = [None] * count
        cells: Any = (count, width)
        self.free = np.full(cells, -1, dtype=np.int64)
        self.bytes = np.zeros(cells, dtype=np.int64)
        self.by_memory = np.full(cells, -1, dtype=np.int64)
        self.time = np.zeros(cells, dtype=np.int64)
        self.memory = np.zeros(cells, dtype=np.int64)
        self.size = np.zeros(cells, dtype=np.int64)
        self.model = np.zeros(cells, dtype=np.int64)
        self.label = np.zeros(cells, dtype=np.int64)
        self.tenants = np.zeros(cells, dtype=np.int64)
        self.like = np.zeros(cells, dtype=np.int64)
        self.cpu = np.zeros(count, dtype=np.float32)
        self.room = np.full((count, 2), -1, dtype=np.int64)
        self.node_model = np.zeros(count, dtype=np.int64)
        self.state = np.zeros(count, dtype=np.int64)
        self.stamp = np.zeros(count, dtype=np.int64)
        self.fixed = np.zeros(count, dtype=np.int64)
        self.last_fixed = self.version
        self.anti_affinity: dict[LabelKey, dict[tuple[int, int], None]] = {}
        self._anti_affinity_of: list[tuple[tuple[LabelKey, int], ...]] = [()] * count

    def _read(self, slot: int) -> None:
        node = self._accounts.get(self.names[slot])
        state = node.state if node is not None else None
        if state is not self.states[slot]:
            self.states[slot] = state
            self.fixed[slot] = self.last_fixed = self.version
        self.stamp[slot] = self.version
        for key, cell in self._anti_affinity_of[slot]:
            self.anti_affinity.get(key, _NO_SLOT).pop((slot, cell), None)
        self._anti_affinity_of[slot] = ()
        if node is None or state is None:
            self._clear_cells(slot, 0)
            self.room[slot] = -1
            self.cpu[slot] = 0.0
            return
        taken = node.taken()
        self.cpu[slot] = taken.free.cpu_milli
        if taken.pods < state.pods and len(node.rows) < MAX_TENANTS:
            self.room[slot] = max(taken.free.cpu_milli, 0), max(taken.free.memory, 0)
        else:
            self.room[slot] = -1
        self._read_cells(slot, node)

    def _clear_cells(self, slot: int, start: int) -> None:
        """There is no GPU from this cell on."""
        for column, value in (
            (self.free, -1),
            (self.by_memory, -1),
            (self.time, 0),
            (self.memory, 0),
            (self.tenants, 0),
            (self.like, 0),
        ):
            column[slot, start:] = value

    def _read_cells(self, slot: int, node: NodeAccount) -> None:
        models, sizes, labels = self._models, self._sizes, self._labels
        free, left, by_memory, time, memory, size, model, label_of, tenants, like = ([] for _ in range(10))
        for cell, gpu in enumerate(node.gpus):
            state = gpu.state
            shared = state.available and state.held and gpu.head_tenant is None and not gpu.exclusive
            milli = gpu.free_milli if shared else -1
            amount = gpu.free_memory
            if not gpu.tenants:
                label = EMPTY
            else:
                label = PLAIN
                if len(gpu.exclusions) != 1 or None not in gpu.exclusions:
                    label = labels.setdefault(frozenset(gpu.exclusions), PLAIN + 1 + len(labels))
            of_model = models.setdefault(state.model, len(models))
            of_size = sizes.setdefault(state.memory, len(sizes))
            share = max(amount, 0) * WHOLE_GPU // state.memory if state.memory else 0
            most = -(-(amount + 1) * WHOLE_GPU // state.memory) - 1 if state.memory else WHOLE_GPU
            milli_index = milli if milli > 0 else 0
            alike = (((((label << 16) | of_model) << 10) | of_size) << 20) | (share << 10) | milli_index
            if milli < 0:
                alike = -1
            free.append(milli)
            left.append(amount)
            by_memory.append(min(milli, most))
            time.append(milli_index)
            memory.append(share)
            size.append(of_size)
            model.append(of_model)
            label_of.append(label)
            tenants.append(gpu.tenants)
            like.append(alike)
            for key in gpu.anti_affinity:
                self.anti_affinity.setdefault(key, {})[slot, cell] = None
                self._anti_affinity_of[slot] = (*self._anti_affinity_of[slot], (key, cell))
        count = len(free)
        if count < self.width:
            self._clear_cells(slot, count)
        for column, values in (
            (self.free, free),
            (self.bytes, left),
            (self.by_memory, by_memory),
            (self.time, time),
            (self.memory, memory),
            (self.size, size),
            (self.model, model),
            (self.label, label_of),
            (self.tenants, tenants),
            (self.like, like),
        ):
            column[slot, :count] = values
        self.node_model[slot] = max(model, key=lambda one: (model.count(one), -one)) if model else 0
        self.state[slot] = hash((int(self.node_model[slot]), int(self.cpu[slot]), *sorted(like)))


_NOTHING: npt.NDArray[np.intp] = np.zeros(0, dtype=np.intp)
