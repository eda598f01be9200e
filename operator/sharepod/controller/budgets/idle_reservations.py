"""Reservations that nobody uses: noticed after an hour, told to their owner and counted by namespace.

Guarantees:
- An owner is told once for as long as the share stays unused.
- What cannot be seen (an agent that reports nothing) counts as used.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator

from sharepod.api import claims, sharepod
from sharepod.api.gpunode import TenantState
from sharepod.api.units import Milli, format_fraction
from sharepod.budgets.forecast import IDLE_AFTER_S, Holding, IdleReservation, unused_since
from sharepod.controller import metrics
from sharepod.controller.apiserver.events import Events
from sharepod.controller.state.cluster_state import ClusterState

PERIOD_S = 30.0
"""Seconds between two looks."""
REASON = "ReservationIdle"


class IdleReservations:
    """Watcher of idle reservations.

    Args:
        state: The cluster state.
        events: Recorder of Events.
        acts: Asked before each look.
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
        self._told: set[str] = set()

    async def run(self) -> None:
        """Look every `PERIOD_S` until cancelled."""
        while True:
            if self._acts():
                self.look()
            await asyncio.sleep(PERIOD_S)

    def look(self) -> None:
        """Notice which reservations are idle now."""
        self._since, idle = unused_since(self._since, self._holdings(), self._clock())
        amounts: Counter[str] = Counter()
        for one in idle:
            amounts[one.namespace] += one.milli
            if one.tenant not in self._told:
                self._tell(one)
        self._told = {one.tenant for one in idle}
        metrics.NAMESPACE_IDLE.clear()
        for namespace, milli in amounts.items():
            metrics.NAMESPACE_IDLE.labels(namespace).set(milli / 1000)

    def _holdings(self) -> Iterator[Holding]:
        for gpunode in self._state.gpunodes:
            for row in gpunode.spec.tenants:
                if row.state is TenantState.RESERVED:
                    seen = gpunode.seen(row.id)
                    used = seen is None or seen.held_milli > 0
                    yield Holding(row.id, row.namespace, row.request_milli * len(row.gpus), used)

    def _tell(self, one: IdleReservation) -> None:
        share = format_fraction(Milli(one.milli))
        note = (
            f"{share} of a GPU has been reserved and not used for {IDLE_AFTER_S / 3600:g} h; delete it, or lower "
            "spec.gpu.request, so that others can have it"
        )
        if (item := self._state.sharepods.get(one.tenant)) is not None:
            self._events.warning(sharepod.KIND, item, REASON, "Watching", note)
        elif (claim := self._state.seen_claims.claims.get(one.tenant)) is not None:
            self._events.warning(claims.KIND, claim, REASON, "Watching", note)
