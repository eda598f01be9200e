"""Garbage collection that does not stop the event loop for long, however many objects are known.

Python's own full collection looks at every object that is alive: 0.3 s with 10,000 SharePods (359,000 objects). What
survives one collection here is not looked at again, so that each looks at what the last second has made.

Guarantees:
- Reference cycles end within a second, but for those that were alive at a collection: they end within a day.
- What is free of cycles ends at once, as ever.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from types import TracebackType
from typing import Self

_EVERYTHING_S = 86_400.0
"""Seconds between two collections that look at everything: a stall a day, for the cycles that outlived a look."""
_YOUNG = 20_000
"""New objects between two collections of the youngest generation. Python's 700 is some ten decisions."""
_NEVER = 1 << 30


class Garbage:
    """Garbage collection of this process, in a `with` block. `clock`: monotonic seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._everything_at = clock() + _EVERYTHING_S
        self._thresholds = gc.get_threshold()

    def __enter__(self) -> Self:
        gc.set_threshold(_YOUNG, self._thresholds[1], _NEVER)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        gc.set_threshold(*self._thresholds)
        gc.unfreeze()

    def settle(self, *, acting: bool) -> None:
        """Collect what was made since the last call; to be called each second.

        `acting`: False while the operator begins and stands by: what it lists then has no cycles worth a stall.
        """
        now = self._clock()
        if now >= self._everything_at:
            self._everything_at = now + _EVERYTHING_S
            gc.unfreeze()
            acting = True
        if acting:
            gc.collect()
        gc.freeze()
