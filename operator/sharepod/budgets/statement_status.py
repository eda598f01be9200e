"""Conversion of a namespace's account to the status of its GPUStatement, and back.

Guarantee:
- An account that is written and read again is the same.
"""

from __future__ import annotations

from collections.abc import Mapping

from sharepod.api.statement import (
    MAX_MODELS,
    GPUStatementStatus,
    StatementAmount,
    StatementMonth,
    StatementSeries,
    StatementShown,
)

from .amounts import Amounts, hours_text
from .namespace_account import NamespaceAccount, TakenIn


def status_of(account: NamespaceAccount, cost: str | None = None) -> GPUStatementStatus:
    """Return the status of an account. `cost`: cost of the latest month, for `kubectl get`."""
    return GPUStatementStatus(
        shown=_shown(account, cost),
        totals=_amounts(account.totals),
        months=tuple(
            StatementMonth(month=month, models=_amounts(models)) for month, models in sorted(account.months.items())
        ),
        series=tuple(
            StatementSeries(
                series=one.series,
                node=one.node,
                model=one.model,
                since=one.since,
                at=one.at,
                held_milliseconds=one.amounts.held_ms,
                borrowed_milliseconds=one.amounts.borrowed_ms,
                reserved_milliseconds=one.amounts.reserved_ms,
                memory_mebibyte_seconds=one.amounts.memory_mib_s,
            )
            for one in account.series.values()
        ),
        forgotten_until=account.forgotten_until or None,
    )


def account_of(status: GPUStatementStatus) -> NamespaceAccount:
    """Return the account of a status."""
    return NamespaceAccount(
        series={
            one.series: TakenIn(one.series, one.node, one.model, one.since, one.at, _read(one)) for one in status.series
        },
        totals={one.model: _read(one) for one in status.totals},
        months={each.month: {one.model: _read(one) for one in each.models} for each in status.months},
        forgotten_until=status.forgotten_until or "",
    )


def _shown(account: NamespaceAccount, cost: str | None) -> StatementShown | None:
    """Return month, hours and cost of the latest month, for `kubectl get`. None if there is no month."""
    if not account.months:
        return None
    month, models = max(account.months.items())
    return StatementShown(
        month=month,
        cost=cost,
        held_hours=hours_text(sum(one.held_ms for one in models.values())),
        reserved_hours=hours_text(sum(one.reserved_ms for one in models.values())),
    )


def _amounts(by_model: Mapping[str, Amounts]) -> tuple[StatementAmount, ...]:
    return tuple(
        StatementAmount(
            model=model,
            held_milliseconds=amounts.held_ms,
            borrowed_milliseconds=amounts.borrowed_ms,
            reserved_milliseconds=amounts.reserved_ms,
            memory_mebibyte_seconds=amounts.memory_mib_s,
        )
        for model, amounts in sorted(by_model.items())[:MAX_MODELS]
    )


def _read(amounts: StatementAmount | StatementSeries) -> Amounts:
    return Amounts(
        amounts.held_milliseconds,
        amounts.borrowed_milliseconds,
        amounts.reserved_milliseconds,
        amounts.memory_mebibyte_seconds,
    )
