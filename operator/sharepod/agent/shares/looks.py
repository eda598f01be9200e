"""Schedule of checks whether the processes of tenants that hold a GPU still write heartbeats.

The agent's event loop checks a tenant inside its wait (`on_time.SilenceWatch`), from the tenant's grant until it has
drained. Python code runs only when the tenant may be silent. A timer checks instead on any other loop, and for
processes without heartbeats.

Guarantees:
- A check runs when it is due.
- A check that runs late is marked as late, so that a stall of the agent is not taken for a silent tenant.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from sharepod import protocol

STALL_NS = 20_000_000
"""Nanoseconds by which a timer must be late for the agent to count as stalled: 20 ms. A busy machine delays a program
at nice -10 by less. The processes may have stalled too, so a late check decides nothing."""


class Watch(Protocol):
    """The event loop's silence watch, as this module uses it (see `on_time.SilenceWatch`)."""

    @property
    def keeps(self) -> bool:
        """True if any tenant is watched."""

    def keep(self, tenants: Mapping[str, Sequence[protocol.Beat]], due_ns: int, over: Callable[[int], None]) -> bool:
        """Watch exactly these tenants from `due_ns` on; `over` is called when one may be silent. Return False if
        impossible."""

    def put(self, tenant: str, beats: Sequence[protocol.Beat], over: Callable[[int], None]) -> bool:
        """Watch one more tenant. Return False if the watch cannot hold it."""

    def drop(self, tenant: str) -> None:
        """Stop watching a tenant."""

    def watches(self, tenant: str) -> bool:
        """Return whether a tenant is watched."""

    def end(self) -> None:
        """Stop watching all tenants."""


class Looks:
    """Scheduled checks of all tenants, on the running loop.

    Args:
        clock: CLOCK_MONOTONIC in nanoseconds.
        look: Called for each check of all tenants. Its argument is True if the check is late.
    """

    def __init__(self, clock: Callable[[], int], look: Callable[[bool], None]) -> None:
        self._clock = clock
        self._look = look
        self._timer: asyncio.TimerHandle | None = None
        self._at = 0
        """Moment at which `_timer` fires."""
        self._silence_watch: Watch | None = None
        """The loop's silence watch. None before its first use, and on a loop without one."""

    @property
    def pending(self) -> bool:
        """True if a check is scheduled."""
        return self._timer is not None or (self._silence_watch is not None and self._silence_watch.keeps)

    def by(self, at: int) -> None:
        """Check all tenants at `at` or earlier."""
        if self._timer is not None:
            if self._at <= at:
                return
            self._timer.cancel()
        self._at = at
        loop = asyncio.get_running_loop()
        self._timer = loop.call_at(loop.time() + max(0, at - self._clock()) / 1e9, self._due)

    def watch(self, tenants: Mapping[str, Sequence[protocol.Beat]], at: int) -> None:
        """Check at `at`, and then whenever a tenant may be silent. If the loop cannot watch, check only once, at `at`
        or earlier.

        Args:
            tenants: Addresses of the processes' heartbeats, by tenant id. The tenant is not silent while any of them
            writes heartbeats. Empty: the tenant cannot be watched.
            at: Moment of the first check.
        """
        silence_watch = self._of_the_loop()
        if silence_watch is None or not all(tenants.values()) or not silence_watch.keep(tenants, at, self._over):
            self.by(at)

    def put(self, tenant: str, beats: Sequence[protocol.Beat]) -> bool:
        """Also check whenever this tenant may be silent. Return False if the loop cannot watch it; the caller must then
        schedule a check by `by`."""
        silence_watch = self._of_the_loop()
        return silence_watch is not None and bool(beats) and silence_watch.put(tenant, beats, self._over)

    def drop(self, tenant: str) -> None:
        """Stop checking a tenant, because it holds nothing."""
        if self._silence_watch is not None:
            self._silence_watch.drop(tenant)

    def watches(self, tenant: str) -> bool:
        """Return True if a check runs whenever this tenant may be silent."""
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
        self._cancel()  # `look` checks all tenants, so no other check is needed now
        self._look(self._clock() - due >= STALL_NS)
