"""Binpack's order of places: the request goes where the usable capacity of the cluster falls least.

Guarantees: it ranks, and only that: what it offers has passed the columns' form of every filter that they know, and
the caller asks the filters themselves before it takes an offer (`Offers.reject` where they say no). The same history
gives the same offers. A decision re-scores only the nodes that changed since its kind of request was last decided; the
weights are renewed by `renew`, which a caller runs between decisions when `due`.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping

import numpy as np

from sharepod.placement.state.accounts import NodeAccount
from sharepod.placement.state.types import PlacementRequest, PodNeeds

from .columns import Columns
from .demand import Demand, class_of
from .hole_prices import Prices
from .queries import Ask, needs_key, request_key
from .scores import NO_PLACE, Scored, Scores
from .usable_capacity import UsableCapacity

_MAX_KINDS = 4096
_SAMPLE = 4096
_RENEWAL_WORK = 20_000_000
"""Cells times kinds of requests that a renewal scores anew: some 20 ms."""


class Packing:
    """One for each engine. `accounts`: a live view of the cluster's accounts by node name."""

    def __init__(self, accounts: Mapping[str, NodeAccount]) -> None:
        self.columns = Columns(accounts)
        self.demand = Demand()
        self.usable: UsableCapacity | None = None
        """What is known of the demand."""
        self._prices = Prices()
        self._scores = Scores(self.columns)
        self._scored: dict[Hashable, Scored] = {}

    # What the model tells it

    def touch(self, name: str) -> None:
        self.columns.touch(name)

    def arrived(self, request: PlacementRequest) -> None:
        """A request that was not there before. Counts once, placed or not."""
        self.demand.count(class_of(request))

    @property
    def ready(self) -> bool:
        """Something is known of the demand."""
        return self.usable is not None

    @property
    def due(self) -> bool:
        """Time to `renew`."""
        return self.demand.due

    def renew(self) -> None:
        """Learns the weights anew from what arrived. Milliseconds on a thousand nodes: not for a decision's path."""
        self.settle()
        columns = self.columns
        shares = self.demand.shares()
        if not shares:
            return
        worth = self._prices.worth(shares, np.maximum(columns.free, 0)[columns.free > 0])
        by_memory = np.array([self._prices.worth_of_memory(shares, size) for size in columns.sizes or [0]])
        usable = UsableCapacity(
            shares, models=columns.models, sizes=columns.sizes, hole_worth=worth, hole_memory=by_memory
        )
        self._scores.weigh(usable)
        step = max(1, len(columns.names) // _SAMPLE)
        model = np.minimum(columns.node_model[::step], usable.models)
        room = usable.room(usable.copies(self._scores.held[::step], columns.cpu[::step]), model) * step
        idle = float(np.maximum(columns.free, 0).sum())
        usable.weigh_by_scarcity(room, max(idle, 1.0))
        self._scores.weigh(usable)
        self.usable = usable
        self._rescore()

    def _rescore(self) -> None:
        """With the new weights, the kinds of requests first that were decided last."""
        work = _RENEWAL_WORK
        for scored in sorted(self._scored.values(), key=lambda scored: -scored.seen):
            work = self._scores.renew(scored, work)
            if work < 0:
                break

    def forget(self) -> None:
        """Drops the scores that were kept, not what was learned. The next decision of each kind makes its own anew."""
        self._scored.clear()

    def settle(self) -> None:
        """Takes over what has changed since: some microseconds for each node that did."""
        changed = self.columns.settle()
        if changed is None:
            self._scored.clear()
            self._scores.bind()
        else:
            self._scores.hold(changed)

    # What the engine asks of it

    def offers(self, request: PlacementRequest) -> Offers:
        """The places for a request, best first. The request asks for shares on any GPUs, not for certain ones."""
        scored = self.scored(request)
        return Offers(self, self._without(scored.copy(), request.avoid) if request.avoid else scored)

    def scored(self, request: PlacementRequest) -> Scored:
        """The scores of all nodes for such a request, up to date."""
        self.settle()
        key = request_key(request)
        scored = self._scored.get(key) or self._new(key, Ask.of(request))
        self._scores.update(scored)
        return scored

    def host(self, needs: PodNeeds) -> Offers:
        """The places for a pod that takes no GPU: where the CPU it takes is missed least."""
        self.settle()
        key = ("host", *needs_key(needs))
        scored = self._scored.get(key) or self._new(key, Ask(needs))
        self._scores.update(scored)
        return Offers(self, scored)

    def most_free(self, request: PlacementRequest, *, without: Iterable[str] = ()) -> Offers:
        """The nodes for a request by how free the fullest of the GPUs is that it would get there; not those of
        `without`."""
        self.settle()
        scored = self._scores.most_free(Ask.of(request))
        return Offers(self, self._without(scored, (*request.avoid, *without)))

    def least_promised(self, request: PlacementRequest) -> Offers:
        """The nodes for best effort: GPUs in use, with little promised time; then those with few idle GPUs."""
        self.settle()
        scored = self._scores.least_promised(Ask.of(request))
        return Offers(self, self._without(scored, request.avoid))

    def _new(self, key: Hashable, ask: Ask) -> Scored:
        if len(self._scored) >= _MAX_KINDS:
            self._scored.clear()
        scored = self._scored[key] = Scored(ask, len(self.columns.names))
        return scored

    def _without(self, scored: Scored, names: Iterable[str]) -> Scored:
        """The same, once it has no place on these nodes."""
        for name in names:
            slot = self.columns.slots.get(name)
            if slot is not None:
                scored.score[slot] = NO_PLACE
        return scored

    def best(self, scored: Scored) -> int:
        return self._scores.best(scored)

    def passing(self, scored: Scored, slot: int) -> list[int]:
        """The cells of one node that pass; none where they are fewer than asked."""
        return self._scores.passing(scored, slot)


class Offers:
    """Iterates over nodes, best first. `cells`: which GPUs of the node last offered to take, by position."""

    __slots__ = ("_packing", "_scored", "_slot")

    def __init__(self, packing: Packing, scored: Scored) -> None:
        self._packing = packing
        self._scored = scored
        self._slot = -1

    def next(self) -> str | None:
        """The best node that has not been rejected; None: there is none."""
        self._slot = self._packing.best(self._scored)
        return None if self._slot < 0 else self._packing.columns.names[self._slot]

    def reject(self) -> None:
        """The node last offered does not take it, and will not until something about it changes."""
        self._scored.score[self._slot] = NO_PLACE

    def gpus(self, *, all_passing: bool = False) -> list[int]:
        """As many as are asked for: a single one as it was scored, of several the tightest that pass; with `whole` all
        that pass, in that order."""
        columns, scored, slot = self._packing.columns, self._scored, self._slot
        cells = self._packing.passing(scored, slot)
        if scored.ask.count == 1:
            like, wanted = columns.like[slot].tolist(), int(scored.cell[slot])
            return next(([cell] for cell in cells if like[cell] == wanted), cells[:1])
        time = columns.time[slot].tolist()
        tightest = sorted(cells, key=lambda cell: (time[cell], cell))
        return tightest if all_passing else sorted(tightest[: scored.ask.count])
