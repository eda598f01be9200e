"""Facts of GPUBudgets, read from objects of the API server.

Guarantees:
- `budget_facts` does not raise for any object with a uid and a name: an unreadable object has an `error` and no `spec`.
- If only the status is unreadable, the spec counts, and the account in the status is lost.
"""

from __future__ import annotations

from dataclasses import dataclass

from pydantic import ValidationError

from sharepod.api.bounds import clipped
from sharepod.api.gpubudget import GPUBudgetSpec, GPUBudgetStatus

from .object_facts import Json, ObjectFacts, common, mapping, whole_number


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetFacts(ObjectFacts):
    """Facts of a GPUBudget. `status_error`: error in reading its status; None if it was read. With an error,
    consumption is counted from zero.
    """

    created: str
    generation: int
    spec: GPUBudgetSpec | None
    error: str | None
    status: GPUBudgetStatus
    status_error: str | None = None


def budget_facts(raw: Json) -> BudgetFacts:
    """Return the facts of a GPUBudget."""
    metadata = mapping(raw.get("metadata"))
    spec, error = None, None
    try:
        spec = GPUBudgetSpec.model_validate(raw.get("spec") or {}, extra="ignore")
    except Exception as found:  # invalid content must affect this budget only
        error = _first(found)
    status, status_error = GPUBudgetStatus(), None
    try:
        status = GPUBudgetStatus.model_validate(raw.get("status") or {}, extra="ignore")
    except Exception as found:
        status_error = _first(found)
    return BudgetFacts(
        **common(metadata),
        created=str(metadata.get("creationTimestamp") or ""),
        generation=whole_number(metadata.get("generation")),
        spec=spec,
        error=error,
        status=status,
        status_error=status_error,
    )


def unreadable_budget(metadata: Json, why: str) -> BudgetFacts:
    """Return the facts of a GPUBudget of which only the metadata can be read."""
    return BudgetFacts(
        **common(metadata),
        created=str(metadata.get("creationTimestamp") or ""),
        generation=whole_number(metadata.get("generation")),
        spec=None,
        error=clipped(f"the object {why}"),
        status=GPUBudgetStatus(),
        status_error=clipped(f"the object {why}"),
    )


def _first(found: Exception) -> str:
    """Return the first validation error, as text for the budget's owner."""
    if not isinstance(found, ValidationError):
        return clipped(f"cannot be read: {found}")
    fault = found.errors()[0]
    where = ".".join(str(part) for part in fault["loc"])
    return clipped(f"{where}: {fault['msg']}" if where else str(fault["msg"]))
