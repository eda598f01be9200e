"""Rounds of the event loop: how much of one is given to the tasks whose answers have arrived.

A round runs all that is ready, and only then looks at the sockets again. Where 32 writers wait for answers, and each
goes on for a millisecond, whoever calls meanwhile waits for all of them, and that two or three times: for the
connection, the request and the answer.

Guarantees:
- Tasks that `enter` take no more of a round together than the budget and one step.
- They go on in the order in which they came.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

_BUDGET_S = 0.005
"""Seconds of a round: as long as a watch takes in events before others get a turn."""


class LoopRounds:
    """Budget of each round of one event loop. `clock`: monotonic seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic, budget_s: float = _BUDGET_S) -> None:
        self._clock = clock
        self._budget_s = budget_s
        self._ends: float | None = None
        """When the budget of this round is used up; None: nobody has entered in it."""

    async def enter(self) -> None:
        """Go on at once while there is time left in this round, else in one of the next."""
        while self._ends is not None and self._clock() >= self._ends:  # noqa: ASYNC110 - a round is no event
            await asyncio.sleep(0)
        if self._ends is None:
            self._ends = self._clock() + self._budget_s
            asyncio.get_running_loop().call_soon(self._next)

    def _next(self) -> None:
        self._ends = None
