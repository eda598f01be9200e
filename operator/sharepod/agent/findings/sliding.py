"""Sliding windows: the values of the last seconds, and a counter's growth over them. Pure: callers pass the time, in
seconds."""

from __future__ import annotations

from collections import deque
from typing import Generic, TypeVar

Value = TypeVar("Value")


class SlidingWindow(Generic[Value]):
    """Values of the last `seconds`, and the newest value before them."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._marks: deque[tuple[float, Value]] = deque()

    def add(self, now: float, value: Value) -> None:
        """Record the value at the time `now`."""
        self._marks.append((now, value))
        while len(self._marks) > 2 and now - self._marks[1][0] >= self._seconds:
            self._marks.popleft()

    @property
    def span(self) -> float:
        """Seconds between the oldest and the newest value: at least `seconds`, or less at the start."""
        return self._marks[-1][0] - self._marks[0][0] if self._marks else 0.0


class SlidingRate(SlidingWindow[float]):
    """Growth of a monotonic counter over the last `seconds`."""

    @property
    def growth(self) -> float:
        """Growth of the counter over `span`."""
        return self._marks[-1][1] - self._marks[0][1] if self._marks else 0.0

    @property
    def rate(self) -> float:
        """Growth per second; 0 before there are two values."""
        return self.growth / self.span if self.span > 0 else 0.0
