"""Packing: Binpack's ranking of places. A request goes to the place where the usable capacity of the cluster falls
least (usable_capacity.py).

Guarantees:
- Packing only ranks (PL2 rules-in-Python of docs/design.md). An offered place has passed the filters that the columns
  contain. The caller must also apply all filters, and call `Offers.reject` if one refuses.
- The same history gives the same offers.
- A decision re-scores only the nodes that have changed since its request class was last decided.
- Weights change only in `renew`, which the caller runs between decisions when `due`.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping

import numpy as np
import numpy.typing as npt

from sharepod.placement.state.accounts import NodeAccount
from sharepod.placement.state.types import PlacementRequest

from .columns import OPEN_AT, Columns
from .demand import Demand
from .hole_prices import ShadowPrices
from .request_classes import RequestClass, request_key
from .scores import NO_PLACE, ClassScores, Scorer
from .sliced_work import Slices
from .usable_capacity import UsableCapacity
from .whole_nodes import largest_kinds, with_whole_nodes

_MAX_SCORES = 2_000_000
"""Most scores (nodes x request classes) that are kept: some 50 MB. Above that, half of the classes are dropped, those
whose last decision is oldest."""
_MIN_CLASSES = 64
"""Request classes whose scores are kept even if they exceed `_MAX_SCORES`."""
_SAMPLE_NODES, _SAMPLE = 4096, 1_000_000
"""Bounds of a renewal's sample: most nodes, and most nodes x demand shapes, that it reads to estimate the cluster's
room. In a larger cluster every n-th node is read."""
_RENEWAL_WORK, _WORK_OF_CLASS = 20_000_000, 5_000_000
"""Work of a renewal, in GPUs x demand shapes scored: for all request classes together (about 20 ms), and at most for
one."""


class Packing:
    """Ranking of nodes for requests by the learned demand. `accounts`: mapping that always shows the cluster's present
    accounts."""

    def __init__(self, accounts: Mapping[str, NodeAccount]) -> None:
        self.columns = Columns(accounts)
        self.demand = Demand()
        self.usable: UsableCapacity | None = None
        """Usable capacity by the demand of the last renewal. None before the first."""
        self._prices = ShadowPrices()
        self._scorer = Scorer(self.columns)
        self._scores: dict[Hashable, ClassScores] = {}

    # Changes and arrivals

    def touch(self, name: str) -> None:
        """Mark a node whose account has changed, so that it is scored again."""
        self.columns.touch(name)

    def arrived(self, request: PlacementRequest) -> None:
        """Count a new request in the demand. Call it once for each request, whether or not the request gets a place."""
        self.demand.count(request)

    @property
    def ready(self) -> bool:
        """True once a renewal has learned the demand."""
        return self.usable is not None

    @property
    def due(self) -> bool:
        """Return True when `renew` is due."""
        return self.demand.due

    def renew(self) -> None:
        """Learn the weights from the arrivals. Takes milliseconds on a thousand nodes: not within a decision."""
        for _ in self.renewal():
            pass

    def renewal(self) -> Slices[None]:
        """Learn the weights from the arrivals, in slices of at most about 5 ms. Between two slices the cluster may
        change, and decisions use the former weights.

        One of the slices applies all new weights. Only one renewal may run at a time.
        """
        self.settle()
        columns = self.columns
        shares = self.demand.shares()
        if not shares:
            return
        yield
        # 1. Worth of the GPUs by the labels of their tenants.
        labels = yield from self.demand.label_shares()
        yield
        worth_of = yield from columns.combinations.weigh(labels)
        began, started_over = columns.version, columns.started_over
        worth = columns.worth_by(worth_of)
        # 2. Shadow prices over the GPUs that most arrivals can use, and the value of holes at these prices.
        models, sizes = columns.models, columns.sizes
        idle = float(np.maximum(columns.share, 0).sum())
        by_time = yield from self._prices.hole_values(shares, columns.share[(columns.share > 0) & (worth >= OPEN_AT)])
        by_memory = []
        for size in sizes or [0]:
            by_memory.append(self._prices.memory_values(shares, size))
            yield
        wanted = with_whole_nodes(shares, largest_kinds(columns.states)) if columns.left else shares
        yield
        usable = UsableCapacity(
            wanted,
            models=models,
            sizes=sizes,
            hole_by_time=by_time,
            hole_by_memory=np.array(by_memory),
            tenants_leave=columns.left > 0,
        )
        yield
        if columns.started_over == started_over:
            weighing = self._scorer.weighing(usable, worth)
            # 3. Scarcity: the room for each class, on a sample of the nodes.
            nodes = len(columns.names)
            step = max(1, -(-nodes * max(len(usable.shapes), 1) // _SAMPLE), nodes // _SAMPLE_NODES)
            sample = np.arange(0, nodes, step, dtype=np.int64)
            room = usable.no_room()
            for summed in weighing.slices(sample):
                copies = usable.copies(weighing.sums[summed], columns.cpu[summed])
                usable.add_room(room, copies, np.minimum(columns.node_model[summed], usable.models))
                yield
                if columns.started_over != started_over:
                    break
            else:
                yield from usable.weigh_by_scarcity(usable.room_of_classes(room) * step, max(idle, 1.0))
            # 4. The usable capacity of each node, summed over its GPUs with the new weights.
            weighing.reweigh()
            everywhere = np.arange(nodes if columns.started_over == started_over else 0, dtype=np.int64)
            for _ in weighing.slices(everywhere):
                yield
                if columns.started_over != started_over:
                    break
        # 5. Apply the weights, and sum again over changed nodes.
        self.settle()
        self.usable = usable
        columns.weigh_labels(worth_of, labels)
        if columns.started_over != started_over:
            self._scorer.bind(usable)
        else:
            self._scorer.take(weighing)
            self._scorer.sum_gpus(np.flatnonzero(columns.changed_at > began).astype(np.int64))
        # 6. Scores by the new weights, for the most recently decided classes first.
        work = _RENEWAL_WORK
        for key, scores in sorted(self._scores.items(), key=lambda item: -item[1].seen):
            yield
            self.settle()
            if self._scores.get(key) is scores:  # skip if all arrays were rebuilt
                work -= _WORK_OF_CLASS - (yield from self._scorer.renew(scores, _WORK_OF_CLASS))
            if work < 0:
                break

    def settle(self) -> None:
        """Copy changed nodes into columns and sums: some microseconds each."""
        changed = self.columns.settle()
        if changed is None:
            self._scores.clear()
            self._scorer.bind(self.usable or UsableCapacity({}, models=(), sizes=()))
        else:
            self._scorer.sum_gpus(changed)

    # Ranking

    def offers(self, request: PlacementRequest) -> Offers:
        """Rank the places for a request that names no GPU UUIDs."""
        scores = self.scores(request_key(request), request)
        return Offers(self, self._without(scores.copy(), request.avoid) if request.avoid else scores)

    def scores(self, key: Hashable, request: PlacementRequest | RequestClass) -> ClassScores:
        """Return the current scores of all nodes for a request class. `key`: of that class (`request_key`)."""
        self.settle()
        scores = self._scores.get(key)
        if scores is None:
            of_class = request if isinstance(request, RequestClass) else RequestClass.of(request)
            if len(self._scores) >= max(_MAX_SCORES // max(len(self.columns.names), 1), _MIN_CLASSES):
                self._drop_oldest()
            scores = self._scores[key] = ClassScores(of_class, len(self.columns.names))
        self._scorer.update(scores)
        return scores

    def _drop_oldest(self) -> None:
        """Drop the scores of the half of the classes whose last decision is oldest."""
        oldest = sorted(self._scores, key=lambda key: self._scores[key].seen)
        for key in oldest[: -(-len(oldest) // 2)]:
            del self._scores[key]

    def most_free(self, request: PlacementRequest, *, without: npt.NDArray[np.bool_] | None = None) -> Offers:
        """Rank nodes for Spread: by the free part of the fullest GPU that the request would get, without nodes true in
        `without`."""
        self.settle()
        scores = self._scorer.most_free(RequestClass.of(request))
        if without is not None:
            scores.score[without] = NO_PLACE
        return Offers(self, self._without(scores, request.avoid))

    def least_promised(self, request: PlacementRequest) -> Offers:
        """Rank nodes for best effort: GPUs in use with little promised time, then nodes with few idle GPUs."""
        self.settle()
        scores = self._scorer.least_promised(RequestClass.of(request))
        return Offers(self, self._without(scores, request.avoid))

    def _without(self, scores: ClassScores, names: Iterable[str]) -> ClassScores:
        """Set the scores of these nodes to `NO_PLACE`."""
        for name in names:
            node = self.columns.positions.get(name)
            if node is not None:
                scores.score[node] = NO_PLACE
        return scores

    def best(self, scores: ClassScores) -> int:
        """Return the index of the node with the best score; -1: no node takes the request."""
        return self._scorer.best(scores)

    def passing(self, scores: ClassScores, node: int) -> list[int]:
        """Return the positions of a node's passing GPUs; empty if fewer than requested."""
        return self._scorer.passing(scores, node)


