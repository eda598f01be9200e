"""Resizing: changes the share of a tenant on its present GPUs.

Guarantees:
- A tenant keeps its share until the change is decided. Only a raise needs room, and its GPUs must be outside the
  head-of-queue reservation.
- A lower request is never refused, not even on a GPU that is over-committed.
- Less memory is refused only if it is below the tenant's last observed usage, because used memory cannot be taken back.
"""

from __future__ import annotations

from dataclasses import replace

from sharepod.api.gpunode import Mode
from sharepod.api.sharepod import GpuRequest
from sharepod.api.units import Bytes, Milli, TenantId, format_fraction

from .state.accounts import NodeAccount, Row
from .state.cluster import Cluster
from .state.types import Obstacle, Outlook, PlacementError, Refusal, Reservation
from .wording import advised_memory, advised_size, counted, size_down, size_near, size_up


def resize(
    cluster: Cluster,
    tenant: TenantId,
    *,
    request_milli: Milli,
    limit_milli: Milli,
    memory: Bytes | None,
    in_use: int = 0,
) -> Reservation | Refusal:
    """Change a tenant's share on its present GPUs. Returns the row to write, or a refusal, which changes nothing.

    Raises `PlacementError` if the tenant does not have exactly one reservation, if that reservation is Exclusive (it
    has whole GPUs), or if the limit is below the request.

    Args:
        memory: bytes on each GPU; None: request x the memory of the smallest of its GPUs.
        in_use: last observed usage in bytes, of the GPU with the highest usage.
    """
    node, row = cluster.only_row(tenant)
    if row.wanted.mode is Mode.EXCLUSIVE:
        raise PlacementError(f"tenant {tenant} is Exclusive: there is no share to change")
    if not 0 <= request_milli <= limit_milli <= 1000 or limit_milli == 0:
        raise PlacementError(f"request {request_milli} and limit {limit_milli} thousandths are no share")
    asked = GpuRequest(request_milli=request_milli, limit_milli=limit_milli, memory=memory)
    capacities = [node.gpus_by_uuid[uuid].state.memory for uuid in row.gpus if uuid in node.gpus_by_uuid]
    # the memory of a GPU that is not in the inventory is unknown, so the granted bytes stay
    amount = memory if memory is not None else min(map(asked.memory_on, capacities), default=row.wanted.memory)
    wanted = replace(row.wanted, request_milli=request_milli, limit_milli=limit_milli, memory=amount)
    refusal = _refuse(node, row, wanted, in_use)
    if refusal is None:
        cluster.change_share(wanted)
        return wanted
    return refusal


def _refuse(node: NodeAccount, row: Row, wanted: Reservation, in_use: int) -> Refusal | None:
    """Return why `wanted` cannot replace `row`. None if it can."""
    more_time = wanted.request_milli - row.request_milli
    more_memory = wanted.memory - row.memory
    # 1. Refuse changes for which room does not matter: of a SharePod that is ending, or to less memory than it uses.
    if row.wanted.releasing:
        advice = "Create a new SharePod with the share that it should have."
        return _refusal(row, Outlook.NEVER, [Obstacle("Ending", "SharePod", 1, "the SharePod is ending")], advice)
    if more_memory < 0 and in_use > wanted.memory:
        text = f"it uses {size_up(in_use)} of memory, more than the {size_down(wanted.memory)} asked for"
        obstacle = Obstacle("MemoryInUse", "SharePod", 1, text)
        advice = "Free memory first; the limit is lowered once less is in use."
        return _refusal(row, Outlook.IN_USE, [obstacle], advice)
    if more_time <= 0 and more_memory <= 0:
        return None
    # 2. A raise needs known GPUs outside the head-of-queue reservation.
    unseen = [uuid for uuid in row.gpus if uuid not in node.gpus_by_uuid]
    if unseen:
        text = f"{counted(len(unseen), 'GPU')} of {node.name} cannot be seen at the moment"
        obstacle = Obstacle("NotSeen", "GPU", len(unseen), text)
        return _refusal(row, Outlook.WAITING, [obstacle], "A raise waits until the node's agent reports its GPUs.")
    gpus = [node.gpus_by_uuid[uuid] for uuid in row.gpus]
    owner = row.wanted
    kept = [gpu for gpu in gpus if gpu.head_tenant not in (None, owner.tenant) and gpu.head_open_to != owner.namespace]
    if kept:
        verb = "is" if len(kept) == 1 else "are"
        text = f"{counted(len(kept), 'GPU')} {verb} kept for the SharePod that has waited longest"
        advice = "A raise waits until that SharePod has been placed."
        return _refusal(row, Outlook.WAITING, [Obstacle("Kept", "GPU", len(kept), text)], advice)
    # 3. A raise needs free time and memory on each of the GPUs.
    outlook = Outlook.WAITING
    obstacles: list[Obstacle] = []
    would_fit: list[str] = []
    least_time = min(gpus, key=lambda gpu: (gpu.free_milli, gpu.index))
    if 0 < more_time > least_time.free_milli:
        left = max(least_time.free_milli, 0)
        more = format_fraction(more_time)
        text = f"{least_time.name} has {format_fraction(left)} of its time free and the raise takes {more} more"
        obstacles.append(Obstacle("Time", "GPU", 1, text))
        if left:
            would_fit.append(f"spec.gpu.request {format_fraction(row.request_milli + left)}")
    least_memory = min(gpus, key=lambda gpu: (gpu.free_memory, gpu.index))
    if 0 < more_memory > least_memory.free_memory:
        left = max(least_memory.free_memory, 0)
        more = size_up(more_memory)
        text = f"{least_memory.name} has {size_down(left)} of memory free and the raise takes {more} more"
        obstacles.append(Obstacle("Memory", "GPU", 1, text))
        if (most := advised_memory(row.memory + left)) is not None and most > row.memory:
            would_fit.append(f"spec.gpu.memory {advised_size(most)}")
        if wanted.memory > min(gpu.state.memory for gpu in gpus):
            outlook = Outlook.NEVER
    if not obstacles:
        return None
    if len(would_fit) < len(obstacles):
        return _refusal(row, outlook, obstacles, "No raise fits now.")
    return replace(_refusal(row, outlook, obstacles, ""), fits_now=" with ".join(would_fit))


def _refusal(row: Row, outlook: Outlook, obstacles: list[Obstacle], advice: str) -> Refusal:
    had = row.wanted
    share = f"request {format_fraction(had.request_milli)}, limit {format_fraction(had.limit_milli)}"
    headline = f"keeps {share}, memory {size_near(had.memory)}"
    return Refusal(outlook=outlook, headline=headline, obstacles=tuple(obstacles), advice=advice)
