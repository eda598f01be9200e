"""Turns of the shares that ask for nodes: which of them have a placeholder now. Pure.

Guarantees:
- There are never more at a time than the limits say, in all and for one namespace.
- A share asks once it has been without room for `after_s`, and for `for_s`; then it asks again after as long, twice as
  long each time, up to sixteen times as long: a node that is never of use is not bought for ever.
- A share that asks goes on until its time is over, whoever comes after it.
- Nobody asks while a node is on its way: it may have room for all.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass

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
    """Turn of one share. Times are monotonic seconds. `began`: when it began to ask; None: it does not ask."""

    not_before: float
    began: float | None = None
    ended: int = 0


class AskingTurns:
    """Turns of the shares without room."""

    def __init__(self, limits: AskingLimits) -> None:
        self._limits = limits
        self._turns: dict[str, _Turn] = {}

    def clear(self) -> None:
        """Forget all: this process no longer leads."""
        self._turns.clear()

    def asking(
        self, short: Iterable[tuple[str, str]], now: float, *, node_comes: bool, there: Collection[str] = ()
    ) -> list[str]:
        """Return the tenants that have a placeholder from now on.

        Args:
            short: Tenant and namespace of each share that no node has room for, those first that come first.
            now: Monotonic seconds.
            node_comes: A node is there that does not take shares yet.
            there: Tenants that have a placeholder; of one that is not known yet, an earlier leader has made it.
        """
        namespaces = dict(short)
        self._turns = {
            tenant: self._turns.get(tenant) or _Turn(now + self._limits.after_s, began=now if tenant in there else None)
            for tenant in namespaces
        }
        for turn in self._turns.values():
            if turn.began is not None and now >= turn.began + self._limits.for_s:
                pause = min(2**turn.ended, _MOST_PAUSES) * self._limits.for_s
                turn.began, turn.ended, turn.not_before = None, turn.ended + 1, now + pause
        if node_comes:
            return []
        found: list[str] = []
        of_namespace: Counter[str] = Counter()
        due = [tenant for tenant, turn in self._turns.items() if turn.began is None and now >= turn.not_before]
        for tenant in (*(tenant for tenant, turn in self._turns.items() if turn.began is not None), *due):
            if len(found) < self._limits.most and of_namespace[namespaces[tenant]] < self._limits.per_namespace:
                of_namespace[namespaces[tenant]] += 1
                found.append(tenant)
                if self._turns[tenant].began is None:
                    self._turns[tenant].began = now
        return found
