"""Allocates memory piece by piece until the driver refuses, for table (c)."""

from __future__ import annotations

from collections.abc import Callable

from conversation import Answer


def fill(take: Callable[[int], object], *, chunk: int, most: int) -> Answer:
    """Call `take(chunk)` until it raises an exception or `most` bytes are allocated. Return the number of allocated
    bytes, and the error."""
    taken, stopped = 0, "nothing stopped it"
    while taken < most:
        try:
            take(chunk)
        except Exception as error:
            stopped = f"{type(error).__name__}: {error}".splitlines()[0][:200]
            break
        taken += chunk
    return {"taken": taken, "stopped": stopped}
