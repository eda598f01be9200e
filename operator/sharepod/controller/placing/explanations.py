"""Explanations: why waiting tenants have no place, and what would help.

Guarantees:
- Explaining delays no placement. It follows the decisions of a pass, in slices that take at most a quarter of a
  processor, and stops after a slice when new requests arrive.
- Namespaces take turns, each with its longest unexplained requests first.
- Changed reasons are written for fifty tenants a second in all: with thousands waiting, each change of a figure would
  write every status.
- One refusal is explained at most every `_EXPLAIN_PERIOD_S`, for all equal requests. An unchanged answer is not written
  again.
- The search for tenants to move or to end takes at most a fiftieth of the time; beyond that a refusal omits them.
- Only tenants of its own namespace are named.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

from sharepod.api.units import TenantId
from sharepod.budgets.standing import Standing
from sharepod.controller.state.memos import TenantMemos
from sharepod.placement.engine import Engine
from sharepod.placement.preemption.moves import Movable
from sharepod.placement.state.types import Assignment, Outlook, PlacementRequest, Refusal
from sharepod.placement.whatif import Leavers, MoveAdvice, leavers, move_advice
from sharepod.rate_limit import RateLimiter

from . import slices
from .requests import borrower_advice
from .unexplained import Unexplained
from .waiting import NEVER, WaitingTenant, who_asks_matters

_EXPLAIN_PERIOD_S = 5.0
"""Least seconds between two explanations of one refusal: an explanation costs more than a decision."""
_EXPLAIN_S = 0.02
"""Seconds of explaining in each pass, whatever else waits: so reasons appear even with a busy queue."""
_REWRITES_PER_S = 50.0
"""Tenants per second whose reason is computed again. Writing and reading back a status costs the operator about 2
ms."""
_REWRITES_AT_ONCE = 5
"""The same, at once: the 10 ms that these take are not noticed."""
_REWRITE_PAUSE_S = 0.1
"""Seconds until the next changed reasons after this many."""
_IDLE_PER_LOOK = 49
"""Pause after each search for tenants that would have to move or end, as a multiple of the search's duration. A search
takes some 20 ms with a thousand tenants, in slices."""


@dataclass(slots=True)
class _Answer:
    """Refusal of a request, computed `at`, monotonic seconds. `explained`: the refusal with the tenants that would have
    to move or end; None before the search for them."""

    refusal: Refusal
    at: float
    explained: Refusal | None = None
    looking: Iterator[MoveAdvice | Leavers | None] | None = None
    """Steps that are left of looking for these tenants; None: that has not begun."""


class Explanations:
    """Explainer of refusals.

    Args:
        engine: Decides, and words refusals.
        memos: Receive the refusals.
        request_of: Returns a tenant's request; None if it no longer waits.
        own_movable: Returns the tenants of a request's namespace that could be moved for it if their owner allowed
            that.
        standing: Returns the standing of a namespace by its budget.
        may_act: True while this process leads and has listed everything.
        on_answered: Called with each tenant whose answer has changed.
        clock: Monotonic seconds.
        later: Called with the time, monotonic seconds, at which to explain again.
        kick: Set to request a pass through the queue.
        arrived: Set while new requests wait to be placed.
        rests: Returns the rest after a slice, in multiples of the slice's duration.
    """

    def __init__(
        self,
        engine: Engine,
        memos: TenantMemos,
        *,
        request_of: Callable[[WaitingTenant], PlacementRequest | None],
        own_movable: Callable[[PlacementRequest], Mapping[TenantId, Movable]],
        standing: Callable[[str], Standing],
        may_act: Callable[[], bool],
        on_answered: Callable[[str], None],
        clock: Callable[[], float],
        later: Callable[[float], None],
        kick: asyncio.Event,
        arrived: asyncio.Event,
        rests: Callable[[], float],
    ) -> None:
        self._engine = engine
        self._memos = memos
        self._request_of = request_of
        self._own_movable = own_movable
        self._standing = standing
        self._may_act = may_act
        self._on_answered = on_answered
        self._clock = clock
        self._later = later
        self._kick = kick
        self._arrived = arrived
        self._rests = rests
        self._next_look = 0.0
        self._rewrites_at = NEVER
        """When changed reasons are handled again."""
        self._rewrites = RateLimiter(clock(), per_s=_REWRITES_PER_S, burst=_REWRITES_AT_ONCE)
        self._answers: dict[str, _Answer] = {}
        """Answers by request content."""

    async def work_out(self, unexplained: Unexplained, places: Mapping[str, WaitingTenant]) -> None:
        """Explain the refusals without a reason, or with an old one.

        With thousands, the rest is left to the next pass once a new request arrives, so that this request does not
        wait.
        """
        began = time.monotonic()
        ends = began + _EXPLAIN_S
        now = self._clock()
        oldest = now - _EXPLAIN_PERIOD_S
        self._answers = {asked: answer for asked, answer in self._answers.items() if answer.at > oldest}
        paced = now < self._rewrites_at
        for waiting in unexplained.due(places, NEVER if paced else oldest):
            if slices.is_over(began):
                enough = time.monotonic() > ends
                await slices.rest(began, self._kick, self._rests(), arrived=self._arrived)
                if self._arrived.is_set() or (self._kick.is_set() and enough):
                    return
                began = time.monotonic()
            if not unexplained.has(waiting) or (waiting.explained_at > NEVER and not self._may_rewrite()):
                continue
            request = self._request_of(waiting) if places.get(waiting.tenant) is waiting else None
            if request is None or not self._may_act():
                continue
            answer = self._answer(waiting, request)
            if not isinstance(answer, _Answer):  # capacity has appeared since
                waiting.refused_at_version = None
                unexplained.leave_out(waiting)
                self._kick.set()
                continue
            if not await self._look_for_tenants(waiting, request, answer):
                return
            if places.get(waiting.tenant) is waiting:
                unexplained.explained(waiting, self._clock())
                self._take(waiting, request, answer)
        next_at = unexplained.next_after(NEVER if paced else oldest)
        if next_at is not None:
            self._later(self._rewrites_at if paced else next_at + _EXPLAIN_PERIOD_S)

    def _may_rewrite(self) -> bool:
        """Return whether one more changed reason may be written now; if not, schedule the rest."""
        now = self._clock()
        if now < self._rewrites_at:
            return False
        if self._rewrites.take(now):
            return True
        self._rewrites_at = now + _REWRITE_PAUSE_S
        self._later(self._rewrites_at)
        return False

    def forget(self) -> None:
        """Compute every answer again: their facts about nodes have changed."""
        self._answers.clear()

    def _answer(self, waiting: WaitingTenant, request: PlacementRequest) -> Assignment | _Answer:
        """Return why a request has no place; computed once in `_EXPLAIN_PERIOD_S` for all equal requests."""
        asked = waiting.worked_out.asks if waiting.worked_out is not None else ""
        for_all = asked and not who_asks_matters(self._engine.cluster, request)
        if for_all and (known := self._answers.get(asked)) is not None:
            return known
        found = self._engine.place(request)
        if not isinstance(found, Refusal):
            return found
        answer = _Answer(found, self._clock())
        if for_all:
            self._answers[asked] = answer
        return answer

    def _take(self, waiting: WaitingTenant, request: PlacementRequest, answer: _Answer) -> None:
        """Store a refusal in the memo, with its remedies, and notify if it has changed."""
        refusal = answer.refusal
        if answer.explained is not None or refusal != waiting.refusal:
            waiting.explained = answer.explained
        waiting.refusal = refusal
        if refusal.outlook is Outlook.WAITING:
            refusal = waiting.explained or refusal
            if budget := borrower_advice(self._standing(request.namespace)):
                refusal = replace(refusal, advice=f"{refusal.advice} {budget}".strip())
        self.store(waiting, refusal)

    def store(self, waiting: WaitingTenant, refusal: Refusal) -> None:
        """Store a refusal in the memo, and notify if it has changed."""
        memo = self._memos.of(waiting.tenant)
        if refusal != memo.refusal:
            memo.refusal = refusal
            self._on_answered(waiting.tenant)

    async def _look_for_tenants(self, waiting: WaitingTenant, request: PlacementRequest, answer: _Answer) -> bool:
        """Add to a refusal the tenant that would have to move or, if no single move helps, the tenants that would have
        to end. Yields to other tasks. Return False if new requests have arrived: the rest is left to the next time."""
        if answer.refusal.outlook is not Outlook.WAITING or answer.explained is not None:
            return True
        if answer.looking is None:
            if time.monotonic() < self._next_look:
                return True
            answer.looking = self._tenants_in_steps(request)
        is_kept = any(kept is answer for kept in self._answers.values())
        began, found = time.monotonic(), None
        for found in answer.looking:  # noqa: B007 the last is the answer
            if slices.is_over(began):
                self._looked_since(began)
                await slices.let_others_go_on()
                if self._arrived.is_set() and is_kept:
                    return False
                began = time.monotonic()
        self._looked_since(began)
        refusal = answer.refusal
        answer.explained = (
            refusal if found is None else replace(refusal, advice=f"{refusal.advice} {found.advice}".strip())
        )
        return True

    def _tenants_in_steps(self, request: PlacementRequest) -> Iterator[MoveAdvice | Leavers | None]:
        """Search for tenants to move or to end; yield them last, if any."""
        engine, found = self._engine, None
        for found in move_advice(engine.cluster, request, self._own_movable(request), engine.find):
            yield found
        if found is None:
            yield from leavers(engine.cluster, request)

    def _looked_since(self, began: float) -> None:
        """Have time pass until tenants are looked for again."""
        ended = time.monotonic()
        self._next_look = max(self._next_look, ended) + _IDLE_PER_LOOK * (ended - began)
