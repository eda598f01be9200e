"""Whether a tenant may have another share on the GPUs it has.

What it holds already is its own and only a raise needs room, of GPUs that are not kept for somebody else; so a lowering
of time is never refused, not even on a GPU that is over-committed; one of memory is only below what the tenant was last
seen to use, which cannot be taken back.
"""

from __future__ import annotations

from sharepod.api.units import format_fraction
from sharepod.placement.state.accounts import NodeAccount, Row
from sharepod.placement.state.types import Obstacle, Outlook, Refusal, Reservation

from .wording import counted, size_down, size_up


def refuse_resize(node: NodeAccount, row: Row, wanted: Reservation, in_use: int = 0) -> Refusal | None:
    """Why `wanted` cannot stand in place of `row`, or None where it can."""
    more_time = wanted.request - row.request
    more_memory = wanted.memory - row.memory
    if row.wanted.releasing:
        advice = "Make a new SharePod with the share that it should have."
        return _refusal(row, Outlook.NEVER, [Obstacle("Ending", "SharePod", 1, "the SharePod is ending")], advice)
    if more_memory < 0 and in_use > wanted.memory:
        text = f"it uses {size_up(in_use)} of memory, more than the {size_down(wanted.memory)} asked for"
        obstacle = Obstacle("MemoryInUse", "SharePod", 1, text)
        return _refusal(row, Outlook.IN_USE, [obstacle], "Free memory first; it is lowered once less is in use.")
    if more_time <= 0 and more_memory <= 0:
        return None
    unseen = [uuid for uuid in row.gpus if uuid not in node.gpus_by_uuid]
    if unseen:
        text = f"{counted(len(unseen), 'GPU')} of {node.name} cannot be seen at the moment"
        obstacle = Obstacle("NotSeen", "GPU", len(unseen), text)
        return _refusal(row, Outlook.WAITING, [obstacle], "A raise waits until the node's agent reports its GPUs.")

    gpus = [node.gpus_by_uuid[uuid] for uuid in row.gpus]
    kept = [gpu for gpu in gpus if gpu.head_tenant not in (None, row.wanted.tenant)]
    if kept:
        verb = "is" if len(kept) == 1 else "are"
        text = f"{counted(len(kept), 'GPU')} {verb} kept for the SharePod that has waited longest"
        advice = "A raise waits until that one has been placed."
        return _refusal(row, Outlook.WAITING, [Obstacle("Kept", "GPU", len(kept), text)], advice)
    outlook = Outlook.WAITING
    obstacles: list[Obstacle] = []
    would_fit: list[str] = []
    least_time = min(gpus, key=lambda gpu: (gpu.free_milli, gpu.index))
    if 0 < more_time > least_time.free_milli:
        left = max(least_time.free_milli, 0)
        more = format_fraction(more_time)
        text = f"{least_time.name} has {format_fraction(left)} of its time free and the raise takes {more} more"
        obstacles.append(Obstacle("Time", "GPU", 1, text))
        would_fit.append(f"spec.gpu.request {format_fraction(row.request + left)}")
    least_memory = min(gpus, key=lambda gpu: (gpu.free_memory, gpu.index))
    if 0 < more_memory > least_memory.free_memory:
        left = max(least_memory.free_memory, 0)
        more = size_up(more_memory)
        text = f"{least_memory.name} has {size_down(left)} of memory free and the raise takes {more} more"
        obstacles.append(Obstacle("Memory", "GPU", 1, text))
        would_fit.append(f"spec.gpu.memory {size_down(row.memory + left)}")
        if wanted.memory > min(gpu.state.memory for gpu in gpus):
            outlook = Outlook.NEVER
    if not obstacles:
        return None
    return _refusal(row, outlook, obstacles, f"{' with '.join(would_fit)} would fit now.")


def _refusal(row: Row, outlook: Outlook, obstacles: list[Obstacle], advice: str) -> Refusal:
    had = row.wanted
    share = f"request {format_fraction(had.request)}, limit {format_fraction(had.limit)}"
    headline = f"keeps {share}, memory {size_down(had.memory)}"
    return Refusal(outlook=outlook, headline=headline, obstacles=tuple(obstacles), advice=advice)
