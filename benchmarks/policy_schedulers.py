"""Schedulers from the literature, with the core's interface to the simulation: one token, one GPU.

Each is work-conserving and gives quanta of one length. They differ in the next tenant:
- SFQ: start-time fair queueing (Goyal, Vin, Cheng 1996): the least start tag;
- stride (Waldspurger, Weihl 1995): the least pass, charged by the time held;
- lottery (Waldspurger, Weihl 1994): a draw, by request;
- Gemini (Chen et al. 2020): of those below their limit in the last 10 s, the tenant that is furthest below its request.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from sharepod.timeshare import Action, TokenGrant

_MS = 1_000_000
QUANTUM_NS = 30 * _MS
"""Length of a turn: three of them are the core's longest."""
_GEMINI_WINDOW_NS = 10_000 * _MS
_BEST_EFFORT = 1
"""Weight of a tenant without a request, in thousandths."""


@dataclass
class Entrant:
    """Tenant of one of these schedulers."""

    id: str
    request_milli: int
    limit_milli: int
    waiting: bool = False
    tag: float = 0.0
    """Virtual time at which its next turn starts."""
    spans: deque[tuple[int, int]] = field(default_factory=deque)
    """Turns of the last window: begin and end."""

    @property
    def weight(self) -> int:
        """Return its share in thousandths."""
        return self.request_milli or _BEST_EFFORT


class LiteratureScheduler:
    """One token for one GPU; a subclass chooses the next tenant."""

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
        """Let a tenant wait."""
        entrant = self.entrants[tenant_id]
        if not entrant.waiting:
            entrant.waiting = True
            self.woke(entrant)

    def draining(self, _now: int, _tenant_id: str, *, expected_ns: int) -> None:
        """Ignore the announcement."""

    def stalled(self, _now: int) -> None:
        """Ignore that the caller was late."""

    def drained(self, now: int, tenant_id: str, *, wanting: bool) -> None:
        """End the hold."""
        assert self._holder is not None, "a tenant held"
        entrant, begun = self._holder
        self._holder = None
        self.charge(now, entrant, begun)
        if wanting:
            entrant.waiting = True

    def tick(self, now: int) -> list[Action]:
        """Grant to the next tenant, if there is no holder."""
        waiting = [entrant for entrant in self.entrants.values() if entrant.waiting]
        if self._holder is not None or not waiting:
            return []
        first = self.next(now, waiting)
        first.waiting = False
        self._holder = first, now
        self._grants += 1
        return [TokenGrant(first.id, self._grants, QUANTUM_NS, metered=True)]

    def next_deadline(self) -> int | None:
        """Return None: nothing happens by itself."""
        return None

    def woke(self, entrant: Entrant) -> None:
        """Record that a tenant began to wait after a sleep."""

    def charge(self, now: int, entrant: Entrant, begun: int) -> None:
        """Charge a hold."""
        entrant.tag += (now - begun) * 1000 / entrant.weight

    def next(self, now: int, waiting: list[Entrant]) -> Entrant:
        """Return the tenant that is next."""
        raise NotImplementedError


class StartTimeFair(LiteratureScheduler):
    """Start-time fair queueing: virtual time is the start tag in service."""

    def __init__(self) -> None:
        super().__init__()
        self._virtual = 0.0

    def woke(self, entrant: Entrant) -> None:
        """Start no earlier than now in virtual time."""
        entrant.tag = max(entrant.tag, self._virtual)

    def next(self, now: int, waiting: list[Entrant]) -> Entrant:
        """Return the tenant of the least start tag."""
        first = min(waiting, key=lambda entrant: (entrant.tag, entrant.id))
        self._virtual = first.tag
        return first


class Stride(LiteratureScheduler):
    """Stride scheduling: a tenant that slept keeps its lead, and no claim."""

    def woke(self, entrant: Entrant) -> None:
        """Join at the least pass of the waiting tenants."""
        others = [other.tag for other in self.entrants.values() if other.waiting and other is not entrant]
        entrant.tag = max(entrant.tag, min(others, default=entrant.tag))

    def next(self, now: int, waiting: list[Entrant]) -> Entrant:
        """Return the tenant of the least pass."""
        return min(waiting, key=lambda entrant: (entrant.tag, entrant.id))


class Lottery(LiteratureScheduler):
    """Lottery scheduling, with draws that can be repeated."""

    def __init__(self) -> None:
        super().__init__()
        self._draw = random.Random(1)

    def next(self, now: int, waiting: list[Entrant]) -> Entrant:
        """Return the tenant of the drawn ticket."""
        return self._draw.choices(waiting, [entrant.weight for entrant in waiting])[0]


class Gemini(LiteratureScheduler):
    """Gemini's token scheduler: usage over a sliding window against request and limit."""

    def charge(self, now: int, entrant: Entrant, begun: int) -> None:
        """Record the turn for the window."""
        entrant.spans.append((begun, now))

    def next(self, now: int, waiting: list[Entrant]) -> Entrant:
        """Return the tenant that is furthest below its request, of those below their limit."""

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
