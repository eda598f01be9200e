"""Consumption file: the counters of `ConsumptionMeter`, which the next agent on this node continues.

Guarantees:
- A file that cannot be read counts as missing: the meter begins new series, and nothing is counted twice.
- A write never raises: a failure is logged, and the next write tries again.
"""

from __future__ import annotations

from typing import Annotated

import structlog
from pydantic import Field, ValidationError

from sharepod.api.objects import Model

from .files import KeptFiles

log = structlog.get_logger(__name__)

FILE = "consumption.json"

Nanoseconds = Annotated[int, Field(ge=0)]


class KeptTenant(Model):
    """Metered tenant, as of its last count."""

    namespace: str
    gpus: dict[str, str]
    """Model of each GPU, by UUID."""
    request_milli: int
    memory_mib: int
    exclusive: bool
    held_ns: Nanoseconds
    """Time that the tenant had held, by its time account."""
    borrowed_ns: Nanoseconds
    at_ns: int
    """Time of the last count, in nanoseconds of the node's monotonic clock."""
    since_ms: int = 0
    """Time at which the totals were 0, in milliseconds since 1970; 0: an earlier version has written the file."""
    total_held_ns: Nanoseconds = 0
    total_borrowed_ns: Nanoseconds = 0
    total_reserved_ns: Nanoseconds = 0
    total_memory_mib_ns: Nanoseconds = 0
    """Totals since `since_ms`, summed over the tenant's GPUs."""


class KeptSeries(Model):
    """Series of counters of one namespace and GPU model."""

    name: str
    namespace: str
    model: str
    since_ms: int
    held_ns: Nanoseconds = 0
    borrowed_ns: Nanoseconds = 0
    reserved_ns: Nanoseconds = 0
    memory_mib_ns: Nanoseconds = 0
    used_ms: int = 0
    """Time of the last count with a tenant of this namespace and model, in milliseconds since 1970."""
    closed: bool = False


class KeptGpu(Model):
    """Account of one GPU, in nanoseconds by use."""

    held: Nanoseconds = 0
    gap: Nanoseconds = 0
    anticipated: Nanoseconds = 0
    handed_over: Nanoseconds = 0
    idle: Nanoseconds = 0
    stalled: Nanoseconds = 0
    unmetered: Nanoseconds = 0
    at_ns: int
    """Time up to which the uses are counted, in nanoseconds of the node's monotonic clock."""


class KeptConsumption(Model):
    """Content of the file."""

    boot: str
    monotonic_ns: int
    wall_ms: int
    """Both clocks at the time of the write."""
    last_since_ms: int = 0
    """Latest start of a series, in ms since 1970; the next series starts later."""
    tenants: dict[str, KeptTenant] = Field(default_factory=dict)
    series: tuple[KeptSeries, ...] = ()
    gpus: dict[str, KeptGpu] = Field(default_factory=dict)


def read_consumption(files: KeptFiles) -> KeptConsumption | None:
    """Return the counters that an earlier agent has stored. None if there are none, or if they cannot be read. Does
    I/O."""
    try:
        return KeptConsumption.model_validate_json(files.read(FILE), extra="ignore")
    except FileNotFoundError:
        return None
    except (OSError, ValidationError) as error:
        log.error("cannot read the former count of GPU time; counting from zero", file=FILE, error=str(error))
        return None


def keep_consumption(files: KeptFiles, kept: KeptConsumption, *, durable: bool) -> None:
    """Store the counters for the next agent. `durable`: flush the file to disk. Does I/O."""
    try:
        files.replace(FILE, kept.model_dump_json(by_alias=True).encode(), durable=durable)
    except OSError as error:
        log.warning("cannot keep the count of GPU time for the next agent", file=FILE, error=str(error))
