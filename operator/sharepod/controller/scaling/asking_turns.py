"""Turns of placeholders: decides which of the shares that fit on no node have a placeholder now. A placeholder is a Pod
that makes a cluster autoscaler add a node. Pure.

Guarantees:
- The limits, in total and per namespace, are never exceeded.
- A share's turn begins once it has fitted nowhere for `after_s`, and lasts `for_s`. The pause before its next turn
  doubles each time, up to sixteen times `for_s`. So an autoscaler does not add useless nodes for it indefinitely.
- If several turns may begin, the namespace with the fewest placeholders comes first. So a namespace with many shares
  does not exclude others.
- A share keeps its turn for `for_s`, whichever shares arrive later.
- No placeholder is requested while a node is starting, because that node may fit all shares.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from itertools import chain

from sharepod.backoff import Backoff

_MOST_PAUSES = 16
"""Longest pause as a multiple of `for_s`: four hours with the default of 15 minutes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AskingLimits:
    """Limits: largest number of placeholders in total (`most`) and for one namespace; seconds of waiting before a turn
    (`after_s`), and of a turn (`for_s`).
    """

    most: int
    per_namespace: int
    after_s: float
    for_s: float


@dataclass(slots=True)
class _Turn:
    """State of one share. Times are monotonic seconds. `not_before`: earliest start of its next turn. `began`: start of
    its present turn; None if it has none. `ended`: number of its past turns."""

    not_before: float
    began: float | None = None
    ended: int = 0


class AskingTurns:
    """Turns of the shares that fit on no node."""

    def __init__(self, limits: AskingLimits) -> None:
        self._limits = limits
        self._backoff = Backoff(limits.for_s, _MOST_PAUSES * limits.for_s)
        self._turns: dict[str, _Turn] = {}

    def clear(self) -> None:
        """Drop all turns: this process no longer leads."""
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
        """Return the tenants that must have a placeholder from now on.

        Args:
            short: (tenant, namespace) of each share that fits on no node, in the order of the queue.
            now: Monotonic seconds.
            node_comes: True if a node of the pool has not reported its GPUs yet, so it is still starting.
            there: Tenants that have a placeholder now, including placeholders of an earlier leader.
            kept: Namespaces of further placeholders that stay, one entry each. The limits count them too.
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
        """Yield the tenants whose turn may begin, the namespace with the fewest turns first. `asking`: number of turns
        by namespace, which the caller updates after each value."""
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
