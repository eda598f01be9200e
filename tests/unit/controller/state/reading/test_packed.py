"""Packed JSON of cached objects: equal to its input, and no larger than its text."""

from __future__ import annotations

from pathlib import Path

import pytest
from sharepod.controller.state.reading.compact import packed, unpacked


@pytest.mark.parametrize("value", [{}, {"a": [1, -0.5, None, True, "x\u2028"]}, {"half": "\ud800", "long": 1 << 70}])
def test_what_is_packed_comes_back(value: dict[str, object]) -> None:
    assert unpacked(packed(value)) == value


def _resident() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmRSS:"))


@pytest.mark.promise("operator-large-sharepods")
def test_ten_thousand_packed_statuses_take_little_more_than_their_text() -> None:
    conditions = [{"type": f"Type{number}", "message": "x" * 100} for number in range(8)]
    before = _resident()
    kept = [packed({"podUID": f"uid-{number}", "conditions": conditions}) for number in range(10_000)]
    assert _resident() - before < 1.3 * sum(map(len, kept)) + (4 << 20)
