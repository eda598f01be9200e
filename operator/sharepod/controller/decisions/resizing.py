"""Resize wish: whether a SharePod requests another share than its row has. Pure.

A refusal also reports what the refused share in the spec means for the next run.

Guarantees:
- The answer depends only on the API server's objects and on one number that the tenant's memo keeps (`memory_settled`).
- If the agent reports a changed size of a GPU's memory, this is no request for another share. The default memory is
  computed again only when the SharePod changes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from sharepod.api.gpunode import Mode
from sharepod.api.sharepod import CONDITION_RESIZED, GpuRequest, RestartPolicy
from sharepod.api.units import format_fraction
from sharepod.controller.state.facts.node_facts import GpuNodeFacts
from sharepod.controller.state.facts.sharepod_facts import SharePodFacts
from sharepod.placement.state.types import Outlook, Refusal, Reservation
from sharepod.placement.wording import size_exact

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


def of_next_run(refusal: Refusal | None, sharepod: SharePodFacts | None) -> Refusal | None:
    """Return the refusal of a raise, with a sentence about the SharePod's next run, whose share the spec sets. Return
    any other refusal as it is."""
    if refusal is None or refusal.outlook not in (Outlook.WAITING, Outlook.NEVER):
        return refusal
    if sharepod is None or sharepod.gpu is None or sharepod.plain or sharepod.restart_policy is RestartPolicy.NEVER:
        return refusal
    memory = f" and memory {size_exact(sharepod.gpu.memory)}" if sharepod.gpu.memory is not None else ""
    asked = f"request {format_fraction(sharepod.gpu.request_milli)}{memory}"
    text = f"With {asked} in the spec, the next run is not placed until that fits."
    return replace(refusal, advice=f"{refusal.advice} {text}".strip())


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
