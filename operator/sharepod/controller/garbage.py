"""Garbage collection with short pauses of the event loop, however many objects the operator knows.

Python's own full collection visits every live object: 0.3 s with 10,000 SharePods (359,000 objects). Here an object
that has survived a collection is not visited again, so a collection visits only new objects. Two triggers start one:
- A number of new objects: a burst of requests creates 200,000 a second.
- A period. The number alone is not enough: Python subtracts freed objects from it, so it stays low while new objects
  replace old ones.

Guarantees:
- A collection visits at most `_YOUNG` times `_LOOKS` new objects. Two kinds add to them: objects created while it
  waited, and objects that replaced older ones within `_PERIOD_S`.
- A reference cycle of new objects is freed after that many further new objects. A cycle that was in use at a collection
  is freed by the daily full collection.
- Objects outside cycles are freed at once, as usual.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable
from types import TracebackType
from typing import Self

_EVERYTHING_S = 86_400.0
"""Seconds between two full collections: one long pause a day, for cycles that survived a collection."""
_YOUNG = 2_000
"""New objects between two collections of the youngest generation: half a millisecond of work. Python's default of 700
would start one every ten decisions or so."""
_LOOKS = 1
"""Collections of new objects before a collection that also visits their survivors, about 2 ms of work. With five times
`_YOUNG` and a value of 3, the latter took 15 to 25 ms. Objects that survive it belong to Python's oldest generation,
which only the daily collection visits. Of its 280,000 objects after 1,000 SharePods, only 400 were in unused cycles."""
_NEVER = 1 << 30
_PERIOD_S = 0.05
"""Seconds between two collections of new objects, whatever their number. At 400 SharePods a second, these are 4,000
objects and 2 ms of work."""


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
        gc.freeze()  # the process ends now: a last collection would only delay the operator that takes over

    async def run(self) -> None:
        """Collect new objects periodically, until cancelled."""
        while True:
            await asyncio.sleep(_PERIOD_S)
            gc.collect(1)

    def settle(self) -> None:
        """Collect everything if a day has passed. The caller must call this about once a second."""
        now = self._clock()
        if now >= self._everything_at:
            self._everything_at = now + _EVERYTHING_S
            gc.collect()
