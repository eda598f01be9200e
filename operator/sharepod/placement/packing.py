"""Binpack's order of places: the request goes where the usable capacity of the cluster falls least.

Guarantees: it ranks, and only that: what it offers has passed the columns' form of every filter that they know, and
the caller asks the filters themselves before it takes an offer (`Offers.reject` where they say no). The same history
gives the same offers. A decision re-scores only the nodes that changed since its kind of request was last decided; the
weights are renewed by `renew`, which a caller runs between decisions when `due`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from sharepod.api.units import WHOLE_GPU

from .accounts import NodeAccount
from .column_filters import Ask, ColumnFilters, needs_key
from .columns import Columns
from .demand import Demand, class_of
from .model import PodNeeds, Request
from .usable import UsableCapacity, memory_share

Array = npt.NDArray[Any]

GAP_WEIGHT = 0.3
ROUND_TO = 20
"""Thousandths: node scores nearer than this are equal, and the first node by name is taken."""

BULK = 64
"""Nodes that are scored at once on a decision's path."""

_REFRESHED = 24
_ROUNDS = 3
_GUESS = 0.3
_LEARNING = 512
"""Arrivals up to which new weights differ so much from those before that no score is kept."""

_MAX_ROWS = 4096
_AT_ONCE = 1024
_SAMPLE = 4096
_NO_PLACE = np.iinfo(np.int64).min
_DEAR = 1 << 50
"""More than any GPU costs."""


@dataclass(slots=True)
class _Row:
    """Scores of all nodes for one kind of request; `_NO_PLACE` where it does not fit. `cell`: what the chosen cell is
    like. `seen`: the stamp up to which changes are in."""

    ask: Ask
    score: Array
    cell: Array
    seen: int
    weights: Array
    """The number of the weights that each score was made with; 0: it is a guess."""


