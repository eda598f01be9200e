"""Budget for frames: divides the event loop's turns, and the frame rate, between a node's tenants.

Guarantees:
- In one turn of the event loop the frames of all tenants together take about 1 ms, whatever the number of tenants and
  the cost of frames. At least one frame of each tenant with frames is handled.
- Tenants that exceed their frame rate at the same time have, together, the rate of one tenant.
"""

from __future__ import annotations

import asyncio

_TURN_S = 0.001
"""Seconds that all tenants' frames together may take in one turn of the loop, and so about the longest delay of a
hand-off. Shorter turns would spend more of the loop on polling."""
_ALONE_S = 2 * _TURN_S
"""Seconds after which a lone tenant's frames count as the next turn of the loop. The end of a turn is inferred in this
way, because a callback at each end would add a turn of the loop to every hand-off."""
_LOUD_S = 5.0
"""Seconds for which a tenant that exceeded its rate shares one tenant's rate with other such tenants. They exceed the
pauses of a flood that comes in waves."""


class FrameBudget:
    """Budget of frames and of loop time, shared by the inboxes of all tenants of a node.

    Args:
        per_s: Most frames of one tenant that are handled in a second.
    """

    def __init__(self, per_s: float) -> None:
        self._per_s = per_s
        self._inboxes_now = self._inboxes_before = 0
        """Number of tenants with frames in the current turn of the loop, and in the turn before."""
        self._first_at = 0.0
        """Loop time at which the first tenant of the current turn began."""
        self._loud: dict[str, float] = {}
        """For each tenant that has exceeded its rate: loop time at which it last did."""

    def begin_turn(self) -> float:
        """Count one more tenant with frames in this turn of the loop. Return the loop time until which it may handle
        frames."""
        loop = asyncio.get_running_loop()
        now = loop.time()
        if self._inboxes_now == 1:
            if now - self._first_at > _ALONE_S:
                self._end_turn()
            else:
                loop.call_soon(self._end_turn)
        if self._inboxes_now == 0:
            self._first_at = now
        self._inboxes_now += 1
        return now + _TURN_S / max(self._inboxes_now, self._inboxes_before)

    def throttled_rate(self, now: float, tenant_id: str) -> float:
        """Record that a tenant exceeds its rate. Return the rate at which its frames may be handled from now on, per
        second."""
        self._loud[tenant_id] = now
        self._loud = {loud: at for loud, at in self._loud.items() if now - at < _LOUD_S}
        return self._per_s / len(self._loud)

    def _end_turn(self) -> None:
        self._inboxes_before, self._inboxes_now = self._inboxes_now, 0
