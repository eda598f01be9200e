"""Event loop on a virtual clock: time stands still while any task can run, otherwise it jumps to the next timer.

So a test that sleeps for ten minutes takes no time, and after a sleep all work that needs no time has been done. Not
for tests with sockets or threads: time would not wait for them.
"""

from __future__ import annotations

import asyncio
import selectors

BEGIN_S = 1000.0
"""First moment of the clock, in seconds. It is not 0, so that a time that was never set is noticed."""


class _JumpingSelector(selectors.DefaultSelector):
    """Selector that advances the clock instead of waiting."""

    def __init__(self) -> None:
        super().__init__()
        self.now = BEGIN_S

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if ready or timeout == 0:
            return ready
        if timeout is None:
            raise RuntimeError("no task can run and no timer is set: the test would wait without end")
        self.now += timeout
        return ready


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """Event loop whose `time()` is virtual."""

    def __init__(self) -> None:
        self._clock = _JumpingSelector()
        super().__init__(self._clock)

    def time(self) -> float:
        return self._clock.now
