"""Hints that tell the processes of a tenant whether others want its GPUs: raised at once, taken down by a sweep.

Guarantees:
- A hint is up from the moment at which another tenant wants a GPU of the tenant's, until at most `SWEEP_S` after the
  last ceased to. One that stays up too long only keeps the tenant's queue bounded.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

SWEEP_S = 0.5
"""Seconds between two sweeps."""


class HintSweep:
    """Hints of all tenants, on the running loop.

    Args:
        sweep: Sets each tenant's hint as it is to be; returns whether any is up.
    """

    def __init__(self, sweep: Callable[[], bool]) -> None:
        self._sweep = sweep
        self._timer: asyncio.TimerHandle | None = None

    def up(self, hints: Iterable[Callable[[bool], None]]) -> None:
        """Raise these."""
        for hint in hints:
            hint(True)
        if self._timer is None:
            self._set()

    def close(self) -> None:
        """Sweep no more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _set(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(SWEEP_S, self._due)

    def _due(self) -> None:
        self._set()  # first: a sweep that fails is made again
        if not self._sweep():
            self.close()
