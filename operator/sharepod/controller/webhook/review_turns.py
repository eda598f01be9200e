"""Turns of reviews: a review is read and answered while no other is, and reviews alternate with the operator's work.

Any client in the cluster may send reviews, because API servers have no labels that a NetworkPolicy could select.

Guarantees:
- After each review, other work has the event loop for as long as the review took. So reviews take at most half of the
  operator's time.
- Client addresses take turns, each with its oldest review first. So many reviews from one address delay any other
  address by at most one review.
- The reviews in memory that are larger than `SMALL` have at most `HELD` bytes in sum.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

SMALL = 64 << 10
"""Bytes up to which a review is always accepted. Reviews of usual Pods have about 10 KiB."""
HELD = 64 << 20
"""Largest sum of the bytes of larger reviews in memory."""
HELD_EACH = 16 << 20
"""Largest part of `HELD` for one client address."""


class ReviewTurns:
    """Turns of reviews by client address."""

    def __init__(self) -> None:
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}
        """Waiting reviews by address, in the order of the addresses' turns."""
        self._busy = False
        self._began = 0.0
        self._held: dict[str, int] = {}

    @contextmanager
    def holding(self, address: str, size: int) -> Iterator[bool]:
        """Count a review of `size` bytes as in memory while the context lasts. Yield False if it must be refused."""
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
        """Wait for a turn. No other review has a turn until `end`."""
        if self._busy:
            mine = asyncio.get_running_loop().create_future()
            self._waiting.setdefault(address, deque()).append(mine)
            try:
                await mine
            except asyncio.CancelledError:
                if mine.done() and not mine.cancelled():  # the turn had begun when the review was cancelled
                    self._next()
                raise
        self._busy = True
        self._began = time.monotonic()

    def end(self) -> None:
        """End the turn. The next one begins once other work has had as much time as this review."""
        asyncio.get_running_loop().call_later(time.monotonic() - self._began, self._next)

    def _next(self) -> None:
        """Begin the turn of the next waiting address."""
        while self._waiting:
            address = next(iter(self._waiting))
            waiting = self._waiting.pop(address)
            mine = waiting.popleft()
            if waiting:
                self._waiting[address] = waiting  # this address's next turn comes after all other addresses
            if not mine.done():
                mine.set_result(None)
                return
        self._busy = False
