"""Looks at the signs of life of tenants that hold: when the next one is due, and who takes it.

While nothing changes the event loop looks itself, in its wait (`on_time.Vigil`), and Python is woken where a tenant is
silent. On another loop, or where a process gives no signs, each look is a timer.

Guarantees:
- A look is taken when it is due, or where somebody has begun or ceased to hold or to wait, when the one before was due.
- A look that comes late says so.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Protocol

from sharepod import protocol

STALL_NS = 20_000_000
"""Nanoseconds by which a timer is late when the agent counts as stalled, and with it perhaps those that it looks at: 20
ms, beyond what a busy machine does to a program at nice -10."""


class Watch(Protocol):
    """The event loop's watch over tenants, see `on_time.Vigil`."""

    @property
    def due_ns(self) -> int | None:
        """Moment of the next look; None: nobody is watched any more."""

    def keep(self, tenants: Sequence[Sequence[protocol.Beat]], due_ns: int, over: Callable[[int], None]) -> bool:
        """Watch these from now on; return False where that is not possible."""

    def end(self) -> None:
        """Watch nobody any more."""


class Looks:
    """Next look, on the running loop.

    Args:
        clock: Nanoseconds of CLOCK_MONOTONIC.
        look: Called for each look, with whether it is late.
    """

    def __init__(self, clock: Callable[[], int], look: Callable[[bool], None]) -> None:
        self._clock = clock
        self._look = look
        self._timer: asyncio.TimerHandle | None = None
        self._at = 0
        """Moment for which the timer is set."""
        self._vigil: Watch | None = None
        """Takes the next look, in place of the timer."""

    @property
    def pending(self) -> bool:
        """True if a look is due at some moment."""
        return self._timer is not None or self._vigil is not None

    def by(self, at: int) -> None:
        """Look at that moment at the latest."""
        if self._timer is not None:
            if self._at <= at:
                return
            self._timer.cancel()
        self._at = at
        loop = asyncio.get_running_loop()
        self._timer = loop.call_at(loop.time() + max(0, at - self._clock()) / 1e9, self._due)

    def watch(self, tenants: Sequence[Sequence[protocol.Beat]], at: int) -> None:
        """Look at that moment, and from then on whenever one of the tenants may be silent, until `changed`.

        Args:
            tenants: Of each tenant the processes of which one has to give signs of life; none: it cannot be
                watched.
            at: Moment of the first look.
        """
        vigil: Watch | None = getattr(asyncio.get_running_loop(), "vigil", None)
        if vigil is not None and all(tenants) and vigil.keep(tenants, at, self._over):
            self._vigil = vigil
        else:
            self.by(at)

    def changed(self) -> None:
        """Look anew at who holds and who waits when the next look is due."""
        vigil, self._vigil = self._vigil, None
        if vigil is not None and vigil.due_ns is not None:  # else `_over` is about to be called
            self.by(vigil.due_ns)
            vigil.end()

    def close(self) -> None:
        """Take no more looks."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._end_vigil()

    def _end_vigil(self) -> None:
        if self._vigil is not None:
            self._vigil.end()
            self._vigil = None

    def _due(self) -> None:
        self._timer = None
        self._end_vigil()
        self._look(self._clock() - self._at >= STALL_NS)

    def _over(self, due: int) -> None:
        self._vigil = None
        if self._timer is None:
            self._look(self._clock() - due >= STALL_NS)
