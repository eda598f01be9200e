"""Whether a SharePod asks for another share than it was granted.

Guarantees: the question is answered from what the API server holds and one number in the tenant's note. That a GPU's
memory is reported otherwise asks for nothing: memory by default changes with the SharePod alone.
"""

from __future__ import annotations

from sharepod.api.gpunode import Mode
from sharepod.api.sharepod import GpuRequest
from sharepod.controller.state.cluster_state import Model
from sharepod.controller.state.facts import SharePodFacts
from sharepod.controller.state.notes import Note
from sharepod.placement.state.types import Reservation

from .lifecycle import View


def asks_for_another_share(model: Model, view: View, note: Note) -> bool:
    """Whether request, limit or memory that `view.sharepod` asks for differ from its row; never of one that has ended,
    is not placed, or is being released."""
    sharepod = view.sharepod
    if sharepod is None or sharepod.request is None or sharepod.ended or sharepod.deleting:
        return False
    if len(view.held) != 1 or view.held[0].written is None or view.held[0].releasing:
        return False
    row, asked = view.held[0].wanted, sharepod.request
    if row.mode is Mode.EXCLUSIVE:
        return False
    if (row.request, row.limit) != (asked.request, asked.limit):
        return True
    if asked.memory is not None:
        return asked.memory != row.memory
    return _default_memory_changed(model, view.held[0].node, row, sharepod, asked, note)


def _default_memory_changed(
    model: Model, node: str, row: Reservation, sharepod: SharePodFacts, asked: GpuRequest, note: Note
) -> bool:
    """Whether this version of the SharePod asks, by its request alone, for other memory than it has."""
    gpunode = model.gpunodes.named(node)
    sizes = [gpu.memory for gpu in (gpunode.status.gpus if gpunode else ()) if gpu.uuid in row.gpus]
    if len(sizes) < len(row.gpus):
        return False
    if note.memory_settled is None:  # since this process began: what the status says was seen to
        refused = any(item.type == "Resized" and item.status == "False" for item in sharepod.status.conditions)
        note.memory_settled = -1 if refused else sharepod.status.observed_generation or -1
    if min(asked.memory_on(size) for size in sizes) == row.memory:
        note.memory_settled = sharepod.generation
    return note.memory_settled != sharepod.generation
