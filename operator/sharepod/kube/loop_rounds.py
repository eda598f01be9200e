"""Rounds of the event loop: bounds the part of a round for tasks whose answers have arrived.

A round runs all ready tasks, and only then polls the sockets again. If 32 writers get their answers at once, and each
runs for a millisecond, any other caller waits for all of them. It does so up to three times: for the connection, the
request and the answer.

Guarantees:
- Tasks that `enter` take no more of a round together than the budget and one step.
- They continue in the order in which they came.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

_BUDGET_S = 0.005
"""Budget in seconds of a round: equal to the time that a watch spends on events before others get a turn."""


class LoopRounds:
    """Budget of each round of one event loop. `clock`: monotonic seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic, budget_s: float = _BUDGET_S) -> None:
        self._clock = clock
        self._budget_s = budget_s
        self._ends: float | None = None
        """Time at which the budget of this round is used up; None: no task has entered in it."""

    async def enter(self) -> None:
        """Continue at once while there is time left in this round, else in a later one."""
        while self._ends is not None and self._clock() >= self._ends:  # noqa: ASYNC110 - a round is no event
            await asyncio.sleep(0)
        if self._ends is None:
            self._ends = self._clock() + self._budget_s
            asyncio.get_running_loop().call_soon(self._next)

    def _next(self) -> None:
        self._ends = None
