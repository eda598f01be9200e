"""Slices of the placement loop's work, with turns of other tasks in between, and the durations of its passes."""

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
"""Seconds of deciding, or of explaining, after which other tasks get turns."""
_TURNS = 10
"""Turns that they get then. A SharePod needs some twenty of them until its Pod exists (watches, requests, their
answers). One turn after each 10 ms of deciding would add a quarter of a second while thousands are tried."""

_AT_ONCE = 64
"""Waiting requests that are handled between two readings of the clock: tens of us of work, or 200."""
RESTS = 3.0
"""Rest after a slice of work that no new request waits for, in multiples of its duration. So retries of refused
requests, and explanations, take a quarter of a processor, however many wait."""


def is_over(began: float) -> bool:
    """Return whether a slice that began then, monotonic seconds, has lasted long enough."""
    return time.monotonic() - began > SLICE_S


async def let_others_go_on(woken: asyncio.Event | None = None) -> None:
    """Yield to other tasks, for one turn only if `woken` is set by then."""
    for _ in range(_TURNS):
        await asyncio.sleep(0)
        if woken is not None and woken.is_set():
            return


async def turns_of_others(began: float, woken: asyncio.Event | None = None) -> float:
    """Yield to other tasks if a slice that began then has lasted long enough; return the start of the present slice.
    `woken`: yield one turn only if this is set by then."""
    if is_over(began):
        await let_others_go_on(woken)
        return time.monotonic()
    return began


async def in_slices(items: Iterable[Item], woken: asyncio.Event) -> AsyncIterator[Item]:
    """Yield the present items, however many, with turns of other tasks in between, one turn at a time once `woken`. The
    items may have changed when they are yielded."""
    began = time.monotonic()
    for number, item in enumerate(list(items), start=1):
        yield item
        if not number % _AT_ONCE:
            began = await turns_of_others(began, woken)


async def rest(began: float, woken: asyncio.Event, times: float, *, arrived: asyncio.Event) -> None:
    """Yield the processor after a slice that began then, for `times` its duration, or until `woken`. If `woken` is
    already set, other tasks still get their turns, unless a new request has `arrived`."""
    lasted = time.monotonic() - began
    await let_others_go_on(arrived)
    with suppress(TimeoutError):
        async with asyncio.timeout(times * lasted):
            await woken.wait()


@dataclass(slots=True)
class Cycle:
    """One pass through the queue: its number, and the durations of its phases (wall time, including turns of other
    tasks)."""

    number: int
    began: float
    phases_ms: dict[str, float]

    def end_of(self, phase: str) -> None:
        """Note that a phase has ended now."""
        now = time.monotonic()
        self.phases_ms[phase] = round((now - self.began) * 1e3, 3)
        self.began = now


class Renewal:
    """Renewal of placement's weights, slice by slice. `wanted`: set when the loop has something to decide."""

    def __init__(self, packing: Packing, wanted: asyncio.Event) -> None:
        self._packing = packing
        self._wanted = wanted
        self._slices: Iterator[None] | None = None

    async def go_on(self) -> None:
        """Renew the weights, if demand has changed.

        Yields between two slices, and new requests are placed before the rest of them. Only the first weights come
        before any placement: without weights each placement takes ten times as long.
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
