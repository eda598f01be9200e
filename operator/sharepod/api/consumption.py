"""Consumption: counters of the GPU time and memory that the tenants of one namespace used on one node's GPUs of one
model.

Guarantees:
- CO1 growing: the counters of one series never fall, and its namespace, model and `since` never change.
- CO2 never-again: a closed series does not grow, and no later series has its name. A namespace that returns to the node
  gets a new series, with a later `since`.
- CO3 told-first: an agent drops a closed series only once an annotation of the GPUNode names it: the operator has then
  added the series to its totals.

So the sum of the largest counters seen of each series is the consumption, for any order of readings.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from .objects import GROUP, Model

TAKEN_IN_ANNOTATION = f"{GROUP}/consumption-taken-in"
"""Annotation of a GPUNode: comma-separated names of closed series that the operator has added to its totals for the
last time. The agent drops these series."""

MAX_CONSUMPTION = 512
"""Most series in one GPUNode: two for each of the `MAX_TENANTS` rows of a ledger."""

MAX_COUNTER = (1 << 53) - 1
"""Largest counter: the largest integer that every JSON reader reads exactly. In milliseconds of GPU time, this is
285,000 GPU-years."""

MAX_MODEL = 96
"""Most characters of a GPU model's name in a series; a longer name is cut."""

TIMESTAMP_PATTERN = r"^[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}[.][0-9]{3}Z$"
"""RFC 3339 in UTC with milliseconds. Such texts sort by time."""

CounterField = Annotated[int, Field(ge=0, le=MAX_COUNTER)]
TimestampField = Annotated[str, Field(pattern=TIMESTAMP_PATTERN)]


class Consumption(Model):
    """Series of counters of one namespace and one model of GPU on one node. Counters only grow."""

    series: Annotated[str, Field(pattern=r"^[a-z0-9-]+$", max_length=64)]
    """Name of the series; no other series ever has it."""
    namespace: Annotated[str, Field(min_length=1, max_length=63)]
    """Namespace of the tenants."""
    model: Annotated[str, Field(max_length=MAX_MODEL)]
    """Model of the GPUs, as NVML has it."""
    since: TimestampField
    """Time at which the counters were 0. It is later than in every earlier series of this namespace and model on the
    node."""
    held_milliseconds: CounterField = 0
    """GPU time held, in milliseconds of one GPU. Exclusive tenants hold their GPUs all the time."""
    borrowed_milliseconds: CounterField = 0
    """Part of heldMilliseconds beyond the guaranteed time."""
    reserved_milliseconds: CounterField = 0
    """Request x time, while the rows were in the ledger, in milliseconds of one GPU."""
    memory_mebibyte_seconds: CounterField = 0
    """Reserved GPU memory x time, while the rows were in the ledger, in MiB x s."""
    closed: bool = False
    """The namespace has had no tenant here for an hour: the counters are final."""
