"""Resize wish: finds out whether a SharePod requests another share than it has. Pure.

Guarantees:
- The answer follows from the API server's objects and from one number in the tenant's memo (`memory_settled`).
- If the agent reports another size of a GPU's memory, this is no request. The default memory is computed again only
  when the SharePod changes.
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
    """Answer, and the number to keep in the memo. `wanted`: True if another share is requested."""

    wanted: bool
    memory_settled: int | None
    """Generation of the SharePod at which its default memory equalled the memory of its row. -1: never. None:
    unknown."""


def resize_wish(snapshot: TenantSnapshot, gpunode: GpuNodeFacts | None, memory_settled: int | None) -> ResizeWish:
    """Compare the SharePod's request, limit and memory with its row.

    Return `wanted` as False for a SharePod that has ended, is not placed, or is being released.

    Args:
        snapshot: The tenant.
        gpunode: The GPUNode of its first reservation.
        memory_settled: `memory_settled` of the last answer.
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
    """Compare the default memory of the SharePod's request with the memory of its row, once per generation of the
    SharePod.
    """
    if settled == sharepod.generation:
        return ResizeWish(False, settled)
    sizes = [gpu.memory for gpu in (gpunode.status.gpus if gpunode else ()) if gpu.uuid in row.gpus]
    if len(sizes) < len(row.gpus):
        return ResizeWish(False, settled)
    if settled is None:  # first answer of this process: take the value of an earlier process from the status
        refused = any(item.type == CONDITION_RESIZED and item.status == "False" for item in sharepod.status.conditions)
        settled = -1 if refused else sharepod.status.observed_generation or -1
    if min(asked.memory_on(size) for size in sizes) == row.memory:
        settled = sharepod.generation
    return ResizeWish(settled != sharepod.generation, settled)
