"""Standstill: time in which the machine did not run, because a virtual machine was paused or this process got no
processor.

A soak that waits for an event does not count that time, because the awaited work did not run either.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import TracebackType

_EVERY_S = 0.05
LATE_S = 0.5
"""Delay of a periodic clock reading, in seconds, from which on it counts as a standstill. A busy machine delays a
reading by less."""


class Standstill:
    """Sum of the standstills so far, found by a thread that reads the clock periodically. A context manager."""

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
        """Return the seconds in which the machine did not run, up to now."""
        return self._lost + self._late(self._looked)

    def look(self) -> None:
        """Read the clock once. Called periodically by the thread."""
        self._lost += self._late(self._looked)
        self._looked = self._clock()

    def _late(self, looked: float) -> float:
        late = self._clock() - looked - _EVERY_S
        return late if late > LATE_S else 0.0

    def _run(self) -> None:
        while not self._ended.wait(_EVERY_S):
            self.look()
