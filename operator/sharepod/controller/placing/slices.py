"""Slices of the placement loop's work, and the turns that other tasks get between two of them."""

from __future__ import annotations

import asyncio
import time

SLICE_S = 0.002
"""Seconds of deciding, or of explaining, after which other tasks get turns."""
_TURNS = 10
"""Turns that they get then. From apply to Pod takes some twenty (watches, requests, their answers): with one turn after
10 ms of deciding it took a quarter of a second while thousands were tried."""


def is_over(began: float) -> bool:
    """Return whether a slice that began then, monotonic seconds, has lasted long enough."""
    return time.monotonic() - began > SLICE_S


async def let_others_go_on() -> None:
    """Give other tasks their turns."""
    for _ in range(_TURNS):
        await asyncio.sleep(0)
