"""Random delays from a seed: calls, their answers and the events of watches overtake each other, as on a busy cluster.

Guarantees:
- Most are short; one in `_LONG_EVERY` is long enough for whole lives to go by, at another place each time.
- Events of one watch keep their order, as they do on one connection; those of two kinds do not.
- The same seed gives the same delays in the same order. Which call meets which is up to the event loop.
"""

from __future__ import annotations

import asyncio
import random

_SHORT_S = 0.005
"""Longest of the short delays in seconds: some turns of the operator's event loop."""
_LONG_S = 0.15
"""Longest of the long ones: an object is created, placed and deleted meanwhile."""
_LONG_EVERY = 12


class Delays:
    """Delays of one API server."""

    def __init__(self, seed: int) -> None:
        self._chance = random.Random(seed)

    async def pass_by(self) -> None:
        """Wait for the next delay."""
        longest = _LONG_S if self._chance.randrange(_LONG_EVERY) == 0 else _SHORT_S
        await asyncio.sleep(self._chance.uniform(0.0, longest))
