"""Account of one namespace: the counters of all nodes, added up by GPU model and month.

A series is the set of counters that one node keeps of the namespace and one GPU model. An hour without tenants ends it.

Guarantees:
- CF1 once: a node's counters that are added again, late, or in another order give the same totals.
- CF2 nothing-lost: the total of a model is the sum, over all series, of the largest counters that were read. Nodes may
  be deleted, come back, or lose their state directory.
- CF3 never-twice: if the account had to drop a series, its counters so far are not added again.
- CF4 months: the months of a model add up to the growth of its total.
- CF5 own-series: a series belongs to the node that reported it first. Other nodes' reports of it are ignored, so that
  no agent can raise or block another's counters.
- The account is bounded: `MAX_SERIES` series and `MAX_MONTHS` months.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from sharepod.api.consumption import Consumption
from sharepod.api.statement import MAX_MONTHS, MAX_SERIES

from .amounts import NOTHING, Amounts, spread

_NO_MONTH = "9999-13"
"""Text that sorts after any month."""
SERIES_OF_A_NODE = 4
"""Number of series that an account keeps of one node and model, the latest ones. Only the latest can grow. The others
are kept so that a late report of them is not added again."""


@dataclass(frozen=True, slots=True)
class TakenIn:
    """Counters of one series that are added already."""

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
    """Latest `since` of the series that were dropped because there was no room."""

    def has(self, entry: Consumption) -> bool:
        """Return whether the account has all of these counters."""
        known = self.series.get(entry.series)
        return known is not None and amounts_of(entry).beyond(known.amounts) == NOTHING


@dataclass(frozen=True, slots=True)
class NodeReading:
    """Counters of a namespace on one node at one time."""

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
    """Return the account with counters of nodes added. If they contain nothing new, return the same object.

    `present`: the present month, such as `2026-01`. If there are too many months, later ones, which a fast clock has
    created, are dropped first.
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
    """For each node and model: (since, name) of the series in an account."""

    def __init__(self, series: Mapping[str, TakenIn]) -> None:
        self._series = series
        self._known: dict[tuple[str, str], list[tuple[str, str]]] | None = None

    def passed(self, node: str, entry: Consumption) -> bool:
        """Return True if an unknown series was dropped before: it is older than all series of its node and model in the
        account, which has as many as it keeps."""
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
    """Drop what exceeds the bounds: future months, then the oldest months, and the series that have not grown for the
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