class Offers:
    """Ranked places of a request: the best node first, with the GPUs to take on it."""

    __slots__ = ("_node", "_packing", "_scores")

    def __init__(self, packing: Packing, scores: ClassScores) -> None:
        self._packing = packing
        self._scores = scores
        self._node = -1

    def next(self) -> str | None:
        """Return the best node that has not been rejected; None: there is none."""
        self._node = self._packing.best(self._scores)
        return None if self._node < 0 else self._packing.columns.names[self._node]

    def reject(self) -> None:
        """Drop the present node, which a filter refused, until its account changes."""
        self._scores.score[self._node] = NO_PLACE

    def gpus(self, *, all_passing: bool = False) -> list[int]:
        """Return the positions of the GPUs to take on the present node, as many as requested.

        For one GPU, it is the GPU with the best score. For several, they are the passing GPUs with the least free time.
        With `all_passing`, return all passing GPUs, those with the least free time first.
        """
        columns, scores, node = self._packing.columns, self._scores, self._node
        passing = self._packing.passing(scores, node)
        signature = columns.signature[node].tolist()
        if scores.request_class.count == 1:
            wanted = int(scores.gpu[node])
            return next(([gpu] for gpu in passing if signature[gpu] == wanted), passing[:1])
        time = columns.time[node].tolist()
        tightest = sorted(passing, key=lambda gpu: (time[gpu], signature[gpu], gpu))
        return tightest if all_passing else sorted(tightest[: scores.request_class.count])
