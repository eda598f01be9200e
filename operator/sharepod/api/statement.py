"""GPUStatement: GPU usage of one namespace, by month and model, and the counters of nodes whose sum it is.

Guarantees:
- A GPUStatement is cluster-scoped and named after its namespace, so it outlives the namespace.
- Only the operator writes it.

Docstrings of models become descriptions in the CRD.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from .consumption import MAX_MODEL, CounterField, TimestampField
from .objects import Model

STATEMENT_KIND = "GPUStatement"
STATEMENT_PLURAL = "gpustatements"

MAX_SERIES = 2048
"""Most series in one statement: two for each node of a cluster of 1,000. They take some 650 kB, or 1.4 MB with the
longest names; etcd takes 1.5 MiB. Beyond that, the series that have not grown for the longest time are dropped."""
MAX_MONTHS = 13
"""Most months in a statement: the current one, and a year."""
MAX_MODELS = 64
"""Most models of GPU in one statement."""

MonthField = Annotated[str, Field(pattern=r"^[0-9]{4}-[0-9]{2}$")]


class StatementSeries(Model):
    """Counters of one series of one node that are already added."""

    series: Annotated[str, Field(pattern=r"^[a-z0-9-]+$", max_length=64)]
    """Name of the series."""
    node: Annotated[str, Field(max_length=253)]
    """Name of the node."""
    model: Annotated[str, Field(max_length=MAX_MODEL)]
    """Model of the GPUs."""
    since: TimestampField
    """Time at which the counters were 0."""
    at: TimestampField
    """Time of these counters."""
    held_milliseconds: CounterField = 0
    """GPU time held, in milliseconds of one GPU."""
    borrowed_milliseconds: CounterField = 0
    """Part of heldMilliseconds beyond the guaranteed time."""
    reserved_milliseconds: CounterField = 0
    """Request x time, in milliseconds of one GPU."""
    memory_mebibyte_seconds: CounterField = 0
    """Reserved memory x time, in MiB x s."""


class StatementAmount(Model):
    """GPU time and memory of one model."""

    model: Annotated[str, Field(max_length=MAX_MODEL)]
    """Model of the GPUs."""
    held_milliseconds: Annotated[int, Field(ge=0)] = 0
    """GPU time held, in milliseconds of one GPU."""
    borrowed_milliseconds: Annotated[int, Field(ge=0)] = 0
    """Part of heldMilliseconds beyond the guaranteed time."""
    reserved_milliseconds: Annotated[int, Field(ge=0)] = 0
    """Request x time, in milliseconds of one GPU."""
    memory_mebibyte_seconds: Annotated[int, Field(ge=0)] = 0
    """Reserved memory x time, in MiB x s."""


class StatementMonth(Model):
    """GPU time and memory of one month, in UTC."""

    month: MonthField
    """The month, such as 2026-01."""
    models: Annotated[tuple[StatementAmount, ...], Field(max_length=MAX_MODELS)] = ()
    """Amounts by model."""


class StatementShown(Model):
    """Hours of the latest month, of all models together, for kubectl get."""

    month: MonthField
    """The month, such as 2026-01."""
    held_hours: Annotated[str, Field(max_length=32)]
    """Hours of one GPU held."""
    reserved_hours: Annotated[str, Field(max_length=32)]
    """Request x time, in hours of one GPU."""
    cost: Annotated[str | None, Field(max_length=64)] = None
    """Cost of that month at the prices of the operator's settings; absent without prices."""


class GPUStatementSpec(Model):
    """Empty: statements have no input."""


class GPUStatementStatus(Model):
    """Sums, written only by the operator."""

    shown: StatementShown | None = None
    """Hours of the latest month, of all models together."""
    totals: Annotated[tuple[StatementAmount, ...], Field(max_length=MAX_MODELS)] = ()
    """Total usage of the namespace, by model."""
    months: Annotated[tuple[StatementMonth, ...], Field(max_length=MAX_MONTHS)] = ()
    """The current month and the twelve before."""
    series: Annotated[tuple[StatementSeries, ...], Field(max_length=MAX_SERIES)] = ()
    """Counters of the nodes that add up to these sums."""
    forgotten_until: TimestampField | None = None
    """Latest start of a series that was dropped for lack of room. An unknown series that started before counts from its
    next reading on."""
