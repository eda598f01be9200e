"""Consumption of one namespace: the counters of all nodes, added up by model and month.

Guarantees:
- CF1 once: a node's counters that are added again, after newer ones, or in another order result in the same totals.
- CF2 nothing-lost: the total of a model is the sum over all series of the largest counters read. Nodes may be deleted,
  come back, or lose their state directory.
- CF3 never-twice: a series that the account had to drop counts from its next reading on, not from 0.
- CF4 months: the months of a model add up to the growth of its total.
- CF5 own-series: a series belongs to the node that reported it first. Reports of other nodes about it are ignored, so
  that no agent raises, or freezes, another's counters.
- The account is bounded: `MAX_SERIES` series and `MAX_MONTHS` months.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from sharepod.api.consumption import Consumption
from sharepod.api.statement import MAX_MONTHS, MAX_SERIES

from .amounts import NOTHING, Amounts, spread

_NO_MONTH = "9999-13"
"""Later than any month."""
SERIES_OF_A_NODE = 4
"""Most series of one node and model in an account, the latest ones. Only the latest can grow; the others are kept so
that a late reading does not count again."""


@dataclass(frozen=True, slots=True)
class TakenIn:
    """Counters of one series that are already added."""

    series: str
    node: str
    model: str
    since: str
    """Time at which the counters were 0."""
    at: str
    """Time of these counters."""
    amounts: Amounts


@dataclass(frozen=True, slots=True)
class NamespaceAccount:
    """Account of one namespace."""

    series: Mapping[str, TakenIn] = field(default_factory=dict)
    """Series by name."""
    totals: Mapping[str, Amounts] = field(default_factory=dict)
    """Total consumption, by model."""
    months: Mapping[str, Mapping[str, Amounts]] = field(default_factory=dict)
    """Consumption in each of the latest months, by month such as `2026-01` and model."""
    forgotten_until: str = ""
    """The latest `since` of a series that was dropped for lack of room."""

    def has(self, entry: Consumption) -> bool:
        """Return whether the account has all of these counters."""
        known = self.series.get(entry.series)
        return known is not None and amounts_of(entry).beyond(known.amounts) == NOTHING


@dataclass(frozen=True, slots=True)
class NodeReading:
    """Counters of a namespace on one node at one moment."""

    node: str
    """Name of the node."""
    at: str
    """Time of the counters."""
    entries: tuple[Consumption, ...]


def amounts_of(entry: Consumption) -> Amounts:
    """Return the counters of a series."""
    return Amounts(
        held_ms=entry.held_milliseconds,
        borrowed_ms=entry.borrowed_milliseconds,
        reserved_ms=entry.reserved_milliseconds,
        memory_mib_s=entry.memory_mebibyte_seconds,
    )


def take_in(account: NamespaceAccount, readings: Iterable[NodeReading], present: str = _NO_MONTH) -> NamespaceAccount:
    """Return the account with counters of nodes added; the same object if they bring nothing new.

    `present`: the current month, such as `2026-01`. If there is no room, later months, which a fast clock has created,
    are dropped first.
    """
    series = dict(account.series)
    totals = dict(account.totals)
    months = {month: dict(models) for month, models in account.months.items()}
    places = _Places(series)
    changed = False
    for reading in readings:
        for entry in reading.entries:
            known = series.get(entry.series)
            if known is not None and known.node != reading.node:
                continue
            now = amounts_of(entry)
            if known is None:
                if places.passed(reading.node, entry):
                    continue
                was, begin = NOTHING, entry.since
                if entry.since <= account.forgotten_until:
                    was, begin = now, reading.at
            else:
                was, begin = known.amounts, known.at
            grown = now.beyond(was)
            if known is not None and grown == NOTHING:
                continue
            changed = True
            series[entry.series] = taken = TakenIn(
                entry.series, reading.node, entry.model, entry.since, max(reading.at, begin), was + grown
            )
            if known is None:
                for dropped in places.add(taken):
                    series.pop(dropped, None)
            totals[entry.model] = totals.get(entry.model, NOTHING) + grown
            for month, amounts in spread(grown, begin, reading.at):
                models = months.setdefault(month, {})
                models[entry.model] = models.get(entry.model, NOTHING) + amounts
    if not changed:
        return account
    return _bounded(replace(account, series=series, totals=totals, months=months), present)


class _Places:
    """For each node and model: the series that an account contains, by their `since`."""

    def __init__(self, series: Mapping[str, TakenIn]) -> None:
        self._series = series
        self._known: dict[tuple[str, str], list[tuple[str, str]]] | None = None

    def passed(self, node: str, entry: Consumption) -> bool:
        """Return whether an unknown series is late: it is older than all known series of its node and model, which are
        the maximum number. Such a series was dropped from the account before."""
        known = self._by_place().get((node, entry.model), ())
        return len(known) >= SERIES_OF_A_NODE and entry.since < min(known)[0]

    def add(self, taken: TakenIn) -> list[str]:
        """Add a series; return the names of the series that are dropped for it."""
        known = self._by_place().setdefault((taken.node, taken.model), [])
        known.append((taken.since, taken.series))
        known.sort()
        dropped = [name for _, name in known[:-SERIES_OF_A_NODE]]
        del known[:-SERIES_OF_A_NODE]
        return dropped

    def _by_place(self) -> dict[tuple[str, str], list[tuple[str, str]]]:
        if self._known is None:
            self._known = {}
            for one in self._series.values():
                self._known.setdefault((one.node, one.model), []).append((one.since, one.series))
        return self._known


def _bounded(account: NamespaceAccount, present: str) -> NamespaceAccount:
    """Drop entries beyond the bounds: future months, then the oldest months, and series that have not grown for the
    longest time."""
    series, months, until = account.series, account.months, account.forgotten_until
    if len(months) > MAX_MONTHS:
        past = sorted(month for month in months if month <= present)[-MAX_MONTHS:]
        to_come = sorted(month for month in months if month > present)[: MAX_MONTHS - len(past)]
        months = {month: months[month] for month in (*past, *to_come)}
    if len(series) > MAX_SERIES:
        oldest = sorted(series.values(), key=lambda one: (one.at, one.series))[: len(series) - MAX_SERIES]
        until = max(until, *(one.since for one in oldest))
        names = {one.series for one in oldest}
        series = {name: one for name, one in series.items() if name not in names}
    return replace(account, series=series, months=months, forgotten_until=until)
