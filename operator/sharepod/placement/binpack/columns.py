"""Columns: the free time, memory and labels of all nodes and GPUs, as NumPy arrays that C reads.

Node columns have shape (nodes,). GPU columns have shape (nodes, width), where `width` is the largest number of GPUs of
a node.

Guarantees:
- After `settle` the columns equal the accounts (placement/state/accounts.py).
- The columns only save time: they may let a place pass that the filters refuse, so the filters decide.
- Nodes are ordered by name, so ties do not depend on the order in which nodes were added.
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

from .label_combinations import LabelCombinations, Numbers
from .label_demand import LabelShares

NO_TENANT, NO_EXCLUSION = 0, 1
"""Values of the column `exclusion`: the GPU has no tenants; its tenants have no exclusion label. Labels have the
numbers from 2 on."""

OPEN_AT = 0.5
"""Least `worth` of a GPU (the part of all arrivals whose labels allow them to join its tenants) at which its free time
counts as room for copies of requests. With 0.5, most arrivals can use the GPU. Equal to the value in scores.c."""

_MAX_COMBINATIONS = 1 << 16
"""Number of label combinations above which all are renumbered, because `signature` has 16 bits for the number."""


class Columns:
    """Columns of all nodes and GPUs. `version` grows with each change; `started_over` counts rebuilds of all arrays.
    `left`: number of tenants that have left a node while the node stayed.

    Node columns:
    - `room`: free thousandths of a core and free bytes of memory, of shape (nodes, 2); -1: the node takes no more pod.
    - `cpu`: free thousandths of a core.
    - `node_model`: number of the model that most of its GPUs have, in `models`.
    - `node_signature`: equal for nodes with the same model, CPU and GPUs.
    - `changed_at`: `version` at which anything about the node last changed.
    - `state_changed_at`: `version` at which its NodeState last changed; `last_state_change` is the largest of them.

    GPU columns:
    - `share`: free thousandths of time for a share; -1: the GPU takes no share.
    - `share_in_proportion`: as `share`, bounded by free memory in proportion to time.
    - `bytes`: free memory. `time`, `memory`: free thousandths, from 0 to 1000.
    - `size`, `model`: indices in `sizes` and `models`. `exclusion`: see `NO_TENANT`. `tenants`: number of tenants.
    - `labels`: number of the combination of its tenants' labels. `worth`: part of all arrivals whose labels allow them
      to join its tenants.
    - `interactive_room`: number of further interactive tenants that it takes.
    - `signature`: equal for GPUs with equal scores; -1: the GPU takes no share, 0: there is no GPU.
    """

    def __init__(self, accounts: Mapping[str, NodeAccount]) -> None:
        self._accounts = accounts
        self._dirty: dict[str, None] = {}
        self._number_exclusions()
        self.combinations = LabelCombinations()
        self._models: dict[str, int] = {}
        self._sizes: dict[int, int] = {}
        self.version = 0
        self.left = 0
        self.started_over = 0
        self._rebuild = True
        self._allocate([], 1)

    @property
    def models(self) -> list[str]:
        """GPU models, in the order of their numbers."""
        return list(self._models)

    @property
    def sizes(self) -> list[int]:
        """Sizes of GPU memory in bytes, in the order of their numbers."""
        return list(self._sizes)

    def exclusion_number(self, key: LabelKey) -> int:
        """Return the number of this exclusion label in the column `exclusion`. -1: no GPU has tenants with it."""
        return self._exclusions.find(frozenset((key,)))

    def worth_by(self, worth: list[float]) -> npt.NDArray[np.float32]:
        """Return the column `worth` of all GPUs, computed from the worth of each combination of labels."""
        return np.array(worth, dtype=np.float32)[self.labels]

    def weigh_labels(self, worth: list[float], shares: LabelShares) -> None:
        """Set the shares of labels among arrivals, and the worths of combinations that `combinations.weigh` computed
        from them."""
        self.combinations.take(worth, shares, self.labels)
        self._exclusions.keep(self.exclusion)
        self.worth[:] = self.worth_by(self.combinations.worth)

    def _number_exclusions(self) -> None:
        self._exclusions: Numbers[frozenset[LabelKey | None]] = Numbers(frozenset(), frozenset((None,)))

    def touch(self, name: str) -> None:
        """Mark a changed node for the next `settle`."""
        self._dirty[name] = None

    def settle(self) -> npt.NDArray[np.intp] | None:
        """Copy the state of the nodes marked by `touch` into the columns. Return the indices of these nodes; None if
        all arrays were rebuilt."""
        if not self._dirty and not self._rebuild:
            return _NOTHING
        changed: list[int] = []
        for name in self._dirty:
            account = self._accounts.get(name)
            node = self.positions.get(name)
            if account is None and node is None:
                continue
            if node is None or (account is not None and len(account.gpus) > self.width):
                self._rebuild = True
                break
            changed.append(node)
        if self._rebuild or len(self.combinations) > _MAX_COMBINATIONS:
            self._start_over()
            return None
        self._dirty.clear()
        self.version += 1
        for node in changed:
            self._read(node)
        return np.array(sorted(changed), dtype=np.intp)

    def _start_over(self) -> None:
        self._dirty.clear()
        self._rebuild = False
        self._number_exclusions()
        self.combinations.start_over()
        names = sorted(self._accounts)
        self._allocate(names, max((len(self._accounts[name].gpus) for name in names), default=1))
        self.version += 1
        self.started_over += 1
        for node in range(len(names)):
            self._read(node)

    def _allocate(self, names: list[str], width: int) -> None:
        count, width = len(names), max(width, 1)
        self.width = width
        self.names = names
        self.positions = {name: node for node, name in enumerate(names)}
        self.states: list[NodeState | None] = [None] * count
        self._rows = [0] * count
        gpus: Any = (count, width)
        self.share = np.full(gpus, -1, dtype=np.int64)
        self.share_in_proportion = np.full(gpus, -1, dtype=np.int64)
        self.bytes = np.zeros(gpus, dtype=np.int64)
        self.time = np.zeros(gpus, dtype=np.int64)
        self.memory = np.zeros(gpus, dtype=np.int64)
        self.size = np.zeros(gpus, dtype=np.int64)
        self.model = np.zeros(gpus, dtype=np.int64)
        self.exclusion = np.zeros(gpus, dtype=np.int64)
        self.tenants = np.zeros(gpus, dtype=np.int64)
        self.labels = np.zeros(gpus, dtype=np.int64)
        self.worth = np.ones(gpus, dtype=np.float32)
        self.interactive_room = np.zeros(gpus, dtype=np.int64)
        self.signature = np.zeros(gpus, dtype=np.int64)
        self.cpu = np.zeros(count, dtype=np.float32)
        self.room = np.full((count, 2), -1, dtype=np.int64)
        self.node_model = np.zeros(count, dtype=np.int64)
        self.node_signature = np.zeros(count, dtype=np.int64)
        self.changed_at = np.zeros(count, dtype=np.int64)
        self.state_changed_at = np.zeros(count, dtype=np.int64)
        self.last_state_change = self.version

    def _read(self, node: int) -> None:
        account = self._accounts.get(self.names[node])
        state = account.state if account is not None else None
        if state is not self.states[node]:
            self.states[node] = state
            self.state_changed_at[node] = self.last_state_change = self.version
        self.changed_at[node] = self.version
        rows = len(account.rows) if account is not None else 0
        if account is None or state is None:
            self._rows[node] = rows
            self._clear_gpus(node, 0)
            self.room[node] = -1
            self.cpu[node] = 0.0
            return
        self.left += max(self._rows[node] - rows, 0)
        self._rows[node] = rows
        taken = account.taken()
        self.cpu[node] = taken.free.cpu_milli
        if taken.pods < state.pods and len(account.rows) < MAX_TENANTS:
            self.room[node] = max(taken.free.cpu_milli, 0), max(taken.free.memory, 0)
        else:
            self.room[node] = -1
        self._read_gpus(node, account)

    def _clear_gpus(self, node: int, start: int) -> None:
        """Mark the node's positions from `start` on as without GPU."""
        for column, value in (
            (self.share, -1),
            (self.share_in_proportion, -1),
            (self.time, 0),
            (self.memory, 0),
            (self.tenants, 0),
            (self.signature, 0),
        ):
            column[node, start:] = value

    def _read_gpus(self, node: int, account: NodeAccount) -> None:
        models, sizes, exclusions = self._models, self._sizes, self._exclusions
        shares, in_proportion, free_bytes, time, memory, size = ([] for _ in range(6))
        model, exclusion_of, tenants, labels, interactive, signatures = ([] for _ in range(6))
        for gpu in account.gpus:
            state = gpu.state
            shared = state.available and state.held and gpu.head_tenant is None and not gpu.exclusive
            milli = gpu.free_milli if shared else -1
            amount = gpu.free_memory
            if not gpu.tenants:
                exclusion = NO_TENANT
            else:
                exclusion = NO_EXCLUSION
                if len(gpu.exclusions) != 1 or None not in gpu.exclusions:
                    labels_of = frozenset(gpu.exclusions)
                    exclusion = exclusions.find(labels_of)
                    if exclusion < 0:
                        exclusion = exclusions.add(labels_of)
            of_model = models.setdefault(state.model, len(models))
            of_size = sizes.setdefault(state.memory, len(sizes))
            free_memory = max(amount, 0) * WHOLE_GPU // state.memory if state.memory else 0
            most = max(-1, -(-(amount + 1) * WHOLE_GPU // state.memory) - 1) if state.memory else WHOLE_GPU
            free_time = milli if milli > 0 else 0
            combination = self.combinations.number(gpu)
            signature = (((((combination << 16) | of_model) << 10) | of_size) << 20) | (free_memory << 10) | free_time
            if milli < 0:
                signature = -1
            shares.append(milli)
            in_proportion.append(min(milli, most))
            free_bytes.append(max(amount, -1))
            time.append(free_time)
            memory.append(free_memory)
            size.append(of_size)
            model.append(of_model)
            exclusion_of.append(exclusion)
            tenants.append(gpu.tenants)
            labels.append(combination)
            interactive.append(gpu.interactive_room)
            signatures.append(signature)
        count = len(shares)
        if count < self.width:
            self._clear_gpus(node, count)
        for column, values in (
            (self.share, shares),
            (self.share_in_proportion, in_proportion),
            (self.bytes, free_bytes),
            (self.time, time),
            (self.memory, memory),
            (self.size, size),
            (self.model, model),
            (self.exclusion, exclusion_of),
            (self.tenants, tenants),
            (self.labels, labels),
            (self.interactive_room, interactive),
            (self.signature, signatures),
        ):
            column[node, :count] = values
        self.worth[node, :count] = [self.combinations.worth[number] for number in labels]
        self.node_model[node] = max(model, key=lambda one: (model.count(one), -one)) if model else 0
        self.node_signature[node] = hash((int(self.node_model[node]), int(self.cpu[node]), *sorted(signatures)))


_NOTHING: npt.NDArray[np.intp] = np.zeros(0, dtype=np.intp)
