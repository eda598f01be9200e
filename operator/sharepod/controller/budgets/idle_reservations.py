"""Idle reservations: shares that were unused for an hour. Their owners get an Event, and a metric counts them by
namespace.

Guarantees:
- An owner gets one Event per idle period, however long the share stays unused.
- Time without observation counts as use: while an agent does not report, or another operator leads.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterator

from sharepod.api.claims import claims
from sharepod.api.gpunode import TenantState
from sharepod.api.units import Milli, format_fraction
from sharepod.budgets.forecast import IDLE_AFTER_S, Holding, IdleReservation, unused_since
from sharepod.controller import metrics
from sharepod.controller.apiserver.events import Events
from sharepod.controller.state.cluster_state import ClusterState
from sharepod.controller.state.facts.node_facts import GpuNodeFacts

PERIOD_S = 30.0
"""Seconds between two checks."""
_TURN_S = 0.005
"""Seconds of work after which other tasks get a turn: 10,000 reservations take 30 ms in all."""
REASON = "ReservationIdle"


class IdleReservations:
    """Observer of idle reservations.

    Args:
        state: The cluster state.
        events: Recorder of Events.
        acts: Returns True while this process acts as the leader.
        clock: Monotonic seconds.
    """

    def __init__(
        self, state: ClusterState, events: Events, *, acts: Callable[[], bool], clock: Callable[[], float]
    ) -> None:
        self._state = state
        self._events = events
        self._acts = acts
        self._clock = clock
        self._since: dict[str, float] = {}
        self._announced: set[str] = set()

    async def run(self) -> None:
        """Check every `PERIOD_S` until cancelled."""
        while True:
            if self._acts():
                await self.look()
            else:
                self._since = {}
            await asyncio.sleep(PERIOD_S)

    async def look(self) -> None:
        """Find the reservations that are idle now; write Events and the metric. Other tasks get a turn every
        `_TURN_S`."""
        now = self._clock()
        since: dict[str, float] = {}
        idle: list[IdleReservation] = []
        turn = time.monotonic() + _TURN_S
        for gpunode in self._state.gpunodes:
            of_node, idle_there = unused_since(self._since, _holdings(gpunode), now)
            since |= of_node
            idle += idle_there
            if time.monotonic() > turn:
                await asyncio.sleep(0)
                turn = time.monotonic() + _TURN_S
        self._since = since
        amounts: Counter[str] = Counter()
        for one in idle:
            amounts[one.namespace] += one.milli
            if one.tenant not in self._announced:
                self._tell(one)
        self._announced = {one.tenant for one in idle}
        metrics.NAMESPACE_IDLE.clear()
        for namespace, milli in amounts.items():
            metrics.NAMESPACE_IDLE.labels(namespace).set(milli / 1000)

    def _tell(self, one: IdleReservation) -> None:
        share = format_fraction(Milli(one.milli))
        note = (
            f"{share} of a GPU has been reserved and not used for {IDLE_AFTER_S / 3600:g} h; delete it, or lower "
            "spec.gpu.request, to free the share for others"
        )
        if (item := self._state.asking(one.tenant)) is not None:
            self._events.warning(item.kind, item, REASON, "Watching", note)
        elif (claim := self._state.seen_claims.claims.get(one.tenant)) is not None:
            self._events.warning(claims.KIND, claim, REASON, "Watching", note)


def _holdings(gpunode: GpuNodeFacts) -> Iterator[Holding]:
    for row in gpunode.spec.tenants:
        if row.state is TenantState.RESERVED:
            seen = gpunode.seen(row.id)
            used = seen is None or bool(seen.held_milli)
            yield Holding(row.id, row.namespace, row.request_milli * len(row.gpus), used)
