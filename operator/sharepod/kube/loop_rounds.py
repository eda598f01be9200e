"""Fair rounds of the event loop: limits the time per round for callers of the API server whose answers have arrived.

A round of asyncio runs all ready tasks, and only then polls the sockets again. If 32 writers get their answers at once,
and each runs for a millisecond, any other caller waits 32 ms. It waits up to three times: for the connection, the
request and the answer.

Guarantees:
- In one round, tasks that have called `enter` run together for at most the budget and one more step.
- Tasks continue in the order of their calls of `enter`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

_BUDGET_S = 0.005
"""Budget of a round in seconds: the same time after which a watch lets other tasks run."""


class LoopRounds:
    """Bound on the time that tasks take in each round of one event loop. `clock`: monotonic seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic, budget_s: float = _BUDGET_S) -> None:
        self._clock = clock
        self._budget_s = budget_s
        self._ends: float | None = None
        """Time at which the budget of this round is used up. None: no task has called `enter` in this round."""

    async def enter(self) -> None:
        """Return at once while this round has time left, else in a later round."""
        while self._ends is not None and self._clock() >= self._ends:  # noqa: ASYNC110 - a round is no event
            await asyncio.sleep(0)
        if self._ends is None:
            self._ends = self._clock() + self._budget_s
            asyncio.get_running_loop().call_soon(self._next)

    def _next(self) -> None:
        self._ends = None
