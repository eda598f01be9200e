"""GPUBudgets of the cluster, as last read.

Guarantee: `on_changed` is called whenever a spec was added, changed or removed, and never after a change of only the
status.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from .facts.budget_facts import BudgetFacts, budget_facts, unreadable_budget
from .store import Store

Json = Mapping[str, Any]


class BudgetsSeen:
    """Store of GPUBudgets."""

    def __init__(self) -> None:
        self.known: Store[BudgetFacts] = Store()
        self.on_changed: Callable[[], None] = lambda: None

    def put(self, raw: Json) -> None:
        """Record a GPUBudget as read or written."""
        self._take(budget_facts(raw))

    def put_unreadable(self, metadata: Json, why: str) -> None:
        """Record a GPUBudget of which only the metadata is readable. Such a budget covers no namespace."""
        self._take(unreadable_budget(metadata, why))

    def _take(self, item: BudgetFacts) -> None:
        taken, before, _ = self.known.put(item)
        if taken and (before is None or before.spec != item.spec):
            self.on_changed()

    def drop(self, uid: str, version: float = math.inf) -> None:
        """Remove a GPUBudget that was deleted at `version`. A later cached version stays."""
        if self.known.drop(uid, version) is not None:
            self.on_changed()
