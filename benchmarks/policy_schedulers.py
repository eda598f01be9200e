"""Schedulers from the literature for one token and one GPU. They have the token scheduler's interface to the
simulation.

Each is work-conserving, and all quanta are equally long. They differ in the tenant that they choose next:
- SFQ: start-time fair queueing (Goyal, Vin, Cheng 1996): the tenant with the least start tag;
- stride (Waldspurger, Weihl 1995): the tenant with the least pass, which grows with the time held;
- lottery (Waldspurger, Weihl 1994): a random tenant, with the requests as weights;
- Gemini (Chen et al. 2020): among the tenants below their limit in the last 10 s, the tenant that is furthest below its
  request.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from sharepod.timeshare import Action, TokenGrant

_MS = 1_000_000
QUANTUM_NS = 30 * _MS
"""Length of a turn. Three of these are as long as the longest quantum of SharePod's scheduler."""
_GEMINI_WINDOW_NS = 10_000 * _MS
_BEST_EFFORT = 1
"""Weight of a tenant whose request is 0, in thousandths."""


@dataclass
class Entrant:
    """Tenant of one of these schedulers."""

    id: str
    request_milli: int
    limit_milli: int
    waiting: bool = False
    tag: float = 0.0
    """Virtual time at which its next turn starts (SFQ: start tag, stride: pass)."""
    spans: deque[tuple[int, int]] = field(default_factory=deque)
    """(begin, end) of each turn within the sliding window, in nanoseconds."""

    @property
    def weight(self) -> int:
        """Return its weight in thousandths: its request, or `_BEST_EFFORT`."""
        return self.request_milli or _BEST_EFFORT


class LiteratureScheduler:
    """Base of these schedulers. A subclass chooses the next tenant."""

    def __init__(self) -> None:
        self.entrants: dict[str, Entrant] = {}
        self._holder: tuple[Entrant, int] | None = None
        self._grants = 0

    def set_tenant(
        self, _now: int, tenant_id: str, _gpus: Sequence[str], *, request_milli: int, limit_milli: int
    ) -> None:
        """Add a tenant, or change its rates."""
        self.entrants.setdefault(tenant_id, Entrant(tenant_id, request_milli, limit_milli))

    def want(self, _now: int, tenant_id: str) -> None:
        """Record that a tenant waits for the token."""
        entrant = self.entrants[tenant_id]
        if not entrant.waiting:
            entrant.waiting = True
            self.woke(entrant)

    def draining(self, _now: int, _tenant_id: str, *, expected_ns: int) -> None:
        """Do nothing: these schedulers wait until the holder has drained."""

    def stalled(self, _now: int) -> None:
        """Do nothing: these schedulers do not compensate for a late caller."""

    def drained(self, now: int, tenant_id: str, *, wanting: bool) -> None:
        """End and charge the holder's turn. `wanting`: the tenant waits for another turn."""
        assert self._holder is not None, "a tenant held"
        entrant, begun = self._holder
        self._holder = None
        self.charge(now, entrant, begun)
        if wanting:
            entrant.waiting = True

    def tick(self, now: int) -> list[Action]:
        """Grant the token to the next tenant if no tenant holds it."""
        waiting = [entrant for entrant in self.entrants.values() if entrant.waiting]
        if self._holder is not None or not waiting:
            return []
        first = self.next(now, waiting)
        first.waiting = False
        self._holder = first, now
        self._grants += 1
        return [TokenGrant(first.id, self._grants, QUANTUM_NS, metered=True)]

    def next_deadline(self) -> int | None:
        """Return None: these schedulers have no timers."""
        return None

    def woke(self, entrant: Entrant) -> None:
        """Called when a tenant waits again after a pause. A subclass may adapt its tag."""

    def charge(self, now: int, entrant: Entrant, begun: int) -> None:
        """Charge a tenant for a turn from `begun` to `now`."""
        entrant.tag += (now - begun) * 1000 / entrant.weight

    def next(self, now: int, waiting: list[Entrant]) -> Entrant:
        """Return the waiting tenant that gets the token next."""
        raise NotImplementedError


class StartTimeFair(LiteratureScheduler):
    """Start-time fair queueing. Virtual time is the start tag of the tenant that holds the token."""

    def __init__(self) -> None:
        super().__init__()
        self._virtual = 0.0

    def woke(self, entrant: Entrant) -> None:
        """Set the tenant's start tag to the present virtual time, unless the tag is later."""
        entrant.tag = max(entrant.tag, self._virtual)

    def next(self, now: int, waiting: list[Entrant]) -> Entrant:
        """Return the waiting tenant with the least start tag."""
        first = min(waiting, key=lambda entrant: (entrant.tag, entrant.id))
        self._virtual = first.tag
        return first


class Stride(LiteratureScheduler):
    """Stride scheduling. A tenant that returns after a pause is not entitled to the time that it missed, but a tenant
    that was ahead stays ahead."""

    def woke(self, entrant: Entrant) -> None:
        """Set the tenant's pass to the least pass of the waiting tenants, unless its own pass is larger."""
        others = [other.tag for other in self.entrants.values() if other.waiting and other is not entrant]
        entrant.tag = max(entrant.tag, min(others, default=entrant.tag))

    def next(self, now: int, waiting: list[Entrant]) -> Entrant:
        """Return the waiting tenant with the least pass."""
        return min(waiting, key=lambda entrant: (entrant.tag, entrant.id))


class Lottery(LiteratureScheduler):
    """Lottery scheduling. The draws come from a seed, so a run can be repeated."""

    def __init__(self) -> None:
        super().__init__()
        self._draw = random.Random(1)

    def next(self, now: int, waiting: list[Entrant]) -> Entrant:
        """Return the waiting tenant whose ticket is drawn."""
        return self._draw.choices(waiting, [entrant.weight for entrant in waiting])[0]


class Gemini(LiteratureScheduler):
    """Gemini's token scheduler: usage over a sliding window against request and limit."""

    def charge(self, now: int, entrant: Entrant, begun: int) -> None:
        """Record the turn in the sliding window."""
        entrant.spans.append((begun, now))

    def next(self, now: int, waiting: list[Entrant]) -> Entrant:
        """Return the tenant that is furthest below its request, among the tenants below their limit."""

        def missing(entrant: Entrant) -> tuple[bool, float, str]:
            since = now - _GEMINI_WINDOW_NS
            while entrant.spans and entrant.spans[0][1] < since:
                entrant.spans.popleft()
            used = sum(end - max(begin, since) for begin, end in entrant.spans) * 1000 / _GEMINI_WINDOW_NS
            return used >= entrant.limit_milli, used - entrant.request_milli, entrant.id

        return min(waiting, key=missing)


POLICIES: dict[str, type[LiteratureScheduler]] = {
    "SFQ": StartTimeFair,
    "stride": Stride,
    "lottery": Lottery,
    "Gemini": Gemini,
}
