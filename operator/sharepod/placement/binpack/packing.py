"""Packing: Binpack's order of places. A request goes where the usable capacity of the cluster falls least.

Guarantees:
- Packing only ranks (PL2 rules-in-Python of docs/design.md). An offer has passed the filters that the columns contain.
  The caller must also apply the filters themselves, and call `Offers.reject` if one refuses.
- The same history gives the same offers.
- A decision re-scores only the nodes that changed since its request class was last decided.
- Weights change only in `renew`, which a caller runs between decisions when `due`.
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
"""Most scores that are kept, over all request classes: some 50 MB. Above that, the half of the classes whose last
decision is oldest is dropped."""
_MIN_CLASSES = 64
"""Request classes whose scores are kept on a cluster of any size."""
_SAMPLE_NODES, _SAMPLE = 4096, 1_000_000
"""Most nodes, and most nodes times demand shapes, from which a renewal estimates the room of the cluster. In a larger
cluster every n-th node is read."""
_RENEWAL_WORK, _WORK_OF_CLASS = 20_000_000, 5_000_000
"""GPUs times demand shapes that a renewal scores: for all request classes (about 20 ms), and at most for one."""


class Packing:
    """Ranking of nodes for requests by the learned demand. `accounts`: a live view of the cluster's accounts."""

    def __init__(self, accounts: Mapping[str, NodeAccount]) -> None:
        self.columns = Columns(accounts)
        self.demand = Demand()
        self.usable: UsableCapacity | None = None
        """Usable capacity under the demand last learned. None before enough requests have arrived."""
        self._prices = ShadowPrices()
        self._scorer = Scorer(self.columns)
        self._scores: dict[Hashable, ClassScores] = {}

    # Changes and arrivals

    def touch(self, name: str) -> None:
        """Record that something about this node has changed."""
        self.columns.touch(name)

    def arrived(self, request: PlacementRequest) -> None:
        """Count a new request. The caller calls this once for each request, whether or not the request gets a place."""
        self.demand.count(request)

    @property
    def ready(self) -> bool:
        """True once the demand is known."""
        return self.usable is not None

    @property
    def due(self) -> bool:
        """Return True when `renew` is due."""
        return self.demand.due

    def renew(self) -> None:
        """Learn the weights from the arrivals. Takes milliseconds on a thousand nodes: do not call within a
        decision."""
        for _ in self.renewal():
            pass

    def renewal(self) -> Slices[None]:
        """Learn the weights from the arrivals, in slices of at most about 5 ms. Between two slices the cluster may
        change and decisions may be made.

        Decisions use the former weights until one slice replaces them all. Only one renewal may run at a time.
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
        # 2. Shadow prices, and from them the value of holes, over the GPUs that most arrivals can use.
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
            # 4. Sums over the GPUs of each node, with the new weights.
            weighing.reweigh()
            everywhere = np.arange(nodes if columns.started_over == started_over else 0, dtype=np.int64)
            for _ in weighing.slices(everywhere):
                yield
                if columns.started_over != started_over:
                    break
        # 5. Apply the weights, with the changes since the renewal began.
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
        """Copy changes into the columns: some microseconds for each changed node."""
        changed = self.columns.settle()
        if changed is None:
            self._scores.clear()
            self._scorer.bind(self.usable or UsableCapacity({}, models=(), sizes=()))
        else:
            self._scorer.sum_gpus(changed)

    # Ranking

    def offers(self, request: PlacementRequest) -> Offers:
        """Rank the places for a request that names no GPUs."""
        scores = self.scores(request_key(request), request)
        return Offers(self, self._without(scores.copy(), request.avoid) if request.avoid else scores)

    def scores(self, key: Hashable, request: PlacementRequest | RequestClass) -> ClassScores:
        """Return the current scores of all nodes for a request class. `key` is equal for requests of that class."""
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
        """Rank nodes by the free part of the fullest GPU that the request would get; skip nodes in `without`."""
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
        """Return the position of the best node; -1: there is none."""
        return self._scorer.best(scores)

    def passing(self, scores: ClassScores, node: int) -> list[int]:
        """Return the positions of the passing GPUs of one node; none if they are fewer than requested."""
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
        """Drop the present node from the ranking until its account changes."""
        self._scores.score[self._node] = NO_PLACE

    def gpus(self, *, all_passing: bool = False) -> list[int]:
        """Return the positions of the GPUs to take, as many as requested.

        A single GPU is the scored one; of several, the tightest passing ones. With `all_passing`: all passing GPUs, the
        tightest first.
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
