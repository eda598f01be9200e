"""Slices of the placement loop's work, the turns that other tasks get between two of them, and what its passes took."""

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
"""Turns that they get then. From apply to Pod takes some twenty (watches, requests, their answers): with one turn after
10 ms of deciding it took a quarter of a second while thousands were tried."""

_AT_ONCE = 64
"""Those that wait that are looked at between two looks at the time: some tens of us of work, or 200."""
RESTS = 3.0
"""Rest after a slice of what nobody new waits for, in times of how long the slice lasted: trying again those that were
refused, and explaining, take a quarter of a processor, however many wait."""


def is_over(began: float) -> bool:
    """Return whether a slice that began then, monotonic seconds, has lasted long enough."""
    return time.monotonic() - began > SLICE_S


async def let_others_go_on(woken: asyncio.Event | None = None) -> None:
    """Give other tasks their turns, or one where this is set by then."""
    for _ in range(_TURNS):
        await asyncio.sleep(0)
        if woken is not None and woken.is_set():
            return


async def turns_of_others(began: float, woken: asyncio.Event | None = None) -> float:
    """Give other tasks their turns if a slice that began then has lasted long enough; return when the present one
    began. `woken`: they get one turn where this is set by then."""
    if is_over(began):
        await let_others_go_on(woken)
        return time.monotonic()
    return began


async def in_slices(items: Iterable[Item], woken: asyncio.Event) -> AsyncIterator[Item]:
    """Yield these as they are now, however many, with turns of others meanwhile, one at a time once `woken`: they may
    have changed by then."""
    began = time.monotonic()
    for number, item in enumerate(list(items), start=1):
        yield item
        if not number % _AT_ONCE:
            began = await turns_of_others(began, woken)


async def rest(began: float, woken: asyncio.Event, times: float, *, arrived: asyncio.Event) -> None:
    """Leave the processor to others after a slice that began then, for so many times as long as it lasted, or until
    `woken`. They have their turns also where it is set already, but for one that has `arrived`."""
    lasted = time.monotonic() - began
    await let_others_go_on(arrived)
    with suppress(TimeoutError):
        async with asyncio.timeout(times * lasted):
            await woken.wait()


@dataclass(slots=True)
class Cycle:
    """One pass through the queue: its number, and how long its phases took (wall time, with the turns of others)."""

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
        """Renew the weights, if demand has moved.

        Others have a turn between two slices, and one that comes to be placed is placed before the rest of them; not
        before the first weights are there, without which each takes ten times as long.
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
