"""Hints: flags in shared memory that show a tenant's processes that other tenants want its GPUs. Hints are raised at
once, and lowered by a periodic sweep.

Guarantees:
- A hint is raised as soon as another tenant wants a GPU that the tenant has.
- A hint is lowered at most `SWEEP_S` after the last other tenant has stopped wanting a GPU. A late lowering does no
  harm: it only keeps the hook's queue bounded for longer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

SWEEP_S = 0.5
"""Seconds between two sweeps."""


class HintSweep:
    """Raises and sweeps hints on the running loop.

    Args:
        sweep: Sets each tenant's hint to its current value. Returns True if any hint is raised.
    """

    def __init__(self, sweep: Callable[[], bool]) -> None:
        self._sweep = sweep
        self._timer: asyncio.TimerHandle | None = None

    def up(self, hints: Iterable[Callable[[bool], None]]) -> None:
        """Call each of these functions with True, which raises a tenant's hint, and start the sweep."""
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
        self._set()  # schedule first, so that an exception does not end the sweeps
        if not self._sweep():
            self.close()
