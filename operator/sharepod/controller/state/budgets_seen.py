"""GPUBudgets as they were read.

Guarantee: `on_changed` is called whenever a spec has changed, come or gone, never for a status alone.
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
        """Take in a GPUBudget as it was read or written."""
        self._take(budget_facts(raw))

    def put_unreadable(self, metadata: Json, why: str) -> None:
        """Take in a GPUBudget of which only the metadata can be read: it covers nothing."""
        self._take(unreadable_budget(metadata, why))

    def _take(self, item: BudgetFacts) -> None:
        taken, before, _ = self.known.put(item)
        if taken and (before is None or before.spec != item.spec):
            self.on_changed()

    def drop(self, uid: str, version: float = math.inf) -> None:
        """Take out a GPUBudget that is gone, as of `version`."""
        if self.known.drop(uid, version) is not None:
            self.on_changed()
