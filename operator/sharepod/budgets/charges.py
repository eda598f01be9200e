"""Charges: GPU time and memory of namespaces in one month, at an administrator's prices, as lines of a bill.

Guarantees:
- CH1 adds-up: the total of a bill is the sum of the costs in its lines.
- Fields that OpenCost's allocations also have use its names and units: `name`, `properties.namespace`, `window`,
  `gpuHours`, `gpuCost`, `totalCost`.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from decimal import ROUND_HALF_UP, Decimal
from enum import StrEnum
from typing import Annotated, Any

from pydantic import Field

from sharepod.api.objects import Model

from .amounts import NOTHING, Amounts, month_after
from .namespace_account import NamespaceAccount

_MS_PER_HOUR = Decimal(3_600_000)
_MIB_S_PER_GIB_HOUR = Decimal(1024 * 3600)
_COST = Decimal("0.0001")
"""Resolution of a cost: a hundredth of a cent."""
_HOURS = Decimal("0.000001")
"""Resolution of hours: 3.6 ms."""
_PLAIN = re.compile(r"[A-Za-z0-9][A-Za-z0-9 ._:/()-]*")
"""Text that no spreadsheet takes for a formula in any locale, such as names of objects, models, times, currencies."""
_SEPARATORS = str.maketrans(dict.fromkeys(',;|"', " "))
"""Translation of the characters that separate or quote cells in a spreadsheet of some locale, to spaces."""


class Charged(StrEnum):
    """Kind of GPU time that a namespace pays for."""

    HELD = "Held"
    """Time that its tenants held: an idle reservation costs nothing."""
    RESERVED = "Reserved"
    """Time that was reserved for its tenants: borrowed time is free."""
    RESERVED_AND_BORROWED = "ReservedAndBorrowed"
    """Time that was reserved for its tenants, and time that they held beyond it."""


PriceField = Annotated[Decimal, Field(ge=0, le=1_000_000)]


class Price(Model):
    """Price of one model of GPU."""

    gpu_hour: PriceField = Decimal(0)
    """Price of one hour of one whole GPU."""
    memory_gib_hour: Annotated[PriceField, Field(alias="memoryGiBHour")] = Decimal(0)
    """Price of one GiB of reserved GPU memory for one hour."""


class Prices(Model):
    """Prices, as an administrator writes them."""

    currency: Annotated[str, Field(max_length=16)] = ""
    """Shown with the costs."""
    charged: Charged = Charged.RESERVED_AND_BORROWED
    """Held, Reserved or ReservedAndBorrowed."""
    default: Price = Price()
    """Price of models without an entry."""
    models: Annotated[dict[str, Price], Field(max_length=256)] = Field(default_factory=dict)
    """Price by model, as GPUNodes name it."""

    def of(self, model: str) -> Price:
        """Return the price of a model."""
        return self.models.get(model, self.default)


@dataclass(frozen=True)
class BillLine:
    """Line of a bill: one namespace and one GPU model. Hours are of one GPU, memory is in GiB times hours."""

    namespace: str
    model: str
    held_hours: Decimal
    borrowed_hours: Decimal
    reserved_hours: Decimal
    memory_gib_hours: Decimal
    charged_hours: Decimal
    gpu_cost: Decimal
    memory_cost: Decimal

    @property
    def total_cost(self) -> Decimal:
        """Cost of time and memory."""
        return self.gpu_cost + self.memory_cost


def bill_lines(accounts: Mapping[str, NamespaceAccount], month: str, prices: Prices) -> list[BillLine]:
    """Return the lines of a month's bill, by namespace and model."""
    return [
        charged_line(namespace, model, amounts, prices)
        for namespace, account in sorted(accounts.items())
        for model, amounts in sorted(account.months.get(month, {}).items())
        if amounts != NOTHING
    ]


def latest_cost(account: NamespaceAccount, prices: Prices) -> str | None:
    """Return the total of the bill of the account's latest month, with the currency; None without prices or months."""
    if prices == Prices() or not account.months:
        return None
    month = max(account.months)
    total = sum((line.total_cost for line in bill_lines({"": account}, month, prices)), Decimal(0))
    return f"{total:.2f} {prices.currency}".rstrip()


def as_csv(lines: Iterable[BillLine], month: str, prices: Prices) -> str:
    """Return the lines as CSV, with a header."""
    return csv_text(_COLUMNS, (_row(line, month, prices) for line in lines))


