"""The account of a namespace: in any order and repetition of readings, no counter is lost or counted twice."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import islice
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sharepod.api.consumption import Consumption
from sharepod.api.statement import MAX_MONTHS, MAX_SERIES
from sharepod.budgets.amounts import NOTHING, Amounts, moment_ms, month_after, month_begin_ms, spread
from sharepod.budgets.namespace_account import (
    SERIES_OF_A_NODE,
    NamespaceAccount,
    NodeReading,
    amounts_of,
    take_in,
)

HOUR_MS = 3_600_000
BEGIN_MS = moment_ms("2026-01-01T00:00:00.000Z")
COUNTERS = ("held_milliseconds", "borrowed_milliseconds", "reserved_milliseconds", "memory_mebibyte_seconds")
amounts = st.builds(Amounts, *[st.integers(0, 10**9)] * 4)


def timestamp(ms: int) -> str:
    """Return a moment as a timestamp, in milliseconds since a fixed one. The years are 2026 to 2039."""
    month = "2026-01"
    while month_begin_ms(month_after(month)) <= ms:
        month = month_after(month)
    days, rest = divmod(ms - month_begin_ms(month), 86_400_000)
    hours, rest = divmod(rest, HOUR_MS)
    minutes, rest = divmod(rest, 60_000)
    return f"{month}-{days + 1:02}T{hours:02}:{minutes:02}:{rest // 1000:02}.{rest % 1000:03}Z"


@dataclass
class PlayedNode:
    """Counters of one node's agent."""

    name: str
    current: dict[str, Consumption] = field(default_factory=dict)
    """Series that still grow, by model. A series is the counters of one namespace and GPU model on one node."""
    closed: list[Consumption] = field(default_factory=list)


def largest(readings: list[NodeReading]) -> dict[str, Amounts]:
    """Return the expected totals by model: the sum over all series of their largest counters that were read."""
    best: dict[str, tuple[str, Amounts]] = {}
    for reading in readings:
        for entry in reading.entries:
            was = best.get(entry.series, (entry.model, NOTHING))[1]
            best[entry.series] = (entry.model, was + amounts_of(entry).beyond(was))
    totals: dict[str, Amounts] = {}
    for model, amount in best.values():
        totals[model] = totals.get(model, NOTHING) + amount
    return totals


def months_together(account: NamespaceAccount) -> dict[str, Amounts]:
    """Return the sums of an account's months, by model."""
    totals: dict[str, Amounts] = {}
    for models in account.months.values():
        for model, amount in models.items():
            totals[model] = totals.get(model, NOTHING) + amount
    return totals


