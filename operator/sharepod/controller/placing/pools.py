"""Pool of a node in its ledger, which follows the Node's pool label once a change is safe. Pure.

Guarantees:
- NP1 one allocator: a node changes its pool only while its ledger is empty and no decision is pending. No holder of the
  former pool may be left, and no claim that kube-scheduler has allocated there.
- NP2 withdrawn-before-left: a node leaves pool `scheduler` only in two steps. The ledger first orders the agent to
  withdraw its devices (`leaving`). The pool changes once the agent, having applied that ledger, reports that it
  publishes none.
- If the label names the node's present pool again, the node stays in that pool.
"""

from __future__ import annotations

from dataclasses import dataclass

from sharepod.api.gpunode import CONDITION_SLICES_PUBLISHED, SLICES_WITHDRAWN, Pool
from sharepod.controller.state.facts.node_facts import GpuNodeFacts


@dataclass(frozen=True, slots=True)
class InPool:
    """Pool of a node in its ledger. `leaving`: True while the node is about to leave the pool and takes no new
    claims."""

    pool: Pool
    leaving: bool = False


def next_pool(base: GpuNodeFacts, label: Pool | None, *, occupied: bool) -> InPool:
    """Return the pool to write to the ledger.

    Args:
        base: The GPUNode as read.
        label: The pool that the Node's label names. None without a valid label or without a Node; the node then keeps
            its pool, but may be leaving it.
        occupied: True if a decision for the ledger is pending, or kube-scheduler has allocated a claim on the node.
    """
    now = base.spec.pool
    if label is now:
        return InPool(now)
    left = bool(base.spec.tenants or base.spec.holders) or occupied
    if now is not Pool.SCHEDULER:
        return InPool(now if left or label is None else label)  # NP1
    if left or not base.spec.leaving or not withdrawn(base):
        return InPool(now, leaving=True)
    return InPool(label) if label is not None else InPool(now, leaving=True)  # NP2


def withdrawn(base: GpuNodeFacts) -> bool:
    """Return True if the agent has applied the present generation of the ledger and reports that it publishes no
    device."""
    reported = any(
        item.type == CONDITION_SLICES_PUBLISHED and item.reason == SLICES_WITHDRAWN for item in base.status.conditions
    )
    return reported and (base.status.observed_generation or 0) >= base.generation
