"""Time slices: divides the placement loop's work, so that other tasks of the event loop run in between. Also measures
the phases of a pass."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeVar

from sharepod.placement.binpack.packing import Packing

Item = TypeVar("Item")

SLICE_S = 0.002
"""Seconds of decisions or explanations after which other tasks of the event loop run."""
_TURNS = 10
"""Rounds of the event loop for other tasks after a slice. A new SharePod needs about twenty rounds until its Pod exists
(watches, calls, answers). With only one round per 10 ms of decisions, that would take a quarter of a second longer
while thousands of requests are tried."""

_AT_ONCE = 64
"""Number of waiting requests that are handled between two checks of the time: tens of us of work, at most 200 us."""
RESTS = 3.0
"""Pause after a slice of retries or explanations, as a multiple of the slice's duration. With 3, this work takes at
most a quarter of a processor, however many requests wait."""


def is_over(began: float) -> bool:
    """Return True if a slice that began at `began` (monotonic seconds) has lasted `SLICE_S`."""
    return time.monotonic() - began > SLICE_S


async def let_others_go_on(woken: asyncio.Event | None = None) -> None:
    """Yield to other tasks for `_TURNS` rounds of the event loop. Return after the first round in which `woken` is
    set."""
    for _ in range(_TURNS):
        await asyncio.sleep(0)
        if woken is not None and woken.is_set():
            return


async def turns_of_others(began: float, woken: asyncio.Event | None = None) -> float:
    """If a slice that began at `began` has lasted `SLICE_S`, yield as `let_others_go_on` does. Return the start of the
    slice that now runs."""
    if is_over(began):
        await let_others_go_on(woken)
        return time.monotonic()
    return began


async def in_slices(items: Iterable[Item], woken: asyncio.Event) -> AsyncIterator[Item]:
    """Yield each of the items, which are copied at the start, and let other tasks run in between. Once `woken` is set,
    they run for one round only. An item may have changed before it is yielded."""
    began = time.monotonic()
    for number, item in enumerate(list(items), start=1):
        yield item
        if not number % _AT_ONCE:
            began = await turns_of_others(began, woken)


async def rest(began: float, woken: asyncio.Event, times: float, *, arrived: asyncio.Event) -> None:
    """Pause after a slice that began at `began`: for `times` its duration, or until `woken` is set. Other tasks run at
    least for `_TURNS` rounds, even if `woken` is set; the event `arrived` shortens these to one."""
    lasted = time.monotonic() - began
    await let_others_go_on(arrived)
    with suppress(TimeoutError):
        async with asyncio.timeout(times * lasted):
            await woken.wait()


@dataclass(slots=True)
class Cycle:
    """One pass through the queue: its number, and the duration of each phase in milliseconds (wall time, with other
    tasks' work)."""

    number: int
    began: float
    phases_ms: dict[str, float]

    def end_of(self, phase: str) -> None:
        """Record that a phase has ended now."""
        now = time.monotonic()
        self.phases_ms[phase] = round((now - self.began) * 1e3, 3)
        self.began = now


class Renewal:
    """Renewal of the weights (shadow prices) by which placement scores places, in slices. `wanted`: event that is set
    when the loop has something to decide.
    """

    def __init__(self, packing: Packing, wanted: asyncio.Event) -> None:
        self._packing = packing
        self._wanted = wanted
        self._slices: Iterator[None] | None = None

    async def go_on(self) -> None:
        """Renew the weights, if demand has changed.

        Yields to other tasks between slices, and returns early for new requests; the next call continues. Only the
        first renewal is completed before any placement, because a placement without weights takes ten times as long.
        """
        if self._slices is None and self._packing.due:
            self._slices = self._packing.renewal()
        while self._slices is not None:
            await asyncio.sleep(0)
            try:
                next(self._slices)
            except StopIteration:
                self._slices = None
            if self._wanted.is_set() and self._packing.ready:
                return
