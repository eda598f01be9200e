"""Limit on the processor time that the agent spends on reading one pod's files in /proc.

A pod controls the length of these files by its mounts, mappings and processes.

Guarantees:
- In t seconds, reading one pod takes at most `_BURST_S + per_s * t` seconds of processor time, plus one reading.
- If a pod has used up its time, only readings of that pod are delayed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

LOOP_PER_S = 0.001
"""Processor seconds per second that a pod gets for readings on the event loop, which grants no GPU time while it
reads."""
THREAD_PER_S = 0.01
"""Processor seconds per second that a pod gets for readings in a thread. An ordinary process's mappings take 3 ms every
10 s."""
_BURST_S = 0.05
"""Processor seconds that a pod may use at once: enough for the first readings of 50 processes."""
_PODS_MAX = 4096
"""Most pods that are remembered: more than a node runs."""


class ReadingTime:
    """Remaining processor time of each pod, for readings in one thread at a time.

    Args:
        per_s: Seconds of processor time that a pod gets in each second.
        clock: Monotonic clock in seconds.
        spent: Returns the processor time of the calling thread in seconds.
    """

    def __init__(
        self,
        per_s: float,
        *,
        clock: Callable[[], float] = time.monotonic,
        spent: Callable[[], float] = time.thread_time,
    ) -> None:
        self._per_s = per_s
        self._clock = clock
        self._spent = spent
        self._paid_at: dict[str, float] = {}
        """For each pod: time at which its allowance has paid for all its readings. In the future if it has used more
        than it got."""

    def left(self, pod: str) -> bool:
        """Return whether a pod's allowance permits a reading now."""
        return self._paid_at.get(pod, 0.0) - self._clock() <= _BURST_S / self._per_s

    @contextmanager
    def charged(self, pod: str) -> Iterator[None]:
        """Charge a pod for the processor time of the block."""
        begun = self._spent()
        try:
            yield
        finally:
            now = self._clock()
            if len(self._paid_at) >= _PODS_MAX:
                self._paid_at = {each: at for each, at in self._paid_at.items() if at > now}
            self._paid_at[pod] = max(now, self._paid_at.get(pod, now)) + (self._spent() - begun) / self._per_s
