"""A slice of `make soak-hook`: random life under the hook."""

from __future__ import annotations

from pathlib import Path

import pytest
from harness.soak import slice_of
from hook.life.randomlife import NOTHING_OF, soak


@pytest.mark.promise("program-gate")
@pytest.mark.soak
def test_in_random_life_no_launch_passes_without_a_token_and_nothing_hangs(double: Path, hook_file: Path) -> None:
    assert double.is_dir()
    counts = soak(slice_of("hook"), hook_file)
    assert {name: counts[name] for name in NOTHING_OF} == dict.fromkeys(NOTHING_OF, 0), counts
    happened = ("launches", "captures", "grants", "bars", "stops", "crossings", "holds")
    assert min(counts[name] for name in happened) > 0, counts
