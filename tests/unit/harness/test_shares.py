"""Shares that count as right, and windows that count although the host takes processor time."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from harness import shares
from harness.shares import Shares, measured, right


@pytest.mark.parametrize(
    ("got", "stolen", "is_right"),
    [
        (40.0, 0.0, True),
        (38.1, 0.0, True),
        (41.9, 0.0, True),
        (37.9, 0.0, False),
        (42.1, 0.0, False),
        (32.1, 6.0, True),
        (31.9, 6.0, False),
        (47.9, 6.0, True),
        (48.1, 6.0, False),
        (42.1, 1.9, False),
    ],
)
def test_what_the_host_took_explains_a_share_and_a_larger_one_only_where_it_took_much(
    got: float, stolen: float, is_right: bool
) -> None:
    assert right(40.0, got, stolen) is is_right


@pytest.mark.parametrize(
    ("stolen", "counts", "measured_again"),
    [([0.5], 0.5, []), ([9.0, 1.0], 1.0, [9.0]), ([9.0, 4.0, 30.0], 4.0, [9.0, 4.0])],
)
def test_windows_are_measured_until_one_is_quiet_and_the_quietest_counts(
    monkeypatch: pytest.MonkeyPatch, stolen: list[float], counts: float, measured_again: list[float]
) -> None:
    parts: Iterator[float] = iter(stolen)

    class Host:
        def part(self) -> float:
            return next(parts) / 100

    monkeypatch.setattr(shares, "Stolen", Host)
    discarded: list[Shares] = []
    window = measured(lambda: {("a", "GPU-0"): 0}, lambda _: None, discarded.append)
    assert window.stolen == pytest.approx(counts)
    assert [each.stolen for each in discarded] == pytest.approx(measured_again)
