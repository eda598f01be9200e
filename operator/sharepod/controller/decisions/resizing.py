"""Whether a SharePod asks for another share than it was granted.

Guarantees: the question is answered from what the API server holds and one number in the tenant's memo. That a GPU's
memory is reported otherwise asks for nothing: memory by default changes with the SharePod alone.
"""

from __future__ import annotations

from sharepod.api.gpunode import Mode
from sharepod.api.sharepod import GpuRequest
from sharepod.controller.state.cluster_state import ClusterState
from sharepod.controller.state.facts import SharePodFacts
from sharepod.controller.state.memos import TenantMemo
from sharepod.placement.state.types import Reservation

from .lifecycle import TenantSnapshot


def asks_for_another_share(state: ClusterState, snapshot: TenantSnapshot, memo: TenantMemo) -> bool:
    """Return whether request, limit or memory that `snapshot.sharepod` asks for differ from its row.

    False for a SharePod that has ended, is not placed, or is being released.
    """
    sharepod = snapshot.sharepod
    if sharepod is None or sharepod.gpu is None or sharepod.ended or sharepod.deleting:
        return False
    if len(snapshot.reserved) != 1 or snapshot.reserved[0].written is None or snapshot.reserved[0].releasing:
        return False
    row, asked = snapshot.reserved[0].wanted, sharepod.gpu
    if row.mode is Mode.EXCLUSIVE:
        return False
    if (row.request, row.limit) != (asked.request, asked.limit):
        return True
    if asked.memory is not None:
        return asked.memory != row.memory
    return _default_memory_changed(state, snapshot.reserved[0].node, row, sharepod, asked, memo)


def _default_memory_changed(
    state: ClusterState, node: str, row: Reservation, sharepod: SharePodFacts, asked: GpuRequest, memo: TenantMemo
) -> bool:
    """Whether this version of the SharePod asks, by its request alone, for other memory than it has."""
    gpunode = state.gpunodes.named(node)
    sizes = [gpu.memory for gpu in (gpunode.status.gpus if gpunode else ()) if gpu.uuid in row.gpus]
    if len(sizes) < len(row.gpus):
        return False
    if memo.memory_settled is None:  # since this process began: what the status says was seen to
        refused = any(item.type == "Resized" and item.status == "False" for item in sharepod.status.conditions)
        memo.memory_settled = -1 if refused else sharepod.status.observed_generation or -1
    if min(asked.memory_on(size) for size in sizes) == row.memory:
        memo.memory_settled = sharepod.generation
    return memo.memory_settled != sharepod.generation
