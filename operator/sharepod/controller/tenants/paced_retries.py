"""Paced retries: limits how fast Pods that the API server has refused are created again, by namespace.

Guarantees:
- At most `TRIES_PER_S` retries of one namespace fall due in any second, so even thousands of SharePods beyond a quota
  cause no more calls.
- A retry falls due after its own pause, in the first second that has fewer than `TRIES_PER_S` retries.
- When one retry succeeds, the two Pods that have waited longest are retried at once. So Pods that fit a raised quota
  run within seconds.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count

TRIES_PER_S = 10
"""Retries of one namespace that fall due in one second."""
_TRIED_AT_ONCE = 2
"""Number of Pods that are retried at once when another Pod's retry succeeds."""


@dataclass(slots=True)
class _Refused:
    """Tenants of one namespace whose Pods were refused."""

    due: Counter[int] = field(default_factory=Counter)
    """Number of retries that fall due in each second."""
    second: int = 0
    """First second in `due`; earlier seconds were dropped."""
    waiting: dict[str, None] = field(default_factory=dict)
    """Tenants that wait for their retry, in order of their last refusal."""


class PacedRetries:
    """Retries of all namespaces. Times are monotonic seconds; a second is their integer part."""

    def __init__(self) -> None:
        self._refused: dict[str, _Refused] = {}
        self._namespace_of: dict[str, str] = {}
        """Namespace of each tenant that waits for its retry, by tenant."""

    def next_try(self, namespace: str, tenant: str, now: float, pause: float) -> float:
        """Return the time at which a refused tenant is retried: `pause` seconds after `now`, or later if that second is
        full.
        """
        refused = self._refused.setdefault(namespace, _Refused())
        refused.waiting.pop(tenant, None)
        refused.waiting[tenant] = None
        self._namespace_of[tenant] = namespace
        due, earliest = refused.due, now + pause
        if refused.second < math.floor(now):
            refused.second = math.floor(now)
            for past in [second for second in due if second < refused.second]:
                del due[past]
        second = next(second for second in count(math.floor(earliest)) if due[second] < TRIES_PER_S)
        due[second] += 1
        return max(earliest, float(second))

    def taken(self, namespace: str, tenant: str, waits: Callable[[str], bool]) -> list[str]:
        """Return further tenants to retry at once, because the retry of `tenant` succeeded.

        `waits`: returns True if a tenant still waits for its retry. Other tenants are dropped.
        """
        self.forget(tenant)
        next_ones: list[str] = []
        while (refused := self._refused.get(namespace)) is not None and len(next_ones) < _TRIED_AT_ONCE:
            other = next(iter(refused.waiting))
            self.forget(other)
            if waits(other):
                next_ones.append(other)
        return next_ones

    def forget(self, tenant: str) -> None:
        """Drop a tenant that is deleted or no longer waits for a retry."""
        namespace = self._namespace_of.pop(tenant, None)
        if namespace is None:
            return
        refused = self._refused[namespace]
        del refused.waiting[tenant]
        if not refused.waiting:
            del self._refused[namespace]

    def clear(self) -> None:
        """Drop all tenants."""
        self._refused.clear()
        self._namespace_of.clear()
