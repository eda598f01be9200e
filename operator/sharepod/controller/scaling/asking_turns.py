"""Turns of the shares that request nodes: which of them have a placeholder now. Pure.

Guarantees:
- The limits, in total and per namespace, are never exceeded.
- A share requests a node once it has been without room for `after_s`, and for `for_s`. The pause before its next turn
  doubles each time, up to sixteen times: a node that never helps is not bought indefinitely.
- Of the due shares, the namespace with the fewest placeholders comes first: neither many shares nor many namespaces
  exclude another.
- A share keeps its turn until its time is over, whichever shares come after it.
- No turn begins while a node is starting: the node may have room for all.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from itertools import chain

from sharepod.backoff import Backoff

_MOST_PAUSES = 16
"""Longest pause in times of `for_s`: four hours of 15 minutes each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AskingLimits:
    """Limits of asking: most placeholders in all and for one namespace; seconds of waiting before, and of asking."""

    most: int
    per_namespace: int
    after_s: float
    for_s: float


@dataclass(slots=True)
class _Turn:
    """Turn of one share. Times are monotonic seconds. `began`: start of its turn; None: it has no turn."""

    not_before: float
    began: float | None = None
    ended: int = 0


class AskingTurns:
    """Turns of the shares without room."""

    def __init__(self, limits: AskingLimits) -> None:
        self._limits = limits
        self._backoff = Backoff(limits.for_s, _MOST_PAUSES * limits.for_s)
        self._turns: dict[str, _Turn] = {}

    def clear(self) -> None:
        """Forget all: this process no longer leads."""
        self._turns.clear()

    def asking(
        self,
        short: Iterable[tuple[str, str]],
        now: float,
        *,
        node_comes: bool,
        there: Collection[str] = (),
        kept: Collection[str] = (),
    ) -> list[str]:
        """Return the tenants that have a placeholder from now on.

        Args:
            short: Tenant and namespace of each share without room on any node, in the queue's order.
            now: Monotonic seconds.
            node_comes: A node exists that does not take shares yet.
            there: Tenants with a placeholder, including placeholders of an earlier leader.
            kept: Namespaces of other placeholders that stay: the limits count them, too.
        """
        namespaces = dict(short)
        self._turns = {
            tenant: self._turns.get(tenant) or _Turn(now + self._limits.after_s, began=now if tenant in there else None)
            for tenant in namespaces
        }
        for turn in self._turns.values():
            if turn.began is not None and now >= turn.began + self._limits.for_s:
                turn.began, turn.ended = None, turn.ended + 1
                turn.not_before = now + self._backoff.pause_s(turn.ended)
        if node_comes:
            return []
        of_namespace = Counter(kept)
        going_on = [tenant for tenant, turn in self._turns.items() if turn.began is not None]
        found: list[str] = []
        for tenant in chain(going_on, self._due(namespaces, now, of_namespace)):
            namespace, turn = namespaces[tenant], self._turns[tenant]
            if len(kept) + len(found) >= self._limits.most:
                break
            if of_namespace[namespace] < self._limits.per_namespace:
                of_namespace[namespace] += 1
                found.append(tenant)
                turn.began = now if turn.began is None else turn.began
        return found

    def _due(self, namespaces: Mapping[str, str], now: float, asking: Mapping[str, int]) -> Iterator[str]:
        """Yield the shares whose turn may begin, from the namespace with the fewest turns first. `asking`: turns by
        namespace, which the caller keeps up to date."""
        due: dict[str, deque[tuple[int, int, str]]] = {}
        for number, (tenant, turn) in enumerate(self._turns.items()):
            if turn.began is None and now >= turn.not_before:
                due.setdefault(namespaces[tenant], deque()).append((turn.ended, number, tenant))
        for namespace, waiting in due.items():
            due[namespace] = deque(sorted(waiting))
        heap = [(asking.get(namespace, 0), waiting[0], namespace) for namespace, waiting in due.items()]
        heapify(heap)
        while heap:
            _, (_, _, tenant), namespace = heappop(heap)
            due[namespace].popleft()
            yield tenant
            if due[namespace]:
                heappush(heap, (asking.get(namespace, 0), due[namespace][0], namespace))
