"""Placement policies: costs by which possible places are ranked.

A cost is a tuple of integers, compared item by item. The lowest cost wins; the engine breaks ties by node name and GPU
index. Costs depend only on the accounts and the request. Binpack uses these costs only until `binpack/` has learned the
demand.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from sharepod.api.gpunode import Mode
from sharepod.api.sharepod import PlacementPolicy
from sharepod.api.units import WHOLE_GPU

from .state.accounts import GpuAccount, NodeAccount
from .state.types import PlacementRequest

Cost = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Policy:
    """Costs by one placement policy. `gpu`: cost of one GPU; the engine takes the cheapest of a node. `node`: cost of a
    node with the GPUs that would be taken there."""

    gpu: Callable[[GpuAccount, PlacementRequest], Cost]
    node: Callable[[NodeAccount, Sequence[GpuAccount], PlacementRequest], Cost]


def policy_for(request: PlacementRequest, *, first_of_group: bool) -> Policy:
    """Return the policy by which a request is placed.

    The first member of an affinity group goes to the GPUs with most free room, whatever its own policy: the other
    members must fit on the same GPUs.
    """
    if first_of_group:
        return MOST_FREE
    if request.gpu.placement is PlacementPolicy.SPREAD:
        return SPREAD
    if request.gpu.mode is Mode.EXCLUSIVE:
        return PACK_WHOLE
    if not request.gpu.request_milli:
        return PACK_BEST_EFFORT
    return PACK


def _memory_share(gpu: GpuAccount, size: int) -> int:
    """Return bytes as thousandths of the GPU's memory."""
    return size * WHOLE_GPU // gpu.state.memory if gpu.state.memory else 0


def _left(gpu: GpuAccount, request: PlacementRequest) -> tuple[int, int]:
    """Return the thousandths of time and of memory that the request would leave free on a GPU."""
    memory = gpu.free_memory - request.gpu.memory_on(gpu.state.memory)
    return gpu.free_milli - request.gpu.request_milli, _memory_share(gpu, memory)


def _leftover(gpu: GpuAccount, request: PlacementRequest) -> Cost:
    """Return the cost of a GPU by best fit: what the request would leave free. A rest without use (time without memory,
    or memory without time) counts twice. A GPU without tenants comes last."""
    time, memory = _left(gpu, request)
    return (0 if gpu.tenants else 1, time + abs(time - memory), time)


def _leftover_of_all(node: NodeAccount, gpus: Sequence[GpuAccount], request: PlacementRequest) -> Cost:
    """Return a node's cost by best fit: the sum of `_leftover` over the GPUs, then its idle GPUs, so that whole nodes
    stay free."""
    costs = [_leftover(gpu, request) for gpu in gpus]
    return (*(sum(column) for column in zip(*costs, strict=True)), node.idle())


PACK = Policy(_leftover, _leftover_of_all)

PACK_WHOLE = Policy(lambda gpu, request: (), lambda node, gpus, request: (node.idle(), len(node.gpus)))
"""Policy of mode Exclusive: of the nodes with enough idle GPUs, the node with the fewest."""


def _least_promised(gpu: GpuAccount, request: PlacementRequest) -> Cost:
    """Return the cost of a GPU for best effort, which uses time that other tenants leave idle: GPUs with tenants come
    first, then GPUs with the least guaranteed time, the fewest tenants, and the least free memory."""
    _, memory = _left(gpu, request)
    return (0 if gpu.tenants else 1, WHOLE_GPU - gpu.free_milli, gpu.tenants, memory)


def _least_promised_of_all(node: NodeAccount, gpus: Sequence[GpuAccount], request: PlacementRequest) -> Cost:
    costs = [_least_promised(gpu, request) for gpu in gpus]
    return (*(sum(column) for column in zip(*costs, strict=True)), node.idle())


PACK_BEST_EFFORT = Policy(_least_promised, _least_promised_of_all)


def _most_free(gpu: GpuAccount, request: PlacementRequest) -> Cost:
    return (-gpu.free_milli, gpu.tenants, -_memory_share(gpu, gpu.free_memory))


def _most_free_of_all(node: NodeAccount, gpus: Sequence[GpuAccount], request: PlacementRequest) -> Cost:
    """Return a node's cost: of the fullest GPU that would be taken."""
    return max(_most_free(gpu, request) for gpu in gpus)


MOST_FREE = Policy(_most_free, _most_free_of_all)


def replicas_on(gpu: GpuAccount, request: PlacementRequest) -> int:
    """Count the tenants of the request's owner on this GPU."""
    return gpu.owners.get(request.owner, 0) if request.owner is not None else 0


def _spread(gpu: GpuAccount, request: PlacementRequest) -> Cost:
    return (replicas_on(gpu, request), *_most_free(gpu, request))


def _spread_of_all(node: NodeAccount, gpus: Sequence[GpuAccount], request: PlacementRequest) -> Cost:
    """Return the cost of a node by Spread: the owner's replicas on these GPUs, then on the node, then the cost of the
    fullest GPU."""
    together = sum(replicas_on(gpu, request) for gpu in gpus)
    return (together, node.replicas_of(request.owner), *_most_free_of_all(node, gpus, request))


SPREAD = Policy(_spread, _spread_of_all)


def least_spread(node: NodeAccount, request: PlacementRequest) -> Cost:
    """Return a lower bound of the node's cost by `SPREAD`. It is cached until the node's rows or GPUs change."""
    owner = request.owner or ""
    least = node.derived.get(owner)
    if least is None:
        free = ((gpu.owners.get(owner, 0), *_most_free(gpu, request)) for gpu in node.gpus)
        together, *most_free = min(free, default=(0,))
        least = node.derived[owner] = (together, node.replicas_of(request.owner), *most_free)
    return (least[0] * request.gpu.count, *least[1:])
