"""Hints by which a tenant's processes know that other tenants want its GPUs: raised at once, lowered by a sweep.

Guarantees:
- A hint is raised as soon as another tenant wants a GPU of the tenant's.
- It is lowered at most `SWEEP_S` after the last such tenant stopped wanting it. A hint that is raised for too long only
  keeps the tenant's queue bounded.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

SWEEP_S = 0.5
"""Seconds between two sweeps."""


class HintSweep:
    """Hints of all tenants, on the running loop.

    Args:
        sweep: Sets each tenant's hint to its current value; returns whether any is raised.
    """

    def __init__(self, sweep: Callable[[], bool]) -> None:
        self._sweep = sweep
        self._timer: asyncio.TimerHandle | None = None

    def up(self, hints: Iterable[Callable[[bool], None]]) -> None:
        """Raise these hints."""
        for hint in hints:
            hint(True)
        if self._timer is None:
            self._set()

    def close(self) -> None:
        """Stop sweeping."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _set(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(SWEEP_S, self._due)

    def _due(self) -> None:
        self._set()  # first, so that a sweep that fails is repeated
        if not self._sweep():
            self.close()
