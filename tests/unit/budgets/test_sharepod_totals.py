"""Totals of a SharePod over its shares: each share counts once, however often its reports are read, and writes
are rare."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sharepod.api.gpunode import TenantStatus
from sharepod.api.sharepod import SharePodConsumption
from sharepod.budgets.sharepod_totals import totals_to_write

FIRST, SECOND = "2026-01-01T00:00:00.000Z", "2026-01-02T00:00:00.000Z"


def seen(since: str | None = FIRST, held: int = 0, reserved: int = 0, **fields: Any) -> TenantStatus:
    return TenantStatus(id="t", counted_since=since, held_seconds=held, reserved_seconds=reserved, **fields)


def final(was: SharePodConsumption | None, report: TenantStatus) -> SharePodConsumption | None:
    return totals_to_write(was, report.model_copy(update={"drained": True}), drained=True)


def test_the_final_count_is_written_once_and_is_that_of_all_shares() -> None:
    first = final(None, seen(held=40, reserved=100, borrowed_seconds=10, memory_mebibyte_seconds=7))
    assert first is not None
    assert final(first, seen(held=40, reserved=100, borrowed_seconds=10, memory_mebibyte_seconds=7)) is None
    second = final(first, seen(SECOND, held=5, reserved=50, borrowed_seconds=1, memory_mebibyte_seconds=2))
    assert second is not None
    assert second.dump() == {
        "since": FIRST,
        "countedSince": SECOND,
        "heldSeconds": 45,
        "borrowedSeconds": 11,
        "reservedSeconds": 150,
        "memoryMebibyteSeconds": 9,
        "former": {"heldSeconds": 40, "borrowedSeconds": 10, "reservedSeconds": 100, "memoryMebibyteSeconds": 7},
    }
    assert final(second, seen(SECOND, held=5, reserved=50)) is None


@pytest.mark.parametrize(
    ("written", "reported", "due"),
    [
        (0, 599, False),
        (0, 600, True),
        (4800, 5399, False),
        (4800, 5400, True),
        (80_000, 89_999, False),
        (80_000, 90_000, True),
    ],
)
def test_a_running_sharepod_is_written_for_an_eighth_more_and_ten_gpu_minutes(
    written: int, reported: int, due: bool
) -> None:
    was = SharePodConsumption(since=FIRST, counted_since=FIRST, held_seconds=written) if written else None
    assert (totals_to_write(was, seen(held=reported), drained=False) is not None) is due


@pytest.mark.parametrize(
    ("written", "reported", "due"),
    [
        (0, 24_575_999, False),
        (0, 24_576_000, True),
        (400_000_000, 449_999_999, False),
        (400_000_000, 450_000_000, True),
    ],
)
def test_one_that_keeps_memory_alone_is_written_for_an_eighth_more(written: int, reported: int, due: bool) -> None:
    """The request is 0 and no time is held: a model that waits for queries uses only memory."""
    was = SharePodConsumption(since=FIRST, counted_since=FIRST, memory_mebibyte_seconds=written) if written else None
    report = seen(memory_mebibyte_seconds=reported)
    assert (totals_to_write(was, report, drained=False) is not None) is due


def test_the_last_report_counts_where_the_agent_confirms_nothing() -> None:
    first = totals_to_write(None, seen(held=5), drained=False, last=True)
    assert first is not None
    assert first.held_seconds == 5
    assert totals_to_write(first, seen(held=5), drained=False, last=True) is None


def test_a_report_of_an_earlier_share_or_without_a_count_is_not_taken() -> None:
    was = SharePodConsumption(since=FIRST, counted_since=SECOND, held_seconds=5000)
    stale = seen(held=50_000, drained=True)
    assert totals_to_write(was, stale, drained=False) is None
    assert totals_to_write(was, seen(None, held=50_000), drained=False) is None
    assert totals_to_write(was, None, drained=True) is None


@pytest.mark.promise("budgets-sharepod-totals")
@given(st.lists(st.lists(st.integers(0, 4000), min_size=1, max_size=6), max_size=5), st.randoms())
def test_totals_are_the_sum_over_shares_whatever_was_read_of_them(shares: list[list[int]], chance: Random) -> None:
    """The held time of each share grows. Its reports are lost, or read twice or late, but its last report is read."""
    was: SharePodConsumption | None = None
    wanted = 0
    for number, steps in enumerate(shares):
        since, held, reports = f"2026-01-{number + 1:02}T00:00:00.000Z", 0, []
        for step in steps:
            held += step
            reports.append(seen(since, held=held))
        for report in reports:
            if chance.random() < 0.5:
                was = totals_to_write(was, chance.choice(reports[: reports.index(report) + 1]), drained=False) or was
        was = final(was, reports[-1]) or was
        wanted += held
        assert (was.held_seconds if was is not None else 0) == wanted
