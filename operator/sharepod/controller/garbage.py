"""Garbage collection with short pauses of the event loop, however many objects the operator knows.

Python's own full collection visits every live object: 0.3 s with 10,000 SharePods (359,000 objects). Here a collection
does not visit objects that survived an earlier collection, so it visits only new objects. There are two triggers:
- A number of new objects: a burst creates 200,000 a second.
- A period: Python subtracts freed objects from the number of new objects, so replaced objects do not count.

Guarantees:
- A collection visits at most `_YOUNG` times `_LOOKS` new objects, plus two kinds: objects created while it waited, and
  objects that replaced older objects within `_PERIOD_S`.
- A reference cycle of new objects is freed after that many further new objects. A cycle that was alive at a collection
  is freed within a day.
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
"""New objects between two collections of the youngest generation: half a millisecond of work. Python's 700 is some ten
decisions."""
_LOOKS = 1
"""Collections of new objects per collection that also visits their survivors: about 2 ms of work. Five times as many
objects and three collections took 15 to 25 ms. Survivors then belong to Python's oldest generation, which is not
visited otherwise: of its 280,000 objects after 1,000 SharePods, 400 were in dead cycles."""
_NEVER = 1 << 30
_PERIOD_S = 0.05
"""Seconds between two collections of new objects, whatever their number: 4,000 objects, 2 ms, at 400 SharePods a
second."""


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
        gc.freeze()  # these objects live until the process ends; visiting them at the end would delay the successor

    async def run(self) -> None:
        """Collect new objects periodically, until cancelled."""
        while True:
            await asyncio.sleep(_PERIOD_S)
            gc.collect(1)

    def settle(self) -> None:
        """Collect everything once a day; to be called each second."""
        now = self._clock()
        if now >= self._everything_at:
            self._everything_at = now + _EVERYTHING_S
            gc.collect()
