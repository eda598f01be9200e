"""Holders: where pods of ours should take whole GPUs from NVIDIA's device plugin, so that a request gets a place.

Guarantees:
- A new holder is asked for only where it makes a place, whichever of the node's free GPUs the kubelet gives it.
- A tenant that waits for a holder in flight gets no other.
"""

from __future__ import annotations

from sharepod.api.units import Bytes

from .filters import gpu as gpu_filters
from .filters.candidates import affinity_places, gpu_checks, gpu_passes, node_passes
from .state.accounts import GpuAccount, NodeAccount
from .state.cluster import Cluster
from .state.types import NewHolder, PlacementRequest

DEVICE_PLUGIN_RESOURCE = "nvidia.com/gpu"
"""The name of a GPU of NVIDIA's device plugin among a node's resources."""


def find_holder(cluster: Cluster, request: PlacementRequest) -> NewHolder | None:
    """Choose where new holders would make a place: the fewest holders, then the node with the fewest GPUs left to give.

    The kubelet chooses among the GPUs that nobody holds, so all of them have to suit. A request for certain GPUs, and
    one whose affinity group runs, cannot be served this way.
    """
    nodes = cluster.plugin_nodes()
    if not nodes or request.gpu.uuids or affinity_places(cluster, request):
        return None
    if any(request.tenant in node.holders.values() for node in nodes):
        return None
    checks = gpu_checks(request)
    best: tuple[int, int, str, NewHolder] | None = None
    for node in nodes:
        ours = [gpu for gpu in node.gpus if gpu.state.held]
        others = [gpu for gpu in node.gpus if not (gpu.state.held or gpu.state.taken)]
        passing = [gpu for gpu in ours if gpu_passes(gpu, checks)][: request.gpu.count]
        wanted = request.gpu.count - len(passing)
        left = _left_to_give(node)
        if not 0 < wanted <= min(left, len(others)) or not node_passes(node, request):
            continue
        if not all(_would_pass(gpu, request) for gpu in others):
            continue
        memory = Bytes(min(request.gpu.memory_on(gpu.state.memory) for gpu in (*passing, *others)))
        answer = NewHolder(node=node.name, count=wanted, memory=memory)
        if best is None or (wanted, left, node.name) < best[:3]:
            best = wanted, left, node.name, answer
    return None if best is None else best[3]


def _left_to_give(node: NodeAccount) -> int:
    """Count the GPUs that the device plugin has given to no pod, less those that holders will get whose Pod is not
    counted among the node's yet."""
    uncounted = sum(holder not in node.pods for holder in node.holders)
    return node.taken().free.extended.get(DEVICE_PLUGIN_RESOURCE, 0) - uncounted


def _would_pass(gpu: GpuAccount, request: PlacementRequest) -> bool:
    """Return whether the GPU passes once a holder of ours has it."""
    fits = all(check.passes(gpu) for check in gpu_filters.static(request))
    return fits and gpu.state.available and not gpu.tenants
