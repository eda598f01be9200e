"""Budgets use the API server's clock if this machine's clock is wrong."""

from __future__ import annotations

import pytest
from sharepod.controller.budgets.time_of_day import TimeOfDay
from structlog.testing import capture_logs

_YEAR_S = 365 * 86_400


@pytest.mark.promise("budgets-clock-off")
@pytest.mark.parametrize(
    ("behind_s", "expected_s"), [(0.0, 1000), (-59.0, 1000), (-_YEAR_S, 1000 - _YEAR_S), (90.0, 1090)]
)
def test_a_wrong_clock_is_ignored_and_reported_once(behind_s: float, expected_s: int) -> None:
    now_ms = TimeOfDay(lambda: behind_s, clock=lambda: 0.0, wall_ns=lambda: 1000 * 10**9)
    with capture_logs() as lines:
        assert [now_ms(), now_ms()] == [expected_s * 1000] * 2
    assert len(lines) == (expected_s != 1000)
