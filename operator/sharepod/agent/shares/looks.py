"""Looks at the signs of life of tenants that hold: when the next one is due, and who takes it.

The event loop checks each tenant from its grant until it has drained, in its wait (`on_time.SilenceWatch`), and wakes
Python where one is silent. On another loop, or where a process gives no signs, each look is a timer.

Guarantees:
- A look is taken when it is due.
- A look that comes late says so.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from sharepod import protocol

STALL_NS = 20_000_000
"""Nanoseconds by which a timer is late when the agent counts as stalled, and with it perhaps those that it looks at: 20
ms, beyond what a busy machine does to a program at nice -10."""


class Watch(Protocol):
    """The event loop's watch over tenants, see `on_time.SilenceWatch`."""

    @property
    def keeps(self) -> bool:
        """True if anybody is watched."""

    def keep(self, tenants: Mapping[str, Sequence[protocol.Beat]], due_ns: int, over: Callable[[int], None]) -> bool:
        """Watch these from now on, and no others; return False where that is not possible."""

    def put(self, tenant: str, beats: Sequence[protocol.Beat], over: Callable[[int], None]) -> bool:
        """Watch a tenant beside others; return False where that is not possible."""

    def drop(self, tenant: str) -> None:
        """Watch a tenant no more."""

    def watches(self, tenant: str) -> bool:
        """Return whether a tenant is watched."""

    def end(self) -> None:
        """Watch nobody any more."""


class Looks:
    """Next look, on the running loop.

    Args:
        clock: Nanoseconds of CLOCK_MONOTONIC.
        look: Called for each look at all tenants, with whether it is late.
    """

    def __init__(self, clock: Callable[[], int], look: Callable[[bool], None]) -> None:
        self._clock = clock
        self._look = look
        self._timer: asyncio.TimerHandle | None = None
        self._at = 0
        """Moment for which the timer is set."""
        self._silence_watch: Watch | None = None
        """The loop's, once anybody was watched by it."""

    @property
    def pending(self) -> bool:
        """True if a look is due at some moment."""
        return self._timer is not None or (self._silence_watch is not None and self._silence_watch.keeps)

    def by(self, at: int) -> None:
        """Look at all tenants at that moment at the latest."""
        if self._timer is not None:
            if self._at <= at:
                return
            self._timer.cancel()
        self._at = at
        loop = asyncio.get_running_loop()
        self._timer = loop.call_at(loop.time() + max(0, at - self._clock()) / 1e9, self._due)

    def watch(self, tenants: Mapping[str, Sequence[protocol.Beat]], at: int) -> None:
        """Look at that moment, and from then on whenever one of the tenants may be silent.

        Args:
            tenants: By tenant the processes of which one has to give signs of life; none: it cannot be watched.
            at: Moment of the first look.
        """
        silence_watch = self._of_the_loop()
        if silence_watch is None or not all(tenants.values()) or not silence_watch.keep(tenants, at, self._over):
            self.by(at)

    def put(self, tenant: str, beats: Sequence[protocol.Beat]) -> bool:
        """Look whenever this tenant may be silent, too. Return False where the loop cannot: a look is to be asked
        for."""
        silence_watch = self._of_the_loop()
        return silence_watch is not None and bool(beats) and silence_watch.put(tenant, beats, self._over)

    def drop(self, tenant: str) -> None:
        """Look at a tenant no more: it holds nothing."""
        if self._silence_watch is not None:
            self._silence_watch.drop(tenant)

    def watches(self, tenant: str) -> bool:
        """Return whether a look is taken whenever this tenant may be silent."""
        return self._silence_watch is not None and self._silence_watch.watches(tenant)

    def close(self) -> None:
        """Take no more looks."""
        self._cancel()
        if self._silence_watch is not None:
            self._silence_watch.end()

    def _of_the_loop(self) -> Watch | None:
        if self._silence_watch is None:
            self._silence_watch = getattr(asyncio.get_running_loop(), "silence_watch", None)
        return self._silence_watch

    def _cancel(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _due(self) -> None:
        self._timer = None
        if self._silence_watch is not None:
            self._silence_watch.end()
        self._look(self._clock() - self._at >= STALL_NS)

    def _over(self, due: int) -> None:
        self._cancel()  # this look is at all of them
        self._look(self._clock() - due >= STALL_NS)
