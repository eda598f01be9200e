"""Hints: flags in shared memory that show a tenant's processes that other tenants want its GPUs. Hints are raised at
once, and lowered by a periodic sweep.

Guarantees:
- A hint is raised as soon as another tenant wants a GPU of the tenant's.
- A hint is lowered at most `SWEEP_S` after the last such tenant has stopped wanting a GPU. A hint that is raised for
  too long does no harm: it only keeps the tenant's queue bounded.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

SWEEP_S = 0.5
"""Seconds between two sweeps."""


class HintSweep:
    """Hints of all tenants, on the running loop.

    Args:
        sweep: Sets each tenant's hint to its current value. Returns True if any hint is raised.
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
        self._set()  # schedule the next sweep first, so that a failed sweep is repeated
        if not self._sweep():
            self.close()
