"""Garbage collection that does not stop the event loop for long, however many objects are known.

Python's own full collection looks at every object that is alive: 0.3 s with 10,000 SharePods (359,000 objects). What
survives one collection here is not looked at again, so that each looks at what was made since the last. It comes after
so many new objects (a second of a burst makes 200,000), and after a time: what replaces older objects does not count as
new for Python, which subtracts those that have gone.

Guarantees:
- A collection looks at no more than `_YOUNG` times `_LOOKS` new objects and what they have made while it waited, and at
  what has replaced older objects since the last look, `_PERIOD_S` ago.
- Reference cycles end within so many new objects, but for those that were alive at a collection: they end within a day.
- What is free of cycles ends at once, as ever.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable
from types import TracebackType
from typing import Self

_EVERYTHING_S = 86_400.0
"""Seconds between two collections that look at everything: a stall a day, for the cycles that outlived a look."""
_YOUNG = 2_000
"""New objects between two collections of the youngest generation: half a millisecond of work. Python's 700 is some ten
decisions."""
_LOOKS = 1
"""Such collections after which one looks at their survivors, too: some 2 ms of work, where five times as many objects
and three looks took 15 to 25 ms. What survives it is of Python's oldest generation, which is never looked at of itself:
of 280,000 objects that were there after 1,000 SharePods 400 were cycles that had ended."""
_NEVER = 1 << 30
_PERIOD_S = 0.05
"""Seconds between two looks at what is new, however much that is: 4,000 objects, 2 ms, at 400 SharePods a second."""


class Garbage:
    """Garbage collection of this process, in a `with` block. `clock`: monotonic seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._everything_at = clock() + _EVERYTHING_S
        self._thresholds = gc.get_threshold()

    def __enter__(self) -> Self:
        gc.set_threshold(_YOUNG, _LOOKS, _NEVER)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        gc.set_threshold(*self._thresholds)
        gc.freeze()  # what is left ends with the process: a look at it would keep the successor waiting

    async def run(self) -> None:
        """Look at what is new, again and again, until cancelled."""
        while True:
            await asyncio.sleep(_PERIOD_S)
            gc.collect(1)

    def settle(self) -> None:
        """Look at everything, once a day; to be called each second."""
        now = self._clock()
        if now >= self._everything_at:
            self._everything_at = now + _EVERYTHING_S
            gc.collect()
