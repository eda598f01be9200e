"""Random delays from a seed, so that calls, their answers and events of watches overtake each other as on a busy
cluster.

Guarantees:
- Most delays are short. One in `_LONG_EVERY` is long enough for an object to be created, placed and deleted; its
  position is random.
- Events of one watch keep their order, as on one connection. Events of two resources may overtake each other.
- The same seed gives the same delays in the same order. The event loop determines which call gets which delay.
"""

from __future__ import annotations

import asyncio
import random

_SHORT_S = 0.005
"""Upper bound of a short delay in seconds: some iterations of the operator's event loop."""
_LONG_S = 0.15
"""Upper bound of a long delay in seconds: an object can be created, placed and deleted within it."""
_LONG_EVERY = 12


class Delays:
    """Draws, from a seed, how long one simulated API server delays each call, each answer and each event of a watch."""

    def __init__(self, seed: int) -> None:
        self._chance = random.Random(seed)

    async def pass_by(self) -> None:
        """Sleep for the next delay of the seed's sequence."""
        longest = _LONG_S if self._chance.randrange(_LONG_EVERY) == 0 else _SHORT_S
        await asyncio.sleep(self._chance.uniform(0.0, longest))
