"""How much of the agent's time the frames of each tenant get.

Guarantees: in one turn of the loop the frames of all tenants together take about a millisecond at most, however many
tenants there are and whatever their frames cost (but each has at least one): who has little to say is heard in every
turn. Tenants that send more than they may have, all together, what one may have.
"""

from __future__ import annotations

import asyncio

_TURN_S = 0.001
_LOUD_S = 5.0
"""Who has sent too much shares with others who do, for so long."""


class FrameBudget:
    """One for all tenants of a node. `per_s`: frames that one tenant may have handled in a second."""

    def __init__(self, per_s: float) -> None:
        self._per_s = per_s
        self._here = self._before = 0
        self._loud: dict[str, float] = {}

    def begin_turn(self) -> float:
        """One more tenant has frames in this turn of the loop. Until when they may be handled."""
        loop = asyncio.get_running_loop()
        if self._here == 0:
            loop.call_soon(self._end_turn)
        self._here += 1
        return loop.time() + _TURN_S / max(self._here, self._before)

    def throttled_rate(self, now: float, tenant_id: str) -> float:
        """The tenant sends too much: frames that it may have handled in a second from now on."""
        self._loud[tenant_id] = now
        self._loud = {loud: at for loud, at in self._loud.items() if now - at < _LOUD_S}
        return self._per_s / len(self._loud)

    def _end_turn(self) -> None:
        self._before, self._here = self._here, 0