class Packing:
    """One for each cluster. `account` and `names` are how it reads that."""

    def __init__(self, account: Callable[[str], NodeAccount | None], names: Callable[[], Iterable[str]]) -> None:
        self.columns = Columns(account, names)
        self.demand = Demand()
        self._account = account
        self._capacity: UsableCapacity | None = None
        self._held: Array = np.zeros((0, 0), np.float32)
        self._value: Array = np.zeros(0, np.float32)
        self._model: Array = np.zeros(0, np.intp)
        self._rows: dict[Hashable, _Row] = {}
        self._filters = ColumnFilters(self.columns)
        self._number = 1

    # What the model tells it

    def touch(self, name: str) -> None:
        self.columns.touch(name)

    def arrived(self, request: Request) -> None:
        """A request that was not there before. Counts once, placed or not."""
        self.demand.count(class_of(request))

    @property
    def due(self) -> bool:
        """Time to `renew`."""
        return self.demand.due

    @property
    def ready(self) -> bool:
        """Something is known of the demand."""
        return self._capacity is not None

    def renew(self) -> None:
        """Learns the weights anew from what arrived. Milliseconds on a thousand nodes: not for a decision's path."""
        self.settle()
        columns = self.columns
        shares = self.demand.shares()
        if not shares:
            return
        capacity = UsableCapacity(shares, models=columns.models, sizes=columns.sizes)
        count = len(columns.names)
        self._capacity = capacity
        self._allocate(count)
        room: Array = np.zeros(len(shares))
        step = max(1, count // _SAMPLE)
        for start in range(0, count, _AT_ONCE):
            part = np.arange(start, min(start + _AT_ONCE, count))
            self._hold(capacity, part)
            some = part[part % step == 0]
            room += capacity.room(capacity.copies(self._held[some], columns.cpu[some]), self._model[some]) * step
        idle = float(np.maximum(columns.free, 0).sum())
        capacity.weigh_by_scarcity(room, max(idle, 1.0))
        self._rows.clear()
        for start in range(0, count, _AT_ONCE):
            self._revalue(capacity, np.arange(start, min(start + _AT_ONCE, count)))

    def forget(self) -> None:
        """Drops the scores that were kept, not what was learned. The next decision of each kind makes its own anew."""
        self._rows.clear()
        self._filters.forget()

    def settle(self) -> None:
        """Takes over what has changed since: some microseconds for each node that did."""
        changed = self.columns.settle()
        if changed is None:
            self.forget()
            self._allocate(len(self.columns.names))
            changed = np.arange(len(self.columns.names))
        if self._capacity is not None and changed.size:
            for start in range(0, changed.size, _AT_ONCE):
                part = changed[start : start + _AT_ONCE]
                self._hold(self._capacity, part)
                self._revalue(self._capacity, part)

    def _allocate(self, count: int) -> None:
        self._held = np.zeros((count, self._capacity.width if self._capacity is not None else 0), np.float32)
        self._value = np.zeros(count, np.float32)
        self._model = np.zeros(count, np.intp)

    def _hold(self, capacity: UsableCapacity, part: Array) -> None:
        columns = self.columns
        # A model or size that was first seen after the weights were made is like no other, or like the first one, until
        # they are renewed.
        self._model[part] = np.minimum(columns.node_model[part], capacity.models)
        size = columns.size[part]
        size[size >= capacity.sizes] = 0
        self._held[part] = capacity.cells(columns.time[part], columns.memory[part], size).sum(axis=1)

    def _revalue(self, capacity: UsableCapacity, part: Array) -> None:
        self._value[part] = capacity.value(self._held[part], self.columns.cpu[part], self._model[part])

    # What the engine asks of it

    def offers(self, request: Request) -> Offers:
        """The places for a request, best first. The request asks for shares on any GPUs, not for certain ones."""
        self.settle()
        gpu = request.gpu
        labels = gpu.labels
        named = labels.exclusion is not None or labels.anti_affinity is not None
        key = (
            gpu.request,
            gpu.memory,
            gpu.count,
            gpu.models,
            gpu.mode,
            (request.namespace, labels.exclusion, labels.anti_affinity) if named else None,
            *needs_key(request.pod),
        )
        row = self._rows.get(key) or self._new_row(key, Ask.of(request))
        self._catch_up(row)
        if not request.avoid:
            return Offers(self, row)
        score = row.score.copy()
        for name in request.avoid:
            slot = self.columns.slots.get(name)
            if slot is not None:
                score[slot] = _NO_PLACE
        return Offers(self, _Row(row.ask, score, row.cell, row.seen, row.weights))

    def host(self, needs: PodNeeds) -> Offers:
        """The places for a pod that takes no GPU: where the CPU it takes is missed least."""
        self.settle()
        key = ("host", *needs_key(needs))
        row = self._rows.get(key) or self._new_row(key, Ask(needs, 0, 0, None, None, (), None, whole=False))
        self._catch_up(row)
        return Offers(self, row)

    def most_free(self, request: Request, *, without: Iterable[str] = ()) -> Offers:
        """The nodes for a request by how free the fullest of the GPUs is that it would get there; not those of
        `without`."""
        self.settle()
        columns, ask = self.columns, Ask.of(request)
        cost = ((WHOLE_GPU - columns.time) << 32) + (columns.tenants << 12) + WHOLE_GPU - columns.memory
        return self._cheapest(ask, cost, {*request.avoid, *without}, worst_counts=True)

    def least_promised(self, request: Request) -> Offers:
        """The nodes for best effort: GPUs in use, with little promised time; then those with few idle GPUs."""
        self.settle()
        columns, ask = self.columns, Ask.of(request)
        promised = (WHOLE_GPU - columns.time) << 28
        cost = ((columns.tenants == 0) << 44) + promised + (columns.tenants << 12) + columns.memory
        return self._cheapest(ask, cost, set(request.avoid), worst_counts=False)

    def _cheapest(self, ask: Ask, cost: Array, without: set[str], *, worst_counts: bool) -> Offers:
        columns = self.columns
        count = len(columns.names)
        score = np.full(count, _NO_PLACE)
        part, cells = self._filters.passing(np.arange(count), ask)
        if part.size:
            of_cells = np.where(cells, cost[part], _DEAR)
            if ask.count == 1:
                of_nodes = of_cells.min(axis=1)
            else:
                of_cells.partition(ask.count - 1, axis=1)
                of_nodes = of_cells[:, ask.count - 1] if worst_counts else of_cells[:, : ask.count].sum(axis=1)
            if not worst_counts:
                idle = (columns.like[part] != 0) & (columns.tenants[part] == 0)
                of_nodes = of_nodes * 64 + np.minimum(idle.sum(axis=1), 63)
            score[part] = -of_nodes
        for name in without:
            slot = columns.slots.get(name)
            if slot is not None:
                score[slot] = _NO_PLACE
        nothing = np.zeros(0, np.int64)
        return Offers(self, _Row(ask, score, nothing, columns.now, nothing))

    def _new_row(self, key: Hashable, ask: Ask) -> _Row:
        if len(self._rows) >= _MAX_ROWS:
            self._rows.clear()
        count = len(self.columns.names)
        row = self._rows[key] = _Row(
            ask, np.full(count, _NO_PLACE), np.zeros(count, np.int64), -1, np.zeros(count, np.int64)
        )
        return row

    def _catch_up(self, row: _Row) -> None:
        """Scores the nodes anew that have changed since. Where those are many, and where the weights are newer than the
        scores, only what looks best is scored: a decision's time stays bounded."""
        thorough = not row.ask.count
        if thorough and (row.weights != self._number).any():
            row.seen = -1  # a node for a pod without GPUs is not urgent: nothing is guessed
        if row.seen < self.columns.now:
            changed = (self.columns.stamp > row.seen).nonzero()[0]
            row.seen = self.columns.now
            row.score[changed] = _NO_PLACE
            row.weights[changed] = self._number
            part, cells = self._filters.passing(changed, row.ask)
            if part.size <= BULK:
                self._score(row, part, cells)
            else:
                self._score_bulk(row, part, cells)
        for _ in range(0 if thorough else _ROUNDS):
            best = int(row.score.argmax()) if row.score.size else 0
            if not row.score.size or row.weights[best] == self._number or row.score[best] == _NO_PLACE:
                return
            old = np.where(row.weights != self._number, row.score, _NO_PLACE)
            top = old.argpartition(max(old.size - _REFRESHED, 0))[-_REFRESHED:]
            top = np.sort(top[old[top] != _NO_PLACE])
            part, cells = self._filters.passing(top, row.ask)
            row.score[top] = _NO_PLACE
            self._score(row, part, cells)

    def passing(self, slot: int, ask: Ask) -> list[int]:
        """The cells of one node that pass; none where the node does not."""
        _, cells = self._filters.passing(np.array([slot]), ask)
        return [int(cell) for cell in cells[0].nonzero()[0]] if cells.size else []

    def is_new(self, row: _Row, slot: int) -> bool:
        """Whether the score was made with the weights that hold now."""
        return bool(row.weights[slot] == self._number)

    def _score(self, row: _Row, part: Array, cells: Array) -> None:
        if part.size:
            row.score[part], row.cell[part] = self._scores(part, cells, row.ask)
            row.weights[part] = self._number

    def _score_bulk(self, row: _Row, part: Array, cells: Array) -> None:
        _, chosen, inverse = np.unique(self.columns.state[part], return_index=True, return_inverse=True)
        if chosen.size <= BULK or not row.ask.count:
            score, cell = self._scores(part[chosen], cells[chosen], row.ask)
            row.score[part], row.cell[part] = score[inverse], cell[inverse]
            row.weights[part] = self._number
        else:
            row.score[part] = self._guess(part, cells, row.ask)
            row.weights[part] = 0

    def _guess(self, part: Array, cells: Array, ask: Ask) -> Array:
        """Which nodes to look at first: those with a tight cell, for several GPUs or none those with little free."""
        time = self.columns.time[part]
        if ask.count != 1 or self._capacity is None:
            total: Array = -(time.sum(axis=1) // 100)
            return total
        free = np.where(cells, time, WHOLE_GPU).min(axis=1)
        loss = self._capacity.gap_loss
        left = np.maximum(free - ask.milli, 0)
        guess: Array = np.rint((loss[free] - loss[left] - left) * (_GUESS / ROUND_TO)).astype(np.int64)
        return guess

    def _scores(self, part: Array, cells: Array, ask: Ask) -> tuple[Array, Array]:
        """Of nodes and their passing cells: the rounded scores, and what the best cell is like."""
        capacity, columns = self._capacity, self.columns
        if capacity is None:
            return np.zeros(part.size, np.int64), np.zeros(part.size, np.int64)
        if ask.count != 1:
            held = self._held[part]
            if ask.count:
                held += self._change_by_tightest(part, cells, ask)
            raw = self._gain(part, held, ask)
            return np.rint(raw / ROUND_TO).astype(np.int64), np.zeros(part.size, np.int64)
        at, cell = (cells & columns.first[part]).nonzero()
        node = part[at]
        raw = self._gain(node, self._held[node] + self._change(node, cell, ask), ask)
        like = columns.like[node, cell]
        if at.size == part.size:
            return np.rint(raw / ROUND_TO).astype(np.int64), like
        starts = np.searchsorted(at, np.arange(part.size))
        best = np.maximum.reduceat(raw, starts)
        winners = (raw == best[at]).nonzero()[0][::-1]
        chosen = np.zeros(part.size, np.int64)
        chosen[at[winners]] = like[winners]
        return np.rint(best / ROUND_TO).astype(np.int64), chosen

    def _gain(self, node: Array, held: Array, ask: Ask) -> Array:
        """What usable capacity the nodes gain, which is rarely more than nothing, once they hold this."""
        assert self._capacity is not None
        raw = self._capacity.value(held, self.columns.cpu[node] - ask.cpu, self._model[node])
        raw -= self._value[node]
        raw -= (held[:, -1] - self._held[node, -1]) * GAP_WEIGHT
        return raw

    def _change(self, node: Array, cell: Array, ask: Ask) -> Array:
        """What putting the request on these cells changes in what they hold."""
        capacity, columns = self._capacity, self.columns
        assert capacity is not None
        if capacity.proportional and ask.memory is None:
            level = columns.level[node, cell]
            left = capacity.levels(np.maximum(level - ask.milli, 0))
            left -= capacity.levels(level)
            return left
        time, memory, size = columns.time[node, cell], columns.memory[node, cell], columns.size[node, cell]
        takes: Array | int = ask.milli
        if ask.whole:
            takes = WHOLE_GPU
        elif ask.memory is not None:
            shares = [memory_share(ask.memory, ask.milli, one) for one in columns.sizes]
            takes = np.array(shares or [0])[size]
        size[size >= capacity.sizes] = 0
        after = capacity.cells(np.maximum(time - ask.milli, 0), np.maximum(memory - takes, 0), size)
        after -= capacity.cells(time, memory, size)
        return after

    def _change_by_tightest(self, part: Array, cells: Array, ask: Ask) -> Array:
        """As `_change` for several GPUs at once: the tightest that pass."""
        free = np.where(cells, self.columns.time[part], WHOLE_GPU + 1)
        order = free.argsort(axis=1, kind="stable")[:, : ask.count]
        change = self._change(np.repeat(part, ask.count), order.ravel(), ask)
        result: Array = change.reshape((part.size, ask.count, -1)).sum(axis=1)
        return result


class Offers:
    """Iterates over nodes, best first. `cells`: which GPUs of the node last offered to take, by position."""

    __slots__ = ("_packing", "_row", "_slot")

    def __init__(self, packing: Packing, row: _Row) -> None:
        self._packing = packing
        self._row = row
        self._slot = -1

    def next(self) -> str | None:
        """The best node that has not been rejected."""
        row, score = self._row, self._row.score
        if not score.size:
            return None
        self._slot = int(score.argmax())
        if score[self._slot] == _NO_PLACE:
            return None
        if row.weights.size and not self._packing.is_new(row, self._slot):
            # What has been scored comes before what only looks better.
            scored = int(np.where(row.weights == row.weights.max(), score, _NO_PLACE).argmax())
            if score[scored] != _NO_PLACE and self._packing.is_new(row, scored):
                self._slot = scored
        return self._packing.columns.names[self._slot]

    def reject(self) -> None:
        """The node last offered does not take it, and will not until something about it changes."""
        self._row.score[self._slot] = _NO_PLACE

    def cells(self, *, whole: bool = False) -> list[int]:
        """The tightest that pass, as many as are asked for; of several, with `whole`, all that pass, tightest first."""
        columns, ask = self._packing.columns, self._row.ask
        new = self._packing.is_new(self._row, self._slot)
        if ask.count == 1 and ask.apart is None and new:
            like = columns.like[self._slot].tolist()
            wanted = int(self._row.cell[self._slot])
            if wanted in like:
                return [like.index(wanted)]
        cells = self._packing.passing(self._slot, ask)
        if ask.count == 1 and new:
            wanted = int(self._row.cell[self._slot])
            return next(([cell] for cell in cells if columns.like[self._slot, cell] == wanted), cells[:1])
        time = columns.time[self._slot].tolist()
        tightest = sorted(cells, key=lambda cell: (time[cell], cell))
        return tightest if whole else sorted(tightest[: ask.count])
