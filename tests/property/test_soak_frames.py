"""A short run of `make soak-frames`."""

from __future__ import annotations

import pytest
from harness.soak import slice_of
from property.soak_frames import WANTED, soak


@pytest.mark.promise("security-input", "security-bad-frames", "security-own-credits")
@pytest.mark.soak
def test_any_input_of_a_tenant_is_refused_or_answered_and_leaves_nothing_behind() -> None:
    counts = soak(slice_of("frames"))
    assert {name: counts[name] for name in WANTED} == WANTED, counts
    assert counts["answers"] > 0
    assert counts["refused"] > 0
