"""Charges by owner: the GPU consumption of existing SharePods since they were created, at an administrator's prices.

The owner of a SharePod is its controller, such as a workflow or another custom resource. A SharePod without a
controller is its own owner.

Guarantees:
- Each SharePod counts with one owner, by its own totals (`status.consumed`).
- Fields that OpenCost's allocations also have carry its names: `controllerKind`, `controller`, and the bill's fields.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from sharepod.api.sharepod import KIND, SharePodStatus

from .amounts import NOTHING, Amounts
from .charges import AMOUNT_COLUMNS, BillLine, Prices, amount_columns, charged_line, csv_text

_COLUMNS = ("namespace", "controllerKind", "controller", "since", "gpuModel", *AMOUNT_COLUMNS)
_UNKNOWN = "unknown"
"""Model in the bill of a SharePod whose status has no GPU."""


@dataclass(frozen=True, slots=True, order=True)
class Owner:
    """Owner of SharePods, and one GPU model."""

    namespace: str
    kind: str
    name: str
    model: str


@dataclass(frozen=True, slots=True)
class OwnerLine:
    """Line of a bill: one owner. `since`: start of its first SharePod."""

    owner: Owner
    since: str
    bill: BillLine


def owner_lines(sharepods: Iterable[tuple[Mapping[str, Any], SharePodStatus]], prices: Prices) -> list[OwnerLine]:
    """Return a line for each owner and GPU model. `sharepods`: (metadata, status) of each SharePod."""
    found: dict[Owner, tuple[str, Amounts]] = {}
    for metadata, status in sharepods:
        consumed = status.consumed
        if consumed is None:
            continue
        owner = _owner(metadata, status)
        since, amounts = found.get(owner, (consumed.since, NOTHING))
        more = Amounts(
            consumed.held_seconds * 1000,
            consumed.borrowed_seconds * 1000,
            consumed.reserved_seconds * 1000,
            consumed.memory_mebibyte_seconds,
        )
        found[owner] = min(since, consumed.since), amounts + more
    return [
        OwnerLine(owner, since, charged_line(owner.namespace, owner.model, amounts, prices))
        for owner, (since, amounts) in sorted(found.items())
    ]


def owners_as_csv(lines: Iterable[OwnerLine], prices: Prices) -> str:
    """Return the lines as CSV, with a header."""
    return csv_text(_COLUMNS, (_row(line, prices) for line in lines))


def owners_as_allocations(lines: Iterable[OwnerLine], until: str, prices: Prices) -> dict[str, Any]:
    """Return the lines as a JSON object: `allocations` in the shape of OpenCost's, and their `totalCost`."""
    allocations = []
    total = Decimal(0)
    for line in lines:
        owner, row = line.owner, _row(line, prices)
        total += line.bill.total_cost
        properties = {
            "namespace": owner.namespace,
            "controllerKind": owner.kind,
            "controller": owner.name,
            "gpuModel": owner.model,
        }
        allocations.append(
            {
                "name": f"{owner.namespace}/{owner.kind}/{owner.name}/{owner.model}",
                "properties": properties,
                "window": {"start": line.since, "end": until},
                **{name: float(row[name]) for name in _COLUMNS if isinstance(row[name], Decimal)},
            }
        )
    return {
        "currency": prices.currency,
        "charged": prices.charged.value,
        "allocations": allocations,
        "totalCost": float(total),
    }


def _owner(metadata: Mapping[str, Any], status: SharePodStatus) -> Owner:
    references = metadata.get("ownerReferences") or ()
    by = next((one for one in references if one.get("controller")), {"kind": KIND, "name": metadata["name"]})
    model = status.gpus[0].model if status.gpus else _UNKNOWN
    return Owner(str(metadata["namespace"]), str(by.get("kind")), str(by.get("name")), model)


def _row(line: OwnerLine, prices: Prices) -> dict[str, str | Decimal]:
    own = {
        "namespace": line.owner.namespace,
        "controllerKind": line.owner.kind,
        "controller": line.owner.name,
        "since": line.since,
        "gpuModel": line.owner.model,
    }
    return own | amount_columns(line.bill, prices)