class PlayedCluster:
    """A few nodes whose counters grow, are closed, and are lost, as Hypothesis chooses."""

    def __init__(self, data: st.DataObject) -> None:
        self._data = data
        self._nodes = [PlayedNode(f"node-{number}") for number in range(data.draw(st.integers(1, 3)))]
        self._now = BEGIN_MS
        self._made = 0

    def statuses(self) -> list[NodeReading]:
        """Return each node's present counters, as one reading per node."""
        at = timestamp(self._now)
        return [NodeReading(node.name, at, (*node.closed, *node.current.values())) for node in self._nodes]

    def go_on(self, taken_in: NamespaceAccount) -> None:
        """Let time pass. Agents drop series that are closed and in `taken_in`."""
        draw = self._data.draw
        self._now += draw(st.integers(1, 40 * 24)) * HOUR_MS // draw(st.sampled_from([1, 100]))
        for node in self._nodes:
            happens = draw(st.sampled_from(["grow", "grow", "grow", "close", "wiped", "forget"]))
            if happens == "close":
                node.closed += [entry.model_copy(update={"closed": True}) for entry in node.current.values()]
                node.current.clear()
            elif happens == "wiped":
                node.current.clear()
                node.closed.clear()
            elif happens == "forget":
                node.closed = [entry for entry in node.closed if not taken_in.has(entry)]
            for model in draw(st.lists(st.sampled_from(["A", "B"]), max_size=2, unique=True)):
                entry = node.current.get(model)
                if entry is None:
                    self._made += 1
                    since = timestamp(self._now - HOUR_MS // 200 + self._made)
                    entry = Consumption(series=f"s-{self._made}", namespace="team", model=model, since=since)
                more = {name: getattr(entry, name) + draw(st.integers(0, 10**7)) for name in COUNTERS}
                node.current[model] = entry.model_copy(update=more)


@pytest.mark.promise("operator-consumption-once")
@settings(max_examples=100)
@given(st.data())
def test_no_counter_is_lost_or_counted_twice_over_repeated_readings_and_operator_deaths(
    data: st.DataObject,
) -> None:
    cluster = PlayedCluster(data)
    written = account = NamespaceAccount()
    read: list[NodeReading] = []
    read_before_write: list[NodeReading] = []
    for _ in range(data.draw(st.integers(1, 12))):
        cluster.go_on(taken_in=written)
        for reading in cluster.statuses():
            account = take_in(account, [reading])
            read.append(reading)
            account = take_in(account, data.draw(st.lists(st.sampled_from(read), max_size=2)))
        happens = data.draw(st.sampled_from(["write", "write", "die", "nothing"]))
        if happens == "write":
            written, read_before_write = account, list(read)
        elif happens == "die":
            read = [*read_before_write, *cluster.statuses()]
            account = take_in(written, cluster.statuses())
        assert account.totals == largest(read)
        if len(account.months) < MAX_MONTHS:
            assert months_together(account) == account.totals


@pytest.mark.promise("operator-consumption-once")
@settings(max_examples=100)
@given(st.data(), st.randoms(use_true_random=False))
def test_totals_do_not_depend_on_the_order_of_reading(data: st.DataObject, random: Random) -> None:
    cluster = PlayedCluster(data)
    readings = []
    for _ in range(4):  # no more series of one node and model than an account keeps
        cluster.go_on(taken_in=NamespaceAccount())
        readings += cluster.statuses()
    for _ in range(3):
        random.shuffle(readings)
        account = NamespaceAccount()
        for reading in readings:
            account = take_in(account, [reading])
        assert account.totals == largest(readings)
        assert months_together(account) == account.totals


@given(amounts, st.integers(0, 4 * 365 * 24), st.integers(0, 4 * 365 * 24))
def test_time_spread_over_months_adds_up(amount: Amounts, begin_h: int, end_h: int) -> None:
    parts = list(spread(amount, timestamp(BEGIN_MS + begin_h * HOUR_MS), timestamp(BEGIN_MS + end_h * HOUR_MS)))
    together = NOTHING
    for _, part in parts:
        together += part
    assert together == amount
    assert len({month for month, _ in parts}) == len(parts)


@pytest.mark.parametrize("begin", ["0000-00-00T00:00:00.000Z", "2026-01-01T00:00:00.000Z", "2026-99-99T99:99:99.999Z"])
@pytest.mark.parametrize("end", ["2027-99-99T99:99:99.999Z", "9999-12-31T23:59:59.999Z", "9999-99-99T99:99:99.999Z"])
def test_times_outside_the_calendar_are_spread_over_few_months_too(begin: str, end: str) -> None:
    parts = list(islice(spread(Amounts(held_ms=4_000), begin, end), 100))
    assert len(parts) <= 25
    assert sum(part.held_ms for _, part in parts) == 4_000
    assert all("01" <= month[5:] <= "12" for month, _ in parts)


def test_time_over_midnight_of_the_last_of_a_month_belongs_to_both() -> None:
    parts = dict(spread(Amounts(held_ms=4_000), "2026-12-31T23:59:57.000Z", "2027-01-01T00:00:01.000Z"))
    assert parts == {"2026-12": Amounts(held_ms=3_000), "2027-01": Amounts(held_ms=1_000)}


@pytest.mark.promise("operator-consumption-bounded")
def test_an_account_is_bounded_and_a_dropped_series_is_not_counted_again() -> None:
    account = NamespaceAccount()
    first = Consumption(
        series="s-0", namespace="team", model="A", since="2026-01-01T00:00:00.000Z", held_milliseconds=5
    )
    readings = [
        NodeReading(
            f"node-{number}",
            timestamp(BEGIN_MS + (number + 1) * 60_000),
            (first.model_copy(update={"series": f"s-{number}"}),),
        )
        for number in range(MAX_SERIES + 1)
    ]
    account = take_in(account, readings)
    assert len(account.series) == MAX_SERIES
    assert "s-0" not in account.series
    again = take_in(account, [NodeReading("node-0", "2026-02-01T00:00:00.000Z", (first,))])
    assert again.totals == account.totals
    grown = first.model_copy(update={"held_milliseconds": 12})
    later = take_in(again, [NodeReading("node-0", "2026-02-01T00:00:01.000Z", (grown,))])
    assert later.totals["A"].held_ms == account.totals["A"].held_ms + 7


def test_a_late_reading_of_a_replaced_series_counts_nothing() -> None:
    first = Consumption(
        series="s-0", namespace="team", model="A", since="2026-01-01T00:00:00.000Z", held_milliseconds=5
    )
    replaced = [
        first.model_copy(update={"series": f"s-{number}", "since": f"2026-01-01T00:00:0{number}.000Z"})
        for number in range(SERIES_OF_A_NODE + 1)
    ]
    readings = [NodeReading("node", f"2026-01-02T00:00:0{number}.000Z", (one,)) for number, one in enumerate(replaced)]
    account = take_in(NamespaceAccount(), readings)
    assert len(account.series) == SERIES_OF_A_NODE
    assert take_in(account, readings) is account
