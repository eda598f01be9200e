"""Schedule of the checks for signs of life of tenants that hold.

The event loop checks each tenant from its grant until it has drained, in its wait (`on_time.SilenceWatch`), and wakes
Python when one is silent. On another loop, or where a process gives no signs of life, each check is a timer.

Guarantees:
- A check runs when it is due.
- A late check is marked as late.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from sharepod import protocol

STALL_NS = 20_000_000
"""Nanoseconds by which a timer must be late for the agent to count as stalled, and possibly the checked processes with
it: 20 ms, more than a busy machine delays a program at nice -10."""


class Watch(Protocol):
    """Silence watch of the event loop, see `on_time.SilenceWatch`."""

    @property
    def keeps(self) -> bool:
        """True if any tenant is watched."""

    def keep(self, tenants: Mapping[str, Sequence[protocol.Beat]], due_ns: int, over: Callable[[int], None]) -> bool:
        """Watch exactly these tenants from now on; return False where that is not possible."""

    def put(self, tenant: str, beats: Sequence[protocol.Beat], over: Callable[[int], None]) -> bool:
        """Watch one more tenant; return False where that is not possible."""

    def drop(self, tenant: str) -> None:
        """Stop watching a tenant."""

    def watches(self, tenant: str) -> bool:
        """Return whether a tenant is watched."""

    def end(self) -> None:
        """Stop watching all tenants."""


class Looks:
    """Next check, on the running loop.

    Args:
        clock: CLOCK_MONOTONIC in nanoseconds.
        look: Called for each check of all tenants, with whether it is late.
    """

    def __init__(self, clock: Callable[[], int], look: Callable[[bool], None]) -> None:
        self._clock = clock
        self._look = look
        self._timer: asyncio.TimerHandle | None = None
        self._at = 0
        """Moment of the timer."""
        self._silence_watch: Watch | None = None
        """The loop's silence watch, once a tenant was watched by it."""

    @property
    def pending(self) -> bool:
        """True if a check is scheduled."""
        return self._timer is not None or (self._silence_watch is not None and self._silence_watch.keeps)

    def by(self, at: int) -> None:
        """Check all tenants at that moment at the latest."""
        if self._timer is not None:
            if self._at <= at:
                return
            self._timer.cancel()
        self._at = at
        loop = asyncio.get_running_loop()
        self._timer = loop.call_at(loop.time() + max(0, at - self._clock()) / 1e9, self._due)

    def watch(self, tenants: Mapping[str, Sequence[protocol.Beat]], at: int) -> None:
        """Check at that moment, and from then on whenever one of the tenants may be silent.

        Args:
            tenants: By tenant, the processes of which one has to give signs of life; none: it cannot be watched.
            at: Moment of the first check.
        """
        silence_watch = self._of_the_loop()
        if silence_watch is None or not all(tenants.values()) or not silence_watch.keep(tenants, at, self._over):
            self.by(at)

    def put(self, tenant: str, beats: Sequence[protocol.Beat]) -> bool:
        """Also check whenever this tenant may be silent. Return False where the loop cannot watch it: the caller
        schedules a check."""
        silence_watch = self._of_the_loop()
        return silence_watch is not None and bool(beats) and silence_watch.put(tenant, beats, self._over)

    def drop(self, tenant: str) -> None:
        """Stop checking a tenant, because it holds nothing."""
        if self._silence_watch is not None:
            self._silence_watch.drop(tenant)

    def watches(self, tenant: str) -> bool:
        """Return whether a check runs whenever this tenant may be silent."""
        return self._silence_watch is not None and self._silence_watch.watches(tenant)

    def close(self) -> None:
        """Cancel all checks."""
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
        self._cancel()  # this check covers all of them
        self._look(self._clock() - due >= STALL_NS)
