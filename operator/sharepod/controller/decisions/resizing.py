"""Resize wish: does a SharePod ask for another share than it was granted? Pure.

Guarantees:
- The answer follows from what the API server holds and one number that the operator remembers of the tenant.
- A GPU whose memory is reported otherwise asks for nothing: memory by default changes with the SharePod alone.
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
    """The answer, and the number to remember."""

    wanted: bool
    memory_settled: int | None
    """The SharePod's generation at which its default memory was what it asked for; -1: none was; None: not known."""


def resize_wish(snapshot: TenantSnapshot, gpunode: GpuNodeFacts | None, memory_settled: int | None) -> ResizeWish:
    """Compare request, limit and memory that the SharePod asks for with its row.

    Nothing is wanted of a SharePod that has ended, is not placed, or is being released.

    Args:
        snapshot: The tenant.
        gpunode: The GPUNode of its first reservation.
        memory_settled: What the last answer said.
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
        return no  # its memory stays as it was granted
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
    """Compare the memory that its request gives by default with its row's, once per version of the SharePod."""
    if settled == sharepod.generation:
        return ResizeWish(False, settled)
    sizes = [gpu.memory for gpu in (gpunode.status.gpus if gpunode else ()) if gpu.uuid in row.gpus]
    if len(sizes) < len(row.gpus):
        return ResizeWish(False, settled)
    if settled is None:  # this process has not answered before: the status tells what an earlier one settled
        refused = any(item.type == CONDITION_RESIZED and item.status == "False" for item in sharepod.status.conditions)
        settled = -1 if refused else sharepod.status.observed_generation or -1
    if min(asked.memory_on(size) for size in sizes) == row.memory:
        settled = sharepod.generation
    return ResizeWish(settled != sharepod.generation, settled)