def csv_text(columns: Sequence[str], rows: Iterable[Mapping[str, str | Decimal]]) -> str:
    """Return rows as CSV, with a header. A text that a spreadsheet could take for a formula, or for several cells or
    rows, is quoted and cleaned."""
    parts = _Parts()
    writer = csv.writer(parts, lineterminator="\n")
    writer.writerow(columns)
    for row in rows:
        writer.writerow([_as_text(row[column]) for column in columns])
    return "".join(parts)


def as_allocations(lines: Iterable[BillLine], month: str, prices: Prices) -> dict[str, Any]:
    """Return the lines as a JSON object: `allocations` in the shape of OpenCost's, and their `totalCost`."""
    window = {"start": f"{month}-01T00:00:00Z", "end": f"{month_after(month)}-01T00:00:00Z"}
    allocations = []
    total = Decimal(0)
    for line in lines:
        row = _row(line, month, prices)
        total += line.total_cost
        allocations.append(
            {
                "name": f"{line.namespace}/{line.model}",
                "properties": {"namespace": line.namespace, "gpuModel": line.model},
                "window": window,
                **{name: float(row[name]) for name in _COLUMNS if isinstance(row[name], Decimal)},
            }
        )
    return {
        "month": month,
        "window": window,
        "currency": prices.currency,
        "charged": prices.charged.value,
        "allocations": allocations,
        "totalCost": float(total),
    }


class _Parts(list[str]):
    """Parts of a text, collected as the CSV writer writes them."""

    def write(self, piece: str) -> None:
        """Append a part of the text."""
        self.append(piece)


AMOUNT_COLUMNS = (
    "gpuHoursHeld",
    "gpuHoursBorrowed",
    "gpuHoursReserved",
    "gpuMemoryGiBHours",
    "gpuHours",
    "gpuCost",
    "gpuMemoryCost",
    "totalCost",
    "currency",
)
_COLUMNS = ("namespace", "month", "gpuModel", *AMOUNT_COLUMNS)


def _row(line: BillLine, month: str, prices: Prices) -> dict[str, str | Decimal]:
    return {"namespace": line.namespace, "month": month, "gpuModel": line.model} | amount_columns(line, prices)


def amount_columns(line: BillLine, prices: Prices) -> dict[str, str | Decimal]:
    """Return the amounts and costs of a line, by column."""
    return {
        "gpuHoursHeld": line.held_hours,
        "gpuHoursBorrowed": line.borrowed_hours,
        "gpuHoursReserved": line.reserved_hours,
        "gpuMemoryGiBHours": line.memory_gib_hours,
        "gpuHours": line.charged_hours,
        "gpuCost": line.gpu_cost,
        "gpuMemoryCost": line.memory_cost,
        "totalCost": line.total_cost,
        "currency": prices.currency,
    }


def charged_line(namespace: str, model: str, amounts: Amounts, prices: Prices) -> BillLine:
    """Return the line of a bill for these amounts, with their costs."""
    price = prices.of(model)
    charged = {
        Charged.HELD: amounts.held_ms,
        Charged.RESERVED: amounts.reserved_ms,
        Charged.RESERVED_AND_BORROWED: amounts.reserved_ms + amounts.borrowed_ms,
    }[prices.charged]
    memory = Decimal(amounts.memory_mib_s) / _MIB_S_PER_GIB_HOUR
    return BillLine(
        namespace=namespace,
        model=model,
        held_hours=_hours(amounts.held_ms),
        borrowed_hours=_hours(amounts.borrowed_ms),
        reserved_hours=_hours(amounts.reserved_ms),
        memory_gib_hours=memory.quantize(_HOURS, ROUND_HALF_UP),
        charged_hours=_hours(charged),
        gpu_cost=(charged / _MS_PER_HOUR * price.gpu_hour).quantize(_COST, ROUND_HALF_UP),
        memory_cost=(memory * price.memory_gib_hour).quantize(_COST, ROUND_HALF_UP),
    )


def _hours(ms: int) -> Decimal:
    return (ms / _MS_PER_HOUR).quantize(_HOURS, ROUND_HALF_UP)


def _as_text(value: str | Decimal) -> str:
    if isinstance(value, Decimal) or _PLAIN.fullmatch(value):
        return str(value)
    return "'" + "".join(each if each.isprintable() else " " for each in value).translate(_SEPARATORS)
