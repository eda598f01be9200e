"""Explanations of refusals: computes, for the status, why a waiting tenant has no place, and a remedy.

Guarantees:
- Explanations delay no placement. They are computed after the decisions of a pass, in slices, with pauses that leave
  three quarters of a processor to other work. When new requests arrive, they stop after the present slice.
- Namespaces take turns, each with its longest unexplained requests first.
- Changed reasons are written for at most fifty tenants per second. With thousands of waiting tenants, each changed
  number would otherwise change every status at once.
- Equal requests share one explanation, which is computed at most every `_EXPLAIN_PERIOD_S`. An unchanged explanation is
  not written again.
- The search for tenants whose move or end would help takes at most a fiftieth of the time. If that is used up, a
  refusal names no such tenants.
- A refusal names only tenants of the waiting tenant's own namespace.
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
"""Shortest time in seconds between two explanations of one refusal: an explanation costs more than a decision."""
_EXPLAIN_S = 0.02
"""Seconds for explanations in each pass, even while other work waits, so that reasons appear while the queue is
busy."""
_REWRITES_PER_S = 50.0
"""Tenants per second whose reason is computed again. Writing and reading back a status costs the operator about 2
ms."""
_REWRITES_AT_ONCE = 5
"""Burst of `_REWRITES_PER_S`: number of tenants whose reasons are written without a pause. Five take 10 ms, which
delays no other work noticeably."""
_REWRITE_PAUSE_S = 0.1
"""Seconds until reasons are written again after `_REWRITES_PER_S` was used up."""
_IDLE_PER_LOOK = 49
"""Pause after a search for tenants whose move or end would help, as a multiple of the search's duration. With a
thousand tenants a search takes some 20 ms, in slices."""


@dataclass(slots=True)
class _Answer:
    """Answer to a request: its refusal. `at`: time in monotonic seconds at which the refusal was computed. `explained`:
    the refusal with the tenants whose move or end would help; None until they were searched for."""

    refusal: Refusal
    at: float
    explained: Refusal | None = None
    looking: Iterator[MoveAdvice | Leavers | None] | None = None
    """Rest of the search for tenants whose move or end would help; each `next` does one step. None if it has not
    begun."""


class Explanations:
    """Explainer of refusals.

    Args:
        engine: The placement engine, which returns a place or a refusal.
        memos: The tenants' memos, where refusals are stored.
        request_of: Returns a tenant's request; None if it no longer waits.
        own_movable: Returns the tenants of a request's namespace that could be moved for the request if their owners
            set `movable: true`.
        standing: Returns the standing of a namespace: its place in the queue by use and budget.
        may_act: Returns True while this process leads and has listed every kind.
        on_answered: Called with each tenant whose answer has changed.
        clock: Monotonic seconds.
        later: Called with the time, in monotonic seconds, at which to call `work_out` again.
        kick: Event that starts a pass through the queue.
        arrived: Event that is set while new requests wait to be placed.
        rests: Returns the pause after a slice, as a multiple of the slice's duration.
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
        """Time before which no changed reason is written, because the rate is used up."""
        self._rewrites = RateLimiter(clock(), per_s=_REWRITES_PER_S, burst=_REWRITES_AT_ONCE)
        self._answers: dict[str, _Answer] = {}
        """Answers by content of the request, for requests of equal content."""

    async def work_out(self, unexplained: Unexplained, places: Mapping[str, WaitingTenant]) -> None:
        """Explain the refusals that have no explanation yet, or an old one. Yields to other tasks.

        When a new request arrives, return early, so that the request is placed first. The next pass explains the rest.
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
            # capacity has become free since the refusal, so the next pass will place this request
            if not isinstance(answer, _Answer):
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
        """Return True if one more changed reason may be written now. Otherwise set the time at which writing goes
        on."""
        now = self._clock()
        if now < self._rewrites_at:
            return False
        if self._rewrites.take(now):
            return True
        self._rewrites_at = now + _REWRITE_PAUSE_S
        self._later(self._rewrites_at)
        return False

    def forget(self) -> None:
        """Drop all computed answers, because facts about nodes that they contain have changed."""
        self._answers.clear()

    def _answer(self, waiting: WaitingTenant, request: PlacementRequest) -> Assignment | _Answer:
        """Return the refusal of a request, or a place if there now is one. For requests of equal content the refusal is
        computed at most once in `_EXPLAIN_PERIOD_S`.
        """
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
        """Store a refusal, with its remedies, in the tenant and in its memo. If the memo's refusal changes, call
        `on_answered`."""
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
        """Store a refusal in the tenant's memo. If the refusal has changed, call `on_answered`."""
        memo = self._memos.of(waiting.tenant)
        if refusal != memo.refusal:
            memo.refusal = refusal
            self._on_answered(waiting.tenant)

    async def _look_for_tenants(self, waiting: WaitingTenant, request: PlacementRequest, answer: _Answer) -> bool:
        """Complete a refusal with a remedy: the tenant whose move would help or, if no single move helps, the tenants
        whose end would help. Yields to other tasks.

        Return True if the refusal is complete. Return False if new requests have arrived; the next call then continues.
        """
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
        """Search for tenants whose move or end would help. Yield after each step; the last value is the result, or None
        if nothing helps.
        """
        engine, found = self._engine, None
        for found in move_advice(engine.cluster, request, self._own_movable(request), engine.find):
            yield found
        if found is None:
            yield from leavers(engine.cluster, request)

    def _looked_since(self, began: float) -> None:
        """Extend the pause before the next search by the time used since `began`, the start of this slice."""
        ended = time.monotonic()
        self._next_look = max(self._next_look, ended) + _IDLE_PER_LOOK * (ended - began)
