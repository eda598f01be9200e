"""Time in which the machine stood still: a paused virtual machine, or no processor for this process.

A soak that waits for an event does not count that time: the awaited work stood still, too.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import TracebackType

_EVERY_S = 0.05
LATE_S = 0.5
"""Seconds by which the reading of the clock must be late to count: less is a busy machine."""


class Standstill:
    """Seconds lost so far, by a thread that reads the clock periodically. Use as a context manager."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._ended = threading.Event()
        self._lost = 0.0
        self._looked = clock()
        self._thread = threading.Thread(target=self._run, name="standstill", daemon=True)

    def __enter__(self) -> Standstill:
        self._looked = self._clock()
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._ended.set()
        self._thread.join()

    @property
    def seconds(self) -> float:
        """Seconds in which the machine stood still, those up to now included."""
        return self._lost + self._late(self._looked)

    def look(self) -> None:
        """Read the clock once; the thread calls it."""
        self._lost += self._late(self._looked)
        self._looked = self._clock()

    def _late(self, looked: float) -> float:
        late = self._clock() - looked - _EVERY_S
        return late if late > LATE_S else 0.0

    def _run(self) -> None:
        while not self._ended.wait(_EVERY_S):
            self.look()
