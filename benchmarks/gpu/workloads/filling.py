"""How each workload of table (c) takes device memory: piece by piece until it is refused."""

from __future__ import annotations

from collections.abc import Callable

from conversation import Answer


def fill(take: Callable[[int], object], *, chunk: int, most: int) -> Answer:
    """Calls `take(chunk)` until it raises, or until `most` bytes are taken: how many were, and what stopped it."""
    taken, stopped = 0, "nothing stopped it"
    while taken < most:
        try:
            take(chunk)
        except Exception as error:
            stopped = f"{type(error).__name__}: {error}".splitlines()[0][:200]
            break
        taken += chunk
    return {"taken": taken, "stopped": stopped}
