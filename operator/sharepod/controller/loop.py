"""The placement loop: the one place where shares are decided.

Guarantees: decisions are taken one at a time, in queue order (priority, then age), each on a model that already holds
all earlier ones, written or not; nothing is decided before everything was listed, nor while this process does not
lead; a decision is handed to the ledger's writer at once and never waited for.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from sharepod.api.gpunode import Mode
from sharepod.api.units import TenantId
from sharepod.placement.engine import find, place, queue_key
from sharepod.placement.model import Assignment, PlacementError, Refusal, Request, label_key

from . import metrics
from .facts import SharePodFacts
from .model import Model
from .notes import Notes

_YIELD = 0.01  # seconds of deciding after which others get a turn
_PASSES = 4  # begun anew because room appeared, before one goes through to the end
_EXPLAIN_AGAIN = 5.0  # a reason is worked out anew at most this often

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Waiting:
    """One that asks for a place. `tried`: the state of the room at which it was refused last; `counted`: placement has
    learned that it came.
    """

    tenant: str
    tried: int = -1
    counted: bool = False
    explained: float = float("-inf")


class PlacementLoop:
    """Decides for whoever waits. `decided(tenant, node)` is told of each reservation or change of one that is to be
    written; `answered(tenant)` of each new answer that is to be shown. `clock`: monotonic seconds.
    """

    def __init__(
        self,
        model: Model,
        notes: Notes,
        *,
        may_act: Callable[[], bool],
        decided: Callable[[str, str], None],
        answered: Callable[[str], None],
        clock: Callable[[], float],
    ) -> None:
        self._model = model
        self._notes = notes
        self._may_act = may_act
        self._decided = decided
        self._answered = answered
        self._clock = clock
        self._places: dict[str, _Waiting] = {}
        self._resizes: dict[str, _Waiting] = {}
        self._room = 0
        self._kick = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None

    def want_place(self, tenant: str) -> None:
        """This SharePod waits for a place."""
        if tenant not in self._places:
            self._places[tenant] = _Waiting(tenant)
            self._kick.set()

    def want_resize(self, tenant: str, *, changed: bool) -> None:
        """This SharePod asks for another share than it has; `changed`: for another one than when it was refused."""
        if changed or tenant not in self._resizes:
            self._resizes[tenant] = _Waiting(tenant)
            self._kick.set()

    def leave(self, tenant: str) -> None:
        """This SharePod asks for nothing any more."""
        self._places.pop(tenant, None)
        self._resizes.pop(tenant, None)

    def room_changed(self) -> None:
        """Something that can help those who wait has changed."""
        self._room += 1
        if self._places or self._resizes:
            self._kick.set()

    def clear(self) -> None:
        """Nobody waits any more."""
        self._places.clear()
        self._resizes.clear()

    async def run(self) -> None:
        """Decides until cancelled."""
        while True:
            await self._kick.wait()
            self._kick.clear()
            await asyncio.sleep(0)  # what arrived at the same moment is decided together, in queue order
            for attempt in range(_PASSES):
                if not self._may_act() or await self._pass(whole=attempt == _PASSES - 1):
                    break
            metrics.WAITING.set(len(self._places))

    async def _pass(self, *, whole: bool) -> bool:
        """Goes through the queue once. Where room appears while others have their turn, those at its head come first
        again: then, unless it is to go through as a `whole`, it stops and returns False.
        """
        began, room = time.monotonic(), self._room
        for waiting in list(self._resizes.values()):
            if waiting.tried != self._room:
                self._resize(waiting)
        refused: dict[tuple[object, ...], Refusal | None] = {}
        for _, waiting, request in self._in_order():
            if time.monotonic() - began > _YIELD:
                await asyncio.sleep(0)
                began = time.monotonic()
                if self._room != room and not whole:
                    return False
            if not self._may_act():
                return True
            if self._places.get(waiting.tenant) is waiting and waiting.tried != self._room:
                self._place(waiting, request, refused)
        packing = self._model.cluster.packing
        if packing.due:
            await asyncio.sleep(0)
            packing.renew()
        return True

    def _in_order(self) -> list[tuple[tuple[int, str, str, str], _Waiting, Request]]:
        found = []
        for waiting in list(self._places.values()):
            if waiting.tried == self._room:
                continue
            sharepod = self._model.sharepods.get(waiting.tenant)
            if sharepod is None or sharepod.request is None:
                self.leave(waiting.tenant)
                continue
            until = self._notes.of(waiting.tenant).not_before
            if self._clock() < until:
                self._later(until)
                continue
            request = self._request(sharepod)
            found.append((queue_key(request), waiting, request))
        return sorted(found, key=lambda item: item[0])

    def _request(self, sharepod: SharePodFacts) -> Request:
        assert sharepod.request is not None
        note = self._notes.of(sharepod.uid)
        now = self._clock()
        note.avoid = {node: (why, until) for node, (why, until) in note.avoid.items() if until > now}
        return Request(
            tenant=TenantId(sharepod.uid),
            namespace=sharepod.namespace,
            name=sharepod.name,
            gpu=sharepod.request,
            pod=sharepod.needs,
            owner=sharepod.owner,
            priority=self._model.priority(sharepod),
            created=sharepod.created,
            avoid={node: why for node, (why, _) in note.avoid.items()},
        )

    def _place(self, waiting: _Waiting, request: Request, refused: dict[tuple[object, ...], Refusal | None]) -> None:
        """Decides for one. `refused`: shapes that found no place in this pass, with the reason where it was worked
        out.
        """
        room, now = self._room, self._clock()
        if not waiting.counted:
            waiting.counted = True
            self._model.cluster.packing.arrived(request)
        note = self._notes.of(waiting.tenant)
        explain = note.refusal is None or now - waiting.explained >= _EXPLAIN_AGAIN
        shape = (room, request.namespace, request.gpu, repr(request.pod), request.owner, repr(request.avoid))
        answer: Assignment | Refusal | None
        if refused.get(shape) is not None or (shape in refused and not explain):
            answer = refused[shape]
        else:
            with metrics.DECISION_SECONDS.time():
                answer = place(self._model.cluster, request) if explain else find(self._model.cluster, request)
        if answer is None or isinstance(answer, Refusal):
            metrics.DECISIONS.labels("refused").inc()
            refused[shape] = answer
            waiting.tried = room
            if note.avoid:
                self._later(min(until for _, until in note.avoid.values()), waiting)
            if answer is None:
                self._later(waiting.explained + _EXPLAIN_AGAIN, waiting)
            else:
                waiting.explained = now
                if answer != note.refusal:
                    note.refusal = answer
                    self._answered(waiting.tenant)
            return
        try:
            self._model.cluster.reserve(answer.node, answer.reservation(request))
        except PlacementError as error:
            log.error("decision for %s/%s could not be kept: %s", request.namespace, request.name, error)
            waiting.tried = room
            return
        metrics.DECISIONS.labels("placed").inc()
        note.refusal = None
        self._places.pop(waiting.tenant, None)
        key = label_key(request.namespace, request.gpu.labels.affinity)
        if key is not None:  # who waited to follow the first of its group can do so now
            self.room_changed()
        self._decided(waiting.tenant, answer.node)

    def _resize(self, waiting: _Waiting) -> None:
        waiting.tried = self._room
        sharepod = self._model.sharepods.get(waiting.tenant)
        held = self._model.cluster.reservations_of(TenantId(waiting.tenant))
        if sharepod is None or sharepod.request is None or len(held) != 1 or held[0][1].mode is Mode.EXCLUSIVE:
            self._resizes.pop(waiting.tenant, None)
            return
        asked, note = sharepod.request, self._notes.of(waiting.tenant)
        gpunode = self._model.gpunodes.named(held[0][0])
        seen = (item.memory for item in (gpunode.status.tenants if gpunode else ()) if item.id == waiting.tenant)
        in_use = next(seen, 0)  # of the GPU where it uses most
        try:
            answer = self._model.cluster.resize(
                TenantId(waiting.tenant), request=asked.request, limit=asked.limit, memory=asked.memory, in_use=in_use
            )
        except PlacementError as error:
            log.error("resize of %s/%s: %s", sharepod.namespace, sharepod.name, error)
            return
        if isinstance(answer, Refusal):
            metrics.DECISIONS.labels("resize_refused").inc()
            if answer != note.resize_refusal:
                note.resize_refusal = answer
                self._answered(waiting.tenant)
            return
        metrics.DECISIONS.labels("resized").inc()
        note.resize_refusal = None
        self._resizes.pop(waiting.tenant, None)
        self._decided(waiting.tenant, held[0][0])

    def _later(self, at: float, waiting: _Waiting | None = None) -> None:
        """Look again at that time; `waiting` then has its reason worked out anew."""
        loop = asyncio.get_running_loop()
        delay = max(0.05, at - self._clock())
        if waiting is not None:
            waiting.tried = -1
        if self._timer is None or self._timer.cancelled() or self._timer.when() > loop.time() + delay:
            if self._timer is not None:
                self._timer.cancel()
            self._timer = loop.call_later(delay, self._again)

    def _again(self) -> None:
        self._timer = None
        self._kick.set()
