"""Resize wish: whether a SharePod requests another share than its row has. Pure.

Guarantees:
- The answer depends only on the API server's objects and on one number that the tenant's memo keeps (`memory_settled`).
- If the agent reports a changed size of a GPU's memory, this is no request for another share. The default memory is
  computed again only when the SharePod changes.
"""

from __future__ import annotations

from dataclasses import dataclass

from sharepod.api.gpunode import Mode
from sharepod.api.sharepod import CONDITION_RESIZED, GpuRequest
from sharepod.controller.state.facts.node_facts import GpuNodeFacts
from sharepod.controller.state.facts.sharepod_facts import SharePodFacts
from sharepod.placement.state.types import Reservation

from .snapshot import TenantSnapshot


@dataclass(frozen=True, slots=True)
class ResizeWish:
    """Answer for one tenant. `wanted`: True if another share is requested."""

    wanted: bool
    memory_settled: int | None
    """Number for the memo: generation of the SharePod for which its default memory equalled the memory of its row. -1:
    none. None: not computed yet."""


def resize_wish(snapshot: TenantSnapshot, gpunode: GpuNodeFacts | None, memory_settled: int | None) -> ResizeWish:
    """Compare the requested request, limit and memory with the row's values.

    Return `wanted` as False for a SharePod that has ended, is not placed, or is being released.

    Args:
        snapshot: The tenant.
        gpunode: The GPUNode of its first reservation.
        memory_settled: Value of the memo, from the last answer.
    """
    sharepod, no = snapshot.sharepod, ResizeWish(False, memory_settled)
    if sharepod is None or sharepod.gpu is None or sharepod.ended or sharepod.deleting:
        return no
    if len(snapshot.reserved) != 1 or snapshot.reserved[0].written is None or snapshot.reserved[0].releasing:
        return no
    row, asked = snapshot.reserved[0].wanted, sharepod.gpu
    if row.mode is Mode.EXCLUSIVE:
        return no
    if (row.request_milli, row.limit_milli) != (asked.request_milli, asked.limit_milli):
        return ResizeWish(True, memory_settled)
    if sharepod.plain:
        return no  # the memory stays as granted
    if asked.memory is not None:
        return ResizeWish(asked.memory != row.memory, memory_settled)
    return _default_memory(gpunode, row, sharepod, asked, memory_settled)


def _default_memory(
    gpunode: GpuNodeFacts | None,
    row: Reservation,
    sharepod: SharePodFacts,
    asked: GpuRequest,
    settled: int | None,
) -> ResizeWish:
    """Compare the default memory for the SharePod's request with the memory of its row. Once they have been equal for a
    generation of the SharePod, they count as equal for that generation.
    """
    if settled == sharepod.generation:
        return ResizeWish(False, settled)
    sizes = [gpu.memory for gpu in (gpunode.status.gpus if gpunode else ()) if gpu.uuid in row.gpus]
    if len(sizes) < len(row.gpus):
        return ResizeWish(False, settled)
    if settled is None:  # first answer of this process: derive the former process's value from the status
        refused = any(item.type == CONDITION_RESIZED and item.status == "False" for item in sharepod.status.conditions)
        settled = -1 if refused else sharepod.status.observed_generation or -1
    if min(asked.memory_on(size) for size in sizes) == row.memory:
        settled = sharepod.generation
    return ResizeWish(settled != sharepod.generation, settled)
