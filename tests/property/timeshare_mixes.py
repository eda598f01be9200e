"""Mixes of tenants for the property tests of time shares: their requests, and the number of examples."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from property.timeshare_simulation import S

WARM_UP = 20 * S
"""Simulated time after which shares are measured."""

SOME = settings(
    max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much]
)
"""Settings of properties whose simulations are short."""

FEW = settings(SOME, max_examples=12)
"""Settings of properties whose simulations are long."""


def parts(whole: int, most: int) -> st.SearchStrategy[list[int]]:
    """Return a strategy for the requests of 2 or more tenants. They add up to `whole` thousandths, and none is
    below 20."""
    cuts = st.lists(st.integers(1, whole // 20 - 1), min_size=1, max_size=most - 1, unique=True)

    def split(points: list[int]) -> list[int]:
        edges = [0, *sorted(points), whole // 20]
        return [20 * (b - a) for a, b in pairwise(edges)]

    return cuts.map(split)
