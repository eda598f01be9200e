"""Turns of reviews: read and answered one at a time, in turn with the operator's other work.

The port is open to the whole cluster: API servers have no labels that a NetworkPolicy could select.

Guarantees:
- After each review other work has the event loop for as long as the review took: reviews take at most half of the
  operator's time.
- Addresses take turns, each with its oldest review first: many reviews of one address delay only that address, and each
  other address by one review.
- The large reviews held at a time are bounded in bytes, however many connections send them.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

SMALL = 64 << 10
"""Size in bytes of a review that is always accepted: usual Pods' reviews have about 10 KiB."""
HELD = 64 << 20
"""Bytes of larger reviews that are held at a time."""
HELD_EACH = 16 << 20
"""Bytes of them for one address."""


class ReviewTurns:
    """Turns of reviews, by address."""

    def __init__(self) -> None:
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}
        """Waiting reviews by address, the next address first."""
        self._busy = False
        self._began = 0.0
        self._held: dict[str, int] = {}

    @contextmanager
    def holding(self, address: str, size: int) -> Iterator[bool]:
        """Within it a review of that many bytes may be held, if it yields True."""
        if size <= SMALL:
            yield True
            return
        held = self._held.get(address, 0) + size
        if held > HELD_EACH or sum(self._held.values()) + size > HELD:
            yield False
            return
        self._held[address] = held
        try:
            yield True
        finally:
            self._held[address] -= size
            if not self._held[address]:
                del self._held[address]

    async def begin(self, address: str) -> None:
        """Wait for a turn. Until `end` no other review has a turn."""
        if self._busy:
            mine = asyncio.get_running_loop().create_future()
            self._waiting.setdefault(address, deque()).append(mine)
            try:
                await mine
            except asyncio.CancelledError:
                if mine.done() and not mine.cancelled():  # the turn came, and its review was cancelled
                    self._next()
                raise
        self._busy = True
        self._began = time.monotonic()

    def end(self) -> None:
        """End the turn; the next begins once other work has had as long."""
        asyncio.get_running_loop().call_later(time.monotonic() - self._began, self._next)

    def _next(self) -> None:
        """Give the turn to the next address that waits."""
        while self._waiting:
            address = next(iter(self._waiting))
            waiting = self._waiting.pop(address)
            mine = waiting.popleft()
            if waiting:
                self._waiting[address] = waiting  # to the end of the round
            if not mine.done():
                mine.set_result(None)
                return
        self._busy = False
