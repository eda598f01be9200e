"""A short run of `make soak-placement`."""

from __future__ import annotations

import pytest
from harness.soak import slice_of
from property.soak_placement import WANTED, soak


@pytest.mark.promise("placement-no-lost-wake-up", "placement-no-starvation")
@pytest.mark.soak
def test_placement_keeps_its_promises_over_any_order_of_events() -> None:
    counts = soak(slice_of("placement"))
    assert {name: counts[name] for name in WANTED} == WANTED, counts
