"""Values of holes, the free time of single GPUs: they depend on the requests that will arrive to fill the holes."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from sharepod.api.units import Bytes
from sharepod.placement.binpack.demand import DemandClass, MemoryShare
from sharepod.placement.binpack.hole_prices import Floats, Ints, ShadowPrices


def hole_values(prices: ShadowPrices, shares: Mapping[DemandClass, float], free: Ints) -> Floats:
    """Run all slices; return the values of holes."""
    slices = prices.hole_values(shares, free)
    while True:
        try:
            next(slices)
        except StopIteration as end:
            value: Floats = end.value
            return value


def _demand(**shares: float) -> dict[DemandClass, float]:
    """Return a demand from arguments such as `m810=0.3`: thousandths of a request, and its share of the arrivals."""
    return {DemandClass(1, int(name[1:]), MemoryShare.IN_PROPORTION, 1000): share for name, share in shares.items()}


def test_slivers_are_worth_something_only_where_enough_comes_to_fill_them() -> None:
    free = np.full(1000, 1000)
    seldom = hole_values(ShadowPrices(), _demand(m160=0.01, m810=0.5), free)
    often = hole_values(ShadowPrices(), _demand(m160=0.5, m810=0.5), free)
    assert seldom[190] < 20 < 100 < often[190]


def test_a_hole_that_common_requests_fill_is_worth_more_than_one_that_they_leave_a_part_of() -> None:
    value = hole_values(ShadowPrices(), _demand(m300=0.5, m700=0.5), np.full(100, 1000))
    assert value[1000] > value[950] + 30
    assert value[700] > value[650] + 30


def test_memory_in_which_no_common_request_fits_makes_a_hole_worth_nothing() -> None:
    common, rare = DemandClass(1, 300, Bytes(4 << 30), 1000), DemandClass(1, 100, Bytes(1 << 30), 1000)
    prices, shares = ShadowPrices(), {common: 0.97, rare: 0.01}
    hole_values(prices, shares, np.full(100, 1000))
    value = prices.memory_values(shares, 16 << 30)
    assert value[249] == 0
    assert value[250] > 100
    assert value[1000] == 4 * value[250]


@settings(max_examples=60, deadline=None)
@given(
    st.dictionaries(st.integers(1, 1000), st.floats(0.001, 1.0), max_size=90),
    st.lists(st.integers(1, 1000), max_size=50),
)
def test_more_free_time_is_never_worth_less(shares: dict[int, float], free: list[int]) -> None:
    demand = {DemandClass(1, milli, MemoryShare.IN_PROPORTION, 1000): share for milli, share in shares.items()}
    prices = ShadowPrices()
    for _ in range(2):
        value = hole_values(prices, demand, np.array(free, dtype=np.int64))
        assert value.shape == (1001,)
        assert value[0] == 0
        assert np.isfinite(value).all()
        assert (np.diff(value) >= -1e-9).all()
