"""Histograms of durations, in Prometheus' form. Pure.

Bounds are fixed, so that histograms of different times and tenants can be added up.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

WAIT_BOUNDS_S = (0.001, 0.003, 0.01, 0.02, 0.04, 0.1, 0.3, 1.0, 3.0, 10.0)
"""Bounds for the time that a tenant waits for the token, in seconds. Each bound is one series per tenant. Quanta take
10 to 100 ms, and the target latency is 0.3 s."""

HAND_OFF_BOUNDS_S = (0.00002, 0.00005, 0.0001, 0.00015, 0.0002, 0.0003, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.1)
"""Bounds for the duration of a hand-off, in seconds: from reading the frame that returns the token until the next grant
is sent."""


class Histogram:
    """Durations counted by size.

    Args:
        bounds_s: Upper bounds of the buckets in seconds, ascending; one more bucket counts durations beyond the last.
    """

    def __init__(self, bounds_s: Sequence[float]) -> None:
        self.bounds_s = tuple(bounds_s)
        self.counts = [0] * (len(self.bounds_s) + 1)
        """Count per bucket, not cumulative; the last one counts durations beyond every bound."""
        self.sum_ns = 0
        self._bounds_ns = [round(bound * 1e9) for bound in self.bounds_s]

    def add(self, duration_ns: int) -> None:
        """Count one duration."""
        self.counts[bisect_left(self._bounds_ns, duration_ns)] += 1
        self.sum_ns += duration_ns

    def buckets(self) -> list[tuple[str, float]]:
        """Return the buckets in Prometheus' form: upper bound as text, cumulative count."""
        total, buckets = 0, []
        for bound, amount in zip((*map(repr, self.bounds_s), "+Inf"), self.counts, strict=True):
            total += amount
            buckets.append((bound, float(total)))
        return buckets
